"""Causal models of families that only `transformers` knows: trained from a folder, equal to it, and exported back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from safetensors.torch import save_file

import cuboid
from cuboid import load_checkpoint
from cuboid.checkpoint.huggingface.export import export_model
from cuboid.cli.verify import verification_run
from cuboid.data.source import make_source
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.model.custom import WholeModel
from cuboid.model.transformers_model import Family, build
from cuboid.spec.model import load_model
from cuboid.spec.run import Run, build_run
from cuboid.training.learning_rate import learning_rate
from tests.matrix import crossed
from tests.parallel.cases import assert_equal

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {},
    "phi3": {},
    # Weights that are renamed as they are loaded; its own sizes are those of SIZES.
    "gpt_neox": {},
    # Layers of a decoder inside of the base model, learned positions.
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    # Embeddings are scaled inside the forward pass of all layers, logits after it.
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    # No norm is called norm; positions by attention biases, a layer returns a tuple.
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 64, "expansion_ratio": 2},
    # Layers hold buffers.
    "gpt_neo": {
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        **dict.fromkeys(("attention_dropout", "embed_dropout", "resid_dropout"), 0.0),
    },
    # Scales its embeddings in place.
    "ctrl": {"n_embd": 32, "n_head": 4, "n_layer": 4, "dff": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "olmoe": {},
}
LAYOUTS = ("dp=2,zero=3", "pp=2", "dp=2,pp=2,schedule=zb1p")


def made(folder: Path, family: str, **more: Any) -> Any:
    """A folder with random weights; its module."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | FAMILIES[family] | more))
    module.save_pretrained(folder)
    return module


@pytest.mark.parametrize(("family", "layout"), crossed(("phi3", "gemma", "opt"), LAYOUTS, every=3))
def test_layouts_equal_one_process(pool: Pool, tmp_path: Path, family: str, layout: str) -> None:
    made(tmp_path / family, family)
    assert_equal(pool, verification_run(layout, str(tmp_path / family), ("training.sequence=8",), steps=2))


def losses_of_transformers(module: Any, run: Run) -> list[float]:
    """The same steps with their module and torch's own AdamW."""
    module = module.double()
    groups = [
        {"params": [p for p in module.parameters() if (p.ndim > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    optimizer, source, losses = (
        torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=run.optimizer.epsilon),
        make_source(run),
        [],
    )
    for step in range(run.training.steps):
        places = range(step * run.training.global_batch, (step + 1) * run.training.global_batch)
        tokens, labels = (torch.stack(each) for each in zip(*map(source.at, places), strict=True))
        loss = functional.cross_entropy(module(input_ids=tokens).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.learning_rate, step, run.training.steps)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if place % 3 == number else pytest.mark.thorough)
        for place, family in enumerate([name for name in FAMILIES if name != "olmoe"])
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_losses_are_those_of_transformers_and_the_export_loads(
    pool: Pool, tmp_path: Path, family: str, layout: str
) -> None:
    from transformers import AutoModelForCausalLM

    module = made(tmp_path / family, family)
    run = build_run(
        {
            "model": str(tmp_path / family),
            "layout": layout,
            "training": {
                "steps": 4,
                "global_batch": 4,
                "sequence": 16,
                "precision": "float64",
                "device": "cpu",
            },
            "checkpoint": {"every": 4},
            "output": {"folder": str(tmp_path / "run")},
        }
    )
    pool.run("tests.training.cases:train_rank", (run,), ranks=run.layout.world_size)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = losses_of_transformers(module, run)
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-9)
    if family == "phi3":
        weights = load_checkpoint(tmp_path / "run")
        assert torch.allclose(weights["head.model.model.norm.weight"].double(), module.model.norm.weight)
    export_model(tmp_path / "run", tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for (name, ours), (_, theirs) in zip(loaded.named_parameters(), module.named_parameters(), strict=True):
        assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-7), name


def test_experts_stacked_as_they_are_loaded(tmp_path: Path) -> None:
    """In float32: torch has no grouped matmul in float64."""
    module = made(tmp_path / "olmoe", "olmoe", num_experts=4, num_experts_per_tok=2)
    built = load_model(str(tmp_path / "olmoe")).built  # type: ignore[attr-defined]
    tokens, labels = torch.randint(3, 259, (2, 2, 8))
    loss = WholeModel(built, 0)({"tokens": tokens, "labels": labels})
    theirs = functional.cross_entropy(module(input_ids=tokens).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("family", ["gpt_neox", "olmoe"])
def test_what_is_renamed_or_stacked_is_read_layer_by_layer(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = made(tmp_path / family, family)
    read: list[str] = []
    take = Family._read
    monkeypatch.setattr(Family, "_read", lambda self, name: (read.append(name), take(self, name))[1])
    monkeypatch.setattr(Family, "_loaded", None)
    built = build(str(tmp_path / family))
    theirs = module.state_dict()
    for prefix in built.prefixes:
        read.clear()
        for name, parameter in built.segment(prefix, 0).named_parameters():
            assert torch.equal(parameter, theirs[built.exported_name(f"{prefix}.{name}")]), name  # type: ignore[misc]
        other = [name for name in read if f".{prefix}." not in name]
        assert read and (not other if prefix.startswith("layers.") else not any(".layers." in name for name in read))


@pytest.mark.parametrize("family", ["opt", "olmoe"])
def test_a_folder_is_planned(tmp_path: Path, family: str) -> None:
    """OPT looks at a random number before each layer, also where it drops none."""
    made(tmp_path / family, family)
    plan = cuboid.plan(str(tmp_path / family), "h100x2", global_batch=4, sequence=16, fixed={"pp": 2})
    assert plan.layout.pp == 2 and plan.memory[0]["weights"] > 0
    block = build(str(tmp_path / family)).block(0)
    state = torch.get_rng_state()
    block(torch.zeros(1, 4, 32), {})
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_are_drawn_where_none_are_asked_for(tmp_path: Path) -> None:
    made(tmp_path / "opt", "opt")
    built = load_model(str(tmp_path / "opt")).built  # type: ignore[attr-defined]
    drawn = build(str(tmp_path / "opt"), weights=False)
    for prefix in built.prefixes:
        given, fresh = (model.segment(prefix, 0).state_dict() for model in (built, drawn))
        assert given.keys() == fresh.keys()
        for name in (name for name in given if name.endswith("weight") and given[name].ndim > 1):
            assert not torch.equal(given[name], fresh[name]) and 0.01 < fresh[name].std() < 0.03, name


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "opt", "opt", dropout=0.1)
    with pytest.raises(UserError, match=r"dropout=0\.1 of its config\.json draws random numbers.*use dropout=0\.0"):
        load_model(str(tmp_path / "opt"))
    made(tmp_path / "granite", "granite")
    with pytest.raises(UserError, match=r"tp=2 needs to know how embedding\.base\.embed_tokens\.weight is split"):
        verification_run("tp=2", str(tmp_path / "granite"))
    made(tmp_path / "other", "granite")
    save_file({"something": torch.zeros(1)}, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    model = load_model(str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"holds no model\.layers\.0\..*; use model\.options\.weights=false"):
        model.built.segment("layers.0", 0)  # type: ignore[attr-defined]
