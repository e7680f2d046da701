"""The global order of samples: a permutation of each epoch, decided by position and seed alone."""

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from cuboid.data.order import permuted, sample_at


@given(size=st.integers(1, 700), key=st.text(max_size=8))
@example(size=1, key="")
@example(size=2, key="0/0")
@example(size=256, key="0/0")
@example(size=257, key="0/0")
def test_a_permutation_takes_every_sample_once(size: int, key: str) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


@given(size=st.integers(1, 1 << 40), index=st.integers(0, 1 << 40), key=st.text(max_size=8))
def test_large_epochs_stay_inside(size: int, index: int, key: str) -> None:
    assert 0 <= permuted(index % size, size, key) < size


@given(size=st.integers(1, 120), seed=st.integers(0, 1 << 32), epoch=st.integers(0, 1000))
def test_every_epoch_meets_every_sample_once(size: int, seed: int, epoch: int) -> None:
    positions = range(epoch * size, (epoch + 1) * size)
    assert sorted(sample_at(position, size, seed) for position in positions) == list(range(size))


@given(size=st.integers(1, 60), seed=st.integers(0, 99), start=st.integers(0, 500), length=st.integers(0, 200))
def test_no_stretch_of_the_order_repeats_a_sample_more_often_than_it_must(
    size: int, seed: int, start: int, length: int
) -> None:
    counts = Counter(sample_at(position, size, seed) for position in range(start, start + length))
    # A stretch touches at most one epoch more at either end than it holds whole.
    assert max(counts.values(), default=0) <= length // size + 2


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(sample_at(epoch * 50 + index, 50, seed) for index in range(50))

    orders = {order(seed, epoch) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36
    assert tuple(range(50)) not in orders


def test_the_order_mixes_near_and_far() -> None:
    size = 10_000
    steps = [abs(sample_at(position, size, 0) - sample_at(position + 1, size, 0)) for position in range(2000)]
    # Two independent draws lie a third of the range apart on average.
    assert 0.3 < sum(steps) / len(steps) / size < 0.37


def test_the_order_is_the_same_on_every_machine_and_in_every_release() -> None:
    # A run that is continued must meet the samples it has not met: these numbers may never change.
    assert [sample_at(position, 1000, 0) for position in (0, 1, 999, 1000)] == [819, 106, 109, 32]
