"""Any causal language model of `transformers`, from its folder, as a `Model`: its own modules, cut between layers.

A block is the family's own base model with one layer in it, so masks, rotary embeddings and whatever else its forward
pass prepares are the family's. The head is the family's own model around a base that only norms. Nothing is split over
tensor ranks: data parallelism, ZeRO and pipelines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.errors import UserError
from cuboid.model.custom import Batch, Model
from cuboid.model.transformer import summed_loss
from cuboid.readers import open_safetensors, read_json
from cuboid.spec.sharding import TIED

NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")


def build(folder: str, weights: bool | None = None) -> Model:
    """`weights`: begin with those of the folder; default: if it has any."""
    family = Family(Path(folder), weights)
    return Model(
        embedding=lambda: family.made("embedding", family.embedding),
        block=lambda layer: family.made(f"layers.{layer}", partial(family.block, layer)),
        layers=family.layers,
        head=lambda: family.made("head", family.head),
        flow=("batch", "sequence", family.config.hidden_size),
        vocab=family.config.vocab_size,
        exported_name=family.exported_name,
        tied=family.tied,
    )


class Family:
    def __init__(self, folder: Path, weights: bool | None) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._make: Callable[[Any], Any] = AutoModelForCausalLM.from_config
        self.folder = folder
        self.config = AutoConfig.from_pretrained(str(folder))
        self.layers = int(self.config.num_hidden_layers)
        files = _weight_files(folder)
        if weights and not files:
            raise UserError(f"model.options.weights=true: {folder} holds no safetensors; use weights=false")
        self._files = files if weights is not False else {}
        with torch.device("meta"):
            self._whole = self._make(self.config)
        self._base_name = str(self._whole.base_model_prefix)
        base = self._whole.base_model
        lists = [name for name, child in base.named_modules() if _holds_layers(child, self.layers)]
        norms = [name for name, _ in base.named_children() if name in NORMS]
        if len(lists) != 1 or len(norms) != 1:
            raise UserError(
                f"model={folder}: {type(base).__name__} is not made of layers and a norm; use another model"
            )
        self._layers_name, self._norm_name = lists[0], norms[0]

    @property
    def tied(self) -> tuple[str, str] | None:
        if not self.config.tie_word_embeddings:
            return None
        names = {id(module): name for name, module in self._whole.named_modules()}
        embedded = names[id(self._whole.get_input_embeddings())].removeprefix(f"{self._base_name}.")
        output = names[id(self._whole.get_output_embeddings())]
        return f"embedding.base.{embedded}.weight", f"head.model.{output}.weight"

    def _shell(self, layer: int | None = None) -> Any:
        """The whole model on the CPU with no layers, and with hardly any vocabulary if it is for a layer."""
        config = copy.deepcopy(self.config)
        for name, value in vars(self.config).items():
            if isinstance(value, list) and len(value) == self.layers:
                setattr(config, name, [] if layer is None else [value[layer]])
        config.num_hidden_layers = 0
        if layer is not None:
            config.vocab_size, config.pad_token_id = 1, None
        return self._make(config)

    def embedding(self) -> nn.Module:
        base = self._shell().base_model
        setattr(base, self._norm_name, nn.Identity())
        return _Embedding(base)

    def block(self, layer: int) -> nn.Module:
        base = self._shell(layer).base_model
        for name, child in list(base.named_children()):
            if any(True for _ in child.parameters()):
                setattr(base, name, nn.Identity())
        self._refuse_inputs_changed(base)
        source = self._whole.base_model.get_submodule(self._layers_name)[layer]
        held = [name for name, _ in source.named_buffers()]
        if held:
            raise UserError(f"model={self.folder}: its layers hold buffers ({held[0]}), which is not supported")
        own = copy.deepcopy(source)
        if torch.get_default_device().type != "meta":
            own = own.to_empty(device="cpu")
            with torch.no_grad():
                for child in own.modules():
                    self._whole._init_weights(child)
        parent, _, name = self._layers_name.rpartition(".")
        setattr(base.get_submodule(parent), name, nn.ModuleList([own]))
        base.config.num_hidden_layers = 1
        return _Block(base)

    def _refuse_inputs_changed(self, base: nn.Module) -> None:
        """Some scale what they embed in the forward pass of all layers; a block would do so again."""
        if torch.get_default_device().type == "meta":
            return
        x = torch.linspace(-1, 1, 2 * self.config.hidden_size).view(1, 2, -1)
        with torch.no_grad():
            same = torch.equal(base(inputs_embeds=x, use_cache=False).last_hidden_state, x)
        if not same:
            raise UserError(f"model={self.folder}: {type(base).__name__} changes what is embedded; use another model")

    def head(self) -> nn.Module:
        model = self._shell()
        norm = model.base_model.get_submodule(self._norm_name)
        setattr(model, self._base_name, _Normed(norm))
        return _Head(model)

    def made(self, prefix: str, make: Callable[[], nn.Module]) -> nn.Module:
        """With the folder's weights, where it has some."""
        module = make()
        if self._files and torch.get_default_device().type != "meta":
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    theirs = self.exported_name(f"{prefix}.{name}")
                    if self.tied is not None and f"{prefix}.{name}" == self.tied[1]:
                        theirs = self.exported_name(TIED)
                    if theirs not in self._files:
                        raise UserError(f"{self.folder} holds no {theirs}; use model.options.weights=false")
                    with open_safetensors(self._files[theirs]) as file:
                        parameter.copy_(file.get_tensor(theirs))
        return module

    def exported_name(self, name: str) -> str:
        """What `transformers` calls a parameter of ours."""
        if self.tied is not None and name == TIED:
            name = self.tied[0]
        if name.startswith("layers."):
            _, layer, _, rest = name.split(".", 3)  # layers.3.base.<layers>.0.<inside>
            inside = rest.removeprefix(f"{self._layers_name}.0.")
            return f"{self._base_name}.{self._layers_name}.{layer}.{inside}"
        rest = name.partition(".")[2].partition(".")[2]  # embedding.base.<inside>, head.model.<inside>
        if name.startswith("embedding."):
            return f"{self._base_name}.{rest}"
        return rest.replace(f"{self._base_name}.norm.", f"{self._base_name}.{self._norm_name}.", 1)


def _holds_layers(module: nn.Module, layers: int) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == layers


def _weight_files(folder: Path) -> dict[str, str]:
    """Tensor -> the file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
            raise UserError(f"{index} is damaged: it has no weight_map; copy the model again")
        return {name: str(folder / file) for name, file in table.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        return {}
    with open_safetensors(single) as file:
        return dict.fromkeys(file.keys(), str(single))


class _Embedding(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, batch: Batch) -> Tensor:
        return self.base(input_ids=batch["tokens"], use_cache=False).last_hidden_state


class _Block(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.base(inputs_embeds=x, use_cache=False).last_hidden_state


class _Normed(nn.Module):
    """In place of the base model: its last norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, *_: Any, inputs_embeds: Tensor, **options: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.norm(inputs_embeds))


class _Head(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def logits(self, x: Tensor, batch: Batch) -> Tensor:
        return self.model(inputs_embeds=x, use_cache=False).logits

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return summed_loss(self.logits(x, batch).flatten(0, 1), batch["labels"].flatten())
