"""CPU memory for what a device copies by itself."""

from __future__ import annotations

import pytest
import torch

from cuboid.errors import UserError
from cuboid.kernels.pinned_memory import PAGE, PinnedMemory, bytes_taken

CPU = torch.device("cpu")


def test_tensors_are_zeros_of_their_own_that_begin_pages() -> None:
    shapes = [((3, 5), torch.float32), ((PAGE,), torch.int16), ((1,), torch.float64)]
    memory = PinnedMemory(sum(bytes_taken(shape, dtype) for shape, dtype in shapes), CPU)
    taken = [memory.take(shape, dtype) for shape, dtype in shapes]
    for number, (tensor, (shape, dtype)) in enumerate(zip(taken, shapes, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert not tensor.any()
        assert tensor.data_ptr() % PAGE == 0
        tensor.fill_(number + 1)
    assert [tensor.unique().tolist() for tensor in taken] == [[1], [2], [3]]
    assert memory.size == 4 * PAGE


def test_tensors_outlive_what_they_were_cut_from() -> None:
    memory = PinnedMemory(PAGE, CPU)
    tensor = memory.take((4,), torch.float32)
    del memory
    assert tensor.add_(1).tolist() == [1, 1, 1, 1]


def test_more_than_there_is_is_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match=r"layout\.offload=true needs .* GiB of CPU memory .* use offload=false"):
        PinnedMemory(2**60, CPU)
