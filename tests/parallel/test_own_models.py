"""Models of one's own: the examples equal one process on any layout, and what cannot work is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cuboid import (
    EXPERT,
    PARTIAL,
    REPLICATED,
    Batch,
    ColumnLinear,
    MixtureSpec,
    Model,
    RoutedExperts,
    Router,
    Routing,
    RowLinear,
    Tokens,
    family,
)
from cuboid.cli.verify import verification_run
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.spec.model import load_model
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import build_run, dump_run, load_run
from cuboid.spec.sharding import ShardingRank, Split
from tests.parallel.cases import assert_equal

EXAMPLES = Path(__file__).parents[2] / "examples"
LAYOUTS = [
    "dp=2,tp=2,pp=2",
    "tp=4",
    "dp=4,zero=3",
    "dp=2,zero=2,pp=2,schedule=zbv",
    "tp=2,pp=2,schedule=zb1p,recompute=full",
    "dp=2,pp=4,micro_batch=2,zero=1",
    "pp=2,schedule=dualpipev,recompute=selective",
]
USUAL = {
    "own_attention": (0, 1, 2, 3, 5, 6),
    "sliding_window": (0,),
    "latent_attention": (4,),
    "state_space": (0, 3),
    "vision_transformer": (3, 4),
    "encoder_decoder": (0, 4),
}
"""Example -> on which of the layouts every run of the tests tries it."""

SHORT = ("training.sequence=8", "data.attention_within_documents=false", "data.positions_within_documents=false")


def own(name: str) -> str:
    return f"python:{EXAMPLES / name}.py:build"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if place in usual else pytest.mark.thorough)
        for name, usual in USUAL.items()
        for place, layout in enumerate(LAYOUTS)
    ],
)
def test_examples_equal_one_process_on_any_layout(pool: Pool, name: str, layout: str) -> None:
    dropped = ("model.options.dropout=0.2",) if name == "own_attention" else ()
    assert_equal(pool, verification_run(layout, own(name), ("training.sequence=8", *dropped), steps=2))


ROUTED = [
    "dp=2,ep=2",
    "tp=2,ep=2",
    "dp=2,pp=2,ep=2,zero=1,schedule=zb1p,recompute=full",
    "dp=2,tp=2,ep=4,zero=3",
    "dp=2,pp=2,ep=2,schedule=dualpipev,recompute=selective",
    "dp=4,ep=2,zero=2,micro_batch=2",
]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((own("mixture"), layout) for layout in ROUTED),
        *(
            pytest.param(f"python:{__file__}:{name}", layout, marks=() if place in usual else pytest.mark.thorough)
            for name, usual in (("routed_alone", (2,)), ("deepseek", (1,)))
            for place, layout in enumerate(ROUTED)
        ),
    ],
)
def test_experts_of_ones_own_equal_one_process_on_any_layout(pool: Pool, name: str, layout: str) -> None:
    assert_equal(pool, verification_run(layout, name, ("training.sequence=8",), steps=2))


@pytest.mark.parametrize(
    ("name", "layout"),
    [("tiny-llama", "dp=1"), ("tiny-gpt2", "pp=2"), ("tiny-qwen3", "tp=2"), ("tiny-mixtral", "dp=2,ep=2")],
)
def test_an_unchanged_model_of_the_catalog_computes_the_same_losses(
    pool: Pool, tmp_path: Path, name: str, layout: str
) -> None:
    """Through the interface of one's own models, bit for bit."""
    (tmp_path / "same.py").write_text(f"from cuboid import family\n\n\ndef build():\n    return family('{name}')\n")
    layout += ",sequence_parallel=false" if "tp" in layout else ""
    ranks = 1 if layout == "dp=1" else 2
    # A mixture of the catalog is proved with every way of balancing; here both have its own.
    mixture, fields = load_model(name).mixture, ("balance_coefficient", "z_coefficient", "router_bias", "bias_rate")
    balanced = [f"model.mixture.{field}={str(getattr(mixture, field)).lower()}" for field in fields if mixture]
    losses = [
        pool.run(
            "tests.parallel.cases:losses",
            (verification_run(layout, model, (*SHORT, *changes), steps=2),),
            ranks=ranks,
        )
        for model, changes in ((name, balanced), (f"python:{tmp_path}/same.py:build", ()))
    ]
    assert losses[0] == losses[1]


