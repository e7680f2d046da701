"""Layers of each stage given by hand: what is predicted is of these stages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cuboid.planning.choose import predict
from cuboid.planning.export.engines import export
from cuboid.planning.question import Question
from cuboid.spec.layout import Layout, format_weights
from cuboid.spec.partition import partition


@pytest.mark.parametrize("more", ["", ",schedule=zbv", ",schedule=interleaved,recompute=full,recompute_layers=2"])
def test_the_balanced_division_by_hand_is_the_engines_own(ask: Callable[..., Question], more: str) -> None:
    question = ask("llama3-8b", "h100x8", global_batch=16)
    layout = Layout.parse(f"dp=2,pp=4{more}")
    counts = tuple(map(len, partition(question.model, layout.stages, question.sequence)))
    own, by_hand = predict(question, layout), predict(question, layout.changed(layers=counts))
    assert by_hand.parts == pytest.approx(own.parts, rel=0.2)  # the update is of the fullest rank, counted exactly
    assert {name: by_hand.parts[name] for name in ("compute", "bubble")} == pytest.approx(
        {name: own.parts[name] for name in ("compute", "bubble")}
    )
    assert (by_hand.memory, by_hand.layers) == (own.memory, counts)


def test_longer_stages_take_longer_and_hold_more(ask: Callable[..., Question]) -> None:
    question = ask("llama3-8b", "h100x8", global_batch=16)
    own = predict(question, Layout.parse("dp=2,pp=4"))
    uneven = predict(question, Layout.parse("dp=2,pp=4,layers=16:8:4:4"))
    assert uneven.layers == (16, 8, 4, 4)
    assert uneven.seconds > 1.35 * own.seconds
    weights = [row["weights"] for row in uneven.memory]
    assert weights[0] > 1.7 * own.memory[0]["weights"] and weights[2] < 0.7 * own.memory[2]["weights"]


def test_megatron_and_torchtitan_are_told(ask: Callable[..., Question]) -> None:
    layout = Layout.parse("dp=2,pp=2,zero=1,layers=30:2")
    script = export(predict(ask("llama3-8b", "h100x4", global_batch=16), layout), "megatron")
    assert '--pipeline-model-parallel-layout "Et*30|t*2L"' in script
    table = export(predict(ask("llama3-8b", "h100x4", global_batch=16), layout.changed(zero=3)), "torchtitan")
    parts = table.partition("module_fqns_per_model_part")[2]
    assert '"layers.29"], ["layers.30"' in " ".join(parts.split()).replace("[ ", "[")
    assert format_weights(layout.layers) == "30:2"
