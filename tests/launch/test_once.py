"""Proofs on many nodes and among ranks that torchrun or Slurm started: real processes on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuboid.cli.verify import verification_run
from cuboid.errors import HangError
from cuboid.launch.once import Heard, Post
from cuboid.telemetry.heartbeat import process_state
from tests.cli.command import SHORT, environment, train
from tests.launch.ports import free_port
from tests.matrix import rest

SMALL = ["--steps", "1", "--set", "model.layers=2", "--set", "training.sequence=8"]
VERIFY = ["-m", "cuboid.cli.main", "verify", *SMALL]
TWO, FOUR = ["--layout", "dp=2"], ["--layout", "dp=2,pp=2"]
DIFFERS = [
    "--precision",
    "float32",
    "--steps",
    "2",
    "--set",
    "optimizer.epsilon=1e-30",
    "--set",
    "learning_rate.peak=100.0",
]
"""Float32 differs from layout to layout in the last digits; an absurd learning rate makes them the first."""
Ended = tuple[int, str, str]


class Processes:
    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, list[subprocess.Popen[str]]()

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        self._started.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self._folder,
                env=environment(**variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return self._started[-1]

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.end()


def ended(process: subprocess.Popen[str]) -> Ended:
    out, errors = process.communicate(timeout=300)
    return process.returncode, out, errors


def test_the_ranks_of_two_torchruns_prove_a_layout(processes: Processes) -> None:
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "proof"]
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meeting]
    both = [processes.start(*torchrun, "--local-addr", "127.0.0.1", *VERIFY, *TWO, "--json") for _ in range(2)]
    codes, outs, said = zip(*map(ended, both), strict=True)
    assert codes == (0, 0), said
    (verdict,) = [json.loads(line) for out in outs for line in out.splitlines()]
    assert (verdict["passed"], verdict["world_size"], verdict["backend"]) == (True, 2, "gloo")


def test_the_tasks_of_srun_all_end_with_the_verdict(processes: Processes) -> None:
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "MASTER_ADDR": "127.0.0.1"}
    slurm |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    tasks = [
        processes.start(*VERIFY, *TWO, *DIFFERS, **slurm, SLURM_PROCID=rank, SLURM_NODEID=rank, SLURM_LOCALID="0")
        for rank in ("0", "1")
    ]
    codes, outs, _ = zip(*map(ended, tasks), strict=True)
    assert codes == (1, 1)
    assert "DIFFERS" in outs[0] and outs[0].splitlines()[1] == "backend: gloo, 2 ranks on CPUs"
    assert outs[1] == ""


@pytest.mark.parametrize("nodes", [[(0, 2), (1, 3)], *rest([(0, 1, 2), (3,)])])
def test_the_first_task_of_each_node_watches_its_own(
    processes: Processes, tmp_path: Path, nodes: list[tuple[int, ...]]
) -> None:
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    slurm |= {"SLURM_STEP_TASKS_PER_NODE": ",".join(str(len(ranks)) for ranks in nodes), "OMP_NUM_THREADS": "1"}
    fields = [*SHORT, "model.layers=1", "resilience.stuck_seconds=5"]
    command = train("--layout", "dp=4", "--inject", "hang rank=3 step=1", fields=fields)
    tasks = {
        rank: processes.start(
            *command, **slurm, SLURM_PROCID=str(rank), SLURM_NODEID=str(node), SLURM_LOCALID=str(local)
        )
        for node, ranks in enumerate(nodes)
        for local, rank in enumerate(ranks)
    }
    said = {rank: ended(task) for rank, task in tasks.items()}
    assert all(code for code, _, _ in said.values()), said
    for first, *others in nodes:
        sentence = "error: rank 3 hangs in step 1: ranks 0–2 wait for it in the all-"
        assert sentence in said[first][2], said[first]
        assert all("hangs" not in said[rank][2] for rank in others), "one speaks for a node"
    stacks = {path.name for path in tmp_path.glob("runs/default/hang-*/rank-*.txt")}
    assert stacks == {f"rank-0000{rank}.txt" for rank in range(4)}


def test_tasks_that_srun_started_through_shells_meet_in_one_folder(tmp_path: Path) -> None:
    stand_in = tmp_path / "slurmstepd"
    stand_in.symlink_to("/bin/sh")
    where = "from cuboid.resilience.watchdog import shared_folder; folder = shared_folder('a'); print(folder)"
    task = f'sh -c "{sys.executable} -c \\"{where}\\"; true"'
    both = [str(stand_in), "-c", f"{task}; {task}; true"]
    folders = subprocess.run(both, env=environment(), capture_output=True, text=True, check=True).stdout.split()
    assert len(folders) == 2 and folders[0] == folders[1]
    Path(folders[0]).rmdir()


def test_two_nodes_prove_a_layout_and_refuse_one_with_another_command(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBOID_SECRET", "s" * 64)
    meeting = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    leading = processes.start(*VERIFY, *FOUR, *meeting, "--json")
    assert leading.stderr is not None and leading.stderr.readline().startswith("2 nodes meet at 127.0.0.1:")
    code, out, errors = ended(processes.start(*VERIFY, *FOUR, *meeting, "--seed", "1", "--json"))
    assert (code, out) == (2, "")
    assert errors == (
        "error: this node was given another run, or other options, than the others; "
        "start all nodes with the same command\n"
    )
    assert ended(processes.start(*VERIFY, *FOUR, *meeting, "--json")) == (0, "", "")
    code, out, errors = ended(leading)
    verdict = json.loads(out)
    assert (code, errors, verdict["passed"], verdict["world_size"]) == (0, "", True, 4)


def test_a_rank_that_hangs_in_a_proof_is_named_and_none_is_left(tmp_path: Path) -> None:
    small = ("model.layers=2", "training.sequence=8", f"output.folder={tmp_path}/run", "resilience.stuck_seconds=2")
    run = verification_run("dp=2", overrides=small, steps=2)
    with pytest.raises(HangError) as caught:
        Post(run).call("tests.launch.jobs:verify_and_hang", (run, "hang rank=1 step=2 at=backward"), Heard(silent=True))
    said = str(caught.value)
    assert said.startswith(
        "rank 1 hangs in step 2, in its backward pass of stage 0: rank 0 waits for it in the all-"
    ), said
    folder = tmp_path / "run-hangs/hang-00001"
    assert "(resilience.stuck_seconds=2: no rank computes, compiles or reads)" in said and str(folder) in said
    assert "in _sleep_for_ever" in (folder / "rank-00001.txt").read_text()
    ranks = json.loads((folder / "report.json").read_text())["ranks"]
    assert [process_state(rank["pid"]) for rank in ranks] == ["", ""]
    assert not (tmp_path / "run").exists(), "it may be the folder of a training"


CALL = """
from cuboid.cli.verify import verification_run
from cuboid.errors import RankError
from cuboid.launch.start import NodeOptions
from cuboid.launch.once import Heard, take_post

