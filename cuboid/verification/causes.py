"""Likely causes in words: each is a hypothesis that is computed from what is right and compared with what was observed.
The first that explains the difference is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cuboid.model.batch import IGNORED
from cuboid.model.rope import rope_frequencies, rotated
from cuboid.spec.model import ModelSpec
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.ranks import groups
from cuboid.training.checks.hypotheses import UNKNOWN, Axes, Hypothesis, fitted_factor, listed, named_factor
from cuboid.verification.evidence import Evidence, Seen, size

MANY = 4096
"""Tokens or heads that are compared each with each."""


def first_cause(hypotheses: Iterator[Hypothesis], seen: Seen, evidence: Evidence, kind: str) -> str:
    """In 16 bits several may come near: the nearest, of those that are much the same the first."""
    best, nearest = "", float("inf")
    for told, make in hypotheses:
        made = make()
        if made is None or not evidence.explains(made.double(), seen, kind):
            continue
        if not evidence.is_rounded:
            return told
        away = size(seen.observed - made.double())
        if away < 0.9 * nearest:
            best, nearest = told, away
    return best


def token_factor(evidence: Evidence, factor: float, replica: int, micro_batch: int) -> str:
    """Where gradients are multiplied by one over another number of tokens than that of the global batch."""
    counts = token_counts(evidence)
    own, of_replica = counts.get((replica, micro_batch), 0), sum(n for (r, _), n in counts.items() if r == replica)
    total, close = sum(counts.values()), 1e-6 if not evidence.is_rounded else 0.01
    if not own or total == 0:
        return ""
    dp, most = evidence.run.layout.dp, evidence.micro_batches
    each = "mean of means: each micro-batch is divided by its own tokens"
    told = [
        (total / (dp * most * own), f"{each}, and not by those of the global batch"),
        (total / (most * own), f"{each}: mean over micro-batches, sum over dp"),
        (total / own, "divided by the micro-batch's own tokens, and not by those of the global batch"),
        (total / (dp * of_replica), "mean of means: each dp rank is divided by its own tokens"),
        (total / of_replica, "divided by its own dp rank's tokens: their count is not summed over dp"),
        (float(total), "not divided by the number of tokens"),
        (total / (total + own), "a micro-batch's tokens are counted twice"),
    ]
    return next((text for value, text in told if abs(factor / value - 1) <= close and abs(value - 1) > close), "")


def token_counts(evidence: Evidence) -> dict[tuple[int, int], int]:
    """Tokens whose label counts, by dp rank and micro-batch."""
    source, found = evidence.source, {}
    for replica in range(evidence.run.layout.dp):
        for micro_batch in range(evidence.micro_batches):
            samples = [source.at(place) for place in evidence.sample_places(replica, micro_batch)]
            labels = [sample[1] for sample in samples if not isinstance(sample, dict)]
            if len(labels) < len(samples):
                return {}
            found[replica, micro_batch] = sum(int((each != IGNORED).sum()) for each in labels)
    return found


def factor_cause(seen: Seen, evidence: Evidence, kind: str, replica: int | None = None, micro_batch: int = 0) -> str:
    """`replica`: whose tokens it is of, where that is known."""
    if seen.observed.shape != seen.right.shape:
        return f"another shape: {tuple(seen.observed.shape)} in place of {tuple(seen.right.shape)}"
    if not bool(seen.observed.isfinite().all()):
        return "not a number"
    if not bool(seen.observed.any()):
        return "it is zero"
    factor = fitted_factor(seen.observed, seen.right)
    if not evidence.explains(seen.right * factor, seen, kind):
        return ""
    exact = not evidence.is_rounded
    named = named_factor(factor, evidence.run, evidence.micro_batches, exact, of_activations=kind == "forward")
    if kind != "forward" and replica is not None:
        named = token_factor(evidence, factor, replica, micro_batch) or named
    return named or (f"factor {factor:.4g}" if not evidence.is_rounded else "")


def activation_cause(evidence: Evidence, kind: str, name: str, rank: int, micro_batch: int, seen: Seen) -> str:
    """Of an activation, or of its gradient."""
    if seen.observed.shape != seen.right.shape or not bool(seen.observed.isfinite().all()):
        return factor_cause(seen, evidence, kind)
    # A partial sum may look like a multiple; where the parts of all ranks add up, that says more.
    hypotheses = _sums(evidence, kind, name, rank, micro_batch, seen)
    return (
        first_cause(hypotheses, seen, evidence, kind)
        or factor_cause(seen, evidence, kind, evidence.place(rank).dp, micro_batch)
        or (first_cause(_added(evidence, name, seen), seen, evidence, kind) if kind == "forward" else "")
        or first_cause(_elsewhere(evidence, kind, name, rank, micro_batch), seen, evidence, kind)
        or (_epsilon_cause(evidence, name, seen) if kind == "forward" else "")
        or _of_each_token(evidence, seen, kind)
        or _in_another_order(evidence, seen, kind)
        or _dropped_cause(evidence, seen)
        or _rotation_cause(evidence, name, seen)
        or rounding_cause(evidence, seen)
        or _which_tokens(evidence, seen, kind)
    )


def _sums(evidence: Evidence, kind: str, name: str, rank: int, micro_batch: int, seen: Seen) -> Iterator[Hypothesis]:
    """What one rank would have, had the others' parts not been added, or been added twice."""
    for dimension in ("tp", "cp", "dp", "ep"):
        members = next(group for group in groups(evidence.run.layout)[dimension] if rank in group)
        if len(members) < 2:
            continue
        others = [evidence.seen(kind, name, member, micro_batch) for member in members if member != rank]
        parts = [each.observed for each in others if each is not None]
        if len(parts) < len(others) or any(part.shape != seen.observed.shape for part in parts):
            continue
        if any(not torch.equal(each.right, seen.right) for each in others if each is not None):
            continue
        total = torch.stack(parts).sum(0)
        cause = f"sum missing over {dimension}: the parts of ranks {listed(members)} add up"
        yield cause, lambda t=total: seen.right - t  # type: ignore[misc]


