"""What the ranks of the pool do in tests of generation."""

from __future__ import annotations

from typing import Any

import torch

from cuboid.generate.batch import Event, Request
from cuboid.generate.engine import make_generator
from cuboid.generate.evaluation import Score
from cuboid.generate.words import Words
from cuboid.spec.generation import GenerationSpec, SamplingSpec

CPU = torch.device("cpu")


def texts(
    rank: int, spec: GenerationSpec, requests: list[Request], settings: list[tuple[SamplingSpec, Words]]
) -> tuple[list[dict[int, list[int]]], int]:
    """For each way of sampling, the tokens that follow each prompt, of those this rank answers for; and the bytes of
    its cache."""
    generator = make_generator(spec, rank, CPU)
    found = []
    for sampling, words in settings:
        written: dict[int, list[int]] = {}

        def heard(events: list[Event], written: dict[int, list[int]] = written) -> None:
            for event in events:
                written.setdefault(event.number, []).append(event.token)

        generator.generate(requests, sampling, words, heard)
        found.append(written)
    return found, generator.cache_bytes


def together(results: list[Any]) -> list[dict[int, list[int]]]:
    """What all ranks wrote."""
    count = len(results[0][0])
    return [{number: text for ranks in results for number, text in ranks[0][way].items()} for way in range(count)]


def scored(rank: int, spec: GenerationSpec, requests: list[Request]) -> list[Score]:
    """What this rank says."""
    said: list[Score] = []
    make_generator(spec, rank, CPU).score(requests, said.extend)
    return said
