"""Causal models of families that only `transformers` knows: trained from a folder, equal to it, and exported back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from cuboid import load_checkpoint
from cuboid.checkpoint.huggingface.export import export_model
from cuboid.cli.verify import verification_run
from cuboid.data.source import make_source
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.spec.model import load_model
from cuboid.spec.run import Run, build_run
from cuboid.training.learning_rate import learning_rate
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


def made(folder: Path, family: str, **more: Any) -> Any:
    """A folder with random weights; its module."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | more))
    module.save_pretrained(folder)
    return module


@pytest.mark.parametrize("family", ["olmo2", "gemma2", "phi3"])
def test_layouts_equal_one_process(pool: Pool, tmp_path: Path, family: str) -> None:
    made(tmp_path / family, family)
    for layout in ("dp=2,zero=3", "pp=2", "dp=2,pp=2,schedule=zb1p"):
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


def test_losses_are_those_of_transformers_and_the_export_loads(pool: Pool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    module = made(tmp_path / "olmo2", "olmo2")
    run = build_run(
        {
            "model": str(tmp_path / "olmo2"),
            "layout": "dp=2,pp=2,schedule=zb1p",
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
    pool.run("tests.training.cases:train_rank", (run,), ranks=4)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = losses_of_transformers(module, run)
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-9)
    weights = load_checkpoint(tmp_path / "run")
    assert torch.allclose(weights["head.model.model.norm.weight"].double(), module.model.norm.weight)
    export_model(tmp_path / "run", tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for (name, ours), (_, theirs) in zip(loaded.named_parameters(), module.named_parameters(), strict=True):
        assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-7), name


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "granite", "granite", embedding_multiplier=2.0)
    model = load_model(str(tmp_path / "granite"))
    with pytest.raises(UserError, match="GraniteModel changes what is embedded"):
        model.built.segment("layers.0", 0)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"tp=2 needs to know how embedding\.base\.embed_tokens\.weight is split"):
        verification_run("tp=2", str(tmp_path / "granite"))
