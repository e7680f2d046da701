"""What the ranks of the pool do in tests of generation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cuboid.generate.batch import Batch, Event, Request
from cuboid.generate.detokenizer import Words
from cuboid.generate.engine import Generator, make_generator
from cuboid.generate.evaluation import Score
from cuboid.spec.generation import GenerationSpec, SamplingSpec

CPU = torch.device("cpu")


def texts(
    rank: int, spec: GenerationSpec, requests: list[Request], settings: list[tuple[SamplingSpec, Words]]
) -> tuple[list[dict[int, list[int]]], int, dict[int, Tensor]]:
    """For each way of sampling, the tokens that follow each prompt, of those this rank answers for; the bytes of its
    cache; and the logits for the token after each prompt."""
    generator = make_generator(spec, rank, CPU)
    found = []
    for sampling, words in settings:
        written: dict[int, list[int]] = {}

        def heard(events: list[Event], written: dict[int, list[int]] = written) -> None:
            for event in events:
                written.setdefault(event.number, []).append(event.token)

        generator.generate(requests, sampling, words, heard)
        found.append(written)
    return found, generator.cache_bytes, _first_logits(generator, requests)


def drafted(rank: int, *given: Any) -> Any:
    """`texts`, of a generation with drafts, which takes more answers of a step than logits have rows."""
    spec, requests, settings = given
    generator = make_generator(spec, rank, CPU)
    ((sampling, words),) = settings
    written: dict[int, list[int]] = {}

    def heard(events: list[Event]) -> None:
        for event in events:
            written.setdefault(event.number, []).append(event.token)

    generator.generate(requests, sampling, words, heard)
    return [written], generator.cache_bytes, {}


def _first_logits(generator: Generator, requests: list[Request]) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}

    def answer(logits: Tensor, batch: Batch) -> list[int]:
        written = batch.written()
        if generator.is_leader:
            found.update({text.request.number: row.clone() for text, row in zip(written, logits, strict=True)})
        return [0] * len(written)

    generator.run([replace(request, room=1) for request in requests], (), answer, lambda _: None)
    return found


def together(results: list[Any]) -> list[dict[int, list[int]]]:
    """What all ranks wrote."""
    count = len(results[0][0])
    return [{number: text for ranks in results for number, text in ranks[0][way].items()} for way in range(count)]


def scored(rank: int, spec: GenerationSpec, requests: list[Request]) -> list[Score]:
    """What this rank says."""
    said: list[Score] = []
    make_generator(spec, rank, CPU).score(requests, said.extend)
    return said
