"""Any causal language model of `transformers`, from its folder, as a `Model`: its own modules, cut between layers.

A block is the family's own base model around one layer, so masks, rotary embeddings and whatever else its forward pass
prepares are the family's. The embedding is the same up to what the first layer would get, the head from what the last
one has given. Which modules act before the layers and which after is found by calling the base model once. Nothing is
split over tensor ranks: data parallelism, ZeRO and pipelines."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.errors import UserError
from cuboid.model.custom import Batch, Model
from cuboid.model.transformer import summed_loss
from cuboid.readers import open_safetensors, read_json
from cuboid.spec.sharding import TIED


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

        self._auto: Any = AutoModelForCausalLM
        self.folder = folder
        try:
            self.config = AutoConfig.from_pretrained(str(folder))
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"model={folder}: transformers cannot read its config.json ({said}); mend it") from None
        self._refuse_dropout()
        self.layers = int(self.config.num_hidden_layers)
        files = _weight_files(folder)
        if weights and not files:
            raise UserError(f"model.options.weights=true: {folder} holds no safetensors; use weights=false")
        self._files = files if weights is not False else {}
        self._converted: tuple[int | None, dict[str, Tensor]] = -1, {}
        """A layer, and its weights as the family loads them: the last that was asked for."""
        with _parameters_without_memory():
            self._bare = self._auto.from_config(copy.deepcopy(self.config))
        for child in self._bare.modules():
            if hasattr(child, "layerdrop"):
                # Such a family draws a random number before each layer while it trains, though none of 0 is skipped
                # by it.
                child.training = False
        self._base_name = str(self._bare.base_model_prefix)
        base = self._bare.base_model
        lists = [name for name, child in base.named_modules() if _holds_layers(child, self.layers)]
        if len(lists) != 1 or any(True for _ in base.parameters(recurse=False)):
            raise UserError(f"model={folder}: {type(base).__name__} is not made of layers; use another model")
        self._layers_name = lists[0]
        self._layers = list(base.get_submodule(lists[0]))
        """Parameters have no memory, buffers have."""
        self._set_layers(base, [])
        self._owners = [name for name, child in base.named_modules() if any(True for _ in child.parameters(False))]
        """Modules of the base model with parameters, outside of the layers."""

    def _refuse_dropout(self) -> None:
        for name, value in vars(self.config).items():
            elsewhere = name.startswith(("classifier", "summary"))  # of other heads than that of a language model
            if "drop" in name and not elsewhere and isinstance(value, float) and value > 0:
                raise UserError(
                    f"model={self.folder}: {name}={value:g} of its config.json draws random numbers, which differ with "
                    f"the layout; use {name}=0.0"
                )

    def _set_layers(self, base: nn.Module, layers: list[nn.Module]) -> None:
        parent, _, name = self._layers_name.rpartition(".")
        setattr(base.get_submodule(parent), name, nn.ModuleList(layers))

    @property
    def tied(self) -> tuple[str, str] | None:
        if not self.config.tie_word_embeddings:
            return None
        names = {id(module): name for name, module in self._bare.named_modules()}
        embedded = names[id(self._bare.get_input_embeddings())].removeprefix(f"{self._base_name}.")
        output = names[id(self._bare.get_output_embeddings())]
        return f"embedding.base.{embedded}.weight", f"head.model.{output}.weight"

    @cached_property
    def _after(self) -> tuple[set[str], bool]:
        """Modules that act after the layers, and whether a layer returns a tuple. Found by calling the base model
        without any of its weights."""
        x = torch.zeros(2, 2, self.config.hidden_size, device="cpu")
        problem: Exception | None = None
        for in_tuple in (False, True):
            called: list[str] = []
            stub = _Stub(self._layers[0], in_tuple)
            stub.register_forward_pre_hook(_noting("", called))
            base = self._around(stub, 0, set()).base_model
            for name in self._owners:
                base.get_submodule(name).register_forward_pre_hook(_noting(name, called))
            try:
                with torch.device("cpu"):
                    fits = base(inputs_embeds=x, use_cache=False)[0].shape == x.shape
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as found:
                fits, problem = False, problem or found
            if fits:
                return set(called[called.index("") + 1 :]), in_tuple
        first = (str(problem).strip().splitlines() or [""])[0]
        raise UserError(
            f"model={self.folder}: {type(self._bare.base_model).__name__} cannot be cut between layers ({first}); use "
            "another model"
        )

    def _around(self, layer: nn.Module, number: int, kept: set[str]) -> Any:
        """The whole model around one layer, with those of its modules that are `kept`."""
        model = copy.deepcopy(self._bare)
        base = model.base_model
        self._keep_one(model.config, number)
        for name in self._owners:
            if name not in kept:
                parent, _, inside = name.rpartition(".")
                absent = _Nothing() if isinstance(base.get_submodule(name), nn.Embedding) else _Itself()
                setattr(base.get_submodule(parent), inside, absent)
        self._set_layers(base, [layer])
        return model

    def _keep_one(self, config: Any, number: int) -> None:
        """Let a config speak of one layer."""
        for name, value in vars(self.config).items():
            if isinstance(value, list) and len(value) == self.layers:
                setattr(config, name, [value[number]])
        config.num_hidden_layers = 1

    def _with_memory(self, module: nn.Module) -> None:
        """On the CPU, initialised as the family does where no weights are to come."""
        if torch.get_default_device().type == "meta":
            return
        for child in module.modules():
            for name, parameter in child.named_parameters(recurse=False):
                setattr(child, name, nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad))
        if self._files:
            return
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=0.02)  # of what the family forgets
            for child in module.modules():
                self._bare._init_weights(child)

    def embedding(self) -> nn.Module:
        after, in_tuple = self._after
        stub = _Stub(self._layers[0], in_tuple)
        base = self._around(stub, 0, set(self._owners) - after).base_model
        self._with_memory(base)
        return _Embedding(base, stub)

    def block(self, layer: int) -> nn.Module:
        own = copy.deepcopy(self._layers[layer])
        self._with_memory(own)
        return _Block(self._around(own, layer, set()).base_model, own)

    def head(self) -> nn.Module:
        after, in_tuple = self._after
        stub = _Stub(self._layers[-1], in_tuple)
        model = self._around(stub, self.layers - 1, after)
        self._with_memory(model)
        return _Head(model, stub)

    def made(self, prefix: str, make: Callable[[], nn.Module]) -> nn.Module:
        """With the folder's weights, where it has some."""
        module = make()
        if self._files and torch.get_default_device().type != "meta":
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    theirs = self.exported_name(f"{prefix}.{name}")
                    if self.tied is not None and f"{prefix}.{name}" == self.tied[1]:
                        theirs = self.exported_name(TIED)
                    parameter.copy_(self._weight(theirs))
                for name, buffer in module.named_buffers():
                    theirs = self.exported_name(f"{prefix}.{name}")
                    if theirs in self._files:
                        buffer.copy_(self._weight(theirs))
        return module

    def _weight(self, name: str) -> Tensor:
        if name in self._files:
            return self._read(name)
        # `transformers` renames some as it loads them, or stacks several to one.
        layers = f"{self._base_name}.{self._layers_name}."
        layer = int(name.removeprefix(layers).partition(".")[0]) if name.startswith(layers) else None
        if self._converted[0] != layer:
            self._converted = layer, self._convert(layer)
        loaded = self._converted[1]
        if name not in loaded:
            loaded = self._loaded  # of a layer that alone would be of another kind
        if name not in loaded:
            raise UserError(f"{self.folder} holds no {name}; use model.options.weights=false")
        return loaded[name]

    def _read(self, name: str) -> Tensor:
        with open_safetensors(self._files[name]) as file:
            found: Tensor = file.get_tensor(name)
            return found

    def _convert(self, layer: int | None) -> dict[str, Tensor]:
        """The weights of one layer, or (None) of what is outside of the layers, as the family itself loads them, by the
        names of its own modules. The first number in the name of a tensor is that of its layer: it is loaded as the
        only one of a smaller model, and nothing is read of the others."""
        numbered = {name: re.match(r"(.*?\.)(\d+)(?=\.)", name) for name in self._files}
        given = {
            name if found is None else f"{found[1]}0{name[found.end() :]}": self._read(name)
            for name, found in numbered.items()
            if (None if found is None else int(found[2])) == layer
        }
        config = copy.deepcopy(self.config)
        self._keep_one(config, layer or 0)
        try:
            found = self._state(type(self._bare), None, config=config, state_dict=given)
        except (RuntimeError, ValueError):
            return {}
        layers = f"{self._base_name}.{self._layers_name}."
        return {name.replace(f"{layers}0.", f"{layers}{layer}.", 1): tensor for name, tensor in found.items()}

    @cached_property
    def _loaded(self) -> dict[str, Tensor]:
        """All weights."""
        return self._state(self._auto, str(self.folder))

    @staticmethod
    def _state(kind: Any, folder: str | None, **options: Any) -> dict[str, Tensor]:
        """What is loaded, without what is missing."""
        from transformers.utils import logging

        level, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()  # it tells of everything that is missing
        logging.disable_progress_bar()
        try:
            model, told = kind.from_pretrained(folder, output_loading_info=True, **options)
        finally:
            logging.set_verbosity(level)
            if shows:
                logging.enable_progress_bar()
        return {name: tensor for name, tensor in model.state_dict().items() if name not in set(told["missing_keys"])}

    def exported_name(self, name: str) -> str:
        """What `transformers` calls a parameter of ours."""
        if self.tied is not None and name == TIED:
            name = self.tied[0]
        if name.startswith("layers."):
            _, layer, _, rest = name.split(".", 3)  # layers.3.base.<layers>.0.<inside>
            inside = rest.removeprefix(f"{self._layers_name}.0.")
            return f"{self._base_name}.{self._layers_name}.{layer}.{inside}"
        rest = name.partition(".")[2].partition(".")[2]  # embedding.base.<inside>, head.model.<inside>
        return f"{self._base_name}.{rest}" if name.startswith("embedding.") else rest


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """While modules are made: their buffers hold numbers that no checkpoint brings."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _noting(name: str, called: list[str]) -> Callable[..., None]:
    return lambda *_: called.append(name)


def _holds_layers(module: nn.Module, layers: int) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == layers and any(True for _ in module.parameters())


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


class _Nothing(nn.Module):
    """In place of embeddings: adds nothing."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(())


