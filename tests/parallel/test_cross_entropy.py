"""Cross-entropy over a vocabulary that is split over ranks equals the one over the whole."""

from __future__ import annotations

import pytest
import torch

from cuboid.launch.pool import Pool
from tests.parallel.cross_entropy_jobs import LABELS, whole


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("ranks", "coefficient", "cap"),
    [(2, 0.0, 0.0), (4, 0.0, 0.0), (1, 0.01, 0.0), (2, 0.01, 0.0), (4, 0.01, 0.0), (1, 0.0, 20.0), (4, 0.01, 20.0)],
)
def test_a_split_vocabulary(pool: Pool, ranks: int, coefficient: float, cap: float, fused: bool) -> None:
    """Nine rows over four ranks: three for each of the first three, and none for the last."""
    vocabulary = 9
    x, weight = whole(vocabulary)
    weight.requires_grad_()
    logits = x @ weight.t()
    logits = cap * torch.tanh(logits / cap) if cap else logits
    loss = torch.nn.functional.cross_entropy(logits, LABELS, reduction="sum", ignore_index=-100)
    z_loss = (logits.logsumexp(1).square() * (LABELS != -100)).sum()
    (2 * (loss + coefficient * z_loss)).backward()
    found = pool.run("tests.parallel.cross_entropy_jobs:split", (vocabulary, fused, coefficient, cap), ranks=ranks)
    told = z_loss.item() if coefficient else 0.0
    assert [one for one, _, _ in found] == pytest.approx([loss.item()] * ranks, rel=1e-12)
    assert [one for _, one, _ in found] == pytest.approx([told] * ranks, rel=1e-12)
    assert torch.allclose(torch.cat([gradient for *_, gradient in found]), weight.grad, rtol=1e-12, atol=1e-12)