def _added(evidence: Evidence, name: str, seen: Seen) -> Iterator[Hypothesis]:
    """The same on every token: a bias, added more than once or not at all."""
    difference = seen.observed - seen.right
    if difference.ndim != 2 or difference.shape[0] < 2:
        return
    mean = difference.mean(0)
    weights = evidence.before(evidence.traces[0], evidence.step)
    for parameter, value in weights.items():
        if parameter.startswith(name) and parameter.endswith("bias") and value.shape == mean.shape and value.any():
            factor = round(fitted_factor(mean, value))
            if factor:
                told = f"{parameter} is added {1 + factor} times" if factor > 0 else f"{parameter} is not added"
                yield told, lambda v=value, f=factor: seen.right + f * v.double()  # type: ignore[misc]
    yield "the same is added to every token: a bias, or a constant", lambda: seen.right + mean


def _elsewhere(evidence: Evidence, kind: str, name: str, rank: int, micro_batch: int) -> Iterator[Hypothesis]:
    """The values of another place."""
    for other in range(evidence.micro_batches):
        if other != micro_batch:
            yield (
                f"it is that of micro-batch {other + 1}: repeated, or out of order",
                lambda other=other: _right(evidence, kind, name, rank, other),  # type: ignore[misc]
            )
    here = evidence.place(rank)
    for record in evidence.ranks:
        there = evidence.place(record.rank)
        if record.rank != rank and there.pp == here.pp:
            differ = [d for d in ("dp", "cp", "tp") if getattr(there, d) != getattr(here, d)]
            yield (
                f"it is that of rank {record.rank}, which differs in {' and '.join(differ)}",
                lambda other=record.rank: _right(evidence, kind, name, other, micro_batch),  # type: ignore[misc]
            )


def _right(evidence: Evidence, kind: str, name: str, rank: int, micro_batch: int) -> Tensor | None:
    seen = evidence.seen(kind, name, rank, micro_batch)
    return None if seen is None else seen.right


def _of_each_token(evidence: Evidence, seen: Seen, kind: str) -> str:
    """Each token by a factor of its own, as a norm over another set of numbers has it."""
    rows = [x.flatten(1) for x in (seen.observed, seen.right)]
    if rows[0].shape[1] < 4 or kind != "forward":
        return ""
    factors = (rows[0] * rows[1]).sum(1) / rows[1].square().sum(1).clamp(min=1e-300)
    if not evidence.explains((rows[1] * factors.unsqueeze(1)).view(seen.right.shape), seen, kind):
        return ""
    low, high = float(factors.min()), float(factors.max())
    nothing = ~rows[0].any(1)
    if bool(nothing.any()) and float((factors[~nothing] - 1).abs().max()) <= (1e-6 if not evidence.is_rounded else 0.1):
        return f"it is zero for {int(nothing.sum())} of {len(nothing)} tokens: these were masked, or looked up nowhere"
    told = "a norm over a part of it, a sum missing over tp" if evidence.run.layout.tp > 1 else "another norm"
    return f"each token by a factor of its own, {low:.3g} to {high:.3g}: {told}"


