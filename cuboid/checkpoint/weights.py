"""The weights alone out of a checkpoint: into any tensors, without the optimizer's state."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

from torch import Tensor

from cuboid.checkpoint.boxes import Box
from cuboid.checkpoint.folder import checkpoints, newest_whole
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import INDEX, MANIFEST, Damage, Manifest, Place
from cuboid.checkpoint.parts import Index
from cuboid.checkpoint.reader import Reader
from cuboid.checkpoint.scattered import Scattered
from cuboid.checkpoint.verify import verify
from cuboid.errors import UserError
from cuboid.model.huggingface import parameter_shapes
from cuboid.spec.model import ModelSpec
from cuboid.spec.run import Run, build_run

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
        elsewhere = _parse(given, RUN_FILE, (given / RUN_FILE).read().decode()).checkpoint.folder
    folder = next((folder for folder in (locate(elsewhere or given / OWN), given) if checkpoints(folder)), None)
    if folder is None:
        raise UserError(f"{given} holds no checkpoint; name a run that was trained with --set checkpoint.every=100")
    found, manifest, damaged = newest_whole(folder)
    if found is None or manifest is None:
        raise UserError(damaged[0])
    return found, manifest, damaged


def run_of(checkpoint: Location, manifest: Manifest) -> Run:
    """The run that wrote a checkpoint."""
    return _parse(checkpoint, MANIFEST, manifest.run)


def _parse(folder: Location, name: str, text: str) -> Run:
    try:
        return build_run(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, UserError) as error:
        raise Damage(folder, name, f"holds no run ({error})") from None


class Weights:
    """The parameters of a checkpoint, of which any part can be read."""

    def __init__(self, checkpoint: Location, model: ModelSpec, index: Index | None = None) -> None:
        """`index`: what is needed of it, checked by the rank that read it."""
        self._reader = Reader(checkpoint, index)
        if index is not None:
            return
        for name, shape in parameter_shapes(model).items():
            entry = self.index.get(f"parameter/{name}")
            if entry is None:
                raise Damage(checkpoint, INDEX, f"lacks the parameter {name}")
            if (held := tuple(entry["shape"])) != shape:
                raise UserError(f"{name} of {checkpoint} has shape {held}, not {shape}; use the model it was made with")

    @property
    def index(self) -> Index:
        return self._reader.index

    def read(self, wanted: Mapping[str, Scattered]) -> None:
        """Fills the boxes of the named parameters, each in its own dtype."""
        self._reader.fill(stored_names(wanted))


def stored_names(wanted: Mapping[str, Scattered]) -> dict[str, Scattered]:
    """Parameters under the names that checkpoints have for them."""
    return {f"parameter/{name}": boxes for name, boxes in wanted.items()}


def whole(values: Tensor) -> Scattered:
    """A tensor that is to hold all of a parameter."""
    shape = tuple(values.shape)
    return Scattered(shape, values.dtype, ((Box((0,) * len(shape), shape, 0), values),))
