"""The global order of samples: a keyed permutation per epoch, computed, never stored.

Position n of the whole training (step · global batch + place in the batch) decides the sample; nothing else is
state."""

from __future__ import annotations

import hashlib

ROUNDS = 6


def permuted(index: int, size: int, key: str) -> int:
    """A bijection of 0..size-1: a Feistel network over the next even power of two, walked until it lands inside."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(ROUNDS):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < size:
            return index


def sample_at(position: int, size: int, seed: int) -> int:
    """Which of `size` samples stands at a position of the global order; each epoch meets each sample once."""
    epoch, index = divmod(position, size)
    return permuted(index, size, f"{seed}/{epoch}")
