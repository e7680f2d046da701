"""A step: runs of tokens of several sequences that go through the model together; without torch."""

from __future__ import annotations

from dataclasses import dataclass


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
