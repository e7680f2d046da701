"""Several supervisors with ranks of their own, on loopback: they are killed, stopped and started again, and the job
continues by itself with the same numbers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuboid.launch.pool import Pool
from cuboid.resilience.goodput import failures
from cuboid.spec.run import build_run
from tests.cli.command import SHORT, Training, rows
from tests.launch.ports import free_port

FIELDS = (
    "training.precision=float64",
    "checkpoint.every=2",
    "learning_rate.schedule=constant",  # so that the numbers do not depend on where a run would end
    "resilience.contact_seconds=8",
)


LEADS = "; other nodes reach the ranks' store at "
"""What who leads says."""


class Job:
    """Supervisors of one job; the first of them leads."""

    def __init__(self, folder: Path, layout: str, *fields: str, options: tuple[str, ...]) -> None:
        self._start = (folder, layout, *FIELDS, *fields)
        self._options = (*options, "--rendezvous", f"127.0.0.1:{free_port()}")
        self.folder, self.started = folder, list[Training]()

    def start(self) -> Training:
        self.started.append(Training(*self._start, options=self._options))
        return self.started[-1]

    def wait_for_lead(self) -> None:
        self._wait(lambda: LEADS in self.started[0].log.read_text())

    def steps(self) -> int:
        path = self.folder / "runs/default/metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_for_steps(self, more: int) -> None:
        """So many rows beyond those there are once an attempt has begun."""
        wanted = self.steps() + more
        self._wait(lambda: self.steps() >= wanted)

    def wait_for_calls(self, leader: Training, text: str, times: int) -> None:
        self._wait(lambda: leader.log.read_text().count(text) >= times)

    def _wait(self, happened: object) -> None:
        limit = time.monotonic() + 600
        while not happened():  # type: ignore[operator]
            assert time.monotonic() < limit, [supervisor.log.read_text() for supervisor in self.started]
            time.sleep(0.05)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for supervisor in (supervisor for job in made for supervisor in job.started):
        for process in supervisor.processes():
            os.kill(process, signal.SIGKILL)
        supervisor.command.wait()
        assert supervisor.command.stderr is not None
        supervisor.command.stderr.close()


def signal_all(supervisor: Training, sent: signal.Signals) -> None:
    for process in supervisor.processes():
        os.kill(process, sent)


def test_a_job_survives_its_nodes(tmp_path: Path, pool: Pool, jobs: list[Job]) -> None:
    job = Job(tmp_path, "dp=4", options=("--nodes", "2", "--min-nodes", "1"))
    jobs.append(job)
    leader = job.start()
    job.wait_for_lead()
    other = job.start()
    job.wait_for_steps(4)
    assert leader.listening() | other.listening() == {"0100007F"}

    os.kill(other.command.pid, signal.SIGKILL)  # its ranks end with it
    job.wait_for_calls(leader, "1 node: ", 1)
    job.wait_for_steps(3)
    other.assert_nothing_is_left()

    other = job.start()
    job.wait_for_calls(leader, "2 nodes: the run's own layout dp=4", 2)
    job.wait_for_steps(3)

    signal_all(other, signal.SIGSTOP)  # as if its link were cut: nobody is told
    job.wait_for_calls(leader, "1 node: ", 2)
    job.wait_for_steps(3)
    signal_all(other, signal.SIGCONT)
    job.wait_for_calls(leader, "2 nodes: the run's own layout dp=4", 3)
    job.wait_for_steps(3)

    os.kill(leader.command.pid, signal.SIGKILL)  # the other one takes over
    leader.assert_nothing_is_left()
    job.wait_for_calls(other, LEADS, 1)
    job.wait_for_steps(3)
    leader = job.start()  # where the rendezvous is, and it follows
    job.wait_for_calls(other, "2 nodes: the run's own layout dp=4", 1)
    job.wait_for_steps(3)
    assert LEADS not in leader.log.read_text()

    other.command.send_signal(signal.SIGTERM)  # one node is wanted back: all save, and end with "requeue me"
    assert [leader.end()[0], other.end()[0]] == [75, 75]
    other.assert_nothing_is_left()

    kinds = [(failure.kind, failure.layout) for failure in failures(tmp_path / "runs/default")]
    assert ("node", "dp=4,tp=1,pp=1") in kinds and all(
        failure.restarted for failure in failures(tmp_path / "runs/default")
    )
    survived = rows(tmp_path / "runs/default/metrics.jsonl")
    assert [row["step"] for row in survived] == list(range(1, len(survived) + 1))
    alone = tmp_path / "alone"
    fields = [*SHORT, *FIELDS, "checkpoint.every=0", f"training.steps={len(survived)}", f"output.folder={alone}"]
    pool.run("tests.training.cases:train_rank", (build_run({"model": "tiny-llama"}, fields),), ranks=1)
    for row, whole in zip(survived, rows(alone / "metrics.jsonl"), strict=True):
        assert row["loss"] == pytest.approx(whole["loss"], rel=1e-9)


@pytest.mark.thorough
def test_a_leader_that_slept_follows_who_took_over(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, "dp=6", "training.global_batch=12", options=("--nodes", "3", "--min-nodes", "1"))
    jobs.append(job)
    leader = job.start()
    job.wait_for_lead()
    others = [job.start(), job.start()]
    job.wait_for_steps(4)
    signal_all(leader, signal.SIGSTOP)  # with its ranks, as a machine that hangs
    job._wait(lambda: any(LEADS in other.log.read_text() for other in others))
    job.wait_for_steps(6)
    new = next(other for other in others if LEADS in other.log.read_text())
    signal_all(leader, signal.SIGCONT)
    job.wait_for_calls(new, "3 nodes: the run's own layout dp=6", 1)
    job.wait_for_steps(3)
    new.command.send_signal(signal.SIGTERM)
    ends = [each.end() for each in (leader, *others)]
    assert [code for code, _ in ends] == [75, 75, 75]
    assert "another node leads now: this node leads no more, and ends its ranks" in ends[0][1]
    found = failures(tmp_path / "runs/default")
    assert [failure.reason.partition(": ")[2] for failure in found] == ["nothing was heard of it for 8 s"]
    survived = [row["step"] for row in rows(tmp_path / "runs/default/metrics.jsonl")]
    assert survived == list(range(1, len(survived) + 1))


@pytest.mark.thorough
def test_every_supervisor_ends_with_the_same_word(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, "dp=2,tp=2", "training.steps=4", options=("--nodes", "2"))
    jobs.append(job)
    leader = job.start()
    job.wait_for_lead()
    other = job.start()
    stranger = Training(tmp_path, "dp=2,tp=2", "training.steps=5", options=job._options)
    code, said = stranger.end()
    assert code == 2 and said.startswith("error: this node has another run file, or other options, than the others; ")
    assert [leader.end(), other.end()] == [(0, ""), (0, "")]
    assert "step 4/4" in leader.log.read_text() and "step" not in other.log.read_text()