def _epsilon_cause(evidence: Evidence, name: str, seen: Seen) -> str:
    """A norm divides by the root of m + epsilon, m the mean square of a token. From its right result m / (m + epsilon)
    follows, and from what was observed then an epsilon of each token: if it is one for all, that is the cause."""
    model, weights = evidence.run.model, evidence.before(evidence.traces[0], evidence.step)
    weight, bias = (weights.get(f"{name}.{each}") for each in ("weight", "bias"))
    if (
        evidence.is_rounded
        or weight is None
        or weight.ndim > 1
        or seen.right.ndim != 2
        or isinstance(model, PythonModelSpec)
    ):
        return ""
    factor = weight.double() + model.unit_norms
    if factor.shape[0] != seen.right.shape[1] or bool((factor == 0).any()):
        return ""
    observed, right = ((x - (0 if bias is None else bias.double())) / factor for x in (seen.observed, seen.right))
    square = right.square().mean(1)
    means = model.norm_epsilon * square / (1 - square)
    found = (means + model.norm_epsilon) * square / observed.square().mean(1).clamp(min=1e-300) - means
    one = float(found.median())
    made = right * ((means + model.norm_epsilon) / (means + one)).sqrt().unsqueeze(1)
    if not 0 <= one < 1 or size(observed - made) > 1e-3 * size(observed - right):
        return ""
    return f"the norm's epsilon is {one:.3g} in place of {model.norm_epsilon:.3g}"


def _in_another_order(evidence: Evidence, seen: Seen, kind: str) -> str:
    """The same tokens, or the same heads, at other places."""
    if kind != "forward":
        return ""
    for dimension, told in ((0, "tokens"), (1, "heads")):
        if seen.observed.ndim <= dimension + 1 or seen.observed.shape[dimension] < 2:
            continue
        observed, right = (x.movedim(dimension, 0).flatten(1) for x in (seen.observed, seen.right))
        if len(observed) > MANY:
            continue
        nearest = torch.cdist(observed, right).argmin(1)
        made = seen.right.index_select(dimension, nearest)
        if len(nearest.unique()) == len(nearest) and evidence.explains(made, seen, kind):
            return f"its {told} are in another order"
    return ""


def _dropped_cause(evidence: Evidence, seen: Seen) -> str:
    """Elements that neither dropped are equal, and others were dropped."""
    if not evidence.run.training.dropout:
        return ""
    both = (seen.observed != 0) & (seen.right != 0)
    apart = seen.observed - seen.right
    if not both.any() or size(apart * both) > (1e-6 if not evidence.is_rounded else 0.1) * size(apart):
        return ""
    return "dropout drops other elements: the mask of other tokens, of another pass, or with another seed"


def _rotation_cause(evidence: Evidence, name: str, seen: Seen) -> str:
    """Queries and keys whose pairs have the lengths they should have are rotated by other angles."""
    if not name.endswith((".query", ".key")) or seen.observed.ndim != 3:
        return ""
    lengths = [_pair_lengths(_rotating(evidence.run.model, x)) for x in (seen.observed, seen.right)]
    away, apart = (lengths[0] - lengths[1]).abs().mean(), (seen.observed - seen.right).abs().mean()
    if away > (1e-6 if not evidence.is_rounded else 0.25) * apart:
        return ""
    if not _is_moved(evidence, int(name.split(".")[1]), seen):
        return "rotated by other angles, at the right positions: another theta or scaling of RoPE"
    return "rotated by other angles: positions of other tokens, such as another chunk of the sequence"


def _is_moved(evidence: Evidence, layer: int, seen: Seen) -> bool:
    """Whether each token is rotated as at another position of its sequence."""
    model, length = evidence.run.model, evidence.run.training.sequence
    if length > MANY // 8:  # too many to try
        return True
    frequencies = rope_frequencies(_as_windowed(model) if model.window_of(layer) else model).double()
    observed, right = (_rotating(model, x) for x in (seen.observed, seen.right))
    best, nearest = right.clone(), (observed - right).flatten(1).square().sum(1)
    for distance in range(1 - length, length):
        angles = (distance * frequencies).repeat(2)
        made = rotated(right, angles.cos(), angles.sin())
        away = (observed - made).flatten(1).square().sum(1)
        best[away < nearest], nearest = made[away < nearest], torch.minimum(away, nearest)
    # The tables are of float32: angles of two positions differ by not quite so much as those of their distance.
    return size(observed - best) <= (1e-3 if not evidence.is_rounded else 0.35) * size(observed - right)


