"""`cuboid generate` as a user meets it: text, files of prompts, results that a second run continues with, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cuboid.cli.main import main
from tests.checkpoint.pretrained import save_pretrained
from tests.cli.command import MARK, environment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("models") / "llama", "llama")


def generate(model: Path, *arguments: str) -> int:
    return main(["generate", f"hf:{model}", "--tokenizer", "byte", "--device", "cpu", *arguments])


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_one_prompt_streams_and_many_come_in_order(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "--prompt", "ab", "--max-tokens", "5", "--json") == 0
    (row,) = answer(capsys)["results"]
    assert row["prompt"] == "ab"
    assert len(row["tokens"]) <= 5
    assert generate(model, "--prompt", "ab", "--max-tokens", "5") == 0
    assert capsys.readouterr().out == row["text"] + "\n"
    assert generate(model, "--prompt", "ab", "--prompt", "c", "--max-tokens", "5", "--batch", "1") == 0
    lines = capsys.readouterr().out
    assert lines.startswith(f"── 0: ab\n{row['text']}\n── 1: c\n")


def test_a_second_run_goes_on_where_the_first_was_ended(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('{"prompt": "one"}\n\n"two"\n{"tokens": [9, 8, 7]}\n')
    arguments = ["--prompts", str(prompts), "-o", str(results), "--max-tokens", "4", "--temperature", "1", "--json"]
    assert generate(model, *arguments) == 0
    whole = answer(capsys)
    lines = results.read_bytes().splitlines(keepends=True)
    assert [len(whole["results"]), whole["skipped"], len(lines)] == [3, 0, 3]
    results.write_bytes(lines[1] + lines[0][:20])  # killed in the middle of a line
    assert generate(model, *arguments) == 0
    again = answer(capsys)
    assert again["skipped"] == 1
    assert [row["text"] for row in again["results"]] == [row["text"] for row in whole["results"]]
    assert sorted(results.read_bytes().splitlines()) == sorted(line.rstrip() for line in lines)
    assert generate(model, *arguments, "--seed", "5") == 2
    assert "was made with seed=0, not 5; name another file" in capsys.readouterr().err


def test_what_cannot_work_is_refused_in_one_sentence(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "broken.jsonl").write_text('{"promt": "x"}\n')
    cases = {
        ("--prompt", "x" * 64): "prompt 0 has 64 tokens and max_positions=64 of llama leaves no room behind it",
        ("--prompts", str(tmp_path / "empty.txt")): "holds no prompt; write one on each line",
        ("--prompts", str(tmp_path / "broken.jsonl")): "line 1 of prompts=",
        ("--prompts", str(tmp_path / "nowhere")): "does not exist; name a file of text or JSON Lines",
        ("--prompt", ""): "prompt 0 is empty",
        (): "there is no prompt; use --prompt",
        ("--prompt", "x", "--layout", "tp=3"): "tp=3 does not divide heads=4; use tp=2 or tp=4",
        ("--prompt", "x", "--layout", "pp=5"): "pp=5 makes more stages than layers=4; use pp=4",
        ("--prompt", "x", "--layout", "ep=2,dp=2"): "ep=2 needs experts and llama has none; use ep=1",
        ("--prompt", "x", "--layout", "dp=2,zero=1"): "zero=1 belongs to training",
        ("--prompt", "x", "--temperature", "-1"): "temperature=-1",
        ("--prompt", "x", "--top-p", "0"): "top-p=0.0 is no probability above 0",
        ("--prompt", "x", "--precision", "int3"): 'precision="int3" is unknown; use float32',
        ("--prompt", "x", "-o", str(tmp_path / "no" / "where")): "cannot be written",
    }
    for arguments, sentence in cases.items():
        assert generate(model, *arguments) == 2, arguments
        said = capsys.readouterr()
        assert sentence in said.err
        assert said.err.count("\n") == 1
        assert said.out == ""
    assert main(["generate", f"hf:{model}", "--prompt", "x"]) == 2
    assert "the model has no tokenizer; use --tokenizer byte" in capsys.readouterr().err
    assert main(["generate", f"hf:{model}", "--prompts", str(tmp_path / "broken.jsonl"), "--stop", "."]) == 2
    assert "stop='.' is text and the model has no tokenizer" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "nowhere"), "--prompt", "x"]) == 2
    assert "does not exist; name a run's folder" in capsys.readouterr().err


def test_control_c_ends_all_ranks_and_leaves_the_results_so_far(model: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    (tmp_path / "prompts.txt").write_text("\n".join(f"prompt {number}" for number in range(4000)))
    words = ["-m", "cuboid.cli.main", "generate", f"hf:{model}", "--tokenizer", "byte", "--device", "cpu"]
    words += ["--layout", "tp=2", "--prompts", "prompts.txt", "-o", str(results), "--max-tokens", "50", "--batch", "4"]
    mark = f"generate-{os.getpid()}"
    command = subprocess.Popen(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment(**{MARK: mark}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until = time.monotonic() + 600
    while not (results.exists() and results.read_bytes().count(b"\n") > 3):
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    begun = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if _has(path, mark)]
    assert len(begun) >= 4, "the command, the server and two ranks"
    until = time.monotonic() + 120
    os.killpg(command.pid, signal.SIGINT)
    while any(_runs(process) for process in begun):
        assert time.monotonic() < until, [process for process in begun if _runs(process)]
        time.sleep(0.01)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 130
    assert b"Traceback" not in errors
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert len({row["index"] for row in rows}) == len(rows) < 4000


def _runs(process: int) -> bool:
    """Not ended; who ended and was not asked for yet is a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _has(environ: Path, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in environ.read_bytes()
    except OSError:
        return False
