"""Prediction layers: DeepSeek-V3 with its layer, against transformers and a small program of its own."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from cuboid.errors import UserError
from cuboid.model.batch import IGNORED, MicroBatch, further
from cuboid.model.huggingface import match_names, state_from_huggingface, state_to_huggingface, to_huggingface
from cuboid.model.transformer import Transformer
from cuboid.spec.huggingface import table_from_config
from cuboid.spec.load import build_model, model_table
from tests.model.test_huggingface import DEEPSEEK, SIZES, exact_norm, exact_router, randomize, stored_state

LAYERS, LENGTH = 3, 12


class Oracle(nn.Module):
    """DeepSeek-V3 with one prediction layer, of the modules of transformers, which has no such layer itself. Its block
    is one more layer of theirs."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        sizes = SIZES | DEEPSEEK | {"num_hidden_layers": LAYERS + 1, "tie_word_embeddings": tied}
        tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
        self.config = AutoConfig.for_model("deepseek_v3", **sizes | tokens)
        plain = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
        self.theirs = AutoModelForCausalLM.from_config(self.config, **plain)
        norm, hidden = type(self.theirs.model.norm), self.config.hidden_size
        self.enorm, self.hnorm, self.norm = (norm(hidden, self.config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.double().eval()
        randomize(self)
        for module in self.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = types.MethodType(exact_norm, module)
            if type(module).__name__.endswith("TopkRouter"):
                exact_router(module)

    def stored(self) -> dict[str, Tensor]:
        """As a checkpoint holds it."""
        state, prefix = stored_state(self.theirs, self.theirs.state_dict()), f"model.layers.{LAYERS}."
        for name in ("enorm", "hnorm", "eh_proj"):
            state[f"{prefix}{name}.weight"] = getattr(self, name).weight
        state[f"{prefix}shared_head.norm.weight"] = self.norm.weight
        state[f"{prefix}shared_head.head.weight"] = state["lm_head.weight"]
        state[f"{prefix}embed_tokens.weight"] = state["model.embed_tokens.weight"]
        return state

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the model, and of its prediction layer."""
        base = self.theirs.model
        x = base.embed_tokens(tokens)
        rotary = base.rotary_emb(x, torch.arange(LENGTH)[None])
        mask = torch.full((LENGTH, LENGTH), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        for layer in base.layers[:LAYERS]:
            x = layer(x, attention_mask=mask, position_embeddings=rotary)
        normed = base.norm(x)
        shifted = torch.cat((tokens[:, 1:], tokens[:, :1]), 1)  # the last place predicts nothing
        x = self.eh_proj(torch.cat((self.enorm(base.embed_tokens(shifted)), self.hnorm(normed)), -1))
        x = base.layers[LAYERS](x, attention_mask=mask, position_embeddings=rotary)
        return self.theirs.lm_head(normed), self.theirs.lm_head(self.norm(x))


@pytest.mark.parametrize("tied", [False, True])
def test_logits_loss_and_gradients_equal_deepseeks(tied: bool) -> None:
    oracle = Oracle(tied)
    config = oracle.config.to_dict() | {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    spec = build_model(table_from_config(config, "small"))
    state = state_from_huggingface(spec, oracle.stored())
    ours = Transformer(spec).double()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(state[name])
    tokens, labels = torch.randint(0, 67, (2, 2, LENGTH), generator=torch.Generator().manual_seed(2))
    labels[0, 7] = IGNORED

    logits, predicted = oracle(tokens)
    x = ours.hidden_states(tokens)
    (loss,) = ours.prediction_losses(x, [further(MicroBatch(tokens, labels), 1)])
    assert (ours.head(x).view_as(logits) - logits).abs().max() < 1e-9 * logits.abs().max()
    wanted = functional.cross_entropy(predicted[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    assert abs(loss - wanted) < 1e-9 * wanted

    loss.backward()
    wanted.backward()
    given = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in ours.named_parameters()}
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    gradients, expected = state_to_huggingface(spec, given), oracle.stored()
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        if not name.endswith("e_score_correction_bias"):
            assert (gradients[name] - gradient).abs().max() <= 1e-9 * gradient.abs().max(), name


def test_no_target_is_beyond_a_document_or_a_sequence() -> None:
    tokens = torch.arange(8)[None]
    labels = tokens + 1
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    plain = further(MicroBatch(tokens, labels), 2)
    assert plain.tokens.tolist()[0][:6] == [2, 3, 4, 5, 6, 7]
    assert plain.labels.tolist() == [[3, 4, 5, 6, 7, 8, IGNORED, IGNORED]]
    packed = further(MicroBatch(tokens, labels, documents), 1)
    # Token 3 begins another document: neither token 1 nor token 2 may predict past it.
    assert packed.labels.tolist() == [[2, IGNORED, IGNORED, 5, 6, 7, 8, IGNORED]]
    short = further(MicroBatch(tokens, labels, torch.zeros_like(documents), cut=4), 1)
    assert short.labels.tolist() == [[2, 3, 4, IGNORED, 6, 7, 8, IGNORED]]
    masked = further(MicroBatch(tokens, labels.masked_fill(labels == 4, IGNORED)), 1)
    assert masked.labels.tolist() == [[2, 3, IGNORED, 5, 6, 7, 8, IGNORED]]


def test_a_checkpoint_and_its_model_agree_on_prediction_layers(tmp_path: Path) -> None:
    with_one = build_model(model_table("tiny-deepseek-mtp"))
    without = build_model({"base": "tiny-deepseek-mtp", "prediction_layers": 0})
    names = list(to_huggingface(with_one))
    with pytest.raises(UserError, match=r"use model.prediction_layers=1"):
        match_names(without, names)
    with pytest.raises(UserError, match=r"use model.prediction_layers=0"):
        match_names(with_one, list(to_huggingface(without)))
    copies = [name for name, target in to_huggingface(with_one).items() if target.copy_of is not None]
    assert copies == ["model.layers.8.embed_tokens.weight", "model.layers.8.shared_head.head.weight"]


def test_a_folder_of_transformers_has_the_key_and_no_layer(tmp_path: Path) -> None:
    config = AutoConfig.for_model("deepseek_v3", **SIZES | DEEPSEEK | {"num_nextn_predict_layers": 1})
    config.save_pretrained(tmp_path)
    assert build_model(model_table(str(tmp_path))).prediction_layers == 1
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert build_model(model_table(str(tmp_path))).prediction_layers == 0