class _Itself(nn.Module):
    """In place of a norm or a projection."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


class _Stub(nn.Module):
    """In place of all layers: notes what the first would get, and returns what the last has given."""

    def __init__(self, layer: nn.Module, in_tuple: bool) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # whose attributes some families look at; no module of this one
        self.in_tuple = in_tuple
        self.seen: Tensor | None = None
        self.given: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        self.seen = hidden_states
        result = hidden_states if self.given is None else self.given
        return (result,) if self.in_tuple else result


class _Embedding(nn.Module):
    def __init__(self, base: nn.Module, stub: _Stub) -> None:
        super().__init__()
        self.base = base
        self.stub = stub

    def forward(self, batch: Batch) -> Tensor:
        self.base(input_ids=batch["tokens"], use_cache=False)
        x, self.stub.seen = self.stub.seen, None
        assert x is not None
        return x


class _Block(nn.Module):
    def __init__(self, base: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.x: Tensor | None = None
        self.result: Any = None
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.register_forward_hook(self._leave)

    def _enter(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return ((self.x, *given[1:]), named) if given else ((), {**named, "hidden_states": self.x})

    def _leave(self, _: nn.Module, given: Any, result: Any) -> None:
        self.result = result[0] if isinstance(result, tuple | list) else result

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        self.x = x
        # What the family makes of what it takes for embeddings is not used: the layer gets x itself. Some scale them in
        # place, so it is not x.
        self.base(inputs_embeds=torch.zeros_like(x), use_cache=False)
        result, self.x, self.result = self.result, None, None
        return result


class _Head(nn.Module):
    def __init__(self, model: nn.Module, stub: _Stub) -> None:
        super().__init__()
        self.model = model
        self.stub = stub

    def logits(self, x: Tensor, batch: Batch) -> Tensor:
        self.stub.given = x
        logits: Tensor = self.model(inputs_embeds=torch.zeros_like(x), use_cache=False).logits
        self.stub.given = self.stub.seen = None
        return logits

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return summed_loss(self.logits(x, batch).flatten(0, 1), batch["labels"].flatten())
