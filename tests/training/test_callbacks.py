"""Callbacks and schedules of one's own are called at their moments, with their arguments; wrong names are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.spec.run import build_run
from cuboid.training.callbacks import load_callbacks

OWN = """
import json
from pathlib import Path
from cuboid import Callback

class Watch(Callback):
    def on_start(self, trainer): self.seen = [["start", trainer.done]]
    def on_step(self, trainer, step, result): self.seen.append(["step", step, round(result.loss, 6)])
    def on_evaluation(self, trainer, step, loss): self.seen.append(["evaluation", step])
    def on_save(self, trainer, step): self.seen.append(["save", step])
    def on_end(self, trainer):
        Path(trainer.run.output.folder, f"seen-{trainer.rank}.json").write_text(json.dumps([*self.seen, ["end"]]))

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
        *(["step", 1, losses[0]], ["step", 2, losses[1]], ["evaluation", 2], ["step", 3, losses[2]]),
        *(["save", 3], ["end"]),
    ]
    for rank in range(2):
        assert json.loads((tmp_path / "run" / f"seen-{rank}.json").read_text()) == expected


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(UserError, match="names no class"):
        load_callbacks("Watch")
    with pytest.raises(UserError, match=r"is no cuboid\.Callback"):
        load_callbacks(f"python:{tmp_path}/own.py:Nothing")
    with pytest.raises(UserError, match=r"learning_rate\.python=halves names no function"):
        build_run({"model": "tiny-llama"}, ["learning_rate.python=halves"])
