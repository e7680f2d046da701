"""Callbacks and schedules of one's own are called at their moments, with their arguments; wrong names are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.resilience.bad_steps import bad_steps
from cuboid.spec.run import build_run
from cuboid.training.callbacks import load_callbacks

OWN = """
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from cuboid import Callback

class Watch(Callback):
    def __enter__(self):
        self.seen = []
        return self
    def on_start(self, trainer): self.seen.append(["start", trainer.done])
    @contextmanager
    def around_step(self, trainer, step):
        self.seen.append(["begin", step])
        yield
    def on_step(self, trainer, step, result): self.seen.append(["step", step, round(result.loss, 6)])
    def on_evaluation(self, trainer, step, loss): self.seen.append(["evaluation", step])
    def on_step_end(self, trainer, step): self.seen.append(["step end", step])
    def on_save(self, trainer, step): self.seen.append(["save", step])
    def on_saved(self, trainer, saves): self.seen.append(["saved", *(save.step for save in saves)])
    def on_rollback(self, trainer, step): self.seen.append(["back to", step])
    def on_end(self, trainer):
        self.path = Path(trainer.run.output.folder, f"seen-{trainer.rank}.json")
        self.seen.append(["end"])
    def __exit__(self, *error): self.path.write_text(json.dumps([*self.seen, ["exit"]]))

class Skips(Watch):
    # Finds the second batch bad.
    def judge(self, trainer, step):
        batch = trainer.engine.course.batch(step - 1)
        return lambda result: "not to my taste" if batch == 1 else ""
    def on_result(self, trainer, step, result, pending):
        return replace(result, loss=-1.0)

def halves(step, steps): return 0.5 ** step

class Nothing: pass
"""


def test_moments_and_learning_rates(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = build_run(
        {
            "model": "tiny-llama",
            "layout": "dp=2",
            "training": {
                "steps": 3,
                "global_batch": 2,
                "sequence": 16,
                "callbacks": f"python:{tmp_path}/own.py:Watch",
            },
            "learning_rate": {"peak": 0.008, "python": f"python:{tmp_path}/own.py:halves"},
            "data": {"validation_fraction": 0.05},
            "evaluation": {"every": 2, "batches": 1},
            "checkpoint": {"every": 3},
            "output": {"folder": str(tmp_path / "run")},
        }
    )
    pool.run("tests.training.cases:train_rank", (run,), ranks=2)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["learning_rate"] for row in rows] == [0.008, 0.004, 0.002]
    losses = [round(row["loss"], 6) for row in rows]
    expected = [
        ["start", 0],
        *(["begin", 1], ["step", 1, losses[0]], ["step end", 1]),
        *(["begin", 2], ["step", 2, losses[1]], ["evaluation", 2], ["step end", 2]),
        *(["begin", 3], ["step", 3, losses[2]], ["save", 3], ["step end", 3]),
        *(["saved", 3], ["end"], ["exit"]),
    ]
    for rank in range(2):
        assert json.loads((tmp_path / "run" / f"seen-{rank}.json").read_text()) == expected


def test_a_callback_may_skip_a_step_and_see_the_run_go_back(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = build_run(
        {
            "model": "tiny-llama",
            "layout": "dp=2",
            "training": {
                "steps": 2,
                "global_batch": 2,
                "sequence": 16,
                "callbacks": f"python:{tmp_path}/own.py:Skips",
            },
            "checkpoint": {"every": 1},
            "resilience": {"bad_steps": "rollback"},
            "output": {"folder": str(tmp_path / "run")},
        }
    )
    pool.run("tests.training.cases:train_rank", (run,), ranks=2)
    seen = [moment for moment in json.loads((tmp_path / "run" / "seen-0.json").read_text()) if moment[0] != "saved"]
    assert seen == [
        *(["save", 0], ["start", 0], ["begin", 1], ["step", 1, -1.0], ["save", 1], ["step end", 1]),
        *(["begin", 2], ["back to", 1]),
        *(["begin", 2], ["step", 2, -1.0], ["save", 2], ["step end", 2], ["end"], ["exit"]),
    ]
    (told,) = bad_steps(tmp_path / "run")
    assert (told["step"], told["batch"], told["reason"]) == (2, 1, "not to my taste")


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(UserError, match="names no class"):
        load_callbacks("Watch")
    folder = tmp_path / "run"
    job = ["--model", "tiny-llama", "--set", f"output.folder={folder}"]
    assert main(["train", *job, "--set", "training.callbacks=s3://"]) == 2
    assert main(["train", *job, "--set", f"training.callbacks=python:{tmp_path}/none.py:Watch"]) == 2
    for field in ("training.callbacks=python:builtins:object", "training.callbacks=python:..:x"):
        assert main(["train", *job, "--set", field]) == 2
    for name in ("builtins:str", "math:nothing", "..:x", "a..b:x"):
        assert main(["train", *job, "--set", f"learning_rate.python=python:{name}"]) == 2, name
    assert not folder.exists()
    with pytest.raises(UserError, match=r"is no cuboid\.Callback"):
        load_callbacks(f"python:{tmp_path}/own.py:Nothing")
    with pytest.raises(UserError, match=r"learning_rate\.python=halves names no function"):
        build_run({"model": "tiny-llama"}, ["learning_rate.python=halves"])
