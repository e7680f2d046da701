"""A config.json written for a model is read back as that model, by Cuboid and by Hugging Face's own class."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from cuboid.errors import UserError
from cuboid.spec.huggingface import config_from_model, table_from_config
from cuboid.spec.load import build_model, catalog_models
from cuboid.spec.model import ModelSpec, RopeScaling, load_model

SCALING = RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192)
WRITTEN = [name for name in catalog_models() if name not in ("deepseek-v2", "moe-1t")]
CHANGED = [
    replace(load_model("tiny-llama"), rope_scaling=SCALING, head_dim=16, mlp_bias=True),
    replace(load_model("tiny-llama"), qkv_bias=True, output_bias=True, norm_epsilon=1e-3, initial_std=0.5),
    replace(load_model("tiny-qwen3"), rope_theta=5e5, tie_embeddings=False),
    replace(load_model("tiny-gpt2"), ffn=100, tie_embeddings=False),
    build_model({"family": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "head_dim": 16, "ffn": 48, "vocab": 67}),
]


@pytest.mark.parametrize("model", [*map(load_model, WRITTEN), *CHANGED], ids=lambda model: model.name)
def test_a_config_is_read_back_as_the_model(model: ModelSpec) -> None:
    config = config_from_model(model)
    assert build_model(table_from_config(config, model.name)) == model
    theirs = AutoConfig.for_model(**config)
    assert build_model(table_from_config(theirs.to_dict(), model.name)) == model


def test_what_a_family_has_not_is_refused() -> None:
    with pytest.raises(UserError, match="model=tiny-mixtral is none of family=llama to Hugging Face"):
        config_from_model(replace(load_model("tiny-mixtral"), family="llama"))
