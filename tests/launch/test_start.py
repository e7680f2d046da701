"""What a process is in a job, and that what cannot work is refused before anything is written."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from threading import Timer

import pytest

from cuboid.checkpoint.memory.folder import NODE
from cuboid.checkpoint.terms import Term, Terms
from cuboid.errors import UserError
from cuboid.launch import start
from cuboid.launch.network import Endpoint, Interface
from cuboid.launch.place import Place
from cuboid.launch.start import NodeOptions, Nodes, TrainingRole, take_role, train_run
from cuboid.launch.supervisor import check_machine
from cuboid.spec.run import Run, build_run, dump_run
from cuboid.training.claim import claimed, try_claim
from tests.launch.ports import free_port

NODES = Nodes(Endpoint("node0", 29400), Interface("eth0", "10.0.0.7"), 2, 4, ranks=2)


def run_in(folder: Path, *overrides: str, layout: str = "dp=8") -> Run:
    table = {
        "model": "tiny-llama",
        "layout": layout,
        "training": {"steps": 1, "global_batch": 16, "sequence": 64, "device": "cpu"},
        "checkpoint": {"every": 2},
        "output": {"folder": str(folder / "run")},
    }
    return build_run(table, overrides)


def rank(number: int, local_ranks: int = 4) -> Place:
    return Place(number, 8, number % local_ranks, local_ranks, "node0", 29500)


def test_one_process_speaks_for_the_job(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert TrainingRole(run).speaks, "it starts all ranks itself"
    assert [TrainingRole(run, place=rank(number)).speaks for number in (0, 1, 4)] == [True, False, False]
    with open(os.devnull) as other:
        leads: object = other  # who listens at the rendezvous leads, whatever it listens with
        assert TrainingRole(run, nodes=NODES, listener=leads).speaks  # type: ignore[arg-type]
    assert not TrainingRole(run, nodes=NODES).speaks


def test_with_how_few_nodes_the_state_must_fit_into_memory(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert TrainingRole(run).fewest_nodes == 1
    assert TrainingRole(run, place=rank(5)).fewest_nodes == 2
    assert TrainingRole(run, place=rank(5, local_ranks=8)).fewest_nodes == 1
    assert TrainingRole(run, nodes=NODES).fewest_nodes == 2, "not four: it continues with two"


def test_a_node_waits_for_the_folder_of_a_leader_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have no time to, or have died just now: the node that was started again is not refused for that."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text(dump_run(run_in(tmp_path, layout="dp=1")))
    monkeypatch.setattr(start, "claimed", partial(claimed, patience=0.05))
    here = NodeOptions(nodes=1, rendezvous=f"127.0.0.1:{free_port()}")
    other = run_in(tmp_path, "training.seed=7", "resilience.contact_seconds=3", layout="dp=1")
    handle = try_claim(folder)
    assert handle is not None
    with pytest.raises(UserError, match="is in use by another run"):
        train_run(other, here)
    assert Terms(folder).take(Term(1, "another", "127.0.0.1", free_port()))
    Timer(0.5, os.close, [handle]).start()
    here = NodeOptions(nodes=1, rendezvous=f"127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match=r"training\.seed=7 is not 0"):  # which is looked at in a folder of one's own
        train_run(other, here)


def test_ranks_of_torchrun_are_no_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    role = take_role(run_in(tmp_path), NodeOptions())
    assert role.nodes is None and role.place is not None and role.place.rank == 3
    assert not role.speaks


def test_a_node_keeps_its_name_when_it_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By that name it finds the state it kept in memory."""
    monkeypatch.delenv(NODE, raising=False)
    options = NodeOptions(rendezvous=f"127.0.0.1:{free_port()}", nodes=4)
    role = take_role(run_in(tmp_path), options)
    assert role.listener is not None and role.speaks
    role.listener.close()
    assert os.environ[NODE] == "127.0.0.1"
    monkeypatch.setenv(NODE, "given")
    again = take_role(run_in(tmp_path), options)
    assert again.listener is not None and os.environ[NODE] == "given"
    again.listener.close()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("training.backend=nccl",), "nccl"),
        (
            ("training.cuda_graphs=on",),
            "training.cuda_graphs=on needs a GPU, not training.device=cpu; use",
        ),
        (("training.overlap_tensor=on",), "overlap_tensor=on"),
        (("checkpoint.memory_every=1", "checkpoint.memory_folder=/nowhere"), "checkpoint.memory_folder=/nowhere is no"),
        (("data.source=/nowhere.bin",), "data.source=/nowhere.bin"),
        (("samples.every=2", "data.source=synthetic"), "samples.every=2 needs text and the data has no tokenizer; use"),
        (("training.start_from=/nowhere",), "/nowhere"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    told: list[str] = []
    with pytest.raises(UserError) as refused:
        train_run(run_in(tmp_path, *overrides, layout="dp=1"), announce=told.append)
    assert sentence in str(refused.value)
    assert not told and not (tmp_path / "run").exists()


def test_a_job_of_another_size_is_refused_by_every_rank(tmp_path: Path) -> None:
    check_machine(run_in(tmp_path), rank(3))
    with pytest.raises(UserError, match="needs world_size=4, not 8; use dp=4 or start 4 ranks"):
        check_machine(run_in(tmp_path, layout="dp=2,tp=2"), rank(3))
