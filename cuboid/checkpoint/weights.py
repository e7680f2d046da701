"""Weights alone, without the optimizer's state: out of a checkpoint or a Hugging Face folder, into any tensors.

`training.start_from` names those a training begins with; every rank reads what it keeps.

hf:FOLDER     config.json and safetensors of Hugging Face
FOLDER        a run of Cuboid, its checkpoints or one of them: the weights alone, the optimizer begins anew
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from filecmp import cmp
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from cuboid.checkpoint.folder import checkpoints, newest_whole
from cuboid.checkpoint.huggingface.folder import ModelFolder, model_of
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import INDEX, MANIFEST, Damage, Manifest, Place, parse_run, read_content, run_of
from cuboid.checkpoint.shards import Index, ShardedTensor, TensorSlice, Wishes
from cuboid.checkpoint.state import weights_to_load
from cuboid.checkpoint.storage import Reader
from cuboid.checkpoint.verify import verify
from cuboid.data.store import TOKENIZER, is_store
from cuboid.errors import UserError
from cuboid.model.huggingface import (
    Origin,
    check_shape,
    from_huggingface,
    match_names,
    parameter_shapes,
    to_huggingface,
)
from cuboid.parallel.coordination import Coordination, open_coordination
from cuboid.parallel.parallelize import Engine
from cuboid.spec.model import ModelSpec
from cuboid.spec.run import Run

RUN_FILE, OWN = "run.toml", "checkpoints"
"""What a run's folder holds."""


def find_checkpoint(place: Place) -> tuple[Location, Manifest, list[str]]:
    """The checkpoint that a run's folder, a folder of checkpoints or one checkpoint means: the newest whole one; and
    sentences about newer ones that are damaged."""
    given = locate(place)
    if (given / MANIFEST).exists:
        return given, verify(given), []
    elsewhere = ""
    if (given / RUN_FILE).exists:
        elsewhere = _read_run(given).checkpoint.folder
    folder = next((folder for folder in (locate(elsewhere or given / OWN), given) if checkpoints(folder)), None)
    if folder is None:
        raise UserError(f"{given} holds no checkpoint; name a run that was trained with --set checkpoint.every=100")
    found, manifest, damaged = newest_whole(folder)
    if found is None or manifest is None:
        raise UserError(damaged[0])
    return found, manifest, damaged


def _read_run(given: Location) -> Run:
    try:
        return parse_run(given, RUN_FILE, read_content(given, RUN_FILE).decode())
    except UnicodeDecodeError:
        raise Damage(given, RUN_FILE, "is not UTF-8 text") from None


class Weights:
    """The parameters of a checkpoint, of which any part can be read."""

    def __init__(
        self, checkpoint: Location, model: ModelSpec, index: Index | None = None, kind: str = "parameter"
    ) -> None:
        """`index`: what is needed of it, checked by the rank that read it. `kind`: or average, which a run with
        `optimizer.average` keeps of each."""
        self._reader, self._kind = Reader(checkpoint, index), kind
        if index is not None:
            return
        for name, shape in parameter_shapes(model).items():
            entry = self.index.get(f"{kind}/{name}")
            if entry is None:
                raise Damage(checkpoint, INDEX, f"lacks the parameter {name}")
            if (held := tuple(entry["shape"])) != shape:
                raise UserError(f"{name} of {checkpoint} has shape {held}, not {shape}; use the model it was made with")

    @property
    def index(self) -> Index:
        return self._reader.index

    def read(self, wanted: Mapping[str, ShardedTensor]) -> None:
        """Fills the slices of the named parameters, each in its own dtype."""
        self._reader.fill(stored_names(wanted, self._kind))


def stored_names(wanted: Mapping[str, ShardedTensor], kind: str = "parameter") -> dict[str, ShardedTensor]:
    """Parameters under the names that checkpoints have for them."""
    return {f"{kind}/{name}": slices for name, slices in wanted.items()}


def whole(values: Tensor) -> ShardedTensor:
    """A tensor that is to hold all of a parameter."""
    shape = tuple(values.shape)
    return ShardedTensor(shape, values.dtype, ((TensorSlice((0,) * len(shape), shape, 0), values),))


PREFIX = "hf:"
ROWS = 4096
"""Rows compared together, where two tensors must be equal."""
NO_MATHS = ("name", "initialization", "base_width", "initial_std", "max_positions")


@dataclass(frozen=True)
class Started:
    """What one rank read."""

    bytes: int
    largest: int
    """Bytes of the largest part that was in memory at once, besides what the rank keeps."""


def start(engine: Engine, place: str, quiet: bool = True) -> Started:
    """Fill this rank's parameters; every rank calls it."""
    if engine.groups.world.index == 0 and not quiet:
        print(f"starting from {place}", flush=True)
    group = open_coordination(engine.run.checkpoint.timeout_seconds)
    if not place.startswith(PREFIX):
        place = group.broadcast(str(find_checkpoint(place)[0]) if group.rank == 0 else "")
    started = read_weights(place, engine.run.model, weights_to_load(engine), group)
    for unit in engine.units:
        unit.publish()
    return started


def read_weights(place: str, model: ModelSpec, weights: dict[str, ShardedTensor], group: Coordination) -> Started:
    """Fill what this rank keeps of each parameter from a folder of Hugging Face or from one checkpoint; every rank
    calls this. Rank 0 looks at all there is, and tells every other rank the part that it needs."""
    first = group.rank == 0
    if not place.startswith(PREFIX):
        index = Weights(locate(place), model).index if first else Index()
        index = Wishes(group, lambda: stored_names(weights)).part(index)
        Weights(locate(place), model, index).read(weights)
        return _read(weights)
    path, copies = Path(place.removeprefix(PREFIX)), _copies(model, weights)
    whole = ModelFolder(path) if first else ModelFolder(path, {})
    given = match_names(model, whole.tensors) if first else {}
    wanted = group.gather(tuple(dict.fromkeys(copy.origin.tensor for copy in copies)))
    # Ranks that want the same are told the same object, whose bytes they share.
    parts = {each: {name: (given[name], whole.tensors[given[name]]) for name in each} for each in set(wanted)}
    own = group.scatter([parts[each] for each in wanted])
    folder = whole if first else ModelFolder(path, dict(own.values()))
    return _fill(copies, {name: found for name, (found, _) in own.items()}, folder.read)


