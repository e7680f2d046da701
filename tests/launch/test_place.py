"""Where a process stands: from the variables of torchrun or Slurm, or alone."""

import pytest

from cuboid.errors import UserError
from cuboid.launch.place import Place, find_place, first_host

TORCHRUN = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "12345",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "1234567",
}


def test_nobody_started_ranks() -> None:
    assert find_place({}) is None
    assert find_place({"PATH": "/bin", "WORLD_SIZE": "8"}) is None
    assert find_place({"RANK": "0"}) is None


def test_torchrun() -> None:
    assert find_place(TORCHRUN) == Place(
        rank=11, world_size=16, local_rank=3, local_world_size=8, master_address="node7", master_port=12345
    )


def test_a_launcher_that_says_the_least() -> None:
    assert find_place({"RANK": "1", "WORLD_SIZE": "2"}) == Place(
        rank=1, world_size=2, local_rank=1, local_world_size=2, master_address="127.0.0.1", master_port=29500
    )


def test_slurm() -> None:
    place = find_place(SLURM)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 8, 1, 4)
    assert (place.master_address, place.master_port) == ("gpu03", 20000 + 1234567 % 20000)
    # Every rank of the job must come to the same meeting point.
    others = [find_place({**SLURM, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 4)}) for rank in range(8)]
    assert {(other.master_address, other.master_port) for other in others if other} == {
        (place.master_address, place.master_port)
    }


def test_the_nodes_of_the_step_come_before_those_of_the_job() -> None:
    place = find_place({**SLURM, "SLURM_STEP_NODELIST": "gpu04"})
    assert place is not None
    assert place.master_address == "gpu04"


def test_what_the_user_says_comes_before_what_slurm_says() -> None:
    place = find_place({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "4000"})
    assert place is not None
    assert (place.master_address, place.master_port) == ("head", 4000)


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert find_place({**SLURM, **TORCHRUN}) == find_place(TORCHRUN)


def test_a_step_may_be_smaller_than_the_job() -> None:
    place = find_place({**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1"})
    assert place is not None
    assert (place.rank, place.world_size, place.local_world_size) == (1, 2, 2)


def test_a_batch_script_without_srun_is_no_rank() -> None:
    # sbatch -n 8 runs the script once, with the number of tasks that srun would start.
    batch = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_NUM_TASKS"}
    assert find_place({**batch, "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize("tasks", [{}, {"SLURM_NTASKS": "1"}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_a_single_task_is_not_a_job_of_ranks(tasks: dict[str, str]) -> None:
    # One shell in an allocation: the ranks of this host are still to be started.
    assert find_place({"SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "gpu03", **tasks}) is None


@pytest.mark.parametrize(
    ("spelling", "tasks"), [("8", 8), ("4(x2)", 4), ("4(x3),2", 4), ("2,1", 2)], ids=["plain", "times", "mixed", "list"]
)
def test_tasks_per_node(spelling: str, tasks: int) -> None:
    place = find_place({**SLURM, "SLURM_TASKS_PER_NODE": spelling})
    assert place is not None
    assert place.local_world_size == tasks


@pytest.mark.parametrize(("node", "tasks"), [("0", 4), ("2", 4), ("3", 2), ("4", 3)])
def test_tasks_of_this_node(node: str, tasks: int) -> None:
    here = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x3),2,3", "SLURM_NODEID": node}
    place = find_place(here)
    assert place is not None and place.local_world_size == tasks
    set_by_a_script = find_place({**here, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert set_by_a_script is not None and set_by_a_script.local_world_size == tasks


@pytest.mark.parametrize(
    "setting",
    ["RANK=x", "RANK=16", "LOCAL_WORLD_SIZE=-1", "LOCAL_WORLD_SIZE=17", "LOCAL_RANK=-1", "MASTER_PORT=99999"],
)
def test_what_no_launcher_sets_is_refused(setting: str) -> None:
    name, _, value = setting.partition("=")
    with pytest.raises(UserError, match=r"are damaged: .*; start the ranks anew|is not below WORLD_SIZE"):
        find_place({**TORCHRUN, name: value})
    slurm = {**SLURM, "MASTER_PORT": "0"}
    with pytest.raises(UserError, match="MASTER_PORT=0 is no port"):
        find_place(slurm)
    with pytest.raises(UserError, match="0 ranks on this node, of 8"):
        find_place({**SLURM, "SLURM_TASKS_PER_NODE": "0(x2)"})


def test_a_node_that_slurm_does_not_name() -> None:
    with pytest.raises(UserError, match="SLURM_NODEID=2 is not in SLURM_STEP_TASKS_PER_NODE="):
        find_place({**SLURM, "SLURM_NODEID": "2"})


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("localhost", "localhost"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[12]", "gpu12"),
        ("gpu[3,5-9]", "gpu3"),
        ("gpu-a-[001-128]", "gpu-a-001"),
        ("login1,gpu[07-09]", "login1"),
        ("rack[1-2]n[03-04]", "rack1n03"),
        ("rack[1-2]-node[03,07].cluster", "rack1-node03.cluster"),
        ("node-1.example.org", "node-1.example.org"),
    ],
)
def test_the_first_host_of_a_node_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host
