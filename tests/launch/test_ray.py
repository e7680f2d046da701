"""Programs for a Ray cluster: valid Python with the run's own settings; what is wrong is one sentence. On a cluster
`test_ray_cluster.py` tries them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuboid.cli.main import main


def written(folder: Path, *options: str, layout: str = "dp=6") -> str:
    run = f'model = "tiny-llama"\nlayout = "{layout}"\n[training]\nglobal_batch = 12\n[checkpoint]\nevery = 10\n'
    (folder / "run.toml").write_text(run)
    target = folder / "on_ray.py"
    assert main(["launch", "ray", str(folder / "run.toml"), "--gpus-per-node", "2", *options, "-o", str(target)]) == 0
    return target.read_text()


def settings(text: str) -> dict[str, Any]:
    """Constants of the program."""
    found = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name.isupper():
                found[name] = ast.literal_eval(statement.value)
    return found


def test_a_program_places_one_supervisor_a_node(tmp_path: Path) -> None:
    found = settings(written(tmp_path, "--min-nodes", "2", "--port", "29411"))
    assert (found["NODES"], found["BUNDLE"], found["PORT"]) == (3, {"CPU": 2, "GPU": 2}, 29411)
    words = found["COMMAND"]
    assert words[:2] == ["train", str(tmp_path / "run.toml")]
    assert words[words.index("--rendezvous") + 1] == "HEAD:29411"
    assert words[words.index("--min-nodes") + 1] == "2"
    assert "resilience.gather_seconds=120" in words


def test_ranks_on_cpus_ask_for_no_gpus(tmp_path: Path) -> None:
    options = ("--set", "training.device=cpu", "--cpus", "8", "--address", "10.0.0.7:6379")
    found = settings(written(tmp_path, *options))
    assert (found["BUNDLE"], found["ADDRESS"]) == ({"CPU": 8}, "10.0.0.7:6379")


def test_without_ray_the_program_says_so(tmp_path: Path) -> None:
    written(tmp_path)
    code = f"import sys; sys.modules['ray'] = None; exec(open({str(tmp_path / 'on_ray.py')!r}).read())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr == "error: this program needs Ray; install it with `pip install ray`\n"


def test_options_of_others_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text('model = "tiny-llama"\n')
    assert main(["launch", "ray", str(tmp_path / "run.toml"), "--time", "60"]) == 2
    assert capsys.readouterr().err.startswith("error: time=60 is for slurm; omit it for ray")
    assert main(["launch", "slurm", str(tmp_path / "run.toml"), "--address", "auto"]) == 2
    assert capsys.readouterr().err.startswith("error: address=auto is for ray; omit it for slurm")
