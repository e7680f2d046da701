"""CUDA graphs where there is no GPU: refused if asked for, else not used."""

from functools import partial

import pytest
import torch

from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.parallel.parallelize import build_engine
from cuboid.spec.run import build_run
from cuboid.training.cuda_graphs import make_passes
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import run_passes
from tests.parallel.cases import small_run


def test_without_a_gpu() -> None:
    run = build_run({"model": "tiny-llama"}, ["model.layers=1", "training.sequence=16"])
    engine = build_engine(run, 0, torch.device("cpu"))
    optimizer, plain = Optimizer(engine, run.optimizer), partial(run_passes, engine)
    assert make_passes(engine, optimizer, plain) is plain
    asked = build_engine(
        build_run({"model": "tiny-llama"}, ["model.layers=1", "training.cuda_graphs=on"]), 0, torch.device("cpu")
    )
    with pytest.raises(UserError, match=r"training\.cuda_graphs=on needs a GPU; use cuda_graphs=auto"):
        make_passes(asked, optimizer, plain)


def test_all_ranks_decide_alike(pool: Pool) -> None:
    """One that refuses is enough, wherever it is; else one rank would replay what others start kernel by kernel."""
    run = small_run("dp=2,tp=2,zero=1")
    assert pool.run("tests.parallel.overlap_jobs:decided", (run, (True, True, True, True)), ranks=4) == [True] * 4
    assert pool.run("tests.parallel.overlap_jobs:decided", (run, (True, True, False, True)), ranks=4) == [False] * 4


def test_no_collective_crosses_the_border_of_a_graph(pool: Pool) -> None:
    run = small_run("dp=2,zero=1")
    assert pool.run("tests.parallel.overlap_jobs:settled", (run,), ranks=2) == [(True, False)] * 2
