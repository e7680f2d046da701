"""A run that is watched while it is written: the frame in a small terminal, lines elsewhere, a served page."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Queue

import pytest
from rich.console import Console

from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.report.page import collect, page, serve
from cuboid.report.source import open_source
from cuboid.report.watch import Watched, bar, frame, line, sparkline
from cuboid.schedule.simulate import StageCosts
from cuboid.training.claim import claimed
from tests.cli.command import environment
from tests.report.cases import make_run, row, write_memory, write_rows, write_timing

COSTS = StageCosts(forward=(0.02, 0.05), input_backward=(0.03, 0.04), weight_backward=(0.02, 0.01))


def rendered(watched: Watched, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(frame(watched, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n").split("\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = make_run(tmp_path, "dp=2,pp=2", 10)
    write_rows(tmp_path / "metrics.jsonl", [row(step, seconds=2.0) for step in (1, 2, 3)])
    write_timing(run, COSTS)
    for rank in range(4):
        write_memory(run, rank, 2**30 * (rank + 1))
    return tmp_path


def test_a_small_terminal(folder: Path) -> None:
    watched = Watched.open(folder, "cpux4")
    assert watched.refresh() == 3
    with claimed(folder):
        lines = rendered(watched, 80, 24)
        assert rendered(watched, 40, 10)[-1].strip(), "less room, fewer lines"
    assert len(lines) <= 23 and all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert "running" in lines[0] and "3/10 steps, 0:00:14 left" in lines[1]
    assert "64 tokens/s   step 2 s" in text and "fullest rank 4.00 GiB" in text
    assert re.search(r"loss 5\.900 → 5\.700 █[▄▅]▁", text)
    assert re.search(r"^rank 0 F+", text, re.M) and re.search(r"^rank 2 ·+F", text, re.M), "stages as lanes"
    assert re.search(r"^pp 1 █+ 4\.00 GiB$", text, re.M)


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing-00000.jsonl"])
def test_a_log_that_a_disk_does_not_read(folder: Path, name: str) -> None:
    """The memory of a process is a file whose first page fails as a broken disk does."""
    (folder / name).unlink()
    (folder / name).symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=f"{name} cannot be read: (Invalid argument|Input/output error)"):
        collect(open_source(folder, "cpux4"))


def test_islands_that_share_a_disk(tmp_path: Path) -> None:
    """Each with its lag, the size of the outer gradient and how far islands are apart; on the page too."""
    for number, done in enumerate((6, 4)):
        folder = tmp_path / f"island-{number}"
        make_run(folder, "dp=1", 10, "islands.count=2")
        told = {"island": number, "round": 3, "islands": 2, "waited": 0.5, "lag": 2 * number}
        told |= {"outer_gradient_norm": 0.125, "drift": 0.0625, "sent_bytes": 100}
        rows = [row(step, **({"islands": told} if step == 4 else {})) for step in range(1, done + 1)]
        write_rows(folder / "metrics.jsonl", rows)
    watched = Watched.open(tmp_path / "island-0")
    watched.refresh()
    lines = [line.rstrip() for line in rendered(watched, 80, 24)]
    assert "island 0   step 6   lag 0   outer gradient 0.125   apart 0.0625" in lines
    assert "island 1   step 4   lag 2   skipped 2   outer gradient 0.125   apart 0.0625" in lines
    assert "2 islands, lag 2" in line(watched.state())
    data = collect(open_source(tmp_path / "island-1"), with_search=False)
    assert [(each["island"], each["lag"], each["drift"]) for each in data["islands"]] == [
        (0, 0, 0.0625),
        (1, 2, 0.0625),
    ]
    assert "function drawIslands" in page(data)
    with pytest.raises(UserError, match=r"name one of its islands, as .*island-0"):
        open_source(tmp_path)


def test_warnings_stand_above_the_loss(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        {"kind": "loss", "text": "loss was above its start in the last 10 steps, 7.00 beside 5.50: lower the peak"}
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(4, warnings=wrong)) + "\n")
    watched = Watched.open(folder, "cpux4")
    watched.refresh()
    lines = rendered(watched, 80, 24)
    place = next(place for place, line in enumerate(lines) if line.startswith("⚠ step 4: loss was above its start"))
    assert lines[place + 1].strip().endswith("the peak") and lines[place + 3].startswith("loss ")
    assert main(["watch", str(folder), "--once"]) == 0
    assert capsys.readouterr().out.startswith(f"warning: step 4: {wrong[0]['text']}\nstep  4/10")


ESCAPES = "\x1b]0;pwn\x07\x1b[31mred \x9b2J"


def test_what_files_say_moves_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in lines nor in the frame of `watch`, nor in tables of `compare`, where brackets are no colours."""
    folders = [tmp_path / f"[a]{ESCAPES}", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
        make_run(folder, "dp=1", 10, f"model.name=name {ESCAPES}")
        wrong = [{"kind": "loss", "text": f"the loss {ESCAPES}"}]
        write_rows(folder / "metrics.jsonl", [row(1), row(2, warnings=wrong)])
    assert main(["watch", str(folders[0]), "--once"]) == 0
    lines = capsys.readouterr().out
    assert "the loss \\x1b]0;pwn\\x07\\x1b[31mred \\x9b2J" in lines
    watched = Watched.open(folders[0], "")
    watched.refresh()
    shown = "\n".join(rendered(watched, 200, 24))
    assert "the loss \\x1b]0;pwn" in shown and "name \\x1b]0;pwn" in shown
    assert main(["compare", *map(str, folders)]) == 0
    for text in (lines, shown, capsys.readouterr().out):
        assert all(letter.isprintable() or letter == "\n" for letter in text), text


def test_a_time_that_no_calendar_has_is_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(folder / "metrics.jsonl", [row(step, seconds=1e20) for step in (1, 2, 3)])
    assert main(["watch", str(folder), "--once"]) == 0
    assert "left –" in capsys.readouterr().out


def test_many_ranks_leave_room(tmp_path: Path) -> None:
    make_run(tmp_path, "pp=8", 10)
    watched = Watched.open(tmp_path)
    watched.refresh()
    assert len(rendered(watched, 80, 12)) <= 11
    assert "no step has ended yet" in "\n".join(rendered(watched, 80, 24))


def test_rows_are_read_once_and_anew_after_a_restart(folder: Path) -> None:
    watched = Watched.open(folder)
    assert (watched.refresh(), watched.refresh()) == (3, 0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(4)) + '\n{"step": 5, "lo')
    assert watched.refresh() == 1 and watched.state()["step"] == 4
    # Gone on from step 2: as many rows as before and more, but not the same ones.
    again = [row(1), row(2), *(row(step, loss=2.0) for step in (3, 4, 5))]
    write_rows(folder / "metrics.jsonl", again)
    watched.refresh()
    assert watched.rows == again
    write_rows(folder / "metrics.jsonl", [row(1)])
    watched.refresh()
    assert watched.state()["step"] == 1 and watched.state()["status"] == "stopped"


