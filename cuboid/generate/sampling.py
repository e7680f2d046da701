"""What logits say: the next token of each sequence, and how likely given tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from cuboid.generate.batch import Span, Text
from cuboid.generate.evaluation import Score
from cuboid.spec.generation import SamplingSpec

# The next token of each sequence, from logits for the whole vocabulary.
#
# Nothing depends on the layout: every random number comes from the seed, the number of the prompt and the place in its
# text; and probabilities are added up in the order of the vocabulary, where rounding moves borders a little but puts no
# token before another.


def uniform(seed: int, prompt: int, place: int) -> float:
    """A number from 0 up to, but not, 1."""
    digest = blake2b(f"{seed}/{prompt}/{place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def choose(
    logits: Tensor, sampling: SamplingSpec, numbers: Sequence[float], texts: Sequence[Sequence[int]]
) -> list[int]:
    """`logits`: (sequences, vocabulary); `numbers`: a random one for each, unless greedy; `texts`: the tokens
    of each so far."""
    logits = logits.float()
    if sampling.repetition_penalty != 1.0:
        logits = _penalized(logits, sampling.repetition_penalty, texts)
    if sampling.temperature == 0.0:
        # Of equals the first; on a CPU numpy finds it ten times as fast.
        found: list[int] = (logits.argmax(1) if logits.is_cuda else logits.numpy().argmax(1)).tolist()
        return found
    logits = logits.double() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k)[0][:, -1:], -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(descending=True, stable=True)
        probabilities = ordered.softmax(1)
        outside = probabilities.cumsum(1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)
    probabilities = logits.softmax(1)
    if sampling.min_p > 0.0:
        probabilities = probabilities.masked_fill(
            probabilities < sampling.min_p * probabilities.amax(1, keepdim=True), 0.0
        )
    sums = probabilities.cumsum(1)
    wanted = torch.tensor(numbers, dtype=torch.float64).to(sums.device).unsqueeze(1) * sums[:, -1:]
    chosen: list[int] = torch.searchsorted(sums, wanted, right=True).squeeze(1).clamp(max=sums.shape[1] - 1).tolist()
    return chosen


def _penalized(logits: Tensor, penalty: float, texts: Sequence[Sequence[int]]) -> Tensor:
    logits = logits.clone()
    for row, text in zip(logits, texts, strict=True):
        seen = torch.tensor(sorted(set(text)), device=logits.device)
        values = row[seen]
        row[seen] = torch.where(values < 0, values * penalty, values / penalty)
    return logits


# How likely a model finds text that is given, from its logits.


def scores(logits: Tensor, parts: Sequence[tuple[Text, Span]]) -> list[Score]:
    """`logits`: of the rows that the parts of a step ask for, in order."""
    found, row = [], 0
    for text, span in parts:
        if not span.asked:
            continue
        request = text.request
        first = span.stop - span.asked - (len(request.tokens) - len(request.labels))
        labels = torch.tensor(request.labels[first : first + span.asked], device=logits.device).unsqueeze(1)
        rows = logits[row : row + span.asked]
        row += span.asked
        likelihood = (rows.gather(1, labels).squeeze(1) - rows.logsumexp(1)).double().sum()
        likeliest = (rows.argmax(1) == labels.squeeze(1)).all()
        found.append(Score(request.number, span.asked, likelihood.item(), bool(likeliest.item())))
    return found
