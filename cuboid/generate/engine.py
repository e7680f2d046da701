"""Generation on one rank: batches take turns, so that while one is at the last stage the next is at the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuboid.console import say
from cuboid.generate.batch import Batch, Event, Request, Span, Step
from cuboid.generate.build import Builder, Stage, make_generation_groups
from cuboid.generate.cache import Rower, Rows
from cuboid.generate.cuda_graphs import FixedDecoder
from cuboid.generate.detokenizer import Words
from cuboid.generate.evaluation import Score
from cuboid.generate.kernels import wants_kernels
from cuboid.generate.sampling import choose, scores, uniform
from cuboid.model.rope import PositionTable
from cuboid.parallel.collectives import all_reduce, all_reduce_maximum
from cuboid.parallel.groups import Group, Groups, connect_groups
from cuboid.parallel.p2p import transport_device
from cuboid.parallel.parallelize import DTYPES
from cuboid.spec.generation import GenerationSpec, SamplingSpec, cache_shape
from cuboid.spec.partition import partition

# Messages between the pipeline ranks of a generation: activations from stage to stage, tokens from the last one back.
#
# Every rank knows from its books what comes next and how large it is. Activations only go from stage to stage, over the
# links of the pipeline. Tokens are in CPU memory when they are chosen, and are wanted there: they go over a gloo
# group of their own. A gloo send never waits for its receive, so that no rank waits for another in a circle.


class StageLinks:
    def __init__(self, groups: Groups) -> None:
        self._links, self._ranks = groups.links, groups.pipeline.ranks
        self.index = groups.pipeline.index
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._tokens: dist.ProcessGroup | None = None
        if len(self._ranks) > 1:
            self._tokens = dist.new_group(list(self._ranks), backend="gloo", use_local_synchronization=True)

    def send(self, x: Tensor, target: int) -> None:
        link = self._links[self.index, target]
        x = x.contiguous().to(transport_device(x, link))
        self._keep(dist.isend(x, link.ranks[1], group=link.handle), x)

    def _keep(self, work: Any, x: Tensor) -> None:
        """Until it has left."""
        self._sent.append((work, x))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def receive(self, like: Tensor, source: int) -> Tensor:
        link = self._links[source, self.index]
        buffer = torch.empty_like(like, device=transport_device(like, link))
        work = dist.irecv(buffer, link.ranks[0], group=link.handle)
        assert work is not None
        work.wait()
        return buffer.to(like.device)

    def answer(self, tokens: list[int]) -> None:
        """From the rank of the last stage to all others."""
        values = torch.tensor(tokens, dtype=torch.int64)
        for index, target in enumerate(self._ranks):
            if index != self.index:
                self._keep(dist.isend(values, target, group=self._tokens), values)

    def receive_answer(self, count: int, source: int) -> list[int]:
        values = torch.empty(count, dtype=torch.int64)
        dist.recv(values, self._ranks[source], group=self._tokens)
        tokens: list[int] = values.tolist()
        return tokens

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._sent:
            self._sent.popleft()[0].wait()


KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Of attention. All but cuDNN's, which torch prefers on Hopper and which plans anew, for tens of milliseconds, at every
length that it has not seen."""


def make_generator(
    spec: GenerationSpec, rank: int, device: torch.device, tensors: Mapping[str, Tensor] | None = None
) -> Generator:
    """With weights of its own, from where the spec says or copied from `tensors`, which have the names of Hugging Face;
    every rank calls it."""
    groups = make_generation_groups(spec, rank, device)
    connect_groups(groups, device)
    builder = Builder(spec, groups, groups.context_outer, device)
    index = groups.coordinates.pp
    stage = builder.stage(partition(spec.model, spec.layout.pp, spec.length)[index])
    builder.load(tensors)
    # Which put a table that is the head too where no other module finds its rows.
    fits = not (spec.draft and spec.model.tie_embeddings)
    if fits and wants_kernels(device, builder.dtype) and (reason := stage.use_kernels()) and rank == 0:
        say(f"a token takes up to twice its time: {reason}", as_warning=True)
    return Generator(spec, groups, groups.context_outer, {index: stage}, tuple(range(spec.layout.pp)), device)


