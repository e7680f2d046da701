"""The first activation, or gradient of one, that is wrong in the recorded step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cuboid.spec.sharding import places_of, vocabulary_rows
from cuboid.training.checks.hypotheses import UNKNOWN, Hypothesis, fitted_factor
from cuboid.training.checks.located import Located
from cuboid.training.checks.masks import Attend, wrong_masks
from cuboid.verification.causes import activation_cause, first_cause, token_counts
from cuboid.verification.evidence import Error, Evidence, Seen
from cuboid.verification.record import PARTS
from cuboid.verification.sums import wrong_weight_gradient


def first_activation(evidence: Evidence) -> Located | None:
    for name in evidence.names:
        found = _first_of(evidence, "forward", name)
        if found is None:
            continue
        rank, micro_batch, seen, error = found
        cause = _attention_cause(evidence, name, rank, micro_batch, seen) if name.endswith(".mixed") else ""
        cause = cause or activation_cause(evidence, "forward", name, rank, micro_batch, seen)
        if name in ("embedding", "embedding.positions"):
            cause = _position_cause(evidence, rank, micro_batch, seen) or cause
        if cause.startswith(UNKNOWN):
            cause = _deduced(evidence, name) or cause
        module = _inside(name)
        return Located(
            name, module, "forward", evidence.step + 1, micro_batch + 1, rank, error.error, error.allowed, cause
        )
    return None


def first_gradient(evidence: Evidence) -> Located | None:
    """A gradient is made by what comes after: that module is named."""
    order = [name for name in evidence.names if name != "head"]
    groups = _beside(order)
    for index in reversed(range(len(groups))):
        worst = None
        for name in groups[index]:
            found = _first_of(evidence, "gradient", name)
            if found is not None and (worst is None or found[3].error > worst[1][3].error):
                worst = name, found
        if worst is None:
            continue
        name, (rank, micro_batch, seen, error) = worst
        cause = activation_cause(evidence, "gradient", name, rank, micro_batch, seen)
        if cause.startswith(UNKNOWN) and name.endswith("feed_forward_norm"):
            cause = _only_through_router(evidence, name) or cause
        if cause.startswith(UNKNOWN) and name == "head.output":
            cause = (
                _z_loss_cause(evidence, rank, micro_batch, seen)
                or "logits are right and the gradient of their loss is not: labels of other tokens, or a mask of them"
            )
        consumer = groups[index + 1][0] if index + 1 < len(groups) else "head"
        if name.rpartition(".")[2] in PARTS[:3] and cause.startswith(UNKNOWN):
            cause = _backward_of_attention(evidence, name, rank, micro_batch, seen) or cause
        where = _inside(consumer) if name.rpartition(".")[2] != "mixed" else _inside(name)
        if consumer.rpartition(".")[2] in PARTS[:3]:
            where = _inside(consumer)
        further = _through_predictions(evidence) if cause.startswith(UNKNOWN) and consumer == "head" else None
        if further is not None:
            comes = "it comes through a layer that predicts further tokens"
            is_unknown = further.cause.startswith(UNKNOWN)
            where, cause = further.module, f"{UNKNOWN}; {comes}" if is_unknown else f"{comes}: {further.cause}"
        told = error.error, error.allowed, cause
        return Located(f"gradient of {name}", where, "input gradient", evidence.step + 1, micro_batch + 1, rank, *told)
    return None


def _beside(order: list[str]) -> list[list[str]]:
    """Names in order; queries, keys and values come from one input side by side."""
    groups: list[list[str]] = []
    for name in order:
        last = groups[-1][0] if groups else ""
        if name.rpartition(".")[2] in PARTS[1:3] and last.rpartition(".")[2] == PARTS[0]:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _inside(name: str) -> str:
    """The module: attention, of what enters or leaves its inner part."""
    path, _, last = name.rpartition(".")
    return path if last in PARTS and path.endswith("attention") else name


def _first_of(evidence: Evidence, kind: str, name: str) -> tuple[int, int, Seen, Error] | None:
    """The first micro-batch and rank where it is wrong; of one micro-batch, the rank where it is most wrong."""
    found: dict[int, tuple[int, int, Seen, Error]] = {}
    for rank, micro_batch, seen in evidence.all_seen(kind, name):
        error = evidence.error(seen, kind, name)
        if error.is_wrong and (micro_batch not in found or error.error > 1.001 * found[micro_batch][3].error):
            found[micro_batch] = rank, micro_batch, seen, error
    return found[min(found)] if found else None


def _deduced(evidence: Evidence, name: str) -> str:
    """From what is right before it."""
    if name.endswith("feed_forward") and f"{name}.router" in evidence.names:
        mixture = evidence.run.model.mixture
        more = ", or other assignments are beyond capacity_factor" if mixture and mixture.capacity_factor else ""
        told = "the router's weights are right: experts compute something else, or rows go to others, or come back to"
        return f"{told} other rows (dispatch){more}"
    if name.endswith("feed_forward.router"):
        told = "other experts are chosen, or weighted otherwise, for the same input"
        mixture = evidence.run.model.mixture
        return f"{told}: the router's noise has another seed" if mixture and mixture.router_noise else told
    return ""


def _only_through_router(evidence: Evidence, name: str) -> str:
    """What enters a mixture gets its gradient from experts and from the router, whose weights alone are then wrong."""
    prefix = name.removesuffix("feed_forward_norm") + "feed_forward"
    names = [each for each in evidence.traces[0].gradients[evidence.step] if each.startswith(f"{prefix}.experts.")]
    if not names or any(wrong_weight_gradient(evidence, each) is not None for each in names):
        return ""
    return "only what comes back through the router is wrong: auxiliary losses, their factor or their statistics"


def _z_loss_cause(evidence: Evidence, rank: int, micro_batch: int, seen: Seen) -> str:
    """Of logits: a z-loss adds their softmax times its logarithm of the sum, times twice the coefficient."""
    logits = evidence.rows("forward", "head.output", rank, micro_batch)
    coefficient, tokens = evidence.run.training.z_loss, sum(token_counts(evidence).values())
    if not coefficient or logits is None or not tokens:
        return ""
    first, count = vocabulary_rows(evidence.run.model.vocab, evidence.run.layout.tp, evidence.place(rank).tp)
    whole = logits[0].logsumexp(1, keepdim=True) * logits[0].softmax(1)
    added = whole[:, first : first + count]
    if added.shape != seen.right.shape:
        return ""
    added = added * seen.right.any(1, keepdim=True)  # of tokens that count
    factor = fitted_factor(seen.observed - seen.right, added)
    if not evidence.explains(seen.right + factor * added, seen, "gradient"):
        return ""
    return f"the gradient of the z-loss is {1 + factor * tokens / (2 * coefficient):.4g} times what it should be"


def _through_predictions(evidence: Evidence) -> Located | None:
    """What the last layer's gradient has from prediction layers, which no activation shows: their weight gradients."""
    first, names = f"layers.{evidence.run.model.layers}.", evidence.traces[0].gradients[evidence.step]
    if not evidence.run.model.prediction_layers:
        return None
    every = (wrong_weight_gradient(evidence, name) for name in names if name.startswith(first) and "norm" in name)
    return next((each for each in every if each is not None), None)


