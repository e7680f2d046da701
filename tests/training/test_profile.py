"""Traces of a real training: which steps, which regions, how they lie in each other."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.schedule.schedules import make_schedule
from cuboid.spec.run import build_run
from cuboid.spec.training import ProfileSpec
from cuboid.training.profile import MEMORY, TRACES
from tests.cli.command import SHORT, run, train
from tests.training.cases import short_run

STEPS = 7
NAMES = {"F": "forward", "B": "backward"}


def regions(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    own = [event for event in events if event.get("cat") == "user_annotation"]
    return [event for event in own if not event["name"].startswith("gloo:")]  # which run in threads of their own


def test_traces_of_a_pipeline_under_zero_3(tmp_path: Path) -> None:
    fields = [*SHORT, f"training.steps={STEPS}", "model.layers=3", "profile.ranks=0,3", "profile.steps=2"]
    finished = run(train("--layout", "dp=2,pp=2,zero=3", "--profile", fields=fields), tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    folder = tmp_path / "runs/default/profile"
    wanted = {pattern.replace("*", f"{rank:05d}") for pattern in (TRACES, MEMORY) for rank in (0, 3)}
    assert {path.name for path in folder.iterdir()} == wanted, "no snapshot without a GPU"
    *_, traces, memory = finished.stdout.splitlines()
    assert traces.startswith("trace: runs/default/profile/trace-* of 2 ranks, ") and "ui.perfetto.dev" in traces
    assert memory.startswith("memory: runs/default/profile/memory-* of 2 ranks, ")

    schedule = make_schedule("1f1b", 2, 2)
    for rank, layers in ((0, {"embedding", "layers.0", "layers.1"}), (3, {"layers.2", "head"})):
        found = regions(folder / TRACES.replace("*", f"{rank:05d}"))
        names = [event["name"] for event in sorted(found, key=lambda event: event["ts"])]
        # Warm after three steps, of which the third warms the profiler; then two are traced.
        assert [name for name in names if name.startswith("step ")] == ["step 4", "step 5"]
        actions = [
            f"stage {action.stage} {NAMES[str(action)[0]]} micro-batch {action.micro_batch}"
            for action in schedule.actions[rank // 2]
        ]
        assert [name for name in names if name.startswith("stage ")] == 2 * actions
        for layer in layers:
            assert names.count(layer) == 4, "two micro-batches in two steps"
            assert names.count(f"reduce gradients of {layer}") == 4
            assert names.count(f"gather weights of {layer}") == 8
            assert names.count(f"backward of {layer}") == (0 if layer == "embedding" else 4)
        assert not {"embedding", "layers.0", "layers.1", "layers.2", "head"} - layers & set(names)
        for part in ("data", "gradients", "update"):
            assert names.count(f"{part} of this step") == 2
        assert {"wait: all-gather of data", "wait: all-reduce of world", "wait: message"} <= set(names)
        assert_nested(found)

        held = json.loads((folder / MEMORY.replace("*", f"{rank:05d}")).read_text())["bytes"]
        assert list(held) == ["parameters", "master weights", "optimizer", "gradients", "activations", "other"]
        assert held["parameters"] == 0 < held["gradients"] and held["optimizer"] == 2 * held["master weights"] > 0
        assert 0 < held["activations"] < held["other"]


def test_activations_that_nobody_counted_are_no_kind_of_their_own(tmp_path: Path, pool: Pool) -> None:
    """The first step is traced, so none before it could be followed."""
    alone = short_run("dp=1", str(tmp_path), "training.steps=1", "profile.steps=1")
    pool.run("tests.training.cases:train_rank", (alone,), ranks=1)
    held = json.loads((tmp_path / "profile/memory-00000.json").read_text())["bytes"]
    assert list(held) == ["parameters", "master weights", "optimizer", "gradients", "other"]
    assert held["other"] > held["optimizer"] > 0


def assert_nested(events: list[dict[str, Any]]) -> None:
    """A viewer draws a region inside another or beside it, never across its end."""
    open_until: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-3, event["name"]
        open_until.append(end)
    assert all(first["tid"] == second["tid"] for first, second in pairwise(events))


def test_which_steps_are_traced() -> None:
    assert not ProfileSpec().window(0, 100, 9)
    assert ProfileSpec(steps=3).window(0, 100, 9) == range(4, 7)
    assert ProfileSpec(steps=3).window(50, 100, 9) == range(54, 57), "after a resumption likewise"
    assert ProfileSpec(steps=3).window(0, 4, 9) == range(2, 5), "earlier in a short run"
    assert ProfileSpec(steps=3).window(0, 2, 9) == range(1, 3)
    assert ProfileSpec(steps=3).window(0, 100, 2) == range(4, 6), "no more than a file can hold"
    assert ProfileSpec(steps=2, first=8).window(0, 100, 9) == range(8, 10)
    assert not ProfileSpec(steps=2, first=8).window(20, 100, 9), "behind already"


def test_what_cannot_be_traced_is_refused() -> None:
    for setting, sentence in {
        "profile.ranks=0,x": "profile.ranks=0,x is no list of ranks; write it like 0,4,5",
        "profile.ranks=0,2": "profile.ranks=2 is outside the layout; use 0 to 1",
        "profile.first=101": "profile.first=101 is after training.steps=100; use profile.first=100",
        "profile.steps=-1": "profile.steps=-1",
    }.items():
        table = {"model": "tiny-llama", "layout": "dp=2", "profile": {"steps": 1}}
        with pytest.raises(UserError, match=sentence):
            build_run(table, [setting])
    with pytest.raises(UserError, match=r"profile.ranks=7 is outside the layout; use 0$"):
        build_run({"model": "tiny-llama"}, ["profile.ranks=7"])


def test_a_training_that_fails_leaves_what_it_traced(tmp_path: Path) -> None:
    fields = [*SHORT, f"training.steps={STEPS}"]
    finished = run(train("--layout", "dp=1", "--profile", "--inject", "oom rank=0 step=5", fields=fields), tmp_path)
    assert finished.returncode == 1 and finished.stderr.startswith("error: rank 0 of "), finished.stderr
    names = [event["name"] for event in regions(tmp_path / "runs/default/profile/trace-00000.json.gz")]
    assert {"step 4", "step 5"} <= set(names)
