"""Which backend a job uses, what it says of it, and that the user's own settings of the network reach the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cuboid.errors import UserError
from cuboid.launch.backend import SHARED_GPU, Joined, refuse_backend
from cuboid.launch.generation import start_scoring
from cuboid.launch.pool import Pool
from cuboid.spec.generation import GenerationSpec, parse_layout
from cuboid.spec.model import load_model
from tests.cli.command import SHORT, environment, run, train
from tests.launch.ports import free_port

SENTENCES = [
    (Joined(1), "backend: none, one rank on CPUs"),
    (Joined(1, gpus=1), "backend: none, one rank on a GPU"),
    (Joined(8, "gloo"), "backend: gloo, 8 ranks on CPUs"),
    (Joined(8, "nccl", 8), "backend: NCCL, 8 ranks on 8 GPUs"),
    (Joined(16, "nccl", 16, 2), "backend: NCCL, 16 ranks on 16 GPUs"),
    (Joined(8, "nccl", 1), "backend: NCCL over sockets: 8 ranks share 1 GPU"),
    (Joined(8, "nccl", 2), "backend: NCCL over sockets: 8 ranks share 2 GPUs"),
    (Joined(8, "gloo", 1), "backend: gloo, as asked, through host memory: 8 ranks share 1 GPU"),
    (Joined(2, "gloo", 2), "backend: gloo, as asked, through host memory: 2 ranks on 2 GPUs"),
]


@pytest.mark.parametrize(("joined", "sentence"), SENTENCES)
def test_the_backend_is_said_in_words(joined: Joined, sentence: str) -> None:
    assert joined.sentence == sentence
    assert joined.as_json()["gpu_shared"] == ("share" in sentence)


def test_ranks_on_cpus_use_gloo_and_say_so(pool: Pool) -> None:
    told: list[dict[str, Any]] = []
    pool.run("tests.launch.jobs:describe", ("word",), ranks=3, joined=told.append)
    assert told == [{**Joined(3, "gloo").as_json(), "sentence": "backend: gloo, 3 ranks on CPUs"}]


def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^training.backend=nccl needs a GPU for every rank, and a rank has none; use "
    ):
        refuse_backend("nccl", torch.device("cpu"))
    with pytest.raises(UserError, match=r"^backend=mpi is unknown; use auto, nccl or gloo$"):
        refuse_backend("mpi", torch.device("cpu"), "backend")


@pytest.mark.parametrize("wanted", ["auto", "nccl"])
def test_nccl_is_never_replaced_in_silence(wanted: str) -> None:
    """Where PyTorch has no NCCL a GPU needs gloo to be asked for."""
    refuse_backend("gloo", torch.device("cuda", 0))
    if dist.is_nccl_available():
        refuse_backend(wanted, torch.device("cuda", 0))
        return
    with pytest.raises(UserError, match=r"needs NCCL on GPUs, and this PyTorch has none; use backend=gloo$"):
        refuse_backend(wanted, torch.device("cuda", 0))


def test_ranks_of_which_only_some_have_a_gpu_are_refused(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 of 3 ranks have a usable GPU and the others none; give every rank one, or"):
        pool.run("tests.launch.jobs:cards_of", (str(tmp_path / "store"), ["a", "b", ""]), ranks=3)


@pytest.mark.parametrize(("cards", "gpus"), [("abc", 3), ("aba", 2), ("aaa", 1)])
def test_cards_are_told_apart_by_their_uuids(pool: Pool, tmp_path: Path, cards: str, gpus: int) -> None:
    """One visible card a rank, each called cuda:0, is no shared card; two ranks of one card are."""
    found = pool.run("tests.launch.jobs:cards_of", (str(tmp_path / "store"), list(cards)), ranks=3)
    assert found == 3 * [(gpus, 1)]


def test_defaults_for_a_shared_card_leave_what_the_user_has_set(pool: Pool) -> None:
    found = pool.run("tests.launch.jobs:environment_after_defaults", ({"NCCL_HOSTID": "mine"},), ranks=2)
    assert found == 2 * [{"NCCL_HOSTID": "mine", **SHARED_GPU}]


@pytest.mark.parametrize("verb", ["train", "probe"])
def test_commands_refuse_nccl_without_a_gpu_before_anything_starts(verb: str, tmp_path: Path) -> None:
    probe = ["-m", "cuboid.cli.main", "probe", "--backend", "nccl", "--ranks", "2"]
    result = run(
        train("--layout", "dp=2", "--backend", "nccl", fields=SHORT[:3]) if verb == "train" else probe, tmp_path
    )
    assert result.returncode == 2, result.stderr
    assert "backend=nccl needs a GPU for every rank" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_generation_refuses_nccl_without_a_gpu() -> None:
    spec = GenerationSpec(
        model=load_model("tiny-llama"), layout=parse_layout("tp=2"), weights="", backend="nccl", slots=1, length=8
    )
    with pytest.raises(
        UserError, match=r"^--backend=nccl needs a GPU for every rank, and a rank has none; use --backend="
    ):
        start_scoring(spec, [])


def test_a_training_says_its_backend_in_json(tmp_path: Path) -> None:
    """That it says so in its first lines is seen in tests/cli/test_train.py."""
    told = json.loads(run(train("--layout", "dp=2", "--json"), tmp_path).stdout)
    assert (told["backend"], told["gpus"], told["gpu_shared"]) == ("gloo", 0, False)
    assert json.loads((tmp_path / "runs/default/backend.json").read_text())["ranks"] == 2


CHOSEN = {
    "NCCL_SOCKET_IFNAME": "eth0,eth1",
    "NCCL_HOSTID": "mine",
    "NCCL_IB_DISABLE": "0",
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_BUFFER_SIZE": "7",
    "GLOO_SOCKET_IFNAME": "lo",
}


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_the_user_has_set_reaches_the_ranks_unchanged(tmp_path: Path, nodes: int) -> None:
    """Real ranks: the environment they were started with is read from the kernel while they train."""
    fields = [*SHORT, "training.steps=100000"]
    options = ["--layout", "dp=2"]
    if nodes == 2:
        options += ["--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    variables = environment(**CHOSEN, CUBOID_TEST_MARK=str(tmp_path))
    with (tmp_path / "log").open("w") as log:
        commands = [
            subprocess.Popen(
                [sys.executable, *train(*options, fields=fields)], cwd=tmp_path, env=variables, stdout=log, stderr=log
            )
            for _ in range(nodes)
        ]
        try:
            found = _ranks_of(tmp_path, 2, commands)
        finally:
            for command in commands:
                command.terminate()
            for command in commands:
                command.wait()
    for pid, seen in found.items():
        assert {name: seen.get(name) for name in CHOSEN} == CHOSEN, pid


def _ranks_of(folder: Path, count: int, commands: list[subprocess.Popen[bytes]]) -> dict[str, dict[str, str]]:
    """The environments of the rank processes, once they train: each has RANK, which only a rank has."""
    metrics = folder / "runs/default/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert all(command.poll() is None for command in commands), (folder / "log").read_text()
        time.sleep(0.05)
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            content = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in content:
            found[path.parent.name] = dict(part.partition("=")[::2] for part in content.split("\0") if "=" in part)
    assert len(found) >= count
    return found
