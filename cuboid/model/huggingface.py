"""Weight maps from and to Hugging Face: which of their tensors each parameter lies in, and how each of theirs is made.

Both maps are tables of names and numbers, so that a checkpoint can be read or written one tensor at a time:

    for name, origins in from_huggingface(model).items():    # reading
        for origin in origins:
            parameter[origin.rows] = origin.take(file[origin.tensor])
    for name, target in to_huggingface(model).items():       # writing
        tensor = target.make([parameters[part] for part in target.parameters])
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cuboid.errors import UserError
from cuboid.model.custom import Model
from cuboid.model.transformer import Transformer
from cuboid.model.weight_names import PREDICTION_COPIES, WeightNames, check_family
from cuboid.spec.model import ModelSpec
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.sharding import TIED


@dataclass(frozen=True)
class Origin:
    """A parameter is rows `start:stop` of one Hugging Face tensor, transposed first where `transposed` says so; or, of
    stacked experts, one expert is."""

    tensor: str
    shape: tuple[int, ...]
    """Of the whole tensor, as it is stored."""
    start: int
    stop: int
    transposed: bool
    expert: int | None = None
    """Which of the experts that the parameter stacks; None: it stacks none, or the tensor stacks them too."""
    stacked: bool = False
    """The tensor stacks all experts: rows, and what is transposed, count behind its first dimension."""
    step: int = 1
    """Of rows, in a tensor that interleaves those of several parameters."""

    @property
    def rows(self) -> slice:
        """Which of the parameter's first dimension it holds."""
        return slice(None) if self.expert is None else slice(self.expert, self.expert + 1)

    @property
    def bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and lengths of what it holds of the parameter."""
        if self.stacked:
            inner = (self.shape[1],) if self.transposed else self.shape[2:]
            sizes = (self.shape[0], -(-(self.stop - self.start) // self.step), *inner)
            return (0,) * len(sizes), sizes
        sizes = (self.stop - self.start, *((self.shape[0],) if self.transposed else self.shape[1:]))
        if self.expert is None:
            return (0,) * len(sizes), sizes
        return (self.expert, *(0 for _ in sizes)), (1, *sizes)

    def holds(self, offsets: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether anything of a slice of the parameter lies here."""
        return self.expert is None or offsets[0] <= self.expert < offsets[0] + lengths[0]

    def part_of(self, values: Tensor, offsets: Sequence[int]) -> Tensor:
        """What lies here of a slice at these offsets, in the dimensions of the stored tensor."""
        return values if self.expert is None else values[self.expert - offsets[0]]

    def index(self, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Where a slice of the parameter, or all of it, lies in the stored tensor, to read no more than is needed."""
        here = self.bounds
        offsets, lengths = offsets or here[0], lengths or here[1]
        if self.expert is not None:
            offsets, lengths = offsets[1:], lengths[1:]
        first, *rest = (slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
        if self.stacked:
            inside, *rest = rest
            begin = self.start + self.step * inside.start
            rows = slice(begin, begin + self.step * (inside.stop - inside.start - 1) + 1, self.step)
            return (first, *rest, rows) if self.transposed else (first, rows, *rest)
        rows = slice(self.start + first.start, self.start + first.stop)
        return (*rest, rows) if self.transposed else (rows, *rest)

    def oriented(self, part: Tensor) -> Tensor:
        """A part of the stored tensor with the dimensions of the parameter, or of one expert of it."""
        return part.transpose(-1, -2) if self.transposed else part

    def take(self, tensor: Tensor) -> Tensor:
        """Its `rows` of the parameter, as a view: what is written into it is written into the stored tensor."""
        part = self.oriented(tensor[self.index()])
        return part if self.expert is None else part.unsqueeze(0)


@dataclass(frozen=True)
class Target:
    """A Hugging Face tensor is these parameters, one below the other, transposed at the end where `transposed` says so;
    or one expert of a parameter that stacks them."""

    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool
    copy_of: str | None = None
    """The tensor it is tied to; files may omit it, modules list it."""
    expert: int | None = None
    interleaved: bool = False
    """It stacks all experts, whose rows come from each parameter in turn."""

    def make(self, parameters: Sequence[Tensor]) -> Tensor:
        if self.expert is not None:
            return parameters[0][self.expert]
        if self.interleaved:
            made = torch.stack(list(parameters), 2).flatten(1, 2)
            return made.transpose(1, 2).contiguous() if self.transposed else made
        whole = parameters[0] if len(parameters) == 1 else torch.cat(list(parameters))
        return whole.t() if self.transposed else whole


def parameter_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter of the single-device model; a tied one once."""
    if isinstance(model, PythonModelSpec):
        return _own(model).parameter_shapes
    with torch.device("meta"):
        module = Transformer(model)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def from_huggingface(model: ModelSpec) -> dict[str, tuple[Origin, ...]]:
    """Our parameter -> where it lies in their checkpoint: in one tensor, or each of stacked experts in its own."""
    if isinstance(model, PythonModelSpec):
        own = _own(model)
        if own.exported_name is not None:
            named = own.exported_name
            return {name: (_same(named(name), shape),) for name, shape in own.parameter_shapes.items()}
    family = check_family(model)
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    fused = {"query": (0, query), "key": (query, query + key_value), "value": (query + key_value, 3 * query)}
    origins: dict[str, tuple[Origin, ...]] = {}
    for name, shape in parameter_shapes(model).items():
        tensor = _their_name(family, name)
        if "#" in tensor:
            origins[name] = tuple(
                Origin(tensor.replace("#", str(expert)), shape[1:], 0, shape[1], False, expert)
                for expert in range(shape[0])
            )
            continue
        if family.stacks and ".experts." in name:
            origins[name] = (_stacked(name, tensor, shape),)
            continue
        start, stop, rows = 0, shape[0], shape[0]
        if family.fused and family.fused in tensor:
            (start, stop), rows = fused[name.split(".")[-2]], 3 * query
        transposed = bool(family.transposed) and tensor.endswith(family.transposed)
        stored = (shape[1], rows) if transposed else (rows, *shape[1:])
        origins[name] = (Origin(tensor, stored, start, stop, transposed),)
    return origins


def _stacked(name: str, tensor: str, shape: tuple[int, ...]) -> Origin:
    """Of GPT-OSS: matrices of all experts are held as (experts, in, out), and outputs of gate and up alternate."""
    is_down, is_matrix = ".down" in name, len(shape) == 3
    step = 1 if is_down else 2
    start, outputs = int(".up" in name), step * shape[1]
    stored = (shape[0], shape[2], outputs) if is_matrix else (shape[0], outputs)
    return Origin(tensor, stored, start, outputs, is_matrix, stacked=True, step=step)


def to_huggingface(model: ModelSpec) -> dict[str, Target]:
    """Their tensor -> which of our parameters make it; the names are those of their files, which their module has too
    except for experts (it stacks them itself when it loads)."""
    targets: dict[str, Target] = {}
    pairs = [(name, origin) for name, origins in from_huggingface(model).items() for origin in origins]
    for name, origin in sorted(pairs, key=lambda pair: pair[1].start):
        before = targets[origin.tensor].parameters if origin.tensor in targets else ()
        targets[origin.tensor] = Target(
            (*before, name), origin.shape, origin.transposed, expert=origin.expert, interleaved=origin.stacked
        )
    if model.tie_embeddings and not isinstance(model, PythonModelSpec):
        tokens = _their_name(check_family(model), "embedding.tokens.weight")
        targets["lm_head.weight"] = replace(targets[tokens], copy_of=tokens)
    for layer in range(model.layers, model.all_layers):
        for copy, ours in PREDICTION_COPIES.items():
            tied = model.tie_embeddings and ours == "head.output.weight"
            original = _their_name(check_family(model), TIED if tied else ours)
            targets[f"model.layers.{layer}.{copy}"] = replace(targets[original], copy_of=original)
    return targets


def _own(model: PythonModelSpec) -> Model:
    built = model.built
    assert isinstance(built, Model)
    return built


def _same(tensor: str, shape: tuple[int, ...]) -> Origin:
    """A parameter that is a tensor of theirs as it is."""
    return Origin(tensor, shape, 0, shape[0], False)


def match_names(model: ModelSpec, names: Iterable[str]) -> dict[str, str]:
    """Their tensor -> its name among `names`, which are all the tensors of a checkpoint. A tied copy may be missing,
    and so may the prefix that checkpoints of the bare model lack."""
    targets, family = to_huggingface(model), check_family(model)
    found: dict[str, str] = {}
    unknown = []
    for name in names:
        full = name if name.startswith((family.prefix, "lm_head.")) else family.prefix + name
        if full in targets and full not in found:
            found[full] = name
        elif not re.fullmatch(family.ignored, full):
            unknown.append(name)
    beyond = re.compile(rf"model\.layers\.{model.layers}\.")  # where a first prediction layer lies
    if not model.prediction_layers and any(map(beyond.match, unknown)) and "prediction_layers" in family.free:
        raise UserError(
            f"the checkpoint holds prediction layers and model={model.name} has none; use model.prediction_layers=1, "
            "or as many as num_nextn_predict_layers of its config.json says"
        )
    if unknown:
        raise UserError(
            f"the checkpoint holds {_some(unknown)}, which model={model.name} of family={model.family} has no place "
            "for; use the model whose config.json lies beside the checkpoint"
        )
    missing = [name for name, target in targets.items() if name not in found and target.copy_of is None]
    if missing == ["lm_head.weight"]:
        raise UserError(
            f"the checkpoint lacks lm_head.weight and model={model.name} is untied; use tie_embeddings=true"
        )
    for held in range(model.prediction_layers):
        further = re.compile(rf"model\.layers\.({'|'.join(map(str, range(model.layers + held, model.all_layers)))})\.")
        if missing == [name for name, target in targets.items() if further.match(name) and target.copy_of is None]:
            raise UserError(
                f"the checkpoint holds {held} of {model.prediction_layers} prediction layers of model={model.name}; "
                f"use model.prediction_layers={held}"
            )
    if missing:
        raise UserError(
            f"the checkpoint lacks {_some(missing)} of model={model.name}; use all files of the checkpoint, and the "
            "model whose config.json lies beside them"
        )
    return found


def state_from_huggingface(model: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters from a whole Hugging Face state, under the names of the single-device model."""
    targets, found = to_huggingface(model), match_names(model, tensors)
    for name, given in found.items():
        check_shape(given, tuple(tensors[given].shape), targets[name].shape)
        original = targets[name].copy_of
        if original is not None and not torch.equal(tensors[given], tensors[found[original]]):
            raise UserError(
                f"{given} differs from {found[original]} and model={model.name} ties them; use tie_embeddings=false"
            )
    return {name: _taken(origins, tensors, found) for name, origins in from_huggingface(model).items()}


def _taken(origins: Sequence[Origin], tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> Tensor:
    parts = [origin.take(tensors[found[origin.tensor]]) for origin in origins]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def state_to_huggingface(model: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state that their module loads, from our named parameters."""
    shapes = parameter_shapes(model)
    if state.keys() != shapes.keys():
        odd = sorted(state.keys() ^ shapes.keys())
        raise UserError(f"the state and model={model.name} differ in {_some(odd)}; use the model's named parameters")
    for name, shape in shapes.items():
        check_shape(name, tuple(state[name].shape), shape)
    return {
        name: target.make([state[part] for part in target.parameters]) for name, target in to_huggingface(model).items()
    }


def check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise UserError(f"{name} has shape {shape}, not {wanted}; use a model of the checkpoint's sizes")


def _their_name(family: WeightNames, name: str) -> str:
    number = next((part for part in name.split(".") if part.isdigit()), "")
    ours = re.sub(r"\.\d+\.", ".*.", name)
    module, _, kind = ours.rpartition(".")
    if ours in family.names:  # a parameter that is a module of theirs, or has a name of its own
        theirs = family.names[ours] + (".weight" if "#" in family.names[ours] else "")
    else:
        theirs = f"{family.names[module]}.{kind}"
    return theirs.replace("*", number)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
