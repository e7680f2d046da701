"""Bad input on the command line: one sentence, exit code 2, nothing written, within seconds."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cuboid.cli.main import VERBS as MODULES
from cuboid.cli.main import main
from cuboid.spec.run import build_run, dump_run
from tests.launch.ports import free_port

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from confined import lose_rights

ROWS = [{"step": step, "loss": 6.0, "gradient_norm": 1.0, "seconds": 0.1, "tokens": 64} for step in (1, 2, 3)]
SIZES = {"steps": 4, "global_batch": 2, "sequence": 32, "device": "cpu"}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run where no other test writes."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run that was interrupted, as its folder tells of it; the command runs beside it."""
    folder = tmp_path / "run"
    folder.mkdir()
    run = build_run({"model": "tiny-llama", "training": SIZES, "output": {"folder": "run"}})
    (folder / "run.toml").write_text(dump_run(run))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def listing(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha1(path.read_bytes()).hexdigest() if path.is_file() else oct(path.lstat().st_mode)
        for path in sorted(folder.rglob("*"))
    }


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence; nothing beside it has changed."""
    before = listing(Path())
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and len(said) < 700, said
    assert listing(Path()) == before
    return said


VERBS = {
    "watch": ["watch", "run", "--once"],
    "report": ["report", "run", "--no-search"],
    "compare": ["compare", "run", "run"],
    "replay": ["replay", "run", "--step", "3"],
    "goodput": ["goodput", "run/run.toml"],
    "train": ["train", "run/run.toml"],
}
DAMAGE = {
    "not JSON": b'{"step": 2, "loss"\n',
    "not a table": b"[]\n",
    "no step": b'{"loss": 1.0}\n',
    "wrong type": b'{"step": 2, "loss": "low", "seconds": []}\n',
    "not text": b"\xff\xfe\n",
    "zeros": b"\0" * 100 + b"\n",
    "deep": b"[" * 100_000 + b"\n",
    "digits": b'{"step": ' + b"9" * 5000 + b"}\n",
    "infinite": b'{"step": 2, "loss": 1e999}\n',
    "no tokens": b'{"step": 2, "loss": 1.0, "gradient_norm": 1.0, "seconds": 0.1}\n',
    "no time": b'{"step": 2, "loss": 1.0, "gradient_norm": 1.0, "seconds": 5e-324, "tokens": 64}\n',
    "back in time": b'{"step": 2, "loss": 1.0, "gradient_norm": 1.0, "seconds": -1, "tokens": 64}\n',
    "for ever": b'{"step": 2, "loss": 1.0, "gradient_norm": 1.0, "seconds": 1e308, "tokens": 64}\n',
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["wrong type", "zeros", "no tokens"])
def test_damaged_metrics_are_refused(
    run_folder: Path, verb: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (run_folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run_folder / "metrics.jsonl").write_bytes(b"".join([lines[0], DAMAGE[kind], lines[2]]))
    assert "metrics.jsonl is damaged: its line 2 is no row; remove that line" in refusal(VERBS[verb], capsys)


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_last_row_may_be_cut_off_and_no_other(
    run_folder: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_folder / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + DAMAGE[kind])
    assert main(["watch", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    path.write_bytes(DAMAGE[kind] + whole)
    assert "line 1 is no row" in refusal(VERBS["watch"], capsys)


@pytest.mark.parametrize("verb", VERBS)
def test_a_fifo_in_the_place_of_a_file_is_refused(
    run_folder: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_folder / "metrics.jsonl").unlink()
    os.mkfifo(run_folder / "metrics.jsonl")
    assert "metrics.jsonl is a FIFO, not a file" in refusal(VERBS[verb], capsys)


OTHERS = {
    "memory-00000.jsonl": ('{"step": 1}\n{"step": 2}\n', ("watch", "report", "compare")),
    "failures.jsonl": ('{"checkpoint": "a"}\n{}\n', ("watch", "report", "goodput")),
    "bad_steps.jsonl": ('{"step": 3, "batch": 1, "loss": []}\n{}\n', ("report", "replay")),
    "ranks-00000.jsonl": ('{"step": "1"}\n{"ranks": 1}\n', ("report",)),
    "communication-00000.jsonl": ('{"step": 1}\n{}\n', ("report",)),
    "timing-00000.jsonl": ('{"step": -1}\n{"step": 1}\n', ("train",)),
}
"""A log of a run -> damage to it, and who reads it."""


@pytest.mark.parametrize(("name", "verb"), [(name, verb) for name, (_, verbs) in OTHERS.items() for verb in verbs])
def test_damaged_logs_are_refused(run_folder: Path, name: str, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / name).write_text(OTHERS[name][0])
    assert f"{name} is damaged" in refusal(VERBS[verb], capsys)


@pytest.mark.parametrize("name", [*OTHERS, "tracked.jsonl", "samples.jsonl", "goodput.json"])
def test_a_run_does_not_wait_for_a_fifo_in_the_place_of_its_log(
    run_folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(run_folder / name)
    assert f"{name} is a FIFO, not a file" in refusal(VERBS["train"], capsys)


@pytest.mark.parametrize("mode", [0o555, 0])
@pytest.mark.parametrize("closed", ["checkpoints/step-00000002", "hang-00001"])
def test_what_cannot_be_removed_costs_no_run(
    run_folder: Path, closed: str, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process without the rights of root, as most users are."""
    (run_folder / closed).mkdir(parents=True)
    (run_folder / closed).chmod(mode)
    before = listing(run_folder)
    child = os.fork()
    if not child:
        status = 70
        with suppress(BaseException):
            lose_rights()
            status = main([*VERBS["train"], "--overwrite"])
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert listing(run_folder) == before