class Generator:
    """Every rank makes one and calls the same methods in the same order."""

    def __init__(
        self,
        spec: GenerationSpec,
        groups: Groups,
        context: Group,
        stages: dict[int, Stage],
        stage_rank: tuple[int, ...],
        device: torch.device,
    ) -> None:
        """`stages`: those of this rank by index; `stage_rank`: the pipeline rank of each."""
        self.spec, self.groups, self.context, self.device = spec, groups, context, device
        self._stages, self._stage_rank = stages, stage_rank
        layout, dtype = spec.layout, DTYPES[spec.precision]
        self._table = PositionTable(spec.model, spec.length, dtype, device)
        # Each tensor rank routes an equal part of the tokens.
        multiple = layout.tp if spec.model.mixture is not None else 1
        self._places = cache_shape(spec.model, layout, spec.slots, spec.length).places
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._rower = Rower(self._table, context, self._places, multiple, self._like)
        self._links = StageLinks(groups)
        self._decoders: dict[range, FixedDecoder] = {}
        # Where a rank has several stages, messages of two batches would cross.
        self._batches = spec.batches if len(stage_rank) == layout.pp else 1
        # Experts of one layer may lie on ranks of several replicas: all of these compute, or none does.
        self._in_step = layout.ep > 1 and layout.dp > 1

    @property
    def _is_last(self) -> bool:
        return self._stage_rank[-1] == self._links.index

    @property
    def is_leader(self) -> bool:
        """Of its replica: the one rank that says what it has written."""
        return self._is_last and self.groups.tensor.index == 0 and self.context.index == 0

    @property
    def cache_bytes(self) -> int:
        return sum(cache.bytes for stage in self._stages.values() for cache in stage.caches)

    def generate(
        self, requests: Sequence[Request], sampling: SamplingSpec, words: Words, heard: Callable[[list[Event]], None]
    ) -> None:
        """`requests`: of all replicas; `heard` is told what the leader has written."""

        def answer(logits: Tensor, batch: Batch) -> list[int]:
            return self._choose(logits, batch, sampling, words)

        self.run(requests, words.ends, answer, heard)

    def score(self, requests: Sequence[Request], heard: Callable[[list[Score]], None]) -> None:
        """How likely the labels of each request are; `heard` is told by the leader, a part of a text at a time."""

        def answer(logits: Tensor, batch: Batch) -> list[int]:
            found = scores(logits, batch.taking_part())
            if self.is_leader:
                heard(found)
            return []

        self.run(requests, (), answer, lambda _: None)

    @torch.inference_mode()
    @sdpa_kernel(KERNELS)
    def run(
        self,
        requests: Sequence[Request],
        ends: Sequence[int],
        answer: Callable[[Tensor, Batch], list[int]],
        heard: Callable[[list[Event]], None],
    ) -> None:
        """`answer` makes of the logits that a step asked for a token for each text that gets one; on all ranks of the
        last stage, which see the same."""
        waiting = deque(requests[self.groups.coordinates.dp :: self.spec.layout.dp])
        batches = [
            Batch(slots, self.spec.chunk, ends, waiting, self.spec.draft)
            for slots in _equal_parts(self.spec.slots, self._batches)
        ]
        answers: dict[Batch, list[int]] = {}  # of the last stage to itself
        busy = True
        while busy:
            busy = False
            for batch in batches:
                if batch.under_way is not None:
                    events = batch.take(self._answer_of(batch, answers))
                    if self.is_leader and events:
                        heard(events)
                step = batch.next_step()
                if not self._anybody(step is not None):
                    continue
                busy = True
                if self._is_alone and step is not None and batch.decodes and not self.spec.draft:
                    answers[batch] = answer(self._decoder(batch.slots)(step), batch)
                    continue  # nobody else asks
                made = self._forward(step or Step(()))
                if made is None:
                    continue
                answers[batch] = answer(self._logits(*made, step), batch) if step and step.asked else []
                if self.spec.draft:
                    answers[batch] += self._drafts(made[0], batch, answers[batch])
                if answers[batch]:
                    self._links.answer(answers[batch])
        self._links.finish()

    @property
    def _is_alone(self) -> bool:
        """Whether one GPU has all layers and decides alone how many rows each of its matmuls has."""
        parts = self.groups.tensor.size * self.context.size * len(self._stage_rank)
        return self.device.type == "cuda" and parts == 1 and self.spec.model.mixture is None

    def _decoder(self, slots: range) -> FixedDecoder:
        if slots not in self._decoders:
            self._decoders[slots] = FixedDecoder(
                self._stages[0], self._table, slots, self._places, self._like, records=True
            )
        return self._decoders[slots]

    def _answer_of(self, batch: Batch, own: dict[Batch, list[int]]) -> list[int]:
        """The tokens that the step in flight gave."""
        if self._is_last:
            return own.pop(batch, [])
        count = batch.answers
        return self._links.receive_answer(count, self._stage_rank[-1]) if count else []

    def _anybody(self, busy: bool) -> bool:
        if not self._in_step:
            return busy
        return bool(all_reduce_maximum(torch.tensor([int(busy)], device=self.device), self.groups.data).item())

    def _forward(self, step: Step) -> tuple[Tensor, Rows] | None:
        """What the head reads, on the rank of the last stage."""
        rows = self._rower.rows(step)
        own, x = self._links.index, rows.tokens
        for index, stage in self._stages.items():
            if index and self._stage_rank[index - 1] != own:
                like = self._like.new_empty(rows.tokens.shape[1], self.spec.model.hidden)
                x = self._links.receive(like, self._stage_rank[index - 1])
            x = stage.hidden(x, rows.positions)
            if index + 1 < len(self._stage_rank) and self._stage_rank[index + 1] != own:
                self._links.send(x, self._stage_rank[index + 1])
        return (x, rows) if self._is_last else None

    def _logits(self, x: Tensor, rows: Rows, step: Step) -> Tensor:
        """Those that were asked for."""
        return self._stages[len(self._stage_rank) - 1].logits(self._asked(x, rows, step.asked))

    def _drafts(self, x: Tensor, batch: Batch, answers: Sequence[int]) -> list[int]:
        """Of each text that gets a token those that prediction layers say may follow it, on the ranks of the last
        stage. They read all tokens that the model has read, so that they can look back."""
        parts = batch.known(answers) if batch.under_way is not None else []
        drafts: list[list[int]] = [[] for _, _, gains in parts if gains]
        for depth, layer in enumerate(self._stages[len(self._stage_rank) - 1].predictions, 1):
            spans = [replace(span, tokens=_further(span, tokens, depth)) for span, tokens, _ in parts]
            step = Step(tuple(spans))
            rows = self._rower.rows(step)
            x = layer.predict(x, rows.tokens, rows.positions)
            if not step.asked:
                continue
            likeliest = self._logits(x, rows, step).argmax(1).tolist()
            writing, row = iter(drafts), 0
            for span, tokens, gains in parts:
                if gains:
                    next(writing).append(likeliest[row + gains - 1])
                    tokens.append(likeliest[row + gains - 1])
                row += span.asked
        return [token for each in drafts for token in each]

    def _asked(self, x: Tensor, rows: Rows, count: int) -> Tensor:
        """The rows whose logits are wanted, on every context rank all of them."""
        if self.context.size == 1 and len(rows.asked) == x.shape[0]:
            return x
        asked, answers = torch.tensor([rows.asked, rows.answers], dtype=torch.int64).to(self.device)
        if self.context.size == 1:
            return x.index_select(0, asked)
        whole = x.new_zeros(count, x.shape[1]).index_copy_(0, answers, x.index_select(0, asked))
        return all_reduce(whole, self.context)

    def _choose(self, logits: Tensor, batch: Batch, sampling: SamplingSpec, words: Words) -> list[int]:
        # Behind each draft as if it were right: then the same random number decides that would without drafts.
        texts = [
            (text, text.tokens + text.tried[:row]) for text in batch.written() for row in range(len(text.tried) + 1)
        ]
        numbers: list[float] = []
        if sampling.temperature:
            numbers = [uniform(sampling.seed, text.request.number, len(tokens)) for text, tokens in texts]
        chosen = choose(logits, sampling, numbers, [tokens for _, tokens in texts])
        for place, ((text, tokens), token) in enumerate(zip(texts, chosen, strict=True)):
            if sampling.stop and words.stops([*tokens[len(text.request.tokens) :], token], sampling.stop):
                chosen[place] = -1 - token
        return chosen


def _further(span: Span, tokens: Sequence[int], depth: int) -> tuple[int, ...]:
    """Of each token of a part of a step the one so many places further; of those that are not known, any."""
    return tuple(tokens[place] if place < len(tokens) else 0 for place in range(span.start + depth, span.stop + depth))


def _equal_parts(count: int, parts: int) -> list[range]:
    return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]