if __name__ == "__main__":
    post = take_post(verification_run("dp=4"), NodeOptions(nodes=2, rendezvous={meeting!r}))
    try:
        post.call("tests.launch.jobs:fail_while_others_sleep", (3,), Heard(silent=True))
    except RankError as error:
        print(error)
"""


def test_a_rank_that_fails_ends_the_ranks_of_other_nodes(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "call.py").write_text(CALL.format(meeting=f"127.0.0.1:{free_port()}"))
    leading = processes.start("call.py")
    assert leading.stderr is not None and leading.stderr.readline()
    code, out, _ = ended(processes.start("call.py"))
    assert code == 0 and out.startswith("rank 3 failed:") and out.strip().endswith("ValueError: rank 3 has a reason")
    assert ended(leading)[:2] == (0, "another node failed: rank 3 failed: ValueError: rank 3 has a reason\n")


def test_what_carries_the_collectives_is_said_once_and_kept_for_json(capsys: pytest.CaptureFixture[str]) -> None:
    told = {"backend": "gloo", "gpus": 0, "gpu_shared": False, "hosts": 1, "sentence": "backend: gloo, 2 ranks on CPUs"}
    heard, silent = Heard(silent=False), Heard(silent=True)
    assert heard.backend == {"backend": None, "gpus": 0, "gpu_shared": False}, "one rank has nobody to talk to"
    for _ in range(2):  # a chain of layouts joins several times
        heard(told)
        silent(told)
    assert capsys.readouterr().out == "backend: gloo, 2 ranks on CPUs\n"
    heard({**told, "sentence": "backend: gloo, 4 ranks on CPUs"})
    assert capsys.readouterr().out == "backend: gloo, 4 ranks on CPUs\n"
    assert heard.backend == silent.backend == {"backend": "gloo", "gpus": 0, "gpu_shared": False}
