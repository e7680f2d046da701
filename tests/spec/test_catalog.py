"""The catalog against published parameter counts."""

from dataclasses import replace

import pytest

from cuboid.spec.load import build_model, catalog_models, dump_model
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import RopeScaling, load_model
from cuboid.spec.run import build_run

PUBLISHED = {
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "olmo3-7b": 7_298_011_136,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
}
"""Counts of the released checkpoints."""

MEGATRON = {
    "gpt-1.7b": 1.7,
    "gpt-3.6b": 3.6,
    "gpt-7.5b": 7.5,
    "gpt-18b": 18.4,
    "gpt-22b": 22.1,
    "gpt-39b": 39.1,
    "gpt-76b": 76.1,
    "gpt-145b": 145.6,
    "gpt3-175b": 174.6,
    "gpt-310b": 310.1,
    "gpt-530b": 529.6,
    "gpt-1t": 1008.0,
}
"""Billions, as the Megatron papers print them."""

ACTIVE = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39.2,
    "qwen3-30b-a3b": 3.4,
    "qwen3-235b-a22b": 22.2,
    "deepseek-v2": 21.4,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_released_models_have_their_published_parameter_count(name: str) -> None:
    assert load_model(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_models_have_the_printed_size(name: str) -> None:
    # The papers cut or round the last digit.
    assert abs(load_model(name).parameters / 1e9 - MEGATRON[name]) < 0.1


@pytest.mark.parametrize("name", ACTIVE)
def test_mixtures_have_their_published_active_size(name: str) -> None:
    assert round(load_model(name).active_parameters / 1e9, 1) == ACTIVE[name]


def test_every_model_of_the_catalog_loads_and_round_trips() -> None:
    for name in catalog_models():
        model = load_model(name)
        assert model.name == name
        assert build_model(dump_model(model)) == model
    tiny = {name for name in catalog_models() if name.startswith("tiny-")}
    assert set(catalog_models()) == set(PUBLISHED) | set(MEGATRON) | {"moe-1t"} | tiny
    assert 1.0e12 < load_model("moe-1t").parameters < 1.1e12


def test_families_differ_where_they_should() -> None:
    llama, qwen2, qwen3, gpt = (load_model(name) for name in ("llama3.1-8b", "qwen2.5-7b", "qwen3-8b", "gpt3-175b"))
    assert llama.rope_scaling == RopeScaling(
        factor=8, low_frequency_factor=1, high_frequency_factor=4, original_positions=8192
    )
    assert load_model("llama3.2-1b").rope_scaling.factor == 32
    assert load_model("llama3-8b").rope_scaling is None
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.tie_embeddings) == (False, True, False)
    assert (gpt.norm, gpt.positions, gpt.activation, gpt.max_positions) == ("layernorm", "learned", "gelu", 2048)
    assert (gpt.qkv_bias, gpt.output_bias, gpt.mlp_bias, gpt.tie_embeddings) == (True, True, True, True)


def test_tiny_models_take_every_degree_up_to_eight() -> None:
    for name in ("tiny-llama", "tiny-gpt2", "tiny-qwen3"):
        model = load_model(name)
        assert (model.layers, model.heads % 8, model.ffn % 8) == (8, 0, 0)
        assert model.vocab > 256 and model.vocab % 2 == 1
        assert model.parameters < 1_000_000
    assert load_model("tiny-qwen3").tie_embeddings


@pytest.mark.parametrize("name", [name for name in catalog_models() if load_model(name).mixture is not None])
def test_every_mixture_is_balanced_unless_it_says_otherwise(name: str) -> None:
    mixture = load_model(name).mixture
    assert mixture is not None and mixture.balance_coefficient > 0
    assert bool(mixture.bias_rate) == mixture.router_bias
    off = build_run({"model": name}, ["model.mixture.balance_coefficient=0"]).model.mixture
    assert off == replace(mixture, balance_coefficient=0.0)


def test_a_mixture_that_says_nothing_is_balanced_and_a_saved_one_stays_as_it_is() -> None:
    sizes = {"hidden": 8, "layers": 2, "heads": 2, "ffn": 8, "vocab": 16}
    silent = {"experts": 4, "top_k": 2, "expert_ffn": 8}
    mixture = build_model({**sizes, "mixture": {**silent, "router_bias": True}}).mixture
    assert mixture is not None
    assert (mixture.balance_coefficient, mixture.balance_over, mixture.bias_rate) == (0.1, "sequence", 0.001)
    # As a run before `balance_over` wrote its table.
    saved = {**silent, "router_bias": True, "balance_coefficient": 0.0, "z_coefficient": 0.0, "bias_rate": 0.0}
    old = build_model({**sizes, "mixture": saved}).mixture
    assert old == MixtureSpec(experts=4, top_k=2, expert_ffn=8, router_bias=True)
