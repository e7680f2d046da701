"""Random numbers that depend on a key and a place alone: SplitMix64 on tensors.

Any rank computes the number of any place, in integers, so that no layout and no device changes it."""

from __future__ import annotations

import hashlib

from torch import Tensor

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hashes(key: str, places: Tensor, number: int = 0) -> Tensor:
    """64 random bits for each place. `number`: 0 to 3, of independent ones with the same key."""
    digest = hashlib.sha256(key.encode()).digest()
    hashed = places * _signed(GOLDEN) + int.from_bytes(digest[8 * number : 8 * number + 8], "little", signed=True)
    hashed ^= shifted(hashed, 30)
    hashed *= _signed(FIRST)
    hashed ^= shifted(hashed, 27)
    hashed *= _signed(SECOND)
    hashed ^= shifted(hashed, 31)
    return hashed


def shifted(values: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    """The same 64 bits as an int64."""
    return constant - (1 << 64)
