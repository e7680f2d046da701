"""Which tokens of which sequences go through the model next. Every rank keeps the same books from the same answers, so
that ranks tell each other nothing but tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

# A step: runs of tokens of several sequences that go through the model together; without torch.


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence."""

    slot: int
    """Where in the cache the sequence is kept."""
    start: int
    """The position of the first token."""
    tokens: tuple[int, ...]
    asked: int = 0
    """For how many of the last tokens logits are wanted."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Step:
    spans: tuple[Span, ...]

    @property
    def decodes(self) -> bool:
        """Whether it has one token of each sequence."""
        return all(len(span.tokens) == 1 for span in self.spans)

    @property
    def asked(self) -> int:
        return sum(span.asked for span in self.spans)


Ending = Literal["", "end", "stop", "length"]
"""Why a text ends: it does not yet, a token that ends texts, a string to stop at, or no room."""


@dataclass(frozen=True)
class Request:
    number: int
    """Of the prompt among all: with the place it decides random numbers."""
    tokens: tuple[int, ...]
    room: int = 0
    """Most tokens that may follow."""
    labels: tuple[int, ...] = ()
    """What follows each of the last tokens: nothing is written, but asked how likely they are."""


@dataclass(frozen=True)
class Event:
    """What is new in a text."""

    number: int
    token: int
    ending: Ending
    accepted: bool = False
    """Whether it came in the same step as the token before it, because that had been drafted."""
    drafted: int = 0
    """Tokens that the step of it was given as drafts; said by the first that came of a step."""


def gained(chosen: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """`chosen`: what the model says behind a text's last token and behind each of its drafts, which were right as long
    as they are what was chosen: so many of them follow."""
    pairs = zip(drafts, chosen, strict=False)
    right = next((place for place, (draft, said) in enumerate(pairs) if draft != token_of(said)), len(drafts))
    return list(chosen[: right + 1])


def token_of(answer: int) -> int:
    """Below zero it is -1 - token, and a string to stop at ends the text."""
    return answer if answer >= 0 else -1 - answer


@dataclass
class Text:
    request: Request
    slot: int
    tokens: list[int]
    """Of the prompt and what follows it."""
    kept: int = 0
    """How many of them are in the cache, or will be when the steps in flight are done."""
    drafts: list[int] = field(default_factory=list)
    """What prediction layers say may follow."""
    tried: list[int] = field(default_factory=list)
    """Those of them that are in the step in flight."""


class Batch:
    """The sequences in some slots of the cache, which go through the model together."""

    def __init__(self, slots: range, chunk: int, ends: Sequence[int], waiting: deque[Request], drafts: int = 0) -> None:
        """`ends`: tokens that end a text; `waiting`: requests for all batches, of which each takes the next one;
        `drafts`: tokens drafted behind each that is written."""
        self.slots, self._drafts = slots, drafts
        self._free = deque(slots)
        self._chunk, self._ends, self._waiting = chunk, frozenset(ends), waiting
        self._texts: dict[int, Text] = {}
        self.under_way: Step | None = None
        """The step whose answers have not come."""

    def next_step(self) -> Step | None:
        """Prompts first, as many as fit; None when there is nothing to do."""
        while self._free and self._waiting:
            request = self._waiting.popleft()
            slot = self._free.popleft()
            self._texts[slot] = Text(request, slot, list(request.tokens))
        texts = [self._texts[slot] for slot in sorted(self._texts)]
        spans, left = [], self._chunk
        for text in texts:
            missing = len(text.request.tokens) - text.kept
            if missing > 0 and left > 0:
                spans.append(self._span(text, min(missing, left)))
                left -= len(spans[-1].tokens)
        if not spans:
            spans = [self._span(text, 1) for text in texts]
        self.under_way = Step(tuple(spans)) if spans else None
        return self.under_way

    @property
    def decodes(self) -> bool:
        """Whether the step in flight gives every text of the batch a token."""
        step = self.under_way
        return step is not None and step.decodes and step.asked == len(step.spans) == len(self._texts)

    def _span(self, text: Text, count: int) -> Span:
        start, text.kept = text.kept, text.kept + count
        asked = 1 if text.kept == len(text.tokens) else 0
        if text.request.labels:
            asked = max(0, text.kept - max(start, len(text.tokens) - len(text.request.labels)))
            return Span(text.slot, start, tuple(text.tokens[start : text.kept]), asked)
        # No more than there is room for behind the token that comes in any case.
        room = len(text.request.tokens) + text.request.room - len(text.tokens) - 1
        text.tried = text.drafts[: max(room, 0)] if asked else []
        tokens = (*text.tokens[start : text.kept], *text.tried)
        return Span(text.slot, start, tokens, asked and asked + len(text.tried))

    def written(self) -> list[Text]:
        """The texts that get a token from the step in flight, in its order."""
        return [text for text, span in self.taking_part() if span.asked and not text.request.labels]

    @property
    def answers(self) -> int:
        """How many numbers the step in flight gives: tokens behind the last ones of texts and behind their drafts, and
        new drafts."""
        written = self.written()
        return sum(1 + len(text.tried) for text in written) + self._drafts * len(written)

    def known(self, answers: Sequence[int]) -> list[tuple[Span, list[int], int]]:
        """Of each part of the step in flight the tokens of its text with those that it gains; and how many these are.
        `answers`: without drafts."""
        found, place = [], 0
        for text, span in self.taking_part():
            more: list[int] = []
            if span.asked and not text.request.labels:
                more = [token_of(each) for each in gained(answers[place : place + span.asked], text.tried)]
                place += span.asked
            found.append((span, [*text.tokens, *more], len(more)))
        return found

    def taking_part(self) -> list[tuple[Text, Span]]:
        """The texts of the step in flight, each with its part."""
        assert self.under_way is not None
        return [(self._texts[span.slot], span) for span in self.under_way.spans]

    def take(self, answers: Sequence[int]) -> list[Event]:
        """The next tokens of each text that gets some, then its drafts; as `answers` counts them."""
        events, written = list[Event](), self.written()
        place, drafts = 0, len(answers) - self._drafts * len(written)
        for text, span in self.taking_part():
            if text.request.labels and span.stop == len(text.tokens):
                self._leave(text)
        for text in written:
            asked = 1 + len(text.tried)
            events += self._write(text, gained(answers[place : place + asked], text.tried))
            place += asked
            # What was tried in vain is in the cache behind the text, and will be written over.
            text.kept = len(text.tokens) - 1
            text.drafts = list(answers[drafts : drafts + self._drafts])
            drafts += self._drafts
        self.under_way = None
        return events

    def _write(self, text: Text, answers: Sequence[int]) -> list[Event]:
        events = []
        for place, answer in enumerate(answers):
            token = token_of(answer)
            text.tokens.append(token)
            following = len(text.tokens) - len(text.request.tokens)
            ending: Ending = ""
            if token in self._ends:
                ending = "end"
            elif answer < 0:
                ending = "stop"
            elif following == text.request.room:
                ending = "length"
            events.append(Event(text.request.number, token, ending, place > 0, 0 if place else len(text.tried)))
            if ending:
                self._leave(text)
                break
        return events

    def _leave(self, text: Text) -> None:
        del self._texts[text.slot]
        self._free.append(text.slot)
