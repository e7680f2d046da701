"""Newton-Schulz iterations: a matrix to the nearest one whose singular values are about one, by matmuls alone.

Muon's quintic iteration raises small singular values as fast as it can and lets all of them end between 0.7 and 1.2,
which serves as well as one exactly and takes five iterations."""

from __future__ import annotations

from torch import Tensor, baddbmm

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
"""Added to the norm that a matrix is divided by at first: one of zeros stays so."""


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Of each matrix of a batch (batch, m, n), in its own dtype; of 16 bits in float32 on CPUs, which are many times
    slower in 16."""
    if matrices.device.type == "cpu" and matrices.element_size() == 2:
        return orthogonalize(matrices.float(), steps).to(matrices.dtype)
    linear, cubic, quintic = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # the smaller side is squared
    x = x / (x.norm(dim=(1, 2), keepdim=True) + EPSILON)
    for _ in range(steps):
        square = x @ x.mT
        # linear x + (cubic square + quintic square²) x
        inner = baddbmm(square, square, square, beta=cubic, alpha=quintic)
        x = baddbmm(x, inner, x, beta=linear)
    return x.mT if tall else x