def test_what_a_family_does_not_have_is_initialised_by_its_module() -> None:
    model = load_model(own("latent_attention"))
    assert isinstance(model, PythonModelSpec) and isinstance(model.built, Model)
    changed, plain_block = (each.segment("layers.1", 3) for each in (model.built, family("tiny-llama")))
    same = ("attention.query.weight", "feed_forward.up.weight")
    assert all(torch.equal(changed.get_parameter(name), plain_block.get_parameter(name)) for name in same)
    assert 0.05 < changed.get_parameter("attention.down.weight").std() < 0.1, "as nn.Linear does"
    assert torch.equal(changed.get_parameter("attention.norm.weight"), torch.ones(24))


def test_what_a_family_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="initialization=mup"):
        family({"base": "tiny-llama", "initialization": "mup"})
    with pytest.raises(UserError, match=r"tp=8 does not divide the 4 heads of layers\.0\.attention\.key\.weight"):
        family("tiny-llama").check_tensor_parallel(8)


def test_a_run_of_ones_own_model_comes_back_from_its_file(tmp_path: Path) -> None:
    options = ("model.options.hidden=32", "model.options.layers=2")
    run = build_run({"model": own("vision_transformer"), "layout": "tp=2"}, options)
    assert isinstance(run.model, PythonModelSpec)
    assert (run.model.layers, run.data.source, run.layout.sequence_parallel) == (2, "model", False)
    (tmp_path / "run.toml").write_text(dump_run(run))
    assert load_run(tmp_path / "run.toml") == run


def test_parameters_are_counted() -> None:
    model = load_model(own("own_attention"))
    attention, feed_forward = 4 * 64 * 64 + 4, 2 * 4 * 64 * 64 + 5 * 64
    assert model.parameters == 2 * 259 * 64 + 64 + 4 * (attention + feed_forward + 2 * 64)


class Plain(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return x + self.inner(x)


def plain(inner: nn.Module) -> Model:
    return Model(lambda: nn.Embedding(9, 6), lambda layer: Plain(inner), 2, lambda: nn.Linear(6, 9), ("batch", 4, 6))


def test_a_loop_over_the_sequence_is_seen() -> None:
    """Which a compiler would unroll."""
    seen = {}
    for name in ("state_space", "own_attention"):
        model = load_model(own(name))
        assert isinstance(model, PythonModelSpec) and isinstance(model.built, Model)
        seen[name] = model.built.loops("layers.0")
    assert seen == {"state_space": True, "own_attention": False}


def test_what_is_not_declared_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"tp=2 needs to know how embedding\.weight is split"):
        plain(nn.Linear(6, 6)).check_tensor_parallel(2)


def test_what_draws_random_numbers_or_mixes_samples_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"layers\.1\.inner drops 0\.5 of its inputs.* use cuboid\.Dropout\(0\.5\)"):
        plain(nn.Dropout(0.5)).segment("layers.1", 0)
    with pytest.raises(UserError, match=r"layers\.0\.inner normalises over the micro-batch"):
        plain(nn.BatchNorm1d(6)).segment("layers.0", 0)


def test_widths_that_do_not_divide_are_refused_by_name() -> None:
    column = ColumnLinear(6, 9)
    with pytest.raises(UserError, match=r"tp=2 does not divide dimension 0 of layers\.0\.up\.weight, which is 9"):
        column.sharding["weight"].slice_of("layers.0.up.weight", (9, 6), ShardingRank(2))
    assert RowLinear.sharding["bias"] == REPLICATED


