"""What there is to say of checkpoints, for people: found from a run, a folder or themselves, and told without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import prod
from typing import Any

from cuboid.checkpoint.folder import checkpoints, step_of
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import INDEX, MANIFEST, STEP_FOLDER, Damage, Place, Watch, read_manifest
from cuboid.checkpoint.verify import BYTES, check_file, check_index, damages
from cuboid.errors import UserError
from cuboid.readers import parse_toml


def find(place: Place) -> list[Location]:
    """The checkpoints a person means: those of a run's folder, of a folder of checkpoints, or the one; oldest first."""
    here = locate(place)
    if not here.files.is_folder(here.path) and not here.names():
        raise UserError(f"{here} is no folder; use a run's folder, its checkpoints or one of them")
    if STEP_FOLDER.fullmatch(here.name) or (here / MANIFEST).size is not None:
        return [here]
    found = checkpoints(here) or checkpoints(here / "checkpoints")
    if not found:
        raise UserError(f"{here} holds no checkpoint; use a run's folder, its checkpoints or one of them")
    return found


@dataclass(frozen=True)
class Summary:
    checkpoint: str
    step: int | None
    layout: str
    written: str
    bytes: int
    checked: str
    """names and sizes, or contents."""
    damaged: list[dict[str, str]] = field(default_factory=list)
    """File and reason."""

    @property
    def seconds_old(self) -> float | None:
        try:
            return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(self.written)).total_seconds())
        except (ValueError, TypeError):  # a stranger's date
            return None


def held_bytes(checkpoint: Location) -> int:
    return sum((checkpoint / name).size or 0 for name in checkpoint.names())


def summarize(checkpoint: Location, contents: bool = False, watch: Watch | None = None) -> Summary:
    """Never fails: what is damaged is said."""
    step = step_of(checkpoint) if STEP_FOLDER.fullmatch(checkpoint.name) else None
    layout = written = ""
    try:
        manifest = read_manifest(checkpoint)
        step, layout, written = manifest.step, manifest.layout, manifest.written
    except Damage:
        pass  # said below
    problems = [{"file": damage.file, "reason": damage.reason} for damage in damages(checkpoint, contents, watch)]
    size = held_bytes(checkpoint)
    return Summary(str(checkpoint), step, layout, written, size, "contents" if contents else "sizes", problems)


@dataclass(frozen=True)
class TensorFacts:
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    chunks: int


@dataclass(frozen=True)
class Description:
    checkpoint: str
    step: int
    updates: int
    tokens: int
    position: int
    model: str
    parameters: int
    layout: str
    precision: str
    written: str
    version: str
    torch_version: str
    data: str
    files: dict[str, int]
    bytes: int
    tensors: list[TensorFacts]


def describe(checkpoint: Location, wanted: str = "") -> Description:
    """What it is of, with the tensors whose names contain `wanted`; a `Damage` where it cannot be read."""
    manifest = read_manifest(checkpoint)
    check_file(checkpoint, INDEX, manifest.files[INDEX])
    index = check_index(checkpoint)
    run = _table(manifest.run)
    training, model = _part(run, "training"), _part(run, "model")
    tensors = [
        TensorFacts(
            name,
            entry["dtype"],
            tuple(entry["shape"]),
            prod(entry["shape"]) * BYTES[entry["dtype"]],
            len(entry["chunks"]),
        )
        for name, entry in sorted(index.items())
    ]
    sequence = training.get("sequence", 0)
    files = {name: facts.bytes for name, facts in manifest.files.items()}
    return Description(
        checkpoint=str(checkpoint),
        step=manifest.step,
        updates=manifest.updates,
        tokens=manifest.position * sequence if isinstance(sequence, int) else 0,
        position=manifest.position,
        model=str(model.get("name", "")),
        parameters=sum(prod(tensor.shape) for tensor in tensors if tensor.name.startswith("parameter/")),
        layout=manifest.layout,
        precision=str(training.get("precision", "")),
        written=manifest.written,
        version=manifest.version,
        torch_version=manifest.torch_version,
        data=manifest.data,
        files=files,
        bytes=sum(files.values()),
        tensors=[tensor for tensor in tensors if wanted in tensor.name],
    )


def _table(text: str) -> dict[str, Any]:
    """Only looked at: a stranger's run is not built, so no path in it is followed."""
    try:
        return parse_toml(text)
    except ValueError:
        return {}


def _part(table: dict[str, Any], name: str) -> dict[str, Any]:
    part = table.get(name)
    return part if isinstance(part, dict) else {}
