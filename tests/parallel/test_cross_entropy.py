"""Cross-entropy over a vocabulary that is split over ranks equals the one over the whole."""

from __future__ import annotations

import pytest
import torch

from cuboid.launch.pool import Pool
from tests.parallel.cross_entropy_jobs import LABELS, whole


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("vocabulary", "ranks"), [(9, 2), (9, 4)])
def test_a_split_vocabulary(pool: Pool, vocabulary: int, ranks: int, fused: bool) -> None:
    """Nine rows over four ranks: three for each of the first three, and none for the last."""
    x, weight = whole(vocabulary)
    weight.requires_grad_()
    loss = torch.nn.functional.cross_entropy(x @ weight.t(), LABELS, reduction="sum", ignore_index=-100)
    (2 * loss).backward()
    found = pool.run("tests.parallel.cross_entropy_jobs:split", (vocabulary, fused), ranks=ranks)
    assert [one for one, _ in found] == pytest.approx([loss.item()] * ranks, rel=1e-12)
    assert torch.allclose(torch.cat([gradient for _, gradient in found]), weight.grad, rtol=1e-12, atol=1e-12)
