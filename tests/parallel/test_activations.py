"""The size of activations is that of one device, on any layout."""

from __future__ import annotations

import pytest
import torch

from cuboid.data.loader import micro_batches
from cuboid.data.source import make_source
from cuboid.launch.pool import Pool
from cuboid.model.initialize import initialize
from cuboid.model.transformer import Transformer
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run
from tests.parallel.cases import CPU, small_run


def expected(run: Run) -> float:
    """From the model written for one device."""
    model = Transformer(run.model).double()
    initialize(run.model, model, run.training.seed)
    whole = type(run)(model=run.model, layout=Layout(), training=run.training, data=run.data)
    squares = []
    with torch.no_grad():
        for batch in micro_batches(make_source(whole), whole, 0, 0, CPU):
            squares.append(model.hidden_states(batch.tokens).square().mean())
    return float(torch.stack(squares).mean().sqrt())


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=2,tp=2,pp=2,zero=1", "tiny-llama"),
        ("dp=2,tp=2,sequence_parallel=false,recompute=full", "tiny-qwen3"),
        ("cp=2,pp=2,schedule=zbv,zero=3", "tiny-gpt2"),
        ("dp=2,ep=2,zero=3", "tiny-mixtral"),
    ],
)
def test_any_layout_measures_the_same(pool: Pool, layout: str, model: str) -> None:
    plain = ["data.attention_within_documents=false", "data.positions_within_documents=false"]
    plain += ["model.mixture.router_noise=0"] if model == "tiny-mixtral" else []  # `expected` takes the best experts
    run = small_run(layout, *plain, model=model)
    measured = pool.run("tests.parallel.cases:first_activation", (run,), ranks=run.layout.world_size)
    assert measured == [pytest.approx(expected(run), rel=1e-9)] * run.layout.world_size
