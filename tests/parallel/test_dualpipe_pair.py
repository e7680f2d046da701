"""Passes that run together: one computes while the other waits, in an order that is the same each time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cuboid.cli.verify import verification_run
from cuboid.launch.pool import Pool
from cuboid.parallel.pipeline import DualPipePair

CPU = torch.device("cpu")


class Owner:
    value = "rest"


def test_passes_hand_over_and_keep_their_own_state() -> None:
    pair, seen, owner = DualPipePair(), list[str](), Owner()
    pair.carried = [(owner, "value")]

    def work(name: str, times: int) -> Callable[[], None]:
        def run() -> None:
            seen.append(f"{name} finds {owner.value}")
            for number in range(times):
                owner.value = f"{name}{number}"
                pair.hand_over()
                seen.append(owner.value)

        return run

    for _ in range(2):  # the same each time
        seen.clear()
        owner.value = "rest"
        pair.run(work("F", 2), work("B", 4), CPU)
        assert seen == ["F finds rest", "B finds rest", "F0", "B0", "F1", "B1", "B2", "B3"]
    pair.hand_over()  # alone, it is nothing


@pytest.mark.parametrize("side", [0, 1])
def test_an_error_of_either_is_raised_when_both_have_ended(side: int) -> None:
    pair, ended = DualPipePair(), list[int]()

    def fails() -> None:
        pair.hand_over()
        raise ValueError("broken")

    def works() -> None:
        pair.hand_over()
        pair.hand_over()
        ended.append(1)

    with pytest.raises(ValueError, match="broken"):
        pair.run(*((fails, works) if side == 0 else (works, fails)), CPU)
    assert ended == [1]
    pair.run(works, works, CPU)  # and it can be used again
    assert ended == [1, 1, 1]


def test_dualpipev_computes_one_pass_while_rows_of_the_other_travel(pool: Pool) -> None:
    """No forward waits for its rows before the backward beside it has done something since, as long as that has
    something to do."""
    overrides = ("model.layers=4", "training.global_batch=16")
    run = verification_run("dp=2,ep=2,pp=2,schedule=dualpipev", "tiny-mixtral", overrides, steps=1)
    for logs in pool.run("tests.parallel.overlap_jobs:pair_log", (run,), ranks=4):
        assert len(logs) >= 4  # pairs
        for log in logs:
            last = max(place for place, entry in enumerate(log) if entry[0] == "backward")
            waits = [place for place, entry in enumerate(log) if entry == ("forward", "waited") and place < last]
            assert waits
            for place in waits:
                assert log[place - 1][0] == "backward"


def test_without_experts_elsewhere_nothing_is_paired(pool: Pool) -> None:
    run = verification_run("pp=2,schedule=dualpipev", "tiny-mixtral", ("model.layers=4",), steps=1)
    assert pool.run("tests.parallel.overlap_jobs:pair_log", (run,), ranks=2) == [[], []]
