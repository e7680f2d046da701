"""`cuboid train` as a user runs it: real processes, started by the command itself or by torchrun."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuboid.launch.pool import Pool
from cuboid.schedule.schedules import make_schedule
from cuboid.spec.run import build_run, load_run
from cuboid.training.run_folder import prepare_folder
from tests.cli.command import SHORT, Training, rows, run, train


def test_four_ranks(tmp_path: Path) -> None:
    finished = run(train("--layout", "dp=2,pp=2", fields=[*SHORT, "output.keep_timing=true"]), tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    lines = finished.stdout.splitlines()
    assert lines[0] == "tiny-llama: 427,456 parameters on 4 ranks, dp=2,tp=1,pp=2"
    assert lines[1] == "layers per stage: 4 4"
    assert lines[2] == "64 tokens a step in 2 micro-batches per replica; runs/default/metrics.jsonl"
    assert lines[3] == "backend: gloo, 4 ranks on CPUs"
    for step, line in enumerate(lines[4:7], start=1):
        assert re.fullmatch(rf"step {step}/3  loss \d\.\d{{4}}  norm [\d.]+  lr \d\.\d\de-\d\d  [\d,]+ tokens/s", line)
    assert re.fullmatch(r"loss \d\.\d{4} → \d\.\d{4} in 3 steps", lines[7])
    assert re.fullmatch(r"goodput [\d.]+ %: [\d.]+ of [\d.]+ s in steps that count \(.* set up.*\)", lines[8])
    assert len(lines) == 9, "one rank speaks for all"

    folder = tmp_path / "runs" / "default"
    metrics = rows(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    for row, line in zip(metrics, lines[4:7], strict=True):
        assert f"loss {row['loss']:.4f}" in line
        assert (row["tokens"], row["labelled_tokens"], row["finite"]) == (64, 64, True)
        assert row["gradient_norm"] > 0 and row["seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    asked = build_run({"model": "tiny-llama", "layout": "dp=2,pp=2"}, [*SHORT, "output.keep_timing=true"])
    assert load_run(folder / "run.toml") == asked

    schedule = make_schedule("1f1b", 2, 2)
    for rank in range(4):
        timing = rows(folder / f"timing-{rank:05d}.jsonl")
        assert [row["step"] for row in timing] == [1, 2, 3]
        for row in timing:
            actions: list[tuple[str, float, float, float]] = row["actions"]  # type: ignore[assignment]
            assert [name for name, *_ in actions] == [str(action) for action in schedule.actions[rank // 2]]
            assert all(start <= ready <= end for _, start, ready, end in actions)
            waits: list[tuple[str, str, float, float]] = row["collectives"]  # type: ignore[assignment]
            assert {"all-reduce"} <= {kind for kind, *_ in waits} and all(begin <= end for *_, begin, end in waits)
            # The same clock as the actions': gradients are summed over replicas as the last action ends, or after.
            assert max(end for *_, end in waits) >= actions[-1][3]
        (memory,) = rows(folder / f"memory-{rank:05d}.jsonl")[-1:]
        assert memory["peak"] > memory["before"] > 0
        assert memory["weights"] / 4 == pytest.approx(427_456 / 2, rel=0.2), "half of the layers in float32"
        assert memory["optimizer"] == 2 * memory["weights"]


@pytest.mark.thorough
def test_json_and_a_run_file_from_another_folder(tmp_path: Path) -> None:
    """The same command again continues, here with nothing; another training is refused; --overwrite starts anew."""
    saves = ["--set", "checkpoint.every=2", "--set", "checkpoint.asynchronous=false"]  # so that none is waited for
    command = train("--layout", "tp=2", "--json", *saves)
    first = run(command, tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    summary = json.loads(first.stdout)
    metrics = rows(tmp_path / "runs/default/metrics.jsonl")
    assert summary.pop("tokens_per_second") > 0
    goodput, spent = summary.pop("goodput"), summary.pop("spent")
    assert 0 < goodput < 1 and spent["set_up"] > 0 and spent["saves"] > 0
    spans = sum(seconds for name, seconds in spent.items() if name != "until")
    assert goodput == pytest.approx(spent["steps"] / spans, abs=2e-3)
    assert summary == {
        "model": "tiny-llama",
        "layout": "dp=1,tp=2,pp=1",
        "world_size": 2,
        "steps": 3,
        "first_loss": metrics[0]["loss"],
        "last_loss": metrics[-1]["loss"],
        "folder": "runs/default",
        "slowest": None,
        "backend": "gloo",
        "gpus": 0,
        "gpu_shared": False,
        "bound": None,
    }
    done = run(command, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, first.stdout, "")
    again = [*train("runs/default/run.toml", "--json", fields=["training.steps=2", "training.seed=7"])]
    refused = run(again, tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "training.seed=7 is not 0, of the run in runs/default; use the same training.seed, ano" in refused.stderr
    again = [*train("runs/default/run.toml", "--json", fields=["training.steps=2"])]
    assert len(rows(tmp_path / "runs/default/metrics.jsonl")) == 3
    assert run([*again, "--overwrite"], tmp_path).returncode == 0
    repeated = rows(tmp_path / "runs/default/metrics.jsonl")
    assert [row["loss"] for row in repeated] == [row["loss"] for row in metrics[:1]] + [repeated[1]["loss"]]
    assert len(repeated) == 2
    kept = sorted(path.name for path in (tmp_path / "runs/default/checkpoints").iterdir())
    assert kept == ["step-00000002"], "those of the old run are gone"


def kept(folder: Path) -> list[str]:
    """What a run leaves in its folder, but for what is told of memory, time and slow ranks."""
    told = re.compile(r"(memory|ranks)-\d{5}\.jsonl|goodput\.json")
    return sorted(path.name for path in folder.iterdir() if not told.fullmatch(path.name))


def test_joins_the_ranks_of_torchrun(tmp_path: Path, pool: Pool) -> None:
    here = ("--set", "output.folder=started", "--set", "checkpoint.every=3")
    fields = [*SHORT, f"output.folder={tmp_path / 'started'}", "checkpoint.every=3"]
    started = build_run({"model": "tiny-llama", "layout": "pp=2"}, fields)
    prepare_folder(started)
    pool.run("tests.training.cases:train_rank", (started,), ranks=2)
    shutil.copytree(tmp_path / "started", tmp_path / "beside")
    longer = [*SHORT, "training.steps=4", f"output.folder={tmp_path / 'beside'}"]
    beside = build_run({"model": "tiny-llama", "layout": "dp=2"}, longer)
    prepare_folder(beside)
    alone = pool.run("tests.training.cases:train_rank", (beside,), ranks=2)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    joined = run([*launcher, *train("--layout", "dp=2", *here, fields=[*SHORT, "training.steps=4"])], tmp_path)
    assert joined.returncode == 0, joined.stderr
    assert joined.stdout.count("step 4/4") == 1, "one rank speaks for all"
    assert joined.stdout.startswith("tiny-llama: 427,456 parameters on 2 ranks")
    assert "resuming after step 3, written on dp=1,tp=1,pp=2" in joined.stdout, joined.stderr
    metrics = rows(tmp_path / "started/metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4] and metrics[-1]["loss"] == alone[0]
    assert kept(tmp_path / "started") == ["backend.json", "checkpoints", "metrics.jsonl", "run.toml"]


def test_a_hang_of_ranks_that_torchrun_started_is_named(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    stuck = ("--set", "resilience.stuck_seconds=3")
    ended = run([*launcher, *train("--layout", "dp=2", *stuck, "--inject", "hang rank=1 step=1")], tmp_path)
    assert ended.returncode
    assert "error: rank 1 hangs in step 1: rank 0 waits for it in the all-reduce" in ended.stderr
    assert (tmp_path / "runs/default/hang-00001/rank-00001.txt").exists()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    under_way = Training(tmp_path, "dp=2")
    try:
        under_way.wait_for_a_step()
        yield under_way
    finally:
        for process in under_way.processes():
            os.kill(process, signal.SIGKILL)
        under_way.command.communicate()


def test_a_rank_that_dies_is_named_and_takes_all_with_it(training: Training) -> None:
    ranks = training.ranks()
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    assert training.end() == (1, "error: rank 1 failed: it was ended by SIGKILL (out of memory?)\n")
    training.assert_nothing_is_left()


def test_control_c_leaves_nothing_behind(training: Training) -> None:
    os.killpg(training.command.pid, signal.SIGINT)  # as a terminal does: to every process at once
    assert training.end() == (130, "stopped by SIGINT\n")
    training.assert_nothing_is_left()
    assert kept(training.folder / "runs/default") == ["backend.json", "metrics.jsonl", "run.toml"]


def test_ranks_end_when_the_command_is_killed(training: Training) -> None:
    training.command.kill()
    training.end()
    training.assert_nothing_is_left()


def test_communication_is_counted_beside_the_prediction(tmp_path: Path) -> None:
    """Evaluation also collectives, and does not count."""
    fields = [*SHORT, "evaluation.every=1", "data.validation_fraction=0.1"]
    finished = run(train("--layout", "dp=2,tp=2,zero=1", "--count-communication", fields=fields), tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    shown = finished.stdout.splitlines()
    assert "counted as predicted, to the byte, on 4 ranks" in shown
    table = {tuple(line.split()[:2]): line.split()[2:] for line in shown if "all-gather" in line or "scatter" in line}
    assert set(table) == {(group, kind) for group in ("tp", "shard") for kind in ("all-gather", "reduce-scatter")}
    assert all(found[2] == found[4] for found in table.values()), "bytes counted and predicted"

    folder = tmp_path / "runs" / "default"
    for rank in range(4):
        steps = rows(folder / f"communication-{rank:05d}.jsonl")
        assert [row["step"] for row in steps] == [1, 2, 3]
        assert steps[0]["collectives"] == steps[1]["collectives"] == steps[2]["collectives"]


@pytest.mark.parametrize("layout", ["dp=1", "dp=2"])
def test_a_run_whose_folder_vanishes_ends_with_a_sentence(tmp_path: Path, layout: str) -> None:
    training = Training(tmp_path, layout, "checkpoint.every=5")
    training.wait_for_a_step(3)
    (tmp_path / "runs").rename(tmp_path / "removed")
    code, errors = training.end()
    assert code == 2
    assert re.fullmatch(
        r"(warning: .*\n)*error: output.folder=runs/default was removed, or unmounted, while the run trained, "
        r"which ends after step \d+; use a folder that stays\n",
        errors,
    ), errors
    assert not (tmp_path / "runs").exists(), "not even for the report of what went wrong"
    training.assert_nothing_is_left()
