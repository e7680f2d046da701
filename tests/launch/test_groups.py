"""One job over nodes of two groups: planned, trained on both with unequal stages, on one while the other is lost, and
on both again; the numbers are those of one process."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.launch.pool import Pool
from cuboid.spec.run import build_run, load_run
from tests.cli.command import SHORT, Training, rows
from tests.launch.ports import free_port

NODE = """
[[groups]]
name = "{name}"
site = "here"
accelerator = "cpu"
nodes = 1
accelerators_per_node = 1
peak_tflops = {{float32 = {tflops}}}
tiers = [{{name = "network", size = 1, bandwidth = 0.1, latency = 100.0}}]
"""
LINK = """
[[links]]
between = ["here", "here"]
bandwidth_gbit = 10.0
latency_ms = 0.1
"""
FIELDS = [
    "data.source=python-stdlib",
    "training.precision=float64",
    "checkpoint.every=2",
    "learning_rate.schedule=constant",
    "resilience.contact_seconds=8",
    "output.folder=runs/default",
]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of tiny-llama over a fast and a slow node: pp=2, the fast one first."""
    monkeypatch.chdir(tmp_path)
    groups = [NODE.format(name=name, tflops=tflops) for name, tflops in (("fast", 0.05), ("slow", 0.02))]
    (tmp_path / "kinds.toml").write_text("".join([*groups, LINK]))
    asked = ["--one-job", "--global-batch", "12", "--seq", "64", "--precision", "float32"]
    fixed = ["--fix", "pp=2,schedule=1f1b,micro_batch=1"]
    assert main(["plan", "tiny-llama", "kinds.toml", *asked, *fixed, "-o", "plan.toml"]) == 0
    layout = load_run("plan.toml").layout
    first = re.search(r'\[\{group = "(\w+)", nodes = 1\}, \{group = "(\w+)"', (tmp_path / "plan.toml").read_text())
    assert first is not None and first.groups() == ("fast", "slow")
    assert layout.layers[0] > layout.layers[1]
    return tmp_path


def test_a_job_over_two_groups_loses_one_and_takes_it_back(plan: Path, pool: Pool) -> None:
    layout = str(load_run(plan / "plan.toml").layout)
    options = ["plan.toml", "--nodes", "2", "--min-nodes", "1", "--rendezvous", f"127.0.0.1:{free_port()}"]
    started: list[Training] = []

    def start(group: str) -> Training:
        started.append(Training(plan, layout, *FIELDS, options=[*options, "--group", group]))
        return started[-1]

    def wait(told: str, times: int) -> None:
        limit = time.monotonic() + 600
        while started[0].log.read_text().count(told) < times:
            assert time.monotonic() < limit, started[0].log.read_text()
            time.sleep(0.1)

    def steps() -> int:
        path = plan / "runs/default/metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    try:
        leader = start("fast")
        wait("other nodes reach", 1)
        other = start("slow")
        wait(f"2 nodes: the run's own layout {layout}", 1)
        leader.wait_for_a_step(4)
        os.kill(other.command.pid, signal.SIGKILL)
        wait("1 node: ", 1)
        leader.wait_for_a_step(steps() + 3)
        other = start("slow")
        wait(f"2 nodes: the run's own layout {layout}", 2)
        leader.wait_for_a_step(steps() + 3)
        other.command.send_signal(signal.SIGTERM)
        assert [leader.end()[0], other.end()[0]] == [75, 75]
    finally:
        for supervisor in started:
            for process in supervisor.processes():
                os.kill(process, signal.SIGKILL)
            supervisor.command.wait()
            assert supervisor.command.stderr is not None
            supervisor.command.stderr.close()
    survived = rows(plan / "runs/default/metrics.jsonl")
    alone = plan / "alone"
    fields = [*SHORT, *FIELDS, "checkpoint.every=0", f"training.steps={len(survived)}", f"output.folder={alone}"]
    pool.run("tests.training.cases:train_rank", (build_run({"model": "tiny-llama"}, fields),), ranks=1)
    for row, whole in zip(survived, rows(alone / "metrics.jsonl"), strict=True):
        assert row["loss"] == pytest.approx(whole["loss"], rel=1e-9)


def test_nodes_that_do_not_match_the_plan_are_refused(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--set", "data.source=python-stdlib", "--set", "training.device=cpu"]
    here = ["train", "plan.toml", *data, "--rendezvous", f"127.0.0.1:{free_port()}"]
    for more, sentence in (
        (["--nodes", "2"], "--group is missing for a plan over several groups; add --group fast or --group slow"),
        (["--nodes", "2", "--group", "new"], "group=new is not in a plan over several groups"),
        (["--nodes", "1", "--group", "slow"], "nodes=1 are not the 2 of the plan, 1 of fast and 1 of slow"),
    ):
        assert main([*here, *more]) == 2
        assert sentence in capsys.readouterr().err
    for old, new, sentence in (
        (
            '{group = "slow"',
            '{group = "attic"',
            "plan.nodes.group=attic is none of plan.groups, fast and slow; write it anew",
        ),
        ("bandwidth_gbit = 10.0", "bandwidth_gbit = 0.0", "links.bandwidth_gbit=0"),
    ):
        whole = (plan / "plan.toml").read_text()
        assert old in whole
        (plan / "broken.toml").write_text(whole.replace(old, new))
        assert main(["train", "broken.toml", *here[2:], "--nodes", "2", "--group", "fast"]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["train", *data, "--nodes", "1", "--rendezvous", "127.0.0.1:1", "--group", "fast"]) == 2
    assert "group=fast is for a plan of one job over several groups; omit it" in capsys.readouterr().err
    assert main(["launch", "slurm", "plan.toml", *data[:2]]) == 2
    assert "which a job file of equal nodes does not start" in capsys.readouterr().err
    assert not (plan / "runs").exists()
