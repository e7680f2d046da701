"""Texts as they grow, token by token, to whoever shows or keeps them; without torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from cuboid.generate.batch import Event
from cuboid.generate.detokenizer import Reader, Words
from cuboid.generate.prompts import Prompt


class Text:
    """What follows one prompt."""

    def __init__(self, prompt: Prompt, words: Words, stop: tuple[str, ...]) -> None:
        self.prompt, self.tokens, self.ending = prompt, list[int](), ""
        self._reader, self._stop = Reader(words), stop
        self.text = ""

    def add(self, event: Event) -> str:
        """What is new to show. What may be the beginning of a string to stop at is held back."""
        self.tokens.append(event.token)
        self.ending = event.ending
        self._reader.add([event.token])
        whole = self._reader.text if not self.ending else self._reader.finish()
        cut = min((place for place in (whole.find(stop) for stop in self._stop) if place >= 0), default=len(whole))
        whole = whole[:cut]
        if not self.ending:
            longest = max((len(stop) for stop in self._stop), default=1) - 1
            whole = whole[: len(whole) - longest] if longest else whole
        new = whole[len(self.text) :]
        self.text += new
        return new

    def row(self) -> dict[str, Any]:
        return {
            "index": self.prompt.number,
            "prompt": self.prompt.text,
            "text": self.text,
            "ending": self.ending,
            "prompt_tokens": list(self.prompt.tokens),
            "tokens": self.tokens,
        }


class Texts:
    """All of them. They are shown in the order of prompts: the first that is not done streams, others wait."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        words: Words,
        stop: tuple[str, ...],
        show: Callable[[Prompt, str, bool], None],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        """`show` is told a prompt, what is new behind it, and whether that is all; `keep` a finished row."""
        self._texts = {prompt.number: Text(prompt, words, stop) for prompt in prompts}
        self._order = [prompt.number for prompt in prompts]
        self._show, self._keep = show, keep
        self._start = time.perf_counter()
        self.first_token_seconds: float | None = None
        self.tokens = 0

    def hear(self, events: list[Event]) -> None:
        if self.first_token_seconds is None:
            self.first_token_seconds = self.seconds
        self.tokens += len(events)
        for event in events:
            text = self._texts[event.number]
            new = text.add(event)
            if text.ending:
                self._keep(text.row())
            if self._order and event.number == self._order[0]:
                self._show(text.prompt, new, bool(text.ending))
                if text.ending:
                    self._order.pop(0)
                    self._show_waiting()

    def _show_waiting(self) -> None:
        while self._order:
            text = self._texts[self._order[0]]
            self._show(text.prompt, text.text, bool(text.ending))
            if not text.ending:
                return
            self._order.pop(0)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start