def test_a_file_that_no_disk_reads_is_refused(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It looks like a plain file, and its first byte cannot be read."""
    (run_folder / "memory-00000.jsonl").symlink_to("/proc/self/mem")
    assert main([*VERBS["report"], "-o", "out.html"]) == 2
    assert "memory-00000.jsonl cannot be read: Input/output error" in capsys.readouterr().err
    assert not Path("out.html").exists()


def test_a_folder_that_is_no_run_is_not_cleared(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "run.toml").rename("run.toml")
    job = ["train", "run.toml", "--overwrite"]
    assert "has metrics.jsonl and no run.toml, so that it may not be a run's" in refusal(job, capsys)
    (run_folder / "metrics.jsonl").rename(run_folder / "mine.jsonl")
    (run_folder / "secret").write_text("mine")
    assert main([*job, "--set", "training.steps=1", "--set", "training.sequence=8"]) == 0
    assert (run_folder / "secret").read_text() == "mine" and (run_folder / "mine.jsonl").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "report run --no-search -o run/run.toml",
        "report run --no-search -o run/metrics.jsonl",
        "plan model.toml h100x8 --global-batch 8 --seq 64 -o model.toml",
        "plan model.toml h100x8 --global-batch 8 --seq 64 -o linked.toml",
        "launch slurm run/run.toml --gpus-per-node 1 --set checkpoint.every=100 -o run/run.toml",
    ],
)
def test_what_a_command_reads_it_does_not_write_over(
    run_folder: Path, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("model.toml").write_text('base = "tiny-llama"\n')
    Path("linked.toml").symlink_to("model.toml")
    assert "is a file that this command reads; use another name" in refusal(arguments.split(), capsys)


@pytest.mark.parametrize("field", ["output.folder", "checkpoint.folder"])
def test_a_way_through_a_folder_that_is_not_there_is_refused(
    run_folder: Path, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that lies there would be found only when its rows or checkpoints are mixed with this one's."""
    job = ["train", "run/run.toml", "--set", f"{field}=new/../run"]
    assert f"{field}=new/../run goes through new, which is no folder; use {field}=run" in refusal(job, capsys)


@pytest.mark.parametrize(
    ("job", "named"),
    [
        ("data build text.txt --output new/../run", "output=new/../run"),
        ("export run --to hf:new/../run", "hf:new/../run"),
        ("checkpoint copy run new/../run", "target=new/../run"),
    ],
)
def test_a_store_or_export_reached_through_a_folder_that_is_not_there_is_refused(
    run_folder: Path, job: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("Some words.\n")
    assert f"{named} goes through new, which is no folder; use {named.partition('new')[0]}run" in refusal(
        job.split(), capsys
    )
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [
        ("memory://kept", "checkpoint.folder=memory://kept is the memory of one process and ends with it; use a path"),
        ("file:///none/../kept", "goes through /none, which is no folder; use checkpoint.folder=file:///kept"),
    ],
)
def test_a_store_that_would_be_lost_or_missed_is_refused(
    run_folder: Path, folder: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(["train", "run/run.toml", "--set", f"checkpoint.folder={folder}"], capsys)


def test_prompts_that_leave_no_room_are_refused_before_anything_is_written(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = f'samples.prompts=["{"x" * 5000}"]'
    job = [*VERBS["train"], "--set", "samples.every=1", "--set", prompts, "--set", "output.folder=new"]
    assert "leaves no room behind it" in refusal(job, capsys)


@pytest.mark.parametrize("text", ["4\x00e54", "../../elsewhere", "one\ntwo"])
def test_a_run_that_says_nothing_sane_of_itself_is_refused(
    run_folder: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder in memory is named so."""
    (run_folder / "identity").write_text(text)
    assert "identity" in refusal([*VERBS["train"], "--set", "checkpoint.folder=kept"], capsys)


@pytest.mark.parametrize("times", ['"actions": [["F7.0", 0, 0, 1]]', '"actions": [["F0.9", 0, 0, 1]]'])
def test_times_of_another_schedule_are_no_pipeline_of_this_one(
    run_folder: Path, times: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a run has them whose layout has changed."""
    (run_folder / "timing-00000.jsonl").write_text(f'{{"step": 3, {times}}}\n')
    assert main(["watch", "run", "--once"]) == 0
    assert "pipeline of step" not in capsys.readouterr().out
    (run_folder / "timing-00000.jsonl").write_text('{"step": ' + "9" * 5000 + f", {times}}}\n")
    assert main(["watch", "run", "--once"]) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("goodput --mtbf-hours inf", "mtbf-hours=inf is no number to compute with"),
        ("goodput --mtbf-hours 1e300", "is no time a training has"),
        ("goodput --mtbf-hours 0.001", "leaves no time to train"),
        ("goodput --gpus 1 --interval 1", "times between two failures; use interval="),
        ("goodput --stall nan", "stall"),
        ("goodput --gpus 99999999999", "gpus"),
        ("data build run -o built --workers 1000000", "workers"),
        ("data build run -o built --workers -1", "workers"),
        ("probe --rank 0 --layout dp=1 --model tiny-llama --global-batch 1000000000", "global-batch"),
        ("checkpoint ls memory::x://y", "is no store of files"),
        ("checkpoint ls simplecache::file:///x", "is no store of files"),
        ("checkpoint ls reference://x", "is no store of files"),
        ("checkpoint ls foo://x", "cannot be reached"),
        ("checkpoint ls http://127.0.0.1:1/x", "cannot be reached"),
        ("checkpoint copy webhdfs://127.0.0.1:1/x copied", "cannot be reached"),
        ("plan tiny-llama h100x80000000000 --global-batch 8 --seq 64", "10000000 or less"),
        ("plan tiny-llama h100x8 --global-batch 8 --seq 64 --top 101", "'--top': 101"),
        ("plan tiny-llama h100x8 --global-batch 8 --seq 99999999999999999999", "seq"),
        (f"plan {'x' * 5000} h100x8 --global-batch 8 --seq 64", "File name too long"),
        (f"compare {'x' * 5000} run", "File name too long"),
        ("simulate tiny-llama h100x8 --layout pp=8 --global-batch 10000000 --seq 64", "too many to simulate"),
        ("map tiny-llama h100x8000000 --layout dp=8000000", "too many to map; use 262144 or less"),
    ],
)
def test_absurd_options_are_refused(
    run_folder: Path, arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(arguments.split(), capsys)


@pytest.mark.parametrize("verb", [*MODULES, "nothing"])
def test_what_is_no_text_is_refused_by_every_command(
    run_folder: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the shell brings names that are no UTF-8, and as only another program can."""
    for name in ("caf\udce9", "a\ud800/b"):
        for arguments in ([verb, name], [verb, "run", name], [verb, "--set", f"output.folder={name}"], [name, verb]):
            assert "is not UTF-8 text; rename what it names" in refusal(arguments, capsys)


def test_names_on_the_disk_that_are_no_text_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/corpus/caf\xe9"))
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("a text of a few words")
    assert "has a name that is not UTF-8 text; rename it" in refusal("data build corpus -o store".split(), capsys)
    monkeypatch.chdir(folder)
    assert "is not UTF-8 text; rename what it names" in refusal(["models"], capsys)


@pytest.mark.parametrize("option", ["--ranks-per-node=-9223372036854775808", "--nodes=0", "--set=data.source=/none"])
def test_an_island_that_is_refused_leaves_no_secret_behind(
    run_folder: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["train", "run/run.toml", "--overwrite", "--set", "islands.count=2", "--set", "output.folder=new"]
    islands = ["--island", "0", "--islands-rendezvous", f"127.0.0.1:{free_port()}"]
    refusal([*job, *islands, option], capsys)


@pytest.mark.thorough
def test_hundreds_of_bad_inputs_do_no_harm() -> None:
    campaign = Path(__file__).parents[2] / "benchmarks" / "bad_input.py"
    done = subprocess.run([sys.executable, campaign, "--cases", "400"], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_path_of_a_thousand_folders_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    fields = ["--set", "training.steps=1", "--set", f"output.folder={'a/' * 1500}a"]
    assert "nested too deep" in refusal(["train", *fields], capsys)


def test_a_probe_of_hours_on_a_cpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["probe", "--rank", "0", "--layout", "dp=1", "--model", "tiny-llama", "--device", "cpu"]
    assert "hours a step; use a smaller batch" in refusal([*job, "--seq", "1000000"], capsys)


def test_a_family_that_transformers_does_not_know_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": -1, "num_hidden_layers": 2}')
    said = refusal(["plan", str(tmp_path), "h100x8", "--global-batch", "8", "--seq", "64"], capsys)
    assert "transformers cannot read its config.json" in said
