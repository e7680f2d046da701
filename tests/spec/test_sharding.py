"""Which part of each parameter a tensor rank holds: all of it, once, whole heads together."""

from __future__ import annotations

import pytest
import torch

from cuboid.model.transformer import Transformer
from cuboid.spec.model import ModelSpec, load_model
from cuboid.spec.run import build_run
from cuboid.spec.sharding import kv_part_count, slice_of, vocabulary_rows

MODELS = ["tiny-llama", "tiny-gpt2", "tiny-qwen3"]


def shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Transformer(model).named_parameters()}


@pytest.mark.parametrize("tensor_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_every_element_is_held(name: str, tensor_size: int) -> None:
    """By exactly one rank where it is its own, else by as many as its sharing says."""
    model = load_model(name)
    for parameter, shape in shapes(model).items():
        cuts = [slice_of(parameter, shape, model, tensor_size, index, True) for index in range(tensor_size)]
        assert len({(cut.dimension, cut.length, cut.sharing, cut.partial_gradient) for cut in cuts}) == 1
        holders = [0] * shape[cuts[0].dimension]
        for cut in cuts:
            assert 0 <= cut.start <= cut.stop <= shape[cut.dimension]
            assert cut.stop - cut.start <= cut.length
            for place in range(cut.start, cut.stop):
                holders[place] += 1
        expected = {"own": 1, "tensor": tensor_size, "kv": tensor_size // kv_part_count(model, tensor_size)}
        assert set(holders) == {expected[cuts[0].sharing]}, parameter


@pytest.mark.parametrize("tensor_size", [2, 4, 8])
def test_what_is_split_and_what_is_not(tensor_size: int) -> None:
    model = load_model("tiny-gpt2")
    whole = set()
    for parameter, shape in shapes(model).items():
        cut = slice_of(parameter, shape, model, tensor_size, 1, False)
        if cut.sharing == "tensor":
            assert cut.local_shape(shape) == shape
            assert not cut.partial_gradient, "without sequence parallelism every rank sees every token"
            assert slice_of(parameter, shape, model, tensor_size, 1, True).partial_gradient
            whole.add(parameter.split(".", 2)[-1] if parameter.startswith("layers") else parameter)
        else:
            assert torch.Size(cut.local_shape(shape)).numel() >= torch.Size(shape).numel() // tensor_size
    assert all("norm" in parameter or "position" in parameter or parameter.endswith("bias") for parameter in whole), (
        whole
    )


@pytest.mark.parametrize(("kv_heads", "tensor_size", "parts"), [(8, 4, 4), (2, 8, 2), (1, 8, 1), (4, 4, 4), (6, 4, 2)])
def test_key_value_heads_are_split_as_far_as_they_go(kv_heads: int, tensor_size: int, parts: int) -> None:
    model = build_run(
        {"model": "tiny-llama"}, ["model.heads=24", "model.head_dim=4", f"model.kv_heads={kv_heads}"]
    ).model
    assert kv_part_count(model, tensor_size) == parts
    shape = (kv_heads * model.head_dim, model.hidden)
    for index in range(tensor_size):
        keys = slice_of("layers.0.attention.key.weight", shape, model, tensor_size, index, True)
        assert keys.length == kv_heads // parts * model.head_dim, "whole heads"
        assert keys.sharing == ("own" if parts == tensor_size else "kv")
        # The query heads of this rank read key-value heads that it holds.
        share, group = model.heads // tensor_size, model.heads // kv_heads
        needed = {head // group for head in range(index * share, (index + 1) * share)}
        assert needed <= set(range(keys.start // model.head_dim, keys.stop // model.head_dim))


@pytest.mark.parametrize(("vocabulary", "size"), [(259, 2), (259, 8), (256, 4), (9, 8), (3, 8), (1, 2)])
def test_the_vocabulary_is_padded_to_equal_parts(vocabulary: int, size: int) -> None:
    parts = [vocabulary_rows(vocabulary, size, index) for index in range(size)]
    length = -(-vocabulary // size)
    assert sum(rows for _, rows in parts) == vocabulary
    assert [row for start, rows in parts for row in range(start, start + rows)] == list(range(vocabulary))
    assert all(0 <= rows <= length for _, rows in parts)