# What attention saw, computed again from right queries, keys and values under other masks.


def _attention_cause(evidence: Evidence, name: str, rank: int, micro_batch: int, seen: Seen) -> str:
    return first_cause(_masks(evidence, name, rank, micro_batch), seen, evidence, "forward")


def _masks(evidence: Evidence, name: str, rank: int, micro_batch: int) -> Iterator[Hypothesis]:
    prefix = name.removesuffix(".mixed")
    run, place, length = evidence.run, evidence.place(rank), evidence.run.training.sequence
    samples = list(evidence.sample_places(place.dp, micro_batch))
    notes = evidence.samples[0].notes.forward
    own = torch.cat([torch.arange(part.start, part.stop) for part in places_of(place.cp, run.layout.cp, length)])
    held = evidence.before(evidence.traces[0], evidence.step).get(f"{prefix}.sinks")
    sinks = None if held is None else held.double()

    def seen_with(attend: Attend) -> Tensor:
        made = []
        for sample in samples:
            query, key, value = (notes[f"{prefix}.{part}", sample][0].double() for part in PARTS[:3])
            ids = evidence.source.documents_at(sample) if run.data.attention_within_documents else None
            made.append(attend(query, key, value, ids, sinks)[own])
        mixed = torch.cat(made)
        return mixed.chunk(run.layout.tp, 1)[place.tp] if run.layout.tp > 1 and mixed.shape[1] > 1 else mixed

    for told, attend in wrong_masks(run, int(prefix.split(".")[1]), place.cp, sinks is not None):
        yield told, lambda attend=attend: seen_with(attend)  # type: ignore[misc]


def _backward_of_attention(evidence: Evidence, name: str, rank: int, micro_batch: int, seen: Seen) -> str:
    """The forward pass and the gradient that came are right, and what attention made of that is not."""
    part = name.rpartition(".")[2]
    if evidence.run.layout.cp > 1 and part in ("key", "value"):
        return f"the parts that other cp ranks computed of the gradient of each {part} do not add up to it"
    return f"attention's own backward pass: its {part} gradients differ though what came in is right"


def _position_cause(evidence: Evidence, rank: int, micro_batch: int, seen: Seen) -> str:
    """Rows of learned positions that belong to other places."""
    table = evidence.before(evidence.traces[0], evidence.step).get("embedding.positions.weight")
    if table is None or seen.observed.ndim != 2:
        return ""
    place, layout, length = evidence.place(rank), evidence.run.layout, evidence.run.training.sequence
    tokens = torch.cat([torch.arange(part.start, part.stop) for part in places_of(place.cp, layout.cp, length)])
    difference = seen.observed - seen.right
    rows = table[:length].double()
    # What was added in place of what should have been: the row nearest to it, whichever place the token has.
    apart = difference.unsqueeze(1) - (rows.unsqueeze(0) - rows.unsqueeze(1)).flatten(0, 1).unsqueeze(0)
    nearest = apart.square().sum(-1).amin(1)
    explained = float(nearest.sum()) <= (1e-8 if not evidence.is_rounded else 0.1) * float(difference.square().sum())
    return "positions of other tokens, such as another chunk of the sequence" if explained and len(tokens) else ""
