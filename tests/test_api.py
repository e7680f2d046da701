"""The Python interface: in a script of its own, as users call it, without a guard around what it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import cuboid

SCRIPT = """
import json
import sys

import cuboid

assert "torch" not in sys.modules, "importing cuboid imports torch"
best = cuboid.plan("llama3-8b", "h100x64", global_batch=512, sequence=8192)
assert "torch" not in sys.modules, "planning imports torch"
table = {"model": "tiny-llama", "layout": "dp=2", "output": {"folder": "run"}, "checkpoint": {"every": 3}}
trained = cuboid.train(table, "training.steps=3", "training.sequence=16", "training.global_batch=4", quiet=True)
proof = cuboid.verify("tp=2", steps=1)
weights = cuboid.load_checkpoint("run")
told = {
    "layout": str(best.layout),
    "plan": best._repr_html_(),
    "losses": trained.losses,
    "training": trained._repr_html_(),
    "passed": proof.passed,
    "weights": len(weights),
}
print(json.dumps(told))
"""


def test_a_script_plans_trains_proves_and_reads(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["layout"].startswith("dp=") and told["layout"] in told["plan"]
    assert len(told["losses"]) == 3 and "<svg" in told["training"]
    assert told["passed"] and told["weights"] == len(cuboid.load_checkpoint(tmp_path / "run"))


def test_what_is_wrong_is_one_sentence() -> None:
    with pytest.raises(cuboid.UserError, match="unknown precision=bf17"):
        cuboid.plan("llama3-8b", "h100x64", global_batch=512, sequence=8192, precision="bf17")
    with pytest.raises(cuboid.UserError, match="unknown objective=speed"):
        cuboid.plan("llama3-8b", "h100x64", global_batch=512, sequence=8192, objective="speed")
    with pytest.raises(AttributeError, match="has no attribute 'plam'"):
        cuboid.plam  # type: ignore[attr-defined]  # noqa: B018


def test_every_public_name_is_there() -> None:
    for name in cuboid.__all__:
        assert getattr(cuboid, name) is not None
    assert set(dir(cuboid)) >= set(cuboid.__all__)


def test_a_run_of_a_table_a_file_or_a_run(tmp_path: Path) -> None:
    run = cuboid.make_run({"model": "tiny-llama"}, "training.steps=7")
    assert run.training.steps == 7
    again = cuboid.make_run(run, "training.steps=8")
    assert (again.training.steps, again.model) == (8, run.model)
    (tmp_path / "run.toml").write_text('model = "tiny-gpt2"\n')
    assert cuboid.make_run(tmp_path / "run.toml").model.name == "tiny-gpt2"