def _read(weights: dict[str, ShardedTensor]) -> Started:
    sizes = [values.nbytes for held in weights.values() for _, values in held.slices]
    return Started(sum(sizes), max(sizes, default=0))


@dataclass(frozen=True)
class _Copy:
    """A part of a tensor of Hugging Face, and where it belongs."""

    origin: Origin
    tensor_slice: TensorSlice
    values: Tensor


def _copies(model: ModelSpec, weights: dict[str, ShardedTensor]) -> list[_Copy]:
    origins = from_huggingface(model)
    return [
        _Copy(origin, tensor_slice, values)
        for name, held in weights.items()
        for origin, (tensor_slice, values) in product(origins[name], held.slices)
        if origin.holds(tensor_slice.offsets, tensor_slice.lengths)
    ]


def copy_tensors(
    names: Iterable[str],
    read: Callable[[str, tuple[slice, ...]], Tensor],
    model: ModelSpec,
    weights: dict[str, ShardedTensor],
) -> Started:
    """Fill what a rank keeps from tensors that have the names of Hugging Face; `read` gives a part of one."""
    return _fill(_copies(model, weights), match_names(model, names), read)


def _fill(
    copies: Iterable[_Copy], given: Mapping[str, str], read: Callable[[str, tuple[slice, ...]], Tensor]
) -> Started:
    size, largest = 0, 0
    for copy in copies:
        origin, offsets = copy.origin, copy.tensor_slice.offsets
        part = read(given[origin.tensor], origin.index(offsets, copy.tensor_slice.lengths))
        origin.part_of(copy.values, offsets).copy_(origin.oriented(part))
        size, largest = size + part.nbytes, max(largest, part.nbytes)
    return Started(size, largest)


def check_start(run: Run, own: Place, overwrite: bool = False) -> list[str]:
    """Refuses weights that do not fit, before any process starts; returns notes about what only looks odd. A run that
    has checkpoints of its `own` continues from these, and what it began with may be gone."""
    place = run.training.start_from
    if not place or (checkpoints(own) and not overwrite):
        return []
    if not place.startswith(PREFIX):
        found, manifest, warnings = find_checkpoint(place)
        if found in checkpoints(own):
            raise UserError(f"training.start_from={place} is what --overwrite removes; use another output.folder")
        Weights(found, run.model)
        return [*warnings, *_differences(run.model, run_of(found, manifest).model, place)]
    folder = Path(place.removeprefix(PREFIX))
    described = model_of(folder)
    check_weights(ModelFolder(folder), run.model)
    return [*_differences(run.model, described, place), *_other_tokenizers(run, folder)]


def check_weights(folder: ModelFolder, model: ModelSpec) -> None:
    """Every tensor of the model is there with its shape, none is left over, and tied ones are equal."""
    targets, given = to_huggingface(model), match_names(model, folder.tensors)
    for name, found in given.items():
        check_shape(found, folder.tensors[found].shape, targets[name].shape)
        original = targets[name].copy_of
        if original is not None and not _equal(folder, found, given[original]):
            raise UserError(
                f"{found} differs from {given[original]} and model={model.name} ties them; use tie_embeddings=false"
            )


def _equal(folder: ModelFolder, one: str, other: str) -> bool:
    rows, width = folder.tensors[one].shape
    blocks = ((slice(first, min(first + ROWS, rows)), slice(0, width)) for first in range(0, rows, ROWS))
    return all(torch.equal(folder.read(one, block), folder.read(other, block)) for block in blocks)


def _other_tokenizers(run: Run, folder: Path) -> list[str]:
    """Data whose tokens mean something else to the model."""
    own = folder / TOKENIZER
    stores = [Path(source) for source in run.data.sources if is_store(Path(source))]
    return [
        f"data.source={store} was not made with the tokenizer of {PREFIX}{folder}; build it with --tokenizer {folder}"
        for store in stores
        if own.is_file() and not ((store / TOKENIZER).is_file() and cmp(store / TOKENIZER, own, shallow=False))
    ]


def _differences(ours: ModelSpec, theirs: ModelSpec, place: str) -> list[str]:
    """The shapes agree, or the tensors would not; the rest is the user's to know."""
    names = [field.name for field in fields(ModelSpec) if field.name not in NO_MATHS]
    return [
        f"model.{name}={getattr(ours, name)} is not {getattr(theirs, name)}, with which training.start_from={place} "
        "was made"
        for name in names
        if getattr(ours, name) != getattr(theirs, name)
    ]


def load_checkpoint(place: Place) -> dict[str, Tensor]:
    """Every parameter of the newest checkpoint of a run, or of one checkpoint, whole and in float32 on the CPU, by its
    name: for notebooks and for models of one's own.

    >>> weights = cuboid.load_checkpoint("runs/demo")       # doctest: +SKIP
    """
    checkpoint, manifest, _ = find_checkpoint(place)
    model = run_of(checkpoint, manifest).model
    tensors = {name: torch.empty(shape) for name, shape in parameter_shapes(model).items()}
    Weights(checkpoint, model).read({name: whole(tensor) for name, tensor in tensors.items()})
    return tensors
