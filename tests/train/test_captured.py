"""CUDA graphs where there is no GPU: refused if asked for, else not used."""

from functools import partial

import pytest
import torch

from cuboid.errors import UserError
from cuboid.parallel.apply import build_engine
from cuboid.spec.run import build_run
from cuboid.train.captured import make_passes
from cuboid.train.optimizer import Optimizer
from cuboid.train.step import run_passes


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