def _as_windowed(model: ModelSpec) -> ModelSpec:
    if not model.window_rope_theta:
        return model
    return replace(model, rope_theta=model.window_rope_theta, rope_factor=1.0, rope_scaling=None, yarn=None)


def _rotating(model: ModelSpec, x: Tensor) -> Tensor:
    """What of queries and keys rotates."""
    return x if model.latent is None else x[..., -model.latent.qk_rope_dim :]


def _pair_lengths(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (first.square() + second.square()).sqrt()


def rounding_cause(evidence: Evidence, seen: Seen) -> str:
    """In float64: whether each element is off by what rounding to fewer bits makes of it, and not by more."""
    held = (seen.right != 0) & ((seen.observed - seen.right).abs() > 1e-12 * seen.right.abs())
    if evidence.run.training.precision != "float64" or int(held.sum()) < max(8, held.numel() / 4):
        return ""
    if seen.right.ndim > 1 and _is_of_few_directions(seen.observed - seen.right):
        return ""
    off = ((seen.observed - seen.right) / seen.right.abs())[held]
    off = off[:: -(-len(off) // MANY**2)]  # torch takes quantiles of 2^24 elements at most
    most, together = float(off.abs().quantile(0.75)), float(off.median().abs())
    for precision, bits in (("bf16", 8), ("fp16", 11), ("float32", 23)):
        # A few roundings of each; up or down by chance.
        if 2.0 ** -(bits + 3) <= most <= 2.0 ** -(bits - 2) and together <= most:
            return f"elements are off by 2^{math.log2(most):.0f}, as rounding to {precision} makes them"
    return ""


def _is_of_few_directions(error: Tensor) -> bool:
    """A term that is missing or too large, as of the router's loss: rounding has no direction."""
    rows = error.flatten(0, -2)
    rows = rows[:: -(-len(rows) // MANY)].double()
    whole = float(rows.square().sum())
    return whole > 0 and float(torch.linalg.matrix_norm(rows, 2)) ** 2 > FEW_DIRECTIONS * whole


FEW_DIRECTIONS = 0.5
"""Of the squares of an error, along the one direction that has most of them."""


def _which_tokens(evidence: Evidence, seen: Seen, kind: str) -> str:
    """Where only some tokens differ."""
    apart = (seen.observed - seen.right).flatten(1).square().mean(1).sqrt()
    wrong = apart > 0.05 * apart.max()
    count = int(wrong.sum())
    if 0 < count <= 0.75 * len(wrong):
        places = [str(place) for place in wrong.nonzero().flatten().tolist()]
        told = ", ".join(places[:6]) + (", …" if len(places) > 6 else "")
        return f"{UNKNOWN}; only {count} of {len(wrong)} tokens differ, the rank's tokens {told}"
    return UNKNOWN


def weighted_hypotheses(parts: list[tuple[Axes, Tensor]], counts: dict[tuple[int, int], int]) -> Iterator[Hypothesis]:
    """`counts`: tokens that count, by dp rank and micro-batch. Means of means."""
    total = sum(counts.values())
    replicas = sorted({replica for replica, _ in counts})
    of_replica = {r: sum(count for (replica, _), count in counts.items() if replica == r) for r in replicas}

    def weighted(weight: Callable[[Axes], float]) -> Tensor:
        return torch.stack([part * weight(place) for place, part in parts]).sum(0)

    yield (
        f"factor {total}: the sum of losses is not divided by the tokens that count",
        lambda: weighted(lambda _: total),
    )
    if len(counts) > 1 and all(counts.values()):
        yield (
            "mean of means: each micro-batch is divided by its own tokens, and not by those of the global batch",
            lambda: weighted(lambda place: total / (len(counts) * counts[place["dp"], place["micro-batch"]])),
        )
    if len(replicas) > 1 and all(of_replica.values()):
        yield (
            "divided by the tokens of its own dp rank, their count is not summed over dp",
            lambda: weighted(lambda place: total / of_replica[place["dp"]]),
        )
        yield (
            "mean of means: each dp rank is divided by its own tokens, and not by those of the global batch",
            lambda: weighted(lambda place: total / (len(replicas) * of_replica[place["dp"]])),
        )
