"""Which batch a step takes when some are skipped, and what a stranger's course is refused for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.spec.train_state import Course, from_table


@given(st.sets(st.integers(0, 40)), st.integers(0, 40))
def test_steps_take_the_batches_that_are_left_in_order(skipped: set[int], step: int) -> None:
    course = Course()
    for batch in skipped:
        course.skip(batch)
    left = [batch for batch in range(100) if batch not in skipped]
    assert course.batch(step) == left[step]


def test_a_course_survives_its_manifest() -> None:
    course = Course([2, 5], [0.1 + 0.2], [1e-300])
    again = Course()
    again.restore(json.loads(json.dumps(course.table())))
    assert again == course and Course().table() == {}


@pytest.mark.parametrize(
    "table",
    [[], {"other": []}, {"skipped": [-1]}, {"skipped": [2, 1]}, {"skipped": [True]}, {"losses": ["1"]}, {"norms": 3}],
)
def test_what_is_no_course_is_refused(table: object) -> None:
    with pytest.raises(ValueError, match=r"^(is|has) "):
        from_table(table)
