"""How likely a model finds text that is given, from its logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuboid.generate.batch import Text
from cuboid.generate.evaluation import Score
from cuboid.generate.step import Span


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
