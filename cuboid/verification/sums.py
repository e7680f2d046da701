"""The first sum that is wrong in the recorded step: the loss, weight gradients and their sums over ranks, the norm."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cuboid.spec.sharding import EXPERTS, Part
from cuboid.training.checks.hypotheses import (
    UNKNOWN,
    Axes,
    Hypothesis,
    count_named,
    fitted_factor,
    listed,
    named_factor,
    shifted,
    sum_hypotheses,
)
from cuboid.training.checks.located import Located, module_of
from cuboid.verification.causes import (
    factor_cause,
    first_cause,
    rounding_cause,
    token_counts,
    weighted_hypotheses,
)
from cuboid.verification.compare import relative_error
from cuboid.verification.evidence import Error, Evidence, Seen, part_of, shard_of, size
from cuboid.verification.follows import NORM, norm
from cuboid.verification.rounding import allowed

# The loss.


def _number(evidence: Evidence, observed: float, expected: list[float]) -> Error:
    """As `compare` judges one number."""
    if not evidence.is_rounded:
        tolerance = 1e-9 if evidence.run.training.precision == "float64" else 1e-3
        return Error(relative_error(observed, expected[0]), tolerance)
    *rounded, exact = expected
    scale = abs(exact) or 1.0
    spread = max(abs(each - exact) for each in rounded) / scale
    error = abs(observed - rounded[0]) / scale
    return Error(error if error == error else math.inf, allowed(spread))


def first_loss(evidence: Evidence) -> Located | None:
    layout = evidence.run.layout
    counts = token_counts(evidence)
    for micro_batch in range(evidence.micro_batches):
        for replica in range(layout.dp):
            places = evidence.sample_places(replica, micro_batch)
            expected = []
            for recorder in evidence.samples:
                values = [recorder.notes.forward.get(("head", place)) for place in places]
                if any(value is None for value in values):
                    return None
                expected.append(sum(float(value) for value in values if value is not None))
            for tensor in range(layout.tp):
                parts = {}
                for record in evidence.ranks:
                    place, x = evidence.place(record.rank), record.notes.forward.get(("head", micro_batch))
                    if x is not None and not x.ndim and (place.dp, place.tp) == (replica, tensor):
                        parts[record.rank] = float(x)
                if not parts:
                    continue
                observed = sum(parts.values())
                error = _number(evidence, observed, expected)
                if error.is_wrong:
                    tokens = counts.get((replica, micro_batch), 0)
                    cause = _loss_cause(evidence, observed, expected[0], tokens)
                    where = evidence.step + 1, micro_batch + 1, min(parts)
                    return Located("loss", "head", "loss", *where, error.error, error.allowed, cause)
    return None


def first_prediction_loss(evidence: Evidence) -> Located | None:
    """Of layers that predict further tokens, whose activations nobody records."""
    model, step = evidence.run.model, evidence.step
    for depth in range(model.prediction_layers):
        place = step * model.prediction_layers + depth
        observed, *expected = (trace.prediction_losses[place] for trace in (evidence.observed, *evidence.traces))
        error = _number(evidence, observed, expected)
        if error.is_wrong:
            factor = observed / (expected[0] or math.nan)
            cause = named_factor(factor, evidence.run, evidence.micro_batches, exact=not evidence.is_rounded)
            cause = cause or "what it reads is right: labels of other tokens, a mask of them, or what it computes"
            name = f"layers.{model.layers + depth}"
            told = error.error, error.allowed, cause
            return Located(f"loss of {name}", name, "loss", step + 1, None, None, *told)
    return None


def _loss_cause(evidence: Evidence, observed: float, right: float, tokens: int) -> str:
    if observed != observed:
        return "not a number"
    layout, close = evidence.run.layout, 1e-6 if not evidence.is_rounded else 0.03
    for name, count in (("tp", layout.tp), ("cp", layout.cp), ("dp", layout.dp)):
        if count > 1 and tokens:
            for sign, told in ((1, "+"), (-1, "-")):
                if abs((observed - right) / tokens - sign * math.log(count)) <= close * math.log(count):
                    return f"loss {told} log({name}) for each token: the vocabulary is counted {count} times"
    named = named_factor(observed / right, evidence.run, evidence.micro_batches, exact=not evidence.is_rounded)
    return named or "logits are right and their loss is not: labels of other tokens, or a mask of them"


def first_whole_loss(evidence: Evidence) -> Located | None:
    step = evidence.step
    error = _number(evidence, evidence.observed.losses[step], [trace.losses[step] for trace in evidence.traces])
    if not error.is_wrong:
        return None
    parts = []
    for record in evidence.ranks:
        place = evidence.place(record.rank)
        if place.tp == 0:
            for (name, micro_batch), x in record.notes.forward.items():
                if name == "head" and not x.ndim:
                    axes = {"dp": place.dp, "cp": place.cp, "micro-batch": micro_batch}
                    parts.append((axes, x.double().reshape(1)))
    counts = token_counts(evidence)
    observed, right = evidence.observed.losses[step], evidence.traces[0].losses[step]
    cause = ""
    if parts and counts:
        total = sum(counts.values())
        # A sum of token losses over a count of tokens: both may lack what other ranks have.
        seen = Seen(torch.tensor([observed * total]).double(), [torch.tensor([right * total]).double()])
        cause = named_factor(observed / right, evidence.run, evidence.micro_batches, exact=not evidence.is_rounded)
        cause = cause or _first_number(
            [*sum_hypotheses(parts), *weighted_hypotheses(parts, counts)], seen, evidence.is_rounded
        )
    cause = cause or UNKNOWN
    return Located("loss", "loss", "reduction", step + 1, None, None, error.error, error.allowed, cause)


def _first_number(hypotheses: list[Hypothesis], seen: Seen, is_rounded: bool) -> str:
    """Of one number: many hypotheses come near; only what is nearest counts."""
    best = (0.1 if is_rounded else 1e-6, "")
    apart = size(seen.observed - seen.right)
    for told, make in hypotheses:
        made = make()
        if made is not None:
            best = min(best, (size(seen.observed - made) / apart, told))
    return best[1]


# Weight gradients before any sum over ranks.

Parts = list[tuple[Axes, Tensor]]


def own_parts(evidence: Evidence, name: str) -> dict[tuple[int, int], tuple[Part, Parts]]:
    """By slice of the parameter, what each rank and micro-batch gives of its gradient."""
    found: dict[tuple[int, int], tuple[Part, Parts]] = {}
    for record in evidence.ranks:
        part = record.parts.get(name)
        if part is None:
            continue
        place = evidence.place(record.rank)
        for micro_batch in range(evidence.micro_batches):
            own = record.own.get((name, micro_batch))
            own = torch.zeros(part.shape) if own is None else own
            axes = {"dp": place.dp, "cp": place.cp, "tp": place.tp, "pp": place.pp, "micro-batch": micro_batch}
            parts = found.setdefault((part.slice.start, part.slice.stop), (part, []))[1]
            parts.append((axes, own.double().view(part.shape)))
    return found


def adds_up(part: Part, parts: Parts) -> Parts:
    """Of holders that all have the whole gradient of their tokens, one."""
    if part.slice.sharing == "own" or part.slice.partial_gradient:
        return parts
    first = min(axes["tp"] for axes, _ in parts)
    return [(axes, values) for axes, values in parts if axes["tp"] == first]


def first_weight_gradient(evidence: Evidence) -> Located | None:
    """In the order of a backward pass: of the last module first."""
    order = list(evidence.traces[0].gradients[evidence.step])
    found = (wrong_weight_gradient(evidence, name) for name in _backward_order(evidence, order))
    return next((each for each in found if each is not None), None)


def wrong_weight_gradient(evidence: Evidence, name: str) -> Located | None:
    for part, parts in own_parts(evidence, name).values():
        found = _wrong_part(evidence, name, part, adds_up(part, parts))
        if found is not None:
            return found
    return None


def _backward_order(evidence: Evidence, names: list[str]) -> list[str]:
    """Of a matrix that two stages share, last: both must have come."""

    def place(name: str) -> tuple[int, int, int]:
        path = name.split(".")
        stage = 0 if path[0] == "head" else 2 if path[0] == "embedding" else 1
        inside = ("feed_forward_post_norm", "feed_forward", "feed_forward_norm", "attention_post_norm", "attention")
        layer = -int(path[1]) if stage == 1 and path[1].isdigit() else 0
        rank = inside.index(path[2]) if stage == 1 and len(path) > 2 and path[2] in inside else len(inside)
        return stage, layer, rank

    return sorted(names, key=place)


def _wrong_part(evidence: Evidence, name: str, part: Part, parts: Parts) -> Located | None:
    spread = EXPERTS in name or ".experts." in name  # their tokens come from several dp ranks
    for micro_batch in range(evidence.micro_batches):
        for replica in [None] if spread else range(evidence.run.layout.dp):
            chosen = [
                values for axes, values in parts if axes["micro-batch"] == micro_batch and replica in (None, axes["dp"])
            ]
            replicas = range(evidence.run.layout.dp) if replica is None else [replica]
            places = [place for each in replicas for place in evidence.sample_places(each, micro_batch)]
            expected = [_of_samples(recorder.weight, name, places, part) for recorder in evidence.samples]
            if not chosen:
                continue
            seen = Seen(torch.stack(chosen).sum(0), expected)
            error = evidence.error(seen, "weight gradient")
            if error.is_wrong:
                cause = factor_cause(seen, evidence, "weight gradient", replica, micro_batch) or _other_batch(
                    evidence, name, part, seen, replicas, micro_batch
                )
                rank = _worst_rank(evidence, name, part, replica)
                if not cause and ".router." in name:
                    cause = "only the router's weights are wrong: auxiliary losses, their factor or their statistics"
                told = error.error, error.allowed, cause or UNKNOWN
                where = evidence.step + 1, micro_batch + 1, rank
                return Located(f"gradient of {name}", module_of(name), "weight gradient", *where, *told)
    return None


def _of_samples(weight: dict[tuple[str, int], Tensor], name: str, places: list[int], part: Part) -> Tensor:
    whole = [weight[name, place] for place in places if (name, place) in weight]
    total = torch.stack(whole).double().sum(0) if whole else torch.zeros(part.full_shape, dtype=torch.float64)
    return part_of(total, part)


def _worst_rank(evidence: Evidence, name: str, part: Part, replica: int | None) -> int | None:
    holders = [record.rank for record in evidence.ranks if record.parts.get(name) == part]
    if replica is not None:
        holders = [rank for rank in holders if evidence.place(rank).dp == replica]
    return min(holders, default=None)


def _other_batch(
    evidence: Evidence, name: str, part: Part, seen: Seen, replicas: list[int] | range, micro_batch: int
) -> str:
    def hypotheses() -> Iterator[Hypothesis]:
        for other in range(evidence.micro_batches):
            if other == micro_batch:
                continue
            places = [place for each in replicas for place in evidence.sample_places(each, other)]
            theirs = _of_samples(evidence.samples[0].weight, name, places, part)
            yield f"it is that of micro-batch {other + 1}", lambda t=theirs: t  # type: ignore[misc]
            yield f"that of micro-batch {other + 1} is added", lambda t=theirs: seen.right + t  # type: ignore[misc]

    return first_cause(hypotheses(), seen, evidence, "weight gradient")


# Statistics of routers.


def first_statistics(evidence: Evidence) -> Located | None:
    step = evidence.step
    mixture = evidence.run.model.mixture
    if step >= len(evidence.observed.routers) or mixture is None:
        return None
    for row, seen in enumerate(evidence.observed.routers[step]):
        loads, right = seen[: mixture.experts], evidence.traces[0].routers[step][row][: mixture.experts]
        apart, limit = size(loads - right) / (size(right) or 1.0), 0.25 if evidence.is_rounded else 1e-9
        if apart > limit:
            cause = "statistics of routers are not those of the global batch: other tokens are counted"
            factor = float(loads.sum()) / (float(right.sum()) or math.nan)
            named = named_factor(factor, evidence.run, evidence.micro_batches)
            if abs(factor - 1) > 1e-6 and named:
                told = "tokens are counted again" if factor > 1 else "sum missing over ranks"
                cause = f"statistics of routers are not those of the global batch: {named}, {told}"
            module = f"layers.{row + mixture.first_dense_layers}.feed_forward.router"
            return Located("loads of experts", module, "reduction", step + 1, None, None, apart, limit, cause)
    return None


# Their sums over ranks and micro-batches.


def first_reduction(evidence: Evidence) -> Located | None:
    step = evidence.step
    order = _backward_order(evidence, list(evidence.traces[0].gradients[step]))
    by_name: dict[str, list[tuple[int, int]]] = {}
    for record in evidence.ranks:
        for index, shard in enumerate(record.reduced):
            by_name.setdefault(shard[0].name, []).append((record.rank, index))
    for name in order:
        copies: dict[tuple[int, int, int], tuple[int, Tensor]] = {}
        for rank, index in by_name.get(name, ()):
            shard = evidence.ranks[rank].reduced[index]
            part, start, stop, values = shard
            whole = [trace.gradients[step][name].double() for trace in evidence.traces]
            seen = Seen(values.double(), [shard_of(each, shard) for each in whole])
            error = evidence.error(seen, "weight gradient")
            first, kept = copies.setdefault((part.slice.start, start, stop), (rank, values))
            # In 16 bits copies tell more than bounds: all who hold the same must have the same bits.
            apart = "" if torch.equal(kept, values) else f"copies differ: ranks {first} and {rank} should hold the same"
            if error.is_wrong or apart:
                cause = _reduction_cause(evidence, name, rank, part, start, stop, seen)
                told = error.error, error.allowed, cause if cause != UNKNOWN else apart or UNKNOWN
                return Located(f"gradient of {name}", module_of(name), "reduction", step + 1, None, rank, *told)
    return None


def _reduction_cause(evidence: Evidence, name: str, rank: int, part: Part, start: int, stop: int, seen: Seen) -> str:
    of_slice = own_parts(evidence, name).get((part.slice.start, part.slice.stop))

    def hypotheses() -> Iterator[Hypothesis]:
        step = evidence.step
        if of_slice is not None:
            parts = [(axes, values.flatten()[start:stop]) for axes, values in adds_up(part, of_slice[1])]
            here = evidence.place(rank)
            own = {"dp": here.dp, "cp": here.cp, "tp": here.tp, "pp": here.pp}
            ordered = sorted(parts, key=lambda item: [item[0][axis] != own[axis] for axis in own])
            counts = token_counts(evidence)
            factor = fitted_factor(seen.observed, seen.right)
            exact = not evidence.is_rounded
            if not exact and (named := named_factor(factor, evidence.run, evidence.micro_batches, exact)):
                yield named, lambda: factor * seen.right
            yield from sum_hypotheses(ordered)
            yield from _other_groups(evidence, name, rank, part, start, stop)
            if counts:
                yield from weighted_hypotheses(parts, counts)
        if step:
            before = part_of(evidence.traces[0].gradients[step - 1][name].double(), part).flatten()[start:stop]
            yield "stale by one step: it is the gradient of the step before", lambda: before
            # An update may have scaled it by then.
            left = fitted_factor(seen.observed - seen.right, before)
            yield "the gradient of the step before is still in it: not cleared", lambda: seen.right + left * before
        full = evidence.traces[0].gradients[step][name].double()
        for record in evidence.ranks:
            other = record.parts.get(name)
            if other is not None and other.slice != part.slice and other.shape == part.shape:
                theirs = part_of(full, other).flatten()[start:stop]
                kind = "other experts" if ".experts." in name else "another slice"
                yield f"it is that of {kind}, on rank {record.rank}", lambda t=theirs: t  # type: ignore[misc]
                yield f"that of {kind}, on rank {record.rank}, is added", lambda t=theirs: seen.right + t  # type: ignore[misc]
        whole = part_of(full, part).flatten()
        for first in range(0, whole.numel() - (stop - start) + 1, max(stop - start, 1)):
            if first != start:
                yield "it is the gradient of another shard", lambda o=first: whole[o : o + stop - start]  # type: ignore[misc]
        yield from shifted(seen.observed, seen.right)

    return (
        first_cause(hypotheses(), seen, evidence, "weight gradient")
        or factor_cause(seen, evidence, "weight gradient")
        or rounding_cause(evidence, seen)
        or UNKNOWN
    )


def _other_groups(evidence: Evidence, name: str, rank: int, part: Part, start: int, stop: int) -> Iterator[Hypothesis]:
    """Sums over ranks that hold other slices: neighbours, or ranks at equal distances, of which this rank is one."""
    own, world = dict[int, Tensor](), len(evidence.ranks)
    holders = [each.rank for each in evidence.ranks if each.parts.get(name) == part]
    for record in evidence.ranks:
        held = record.parts.get(name)
        if held is not None and held.shape == part.shape:
            values = [x for (of, _), x in record.own.items() if of == name]
            whole = torch.stack(values).double().sum(0) if values else torch.zeros(part.shape, dtype=torch.float64)
            own[record.rank] = whole.flatten()[start:stop]
    for many in (each for each in range(2, world + 1) if world % each == 0):
        for apart in (each for each in range(1, world // many + 1) if world // many % each == 0):
            first = rank - rank // apart % many * apart
            some = tuple(range(first, first + many * apart, apart))
            if set(some) <= own.keys() and not set(some) <= set(holders):
                told = (
                    f"summed over ranks {listed(some)}, which hold other slices, in place of {listed(tuple(holders))}"
                )
                yield told, lambda some=some: torch.stack([own[each] for each in some]).sum(0)  # type: ignore[misc]


# The norm of the whole gradient.


def first_norm(evidence: Evidence) -> Located | None:
    """Beside that of the gradients that were observed, which is known exactly."""
    step = evidence.step
    right = norm(evidence.observed.gradients[step])
    for observed, rank in [(evidence.observed.gradient_norms[step], 0)] + [
        (record.gradient_norm, record.rank) for record in evidence.ranks
    ]:
        error = Error(relative_error(observed, right), NORM if evidence.is_rounded else 1e-9)
        if evidence.run.training.precision == "float32":
            error = Error(error.error, NORM)
        if error.is_wrong:
            cause = _norm_cause(evidence, observed, right)
            told = error.error, error.allowed, cause
            return Located("gradient norm", "gradient norm", "norm", step + 1, None, rank, *told)
    return None


def _norm_cause(evidence: Evidence, observed: float, right: float) -> str:
    """Of squares: what is counted more than once, or not at all."""
    close = 1e-7 if not evidence.is_rounded else 1e-3
    gradients = evidence.observed.gradients[evidence.step]
    squares = {name: float(gradient.double().square().sum()) for name, gradient in gradients.items()}
    parts = {part.name: part for record in evidence.ranks for part in record.parts.values()}
    kinds = {
        "parameters that all tp ranks hold": lambda part: part.slice.sharing == "tensor",
        "key-value heads that several tp ranks hold": lambda part: part.slice.sharing == "kv",
        "parameters that are split": lambda part: part.slice.sharing == "own",
        "experts": lambda part: ".experts." in part.name,
        "gradients of the tied embedding": lambda part: part.name == "embedding.tokens.weight",
    }
    extra, total = observed**2 - right**2, right**2
    if observed == observed and extra:
        for told, wanted in kinds.items():
            among = sum(square for name, square in squares.items() if name in parts and wanted(parts[name]))
            times = count_named(extra, among, {2, *_counts(evidence)}, close)
            if times:
                return f"{told} are {times}"
        for stage in range(evidence.run.layout.pp):
            names = {
                name for record in evidence.ranks if evidence.place(record.rank).pp == stage for name in record.parts
            }
            if abs(observed**2 - sum(squares[name] for name in names if name in squares)) <= close * total:
                return f"sum missing over pp: only pp rank {stage} is in it"
    named = named_factor(observed / right, evidence.run, evidence.micro_batches, exact=not evidence.is_rounded)
    if named:
        return named
    return "sum missing over ranks: only a part is in it" if observed < right else UNKNOWN


def _counts(evidence: Evidence) -> list[int]:
    layout = evidence.run.layout
    replicas = layout.dp // layout.shard_size if layout.zero else 1
    return [count for count in (layout.tp, layout.dp, layout.cp, layout.ep, layout.pp, replicas) if count > 1]