def test_a_segment_begins_alike_wherever_it_is_built() -> None:
    model = load_model(own("own_attention"))
    assert isinstance(model, PythonModelSpec)
    built = model.built
    assert isinstance(built, Model)
    first = built.segment("layers.2", 7)
    torch.rand(5)
    second = built.segment("layers.2", 7)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = built.segment("layers.3", 7)
    assert not torch.equal(first.get_parameter("up.weight"), other.get_parameter("up.weight"))


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("cp=2", "cp=2 is not for a model of one's own; use cp=1"),
        ("dp=2,ep=2", "ep=2 needs parameters declared as EXPERT and own_attention has none; use ep=1"),
        ("tp=2,sequence_parallel=true", "sequence_parallel=true is not for a model of one's own"),
        ("tp=3", "tp=3 does not divide"),
        ("pp=8", "pp=8 makes more stages than layers=4"),
    ],
)
def test_layouts_that_cannot_work_are_refused(layout: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        verification_run(layout, own("own_attention"))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("python:nowhere.py:build", "nowhere.py is not a file"),
        (f"python:{EXAMPLES / 'own_attention.py'}:bild", "has no bild; did you mean build"),
        ("python:no_such_package.models:build", "No module named"),
        ("python:build", "names no object"),
        (f"python:{EXAMPLES / 'own_attention.py'}:Block", "does not take model.options"),
    ],
)
def test_names_that_lead_nowhere_are_refused(model: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_model(model)


@pytest.mark.parametrize("setting", ["training.precision=fp8", "samples.every=5"])
def test_settings_that_cannot_work_are_refused(setting: str) -> None:
    with pytest.raises(UserError, match=f"{setting} is not for a model of one's own"):
        build_run({"model": own("own_attention")}, [setting])


class Experts(nn.Module):
    """A mixture of one's own, under names that mean something in models of the catalog."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, 2)
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        weights = self.router(x).softmax(-1).unbind(-1)
        return x + sum(weight[..., None] * expert(x) for weight, expert in zip(weights, self.experts, strict=True))


def initial(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(name)))


def experts() -> Model:
    return replace(family("tiny-llama"), block=lambda layer: Experts(64), layers=2, initial=initial)


class RoutedAlone(RoutedExperts):
    """A router of its own, without load balancing; each token has one expert, weighed by a sigmoid."""

    sharding: Mapping[str, Split] = {"router.weight": PARTIAL, "inner": EXPERT}

    def __init__(self, hidden: int) -> None:
        super().__init__(4)
        self.router = nn.Linear(hidden, 4, bias=False)
        self.inner = nn.Parameter(torch.randn(4, hidden, hidden) * 0.1)

    def route(self, x: Tensor, tokens: Tokens) -> Routing:
        scores, chosen = self.router(x).sigmoid().max(-1, keepdim=True)
        return Routing(chosen, scores)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.matmul(rows, self.inner, counts).tanh()


def routed_alone() -> Model:
    return replace(family("tiny-llama"), block=lambda layer: Plain(RoutedAlone(64)), layers=4, initial=initial)


def deepseek() -> Model:
    return family({"base": "tiny-deepseek", "layers": 4})


def test_experts_that_do_not_divide_and_routers_that_differ_are_refused() -> None:
    with pytest.raises(UserError, match=r"ep=3 does not divide the first dimension of layers\.0\.experts\.up, 8"):
        verification_run("dp=3,ep=3", own("mixture"))
    mixtures = [MixtureSpec(experts=4, top_k=top_k, expert_ffn=8) for top_k in (1, 2)]
    with pytest.raises(UserError, match=r"layers\.1 has another Router than layers\.0, or none"):
        print(replace(plain(nn.Identity()), block=lambda layer: Router(6, mixtures[layer])).mixture)
    dense_first = replace(plain(nn.Identity()), block=lambda layer: Router(6, mixtures[0]) if layer else nn.Identity())
    assert dense_first.mixture == replace(mixtures[0], first_dense_layers=1)


def test_nothing_is_guessed_from_the_name_of_a_parameter(pool: Pool) -> None:
    assert_equal(pool, verification_run("dp=2,zero=1", f"python:{__file__}:experts", SHORT, steps=2))


def test_samples_without_a_sequence_are_counted_as_such() -> None:
    pictures = build_run({"model": own("vision_transformer")})
    assert (pictures.training.sequence, pictures.counts) == (1, "samples")
    words = build_run({"model": own("state_space")})
    assert words.counts == "tokens" and words.training.sequence > 1
