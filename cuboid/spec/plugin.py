"""Objects of a user's own Python, by name: `python:folder/file.py:name` or `python:package.module:name`."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from cuboid.errors import UserError, either, nearest_names
from cuboid.spec.coding import check_types
from cuboid.spec.layout import Layout, Recompute
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import Initialization, ModelSpec

PREFIX = "python:"


def is_plugin(text: str) -> bool:
    """Whether it names an object of a user's own."""
    return text.startswith(PREFIX)


def resolve(text: str, folder: Path, where: str) -> str:
    """The same name with the whole path of its file, which any folder finds. `where`: the setting it stands in."""
    source, colon, name = text.removeprefix(PREFIX).rpartition(":")
    if not colon or not source or not name:
        raise UserError(f"{where}={text} names no object; write it like {PREFIX}my_model.py:build")
    if not source.endswith(".py"):
        if not all(part.isidentifier() for part in source.split(".")):
            raise UserError(f"{where}={text}: {source} is no module; write it like {PREFIX}package.module:name")
        return text
    for path in (folder / source, Path(source)):
        if path.is_file():
            return f"{PREFIX}{path.resolve()}:{name}"
    raise UserError(f"{where}={text}: {source} is not a file; name a file beside the run or in this folder")


def resolve_here(text: str, where: str) -> str:
    """As `resolve`, in the folder of the command."""
    return resolve(text, Path(), where)


def load_plugin(text: str, where: str) -> Any:
    """The object itself. What its file raises as it is imported is said as it is."""
    source, _, name = text.removeprefix(PREFIX).rpartition(":")
    module = _from_file(Path(source).resolve()) if source.endswith(".py") else _from_package(source, text, where)
    if not hasattr(module, name):
        near = either(nearest_names(name, [known for known in vars(module) if not known.startswith("_")]))
        raise UserError(f"{where}={text}: {source} has no {name}; did you mean {near}?")
    return getattr(module, name)


@cache
def _from_file(path: Path) -> ModuleType:
    # One name for each file: two files called model.py are two modules.
    name = f"cuboid_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be imported; name a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Files beside it can be imported by it, as if it were run.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def _from_package(source: str, text: str, where: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as problem:
        raise UserError(f"{where}={text}: {problem}; name an installed module or a .py file") from None


@dataclass(frozen=True)
class SegmentRun:
    """How the engine runs a segment of a model of one's own: what its costs depend on."""

    tensor: int
    """Ranks it is split over."""
    micro_batch: int
    sequence: int
    precision: str
    recompute: Recompute = "none"
    splits_backward: bool = False
    """Whether the schedule computes weight gradients later."""
    adds_in_place: bool = False
    """Whether gradients are added to those of earlier micro-batches where they lie."""
    on_gpu: bool = False
    """Where RMSNorm is one kernel, and the matmuls of all experts are; on a CPU both are several, and the norm's keep
    their results in float32."""
    expert: int = 1
    """Ranks over which experts are spread."""


class BuiltModel(Protocol):
    """What `build` returns, as far as it can be spoken of without torch (`cuboid.model.custom.Model`)."""

    layers: int
    vocab: int
    data: Any
    evaluation_data: Any

    @property
    def tie_embeddings(self) -> bool: ...

    @property
    def has_sequence(self) -> bool: ...

    @property
    def parameters(self) -> int: ...

    def segment_parameters(self, prefix: str) -> int: ...

    @property
    def mixture(self) -> MixtureSpec | None: ...

    @property
    def experts(self) -> dict[str, int]: ...

    def check_tensor_parallel(self, ranks: int) -> None: ...

    def declared(self, prefix: str) -> dict[str, Any]: ...

    def flow_shapes(self, micro_batch: int, sequence: int) -> list[tuple[int, ...]]: ...

    def costs(self, prefix: str, run: SegmentRun) -> Any: ...

    def estimated_costs(self, prefix: str, run: SegmentRun) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class PythonModelSpec(ModelSpec):
    """Sizes that no table gives are not used: the modules themselves have them."""

    python: str
    """`file.py:build` or `package.module:build`."""
    options: dict[str, object] = field(default_factory=dict, hash=False)
    """Arguments of `build`."""
    initialization: Initialization = "flat"
    hidden: int = 2
    layers: int = 1
    heads: int = 1
    ffn: int = 1
    vocab: int = 1

    def __post_init__(self) -> None:
        check_types(self, "model")

    @property
    def built(self) -> BuiltModel:
        return _built(self.python, repr(sorted(self.options.items())), Options(self.options))

    @property
    def parameters(self) -> int:
        return self.built.parameters

    @property
    def active_parameters(self) -> int:
        return self.parameters

    @property
    def is_routed(self) -> bool:
        return bool(self.built.experts)

    def layer_parameters(self, layer: int) -> int:
        return self.built.segment_parameters(f"layers.{layer}")


class Options:
    """Equal to any other, so that a cache looks at the words beside it only: a table cannot be hashed."""

    def __init__(self, table: Mapping[str, object]) -> None:
        self.table = table

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options)


@lru_cache(maxsize=8)
def _built(source: str, words: str, options: Options) -> BuiltModel:
    build = load_plugin(f"{PREFIX}{source}", "model.python")
    try:
        built: BuiltModel = build(**options.table)
    except TypeError as problem:
        given = ", ".join(map(str, options.table)) or "none"
        raise UserError(f"model.python={source} does not take model.options ({given}): {problem}") from problem
    if not hasattr(built, "segment_parameters"):
        raise UserError(f"model.python={source} returns {type(built).__name__}; it must return a cuboid.Model")
    return built


def build_python_model(table: Mapping[str, Any], folder: Path) -> PythonModelSpec:
    """From `python`, `options` and `name` of a table."""
    for key in table:
        if key not in ("python", "options", "name"):
            raise UserError(
                f"model.{key} means nothing to a model of one's own; use model.options.{key}, which build gets"
            )
    source, options = table["python"], table.get("options", {})
    if not isinstance(source, str) or not isinstance(options, Mapping):
        raise UserError("model.python is a string like my_model.py:build, and model.options a table")
    source = resolve(f"{PREFIX}{source.removeprefix(PREFIX)}", folder, "model.python").removeprefix(PREFIX)
    name = table.get("name") or source.rpartition(":")[0].rpartition("/")[2].removesuffix(".py")
    described = PythonModelSpec(name=str(name), python=source, options=dict(options))
    built = described.built
    return PythonModelSpec(
        name=described.name,
        python=source,
        options=dict(options),
        layers=built.layers,
        vocab=max(built.vocab, 1),
        tie_embeddings=built.tie_embeddings,
        mixture=built.mixture,
    )


def dump_python_model(model: PythonModelSpec) -> dict[str, Any]:
    """The table that `build_python_model` turns back into an equal model."""
    table: dict[str, Any] = {"name": model.name, "python": model.python}
    return table | ({"options": dict(model.options)} if model.options else {})


def layout_for(model: ModelSpec, text: str) -> Layout:
    """The layout of a text. A model of one's own has no sequence parallelism, unless somebody asks for it."""
    layout = Layout.parse(text)
    if isinstance(model, PythonModelSpec) and "sequence_parallel" not in text:
        return replace(layout, sequence_parallel=False)
    return layout
