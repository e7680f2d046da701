"""Prompts and wishes made into what ranks are started with; what cannot work is refused here."""

from __future__ import annotations

from collections.abc import Sequence

from cuboid.errors import UserError
from cuboid.generate.batch import Request
from cuboid.generate.detokenizer import Words
from cuboid.generate.prompts import Prompt
from cuboid.spec.generation import SamplingSpec
from cuboid.spec.model import ModelSpec


def make_requests(prompts: Sequence[Prompt], sampling: SamplingSpec, model: ModelSpec) -> list[Request]:
    """A prompt and what follows it must fit into the model's context; results end where it does."""
    requests = []
    for prompt in prompts:
        room = model.max_positions - len(prompt.tokens)
        if room < 1:
            raise UserError(
                f"prompt {prompt.number} has {len(prompt.tokens)} tokens and max_positions={model.max_positions} of "
                f"{model.name} leaves no room behind it; use at most {model.max_positions - 1}"
            )
        requests.append(Request(prompt.number, prompt.tokens, min(room, sampling.max_tokens)))
    return requests


def check_words(sampling: SamplingSpec, words: Words) -> None:
    """Strings to stop at need text to be found in."""
    if sampling.stop and not words.tokenizer:
        raise UserError(f"stop={sampling.stop[0]!r} is text and the model has no tokenizer; use --tokenizer byte")


def longest(requests: Sequence[Request]) -> int:
    """Tokens of the longest text there can be."""
    return max(len(request.tokens) + request.room for request in requests)
