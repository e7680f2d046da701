"""What lies side by side in memory is taken as one, and nothing else is."""

import torch

from cuboid.kernels.adjacent import follows, in_runs, together
from cuboid.launch.pool import Pool
from cuboid.parallel.parallelize import build_engine
from cuboid.training.adamw import Elements
from cuboid.training.optimizer import ResidentState
from tests.parallel.cases import small_run


def test_neighbours_become_runs() -> None:
    flat, other = torch.arange(12.0), torch.arange(4.0)
    runs = in_runs([flat[:3], flat[3:5], flat[6:8], flat[8:], other, flat[:2]], follows, together)
    assert [run.tolist() for run in runs] == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10, 11], [0, 1, 2, 3], [0, 1]]
    runs[0].zero_()
    assert flat[:6].tolist() == [0, 0, 0, 0, 0, 5]


def test_what_is_of_another_kind_begins_anew() -> None:
    bits = torch.zeros(8, dtype=torch.int16)
    runs = in_runs([bits[:4], bits[4:].view(torch.bfloat16)], follows, together)
    assert [run.numel() for run in runs] == [4, 4]


def test_moments_at_odd_places_lie_apart(pool: Pool) -> None:
    """Three ranks divide a unit where no kernel would: whatever a rank keeps begins at an even place."""
    for odd in pool.run("tests.parallel.cases:odd_moments", (small_run("dp=3,zero=1"),), ranks=3):
        assert odd == 0


def test_a_block_is_updated_in_four_runs() -> None:
    """Norm, matrices of attention, norm, matrices of the feed-forward; the same numbers as one by one."""
    run = small_run("dp=1", "training.precision=float32")
    engine = build_engine(run, 0, torch.device("cpu"))
    state = ResidentState(engine.units)
    unit = next(unit for unit in engine.units if unit.name == "layers.0")
    unit.begin_step(1)
    (lot,) = state.visit([unit])
    runs = in_runs(lot, Elements.is_followed_by, Elements.with_following)
    assert [elements.decays for elements in runs] == [False, True, False, True]
    assert sum(elements.kept.numel() for elements in runs) == sum(elements.kept.numel() for elements in lot)
    for run_tensor, tensors in (
        (runs[1].first, [elements.first for elements in lot[1:5]]),
        (runs[1].gradient, [elements.gradient for elements in lot[1:5]]),
        (runs[3].kept, [elements.kept for elements in lot[6:]]),
    ):
        run_tensor.copy_(torch.rand_like(run_tensor))
        assert torch.equal(run_tensor, torch.cat(tensors))
