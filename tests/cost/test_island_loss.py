"""The laws that say what islands are expected to lose, against the losses their authors have measured."""

import pytest

from cuboid.cost.island_loss import expected_loss

MEASURED = {
    (35_000_000, 2): (3.508, 3.485),
    (35_000_000, 8): (3.621, 3.485),
    (550_000_000, 4): (2.673, 2.653),
    (2_400_000_000, 2): (2.323, 2.326),
    (2_400_000_000, 8): (2.351, 2.326),
    (10_000_000_000, 2): (2.086, 2.090),
    (10_000_000_000, 4): (2.096, 2.090),
}
"""Tables 4 and 5 of arXiv 2503.09799: parameters and islands -> losses with islands and with data parallelism."""


@pytest.mark.parametrize(("parameters", "islands"), MEASURED)
def test_the_laws_are_near_what_was_measured(parameters: int, islands: int) -> None:
    own, dp = MEASURED[parameters, islands]
    assert expected_loss(parameters, islands, 32).over_dp == pytest.approx(own / dp - 1, abs=0.003)


def test_between_and_beyond_the_fits() -> None:
    found = [expected_loss(10**9, islands, 32).over_dp for islands in (2, 3, 4, 6, 8, 12, 16)]
    assert found == sorted(found)


def test_what_was_not_measured_is_said() -> None:
    assert expected_loss(10**9, 4, 32).caveats == ()
    found = expected_loss(70 * 10**9, 16, 128)
    assert "70B parameters are more than the 10B" in found.sentence
    assert "16 islands are more than the 8" in found.sentence
    assert "every=128" in found.sentence
    assert "not a measurement" in found.sentence
