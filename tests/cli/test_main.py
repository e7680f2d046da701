"""The command line: help, one-line errors with status 2, and nothing imported that was not asked for."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import cuboid
from cuboid.cli.main import VERBS, _open_streams, main, module_of


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(verb in shown for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example_and_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Example: cuboid {verb}" in shown
    assert "--json" in shown
    assert callable(import_module(f"cuboid.cli.{module_of(verb)}").command)


@pytest.mark.parametrize("verb", ["evaluate", "explain", "plan", "probe"])
def test_the_length_of_sequences_has_one_name_everywhere(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert {"--seq", "--sequence"} <= set(re.findall(r"--[a-z]+", shown))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == cuboid.__version__


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["modls"], "error: unknown command modls; did you mean models?"),
        (["models", "--jsn"], "error: No such option: --jsn"),
        (["--bogus"], "error: No such option: --bogus"),
        (["probe", "--rank", "-1"], "error: Invalid value for '--rank': -1 "),
        (["probe", "--seconds", "0"], "error: Invalid value for '--seconds': 0"),
        (["probe", "--ranks", "two"], "error: Invalid value for '--ranks': "),
        (["map", "--layout", "dp=2"], "error: --cluster is missing; name a plan file, or --layout and --cluster"),
        (["map", "--layout", "dq=2", "--cluster", "cpux2"], "error: unknown key dq; did you mean"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_two(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(sentence)
    assert shown.err.count("\n") == 1


def test_help_is_quick() -> None:
    """In time of its own processor: what else the machine does is not the command's fault."""
    seconds = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-m", "cuboid", "--help"], check=True, capture_output=True)
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        seconds.append(spent)
    assert min(seconds) < 0.4


def test_verbs_without_training_do_not_import_torch() -> None:
    code = """
import contextlib, io, sys
from cuboid.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["map", "--layout", "dp=2", "--cluster", "cpux2", "--model", "tiny-llama"]) == 0
    assert main(["models"]) == 0
print("torch" in sys.modules, "cuboid.cli.import_deepspeed" in sys.modules)
"""
    assert run_python(code).split() == ["False", "False"]


def test_a_terminal_without_a_character_is_no_error() -> None:
    words = [sys.executable, "-m", "cuboid.cli.main", "explain", "tiny-llama", "cpux2", "--layout", "dp=2"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    told = subprocess.run([*words, "--global-batch", "2", "--seq", "16"], capture_output=True, env=environment)
    assert told.returncode == 0 and b"\\xd7" in told.stdout, told.stderr


@pytest.mark.parametrize("arguments", [["models"], ["models", "--json"], ["--help"]])
def test_a_full_disk_behind_the_output_is_one_sentence(arguments: list[str]) -> None:
    words = [sys.executable, "-m", "cuboid.cli.main", *arguments]
    with open("/dev/full", "w") as full:
        told = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
        silent = subprocess.run(words, stdout=full, stderr=full)
    assert told.returncode == silent.returncode == 2
    assert told.stderr.startswith("error: what this prints or writes has no room: No space left on device; free some")
    assert told.stderr.count("\n") == 1


def test_whoever_closes_the_streams_gets_no_words_into_files() -> None:
    """A file that is opened first would be number 1 or 2, and what libraries say be written into it."""
    child = os.fork()
    if not child:
        for number in (0, 1, 2):
            os.close(number)
        _open_streams()
        with open("/dev/zero") as file:
            os._exit(0 if file.fileno() > 2 and all(os.get_inheritable(number) for number in (0, 1, 2)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


ASCII = "export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"


@pytest.mark.parametrize(
    ("setting", "command", "sentence"),
    [
        ("rmdir $PWD", "models", "the current folder was removed; go to one that exists"),
        (ASCII, "compare café x", "is not UTF-8 text"),
        (ASCII, "train ../run.toml", "runs/é is no text in this locale, whose characters are ascii"),
    ],
)
def test_a_place_where_nothing_can_work_is_one_sentence(
    tmp_path: Path, setting: str, command: str, sentence: str
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    (tmp_path / "run.toml").write_text('output.folder = "runs/é"\nmodel = "tiny-llama"\n', encoding="utf-8")
    program = f'cd here; {setting}; exec "{sys.executable}" -m cuboid.cli.main {command}'
    environment = {**os.environ, "PYTHONPATH": str(Path(cuboid.__file__).parent.parent)}
    told = subprocess.run(["bash", "-c", program], cwd=tmp_path, env=environment, capture_output=True)
    said = told.stderr.decode()
    assert told.returncode == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    assert sentence in said.replace("\\xe9", "é") and not list(folder.glob("*"))


def test_a_reader_that_stops_early_is_no_error() -> None:
    program = f'"{sys.executable}" -m cuboid.cli.main map --layout dp=4096 --cluster cpux4096 --json | head -c 10'
    finished = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert finished.stderr == ""
