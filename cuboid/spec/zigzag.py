"""Which part of a sequence each context-parallel rank holds.

A sequence is cut into 2 · cp chunks and rank i holds chunks i and 2 · cp - 1 - i: under a causal mask an early chunk is
little work and a late one much, and every such pair is the same."""


def chunks_of(index: int, size: int) -> tuple[int, int]:
    """The two chunks of a rank, earlier first."""
    return index, 2 * size - 1 - index


def places_of(index: int, size: int, length: int) -> list[range]:
    """The places of a sequence that a rank holds, in order."""
    if size == 1:
        return [range(length)]
    width = length // (2 * size)
    return [range(chunk * width, (chunk + 1) * width) for chunk in chunks_of(index, size)]
