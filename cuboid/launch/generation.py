"""Start the ranks of a generation on this machine, and hear what they write."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from cuboid.errors import UserError
from cuboid.generate.batch import Event, Request
from cuboid.generate.detokenizer import Words
from cuboid.generate.evaluation import Score
from cuboid.launch.capacity import check_generation
from cuboid.launch.place import find_place
from cuboid.launch.pool import Pool
from cuboid.spec.generation import GenerationSpec, SamplingSpec
from cuboid.spec.plugin import PythonModelSpec

PATIENCE = 24 * 3600.0
"""Seconds after which ranks that say nothing are given up: a large model is read for minutes, and nobody waits idly."""


def start_generation(
    spec: GenerationSpec,
    requests: Sequence[Request],
    sampling: SamplingSpec,
    words: Words,
    heard: Callable[[list[Event]], None],
    joined: Callable[[dict[str, Any]], None] | None = None,
    oversubscribe: bool = False,
) -> None:
    """Returns when every request has its text. `joined`: as `Pool.run` has it. `oversubscribe`: start also where
    memory or cores seem too few for the ranks."""
    run_ranks("generate_rank", spec, (list(requests), sampling, words), heard, joined, oversubscribe)


def run_ranks(
    name: str,
    spec: GenerationSpec,
    arguments: tuple[Any, ...],
    heard: Callable[[Any], None],
    joined: Callable[[dict[str, Any]], None] | None = None,
    oversubscribe: bool = False,
) -> None:
    """`name`, a function of this file, on every rank of the layout: here where that is one."""
    ranks = spec.layout.world_size
    if find_place(os.environ) is not None:
        raise UserError("torchrun or Slurm started this process as a rank, and generation starts its own; run it alone")
    if spec.backend == "nccl" or spec.device == "cuda":
        from cuboid.launch.backend import refuse_backend
        from cuboid.parallel.device import choose_device

        refuse_backend(spec.backend, choose_device(spec.device, 0, "--device"), "--backend")
    check_generation(spec, oversubscribe)
    if ranks == 1:
        globals()[name](0, heard, spec, *arguments)
        return
    with Pool() as pool:
        job = f"{__name__}:{name}"
        pool.run(
            job,
            (spec, *arguments),
            ranks=ranks,
            timeout=PATIENCE,
            device=spec.device,
            backend=spec.backend,
            heard=heard,
            joined=joined,
        )


def _generator(spec: GenerationSpec, rank: int) -> Any:
    import torch

    from cuboid.generate.engine import make_generator
    from cuboid.parallel.device import choose_device

    if spec.layout.world_size > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // spec.layout.world_size))
    if isinstance(spec.model, PythonModelSpec):
        from cuboid.generate.own import OwnGenerator

        return OwnGenerator(spec, rank, choose_device(spec.device, rank))
    return make_generator(spec, rank, choose_device(spec.device, rank))


def generate_rank(
    rank: int,
    say: Callable[[Any], None],
    spec: GenerationSpec,
    requests: list[Request],
    sampling: SamplingSpec,
    words: Words,
) -> None:
    _generator(spec, rank).generate(requests, sampling, words, say)


def start_scoring(
    spec: GenerationSpec,
    requests: Sequence[Request],
    joined: Callable[[dict[str, Any]], None] | None = None,
    oversubscribe: bool = False,
) -> list[Score]:
    """How likely the labels of each request are, in order. `joined`: as `Pool.run` has it."""
    found: dict[int, Score] = {}

    def heard(scores: list[Score]) -> None:
        for score in scores:
            found[score.number] = found[score.number] + score if score.number in found else score

    run_ranks("score_rank", spec, (list(requests),), heard, joined, oversubscribe)
    return [found[request.number] for request in requests]


def score_rank(rank: int, say: Callable[[Any], None], spec: GenerationSpec, requests: list[Request]) -> None:
    _generator(spec, rank).score(requests, say)
