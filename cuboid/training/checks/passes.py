"""Passes: what a pipeline stage sends is what the next one computes with, forward and backward; the gradient of the
loss begins as one over the tokens of the global batch; the loss is the sum of what the heads computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cuboid.model.batch import MicroBatch
from cuboid.parallel.parallelize import Engine
from cuboid.parallel.rank_batch import RankBatch
from cuboid.parallel.stage import Segment
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.ranks import coordinates
from cuboid.training.checks.check import found_by_all, on_gradient, wrap
from cuboid.training.checks.gather_rows import RowGather, Rows
from cuboid.training.checks.hypotheses import UNKNOWN, named_factor
from cuboid.training.checks.located import Located
from cuboid.training.checks.sampling import SampledStep
from cuboid.training.checks.sketch import NUMBERS, sketch
from cuboid.training.optimizer import Optimizer
from cuboid.training.step import StepResult

ALLOWED = 1e-5
LOSS = {torch.float64: 1e-9, torch.float32: 1e-3}


class Current:
    """The micro-batch that is being computed. Passes of a pair run in two threads; the backward pass of a GPU in one of
    its own, which sees the latest."""

    def __init__(self) -> None:
        self._of_thread: dict[int, int] = {}
        self._latest = 0

    def __call__(self) -> int:
        return self._of_thread.get(threading.get_ident(), self._latest)

    def attach(self, engine: Engine) -> list[Callable[[], None]]:
        """Returns what undoes it."""
        runners, undo = engine.pipeline.runners, list[Callable[[], None]]()
        self._of_thread.clear()
        for kind, act in list(runners.items()):
            runners[kind] = partial(self._act, act)
            undo.append(partial(runners.__setitem__, kind, act))
        return undo

    def _act(self, act: Callable[[int, int], None], stage: int, micro_batch: int) -> None:
        self._of_thread[threading.get_ident()] = self._latest = micro_batch
        act(stage, micro_batch)


class Passes:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._current, self._row_gather = engine, Current(), RowGather(engine)
        self._rows: Rows = {}
        self._losses: list[Tensor] = []
        self._scales: list[Tensor] = []
        self._counted: list[Tensor] = []
        self._loads: Tensor | None = None
        """Of experts, by layer."""
        self._assigned = 0
        """Tokens, each of which a router assigns."""
        self._undo: list[Callable[[], None]] = []

    def begin(self, sampled: SampledStep) -> None:
        engine = self._engine
        self._rows, self._losses, self._scales, self._counted = {}, [], [], []
        self._undo += self._current.attach(engine)
        of = engine.batches.of

        def made(batch: MicroBatch, *more: Any) -> RankBatch:
            result = of(batch, *more)
            self._counted.append(result.counted)
            return result

        self._undo.append(wrap(engine.batches, "of", made))
        for index, stage in engine.pipeline.stages.items():
            self._undo.append(wrap(stage, "forward", partial(self._forward, index, stage.forward)))
            for segment in stage.segments:
                if segment.name == "head":
                    self._follow(segment)

    def _forward(self, index: int, plain: Callable[[Tensor, RankBatch], Tensor], x: Tensor, batch: RankBatch) -> Tensor:
        last, now = self._engine.pipeline.schedule.stages - 1, self._current()
        if index and x.requires_grad:
            self._note("forward", index, now, "received", x)
            on_gradient(x, partial(self._note, "input gradient", index, now, "sent"))
        y = plain(x, batch)
        if index < last and y.requires_grad:
            self._note("forward", index + 1, now, "sent", y)
            on_gradient(y, partial(self._note, "input gradient", index + 1, now, "received"))
        return y

    def _note(self, where: str, border: int, micro_batch: int, side: str, x: Tensor) -> None:
        self._rows[where, border, micro_batch, side] = sketch(x)

    def _follow(self, segment: Segment) -> None:
        plain = segment.run

        def run(x: Tensor, batch: Any) -> Tensor:
            y = plain(x, batch)
            if y.requires_grad:
                self._losses.append(y.detach().double())
                on_gradient(y, lambda gradient: self._scales.append(gradient.double()))
            return y

        self._undo.append(wrap(segment, "run", run))

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def see_gradients(self, result: StepResult) -> None:
        numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=self._engine.device)
        numbers[0] = torch.stack(self._counted).sum() if self._counted else 0
        numbers[1], numbers[2] = result.tokens, result.loss
        if self._losses and self._scales:
            scales = torch.stack(self._scales) / (result.loss_scale or 1.0)
            numbers[3], numbers[4], numbers[5] = torch.stack(self._losses).sum(), scales.min(), scales.max()
            numbers[6] = 1
        self._rows["head", 0, 0, ""] = numbers
        self._loads = result.routers
        self._assigned = result.sequences * self._engine.run.training.sequence

    def judge(self, engine: Engine, optimizer: Optimizer, step: int) -> list[Located]:
        gathered = self._row_gather.gather({key: row.to(engine.device) for key, row in self._rows.items()}, NUMBERS)
        found = [*self._wrong_borders(gathered, step), *self._wrong_head(gathered, step)]
        return found + found_by_all(engine, list(self._wrong_loads(step)))

    def _wrong_loads(self, step: int) -> Iterator[Located]:
        """Each token of the global batch is assigned to so many experts, once."""
        run, mixture = self._engine.run, self._engine.run.model.mixture
        if self._loads is None or mixture is None or isinstance(run.model, PythonModelSpec):
            return
        for row, loads in enumerate(self._loads[:, : mixture.experts].sum(1).tolist()):
            factor = loads / (self._assigned * mixture.top_k)
            if factor != 1:
                named = named_factor(factor, run, run.micro_batches, exact=False) or f"factor {factor:.4g}"
                cause = f"statistics of routers are not those of the global batch: {named}"
                module = f"layers.{row + mixture.first_dense_layers}.feed_forward.router"
                place = step, None, self._engine.groups.world.index
                yield Located("loads of experts", module, "reduction", *place, abs(factor - 1), 0.0, cause)
                return

    def _wrong_borders(self, gathered: list[Rows], step: int) -> Iterator[Located]:
        layout = self._engine.run.layout
        stride = layout.world_size // layout.pp  # ranks of one place in all stages are so far apart
        for place in range(stride):
            line = range(place, layout.world_size, stride)
            sent = {key[:3]: row for rank in line for key, row in gathered[rank].items() if key[3] == "sent"}
            for rank in line:
                for (where, border, micro_batch, side), row in gathered[rank].items():
                    right = sent.get((where, border, micro_batch))
                    if side != "received" or right is None:
                        continue
                    error = float((row - right).norm()) / (float(right.norm()) or 1.0)
                    if error <= ALLOWED:
                        continue
                    equal = [key for key, each in sent.items() if torch.equal(each, row)]
                    other = next((key for key in equal if key[:2] == (where, border)), None)
                    cause = UNKNOWN if other is None else f"it is that of micro-batch {other[2] + 1}"
                    stage = border if where == "forward" else border - 1
                    name = "what" if where == "forward" else "the gradient that"
                    tensor = f"{name} pipeline stage {stage} received"
                    module = self._segments[stage]
                    yield Located(tensor, module, where, step, micro_batch + 1, rank, error, ALLOWED, cause)
                    return

    @property
    def _segments(self) -> list[str]:
        """The segment of each stage that receives gradients."""
        blocks = [max(layers, default=0) for layers in self._engine.partition]
        return [f"layers.{block}" for block in blocks]

    def _wrong_head(self, gathered: list[Rows], step: int) -> Iterator[Located]:
        run, layout = self._engine.run, self._engine.run.layout
        heads = [rows["head", 0, 0, ""].tolist() for rows in gathered]
        places = [coordinates(rank, layout) for rank in range(len(gathered))]
        ranks = list(zip(range(len(gathered)), heads, places, strict=True))
        tokens = sum(head[0] for _, head, place in ranks if place.pp == place.tp == 0)
        for rank, head, _ in ranks:
            if head[1] != tokens:
                named = named_factor(head[1] / max(tokens, 1), run, run.micro_batches, exact=False)
                cause = f"their count is not the sum over dp and cp {named}".strip()
                error = abs(head[1] - tokens) / max(tokens, 1)
                yield Located("tokens with labels", "loss", "reduction", step, None, rank, error, 0.0, cause)
                break
        for rank, head, _ in ranks:
            worst = max((head[4], head[5]), key=lambda scale: abs(scale * tokens - 1))
            if head[6] and tokens and abs(worst * tokens - 1) > 1e-3:
                factor = worst * tokens
                cause = named_factor(factor, run, run.micro_batches, exact=False) or f"factor {factor:.4g}"
                if abs(worst - 1) <= 1e-6:
                    cause = "not divided by the number of tokens"
                elif abs(head[5] / (head[4] or 1.0) - 1) > 1e-6:
                    cause = "mean of means: each micro-batch is divided by its own tokens"
                error, name = abs(factor - 1), "gradient of the loss"
                yield Located(name, "head", "input gradient", step, None, rank, error, 1e-3, cause)
                break
        if run.model.prediction_layers or not tokens:
            return
        loss = sum(head[3] for _, head, place in ranks if place.tp == 0) / tokens
        allowed = LOSS[self._engine.units[0].accumulate]
        for rank, head, _ in ranks:
            error = abs(head[2] - loss) / (abs(loss) or 1.0)
            if not error <= allowed:
                named = named_factor(head[2] / (loss or 1.0), run, run.micro_batches, exact=False)
                cause = named or "the sum over ranks is not that of their losses"
                yield Located("loss", "loss", "reduction", step, None, rank, error, allowed, cause)
                return