def test_lines_where_there_is_no_terminal_and_a_frame_where_there_is(folder: Path) -> None:
    command = [sys.executable, "-m", "cuboid.cli.main", "watch", str(folder)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    line = "step  3/10  loss 5.7000  norm 4.000  lr 3.00e-03  64 tokens/s  left 0:00:14  stopped\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, line, "")
    state = subprocess.run([*command, "--json"], env=environment(), capture_output=True, text=True, timeout=300)
    assert json.loads(state.stdout)["seconds_left"] == 14.0
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        size = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
        subprocess.run(command, env=environment(**size), stdout=terminal, timeout=300, check=True)
    content = b""
    with io.FileIO(ours) as reader, suppress(OSError):  # which is how a terminal ends
        while part := reader.read(1 << 16):
            content += part
    assert "pipeline of step 2" in content.decode()


def test_small_pictures() -> None:
    assert sparkline([1.0, 2.0, None, 3.0], 10) == "▁▅ █"
    assert sparkline([5.0] * 100, 10) == "▁" * 10 and sparkline([None], 5) == "" and sparkline([], 5) == ""
    assert (bar(0.5, 4), bar(2.0, 4), bar(-1.0, 4)) == ("██░░", "████", "░░░░")


def test_a_plan_cannot_be_watched(tmp_path: Path) -> None:
    (tmp_path / "plain.toml").write_text('model = "tiny-llama"\n')
    with pytest.raises(UserError, match="is a plan, not a run; name the folder of a run"):
        Watched.open(tmp_path / "plain.toml", "cpux1")


def served(folder: Path, host: str) -> str:
    said: Queue[str] = Queue()
    arguments = (folder, host, 0, "cpux4", False, said.put)
    threading.Thread(target=serve, args=arguments, daemon=True).start()
    return said.get(timeout=120)


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    yield served(folder, "127.0.0.1")


def get(address: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(
        address, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_the_served_page_follows_the_run(folder: Path, address: str) -> None:
    """Read-only, on loopback, for our own names only."""
    status, _, text = get(address)
    assert status == 200 and b"connect-src 'self'" in text and b"data.json" in text
    status, headers, text = get(f"{address}data.json")
    assert json.loads(text)["summary"]["measured"]["steps"] == 3
    assert get(f"{address}data.json", If_None_Match=headers["ETag"])[0] == 304, "nothing new"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(4)) + "\n")
    status, _, text = get(f"{address}data.json", If_None_Match=headers["ETag"])
    assert status == 200 and json.loads(text)["summary"]["measured"]["steps"] == 4
    assert get(f"{address}run.toml")[0] == 404 and get(f"{address}../run.toml")[0] == 404
    assert get(address, Host="evil.example")[0] == 403
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(address, data=b"x", timeout=60)
    with pytest.raises(UserError, match="cannot be listened on"):
        serve(folder, "127.0.0.1", int(address.rsplit(":", 1)[1].strip("/")), with_search=False)
    with pytest.raises(UserError, match=r"é\.\.a port=0 cannot be listened on: no host has this name"):
        serve(folder, "é..a", 0, with_search=False)


def test_a_served_run_that_is_damaged_or_removed_says_so_until_it_is_mended(folder: Path, address: str) -> None:
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_text("junk\njunk\n")
    for place in (address, f"{address}data.json"):
        status, _, text = get(place)
        assert status == 503 and text.endswith(b"remove that line, or copy the file again\n"), text
    (folder / "metrics.jsonl").write_bytes(whole)
    assert get(f"{address}data.json")[0] == 200
    folder.rename(folder.with_name("removed"))
    status, _, text = get(address)
    assert status == 503 and b"does not exist; name the folder of a run" in text


def test_elsewhere_than_on_loopback_the_address_has_a_token(folder: Path) -> None:
    address = served(folder, "0.0.0.0")
    base, token = address.rstrip("/").rsplit("/", 1)
    assert len(token) >= 40
    assert get(address)[0] == get(f"{address}data.json")[0] == 200
    for path in ("/", "/data.json", f"/{token[:-1]}/", f"/{token}", f"/{'x' * len(token)}/data.json"):
        assert get(base + path)[0] == 404
    assert get(f"{address}../run.toml")[0] == 404


def test_strangers_do_not_keep_the_page_from_its_reader(folder: Path) -> None:
    address = served(folder, "0.0.0.0")
    port = int(address.split(":")[2].split("/")[0])
    with ExitStack() as held:
        for number in range(1000):
            line = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            with suppress(ConnectionError):
                line.sendall((b"", b"junk\r\n\r\n", b"GET / HTT", bytes(3000))[number % 4])
        assert get(f"{address}data.json")[0] == 200
