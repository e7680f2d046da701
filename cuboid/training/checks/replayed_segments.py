"""Which segments of a rank's stages are replayed, in which order, and the outputs of a block's two halves meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from cuboid.parallel.parallelize import Engine
from cuboid.parallel.stage import Segment
from cuboid.spec.plugin import PythonModelSpec

LARGEST = 2**29
"""Parameters of a segment that is replayed: more would need memory that a training lacks."""
LARGEST_HEAD = 2**28
"""Logits of a head."""


@contextmanager
def inside_of(segment: Segment, kept: dict[str, Tensor]) -> Iterator[None]:
    """Keeps the first outputs of a block's attention and feed-forward meanwhile."""
    hooks = []
    for path in ("attention", "feed_forward"):
        module = getattr(segment.module, path, None)
        if isinstance(module, nn.Module):

            def hook(_: nn.Module, __: Any, result: Any, name: str = f"{segment.name}.{path}") -> None:
                if isinstance(result, Tensor):
                    kept.setdefault(name, result.detach().clone())

            hooks.append(module.register_forward_hook(hook))
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def segments_of(engine: Engine) -> list[Segment]:
    return [segment for stage in engine.pipeline.stages.values() for segment in stage.segments]


class Rotation:
    """The order of replays: block, head, block, embedding, … of a rank's stages, each as far as the rank has it."""

    def __init__(self, engine: Engine) -> None:
        names = [segment.name for segment in segments_of(engine) if _is_replayed(engine, segment.name)]
        self._blocks = [name for name in names if name.startswith("layers.")]
        self._ends = [name for name in ("head", "embedding") if name in names]

    def at(self, index: int) -> str | None:
        """The segment of a replay; None: there is none. Every other replay is of head or embedding, if the rank has
        one."""
        if not self._ends:
            return self._blocks[index % len(self._blocks)] if self._blocks else None
        if index % 2 or not self._blocks:
            return self._ends[index // 2 % len(self._ends)]
        return self._blocks[index // 2 % len(self._blocks)]


def _is_replayed(engine: Engine, name: str) -> bool:
    run, segment = engine.run, next(each for each in segments_of(engine) if each.name == name)
    if isinstance(run.model, PythonModelSpec):
        if run.layout.cp > 1:
            return False
    elif name.startswith("layers.") and int(name.rpartition(".")[2]) >= run.model.layers:
        return False  # a layer that predicts further tokens reads more than its input
    if name == "head" and run.model.prediction_layers:
        return False
    tokens = run.layout.micro_batch_of(engine.groups.coordinates.dp) * run.training.sequence
    size = sum(math.prod(part.full_shape) for unit in segment.units for part in unit.parts)
    return size <= LARGEST and (name != "head" or tokens * run.model.vocab <= LARGEST_HEAD)
