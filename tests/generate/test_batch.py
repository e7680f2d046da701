"""The books that every rank keeps: which tokens go through the model next."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from cuboid.generate.batch import Batch, Request


def requests(lengths: list[tuple[int, int]]) -> list[Request]:
    return [Request(number, tuple(range(length)), room) for number, (length, room) in enumerate(lengths)]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(0, 5),
)
def test_every_token_goes_through_once_and_in_order(
    lengths: list[tuple[int, int]], slots: int, chunk: int, seed: int
) -> None:
    generator = random.Random(seed)
    batch = Batch(range(2, 2 + slots), chunk, (99,), deque(requests(lengths)))
    kept: dict[int, int] = {}
    written: dict[int, list[int]] = {}
    ended: dict[int, str] = {}
    while (step := batch.next_step()) is not None:
        taken = [span.slot for span in step.spans]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(2, 2 + slots))
        assert step.decodes or sum(len(span.tokens) for span in step.spans) <= chunk
        for text, span in batch.taking_part():
            assert span.start == kept.get(text.request.number, 0)
            assert list(span.tokens) == text.tokens[span.start : span.stop]
            kept[text.request.number] = span.stop
        asked = [text.request.number for text in batch.written()]
        answers = [generator.choice((3, 4, 99, -1 - 7)) for _ in asked]
        events = batch.take(answers)
        assert [event.number for event in events] == asked
        for event in events:
            assert event.number not in ended
            written.setdefault(event.number, []).append(event.token)
            if event.ending:
                ended[event.number] = event.ending
    for number, (length, room) in enumerate(lengths):
        text = written[number]
        assert kept[number] == length + len(text) - 1, "the last token is written, not read"
        expected = "end" if text[-1] == 99 else "stop" if text[-1] == 7 else "length"
        assert ended[number] == expected
        assert len(text) == room or expected != "length"


def test_only_a_step_with_a_token_for_every_text_decodes_them_all() -> None:
    waiting = deque(requests([(3, 5), (1, 5)]))
    batch = Batch(range(2), 8, (), waiting)
    batch.next_step()
    assert not batch.decodes
    batch.take([1, 1])
    batch.next_step()
    assert batch.decodes
    batch.take([-1, 1])  # the first text ends and leaves its slot to a prompt of one token
    waiting.append(Request(2, (7,), 5))
    step = batch.next_step()
    assert step is not None
    assert step.decodes
    assert not batch.decodes, "the other text would be taken for a free slot"
