"""Learning rates that differ between matrices, in the eager update and in the compiled one."""

from __future__ import annotations

import torch
from torch import Tensor

from cuboid.kernels.adjacent import in_runs
from cuboid.model.initialize import learning_rate_factor
from cuboid.spec.run import Run
from cuboid.training.adamw import Elements, kind_of
from cuboid.training.optimizer import Optimizer, ResidentState
from tests.parallel.cases import small_run
from tests.training.offload_jobs import make, train


def mup(*overrides: str) -> Run:
    return small_run("dp=1", "model.initialization=mup", "model.layers=2", "training.gradient_clip=0", *overrides)


def values(optimizer: Optimizer) -> dict[str, Tensor]:
    return {optimizer_shard.part.name: optimizer_shard.master.clone() for optimizer_shard in optimizer.optimizer_shards}


def test_the_first_step_of_a_matrix_is_as_long_as_its_factor_says_and_its_decay_is_not() -> None:
    """Adam's first step moves every element by the learning rate, whatever its gradient."""
    run = mup("optimizer.weight_decay=0.0")
    engine, optimizer = make(run, 0, compiled=False, away=False)
    before = values(optimizer)
    train(engine, optimizer, range(1))
    plain = values(optimizer)
    engine, optimizer = make(mup("optimizer.weight_decay=0.5"), 0, compiled=False, away=False)
    train(engine, optimizer, range(1))
    decayed = values(optimizer)
    factors = {name: learning_rate_factor(run.model, name) for name in before}
    assert set(factors.values()) == {1.0, 256 / 64, 256 / 192}
    for name, start in before.items():
        moved = (plain[name] - start).abs().max().item()
        assert abs(moved - 0.01 * factors[name]) < 1e-4 * moved, name
        decay = 0.0 if name.endswith("norm.weight") else 0.01 * 0.5
        assert torch.allclose(plain[name] - decayed[name], decay * start, rtol=1e-9, atol=1e-12), name


def test_the_compiled_update_is_the_eager_one() -> None:
    """Compiled, what lies side by side is updated together if its factor is the same, and only then."""
    engine, eager = make(mup(), 0, compiled=False, away=False)
    train(engine, eager, range(3))
    engine, compiled = make(mup(), 0, compiled=True, away=False)
    train(engine, compiled, range(3))
    expected, found = values(eager), values(compiled)
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-12), name
    (lot,) = ResidentState(engine.units).visit(engine.units)
    runs = in_runs(lot, Elements.is_followed_by, Elements.with_following)
    assert len({part.rate_factor for unit in engine.units for part in unit.parts}) == 3
    assert len(runs) < len(lot)
    kinds = iter(
        [kind_of(optimizer_shard.part) for unit in engine.units for optimizer_shard in unit.optimizer_shards()]
    )
    sizes = iter([each.kept.numel() for each in lot])
    for each in runs:
        left = each.kept.numel()
        while left:
            assert next(kinds) == each.kind
            left -= next(sizes)
