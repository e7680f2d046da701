"""`PythonModelSpec`: a model that a user wrote, in place of one described by numbers and switches.

    [model]
    python = "my_model.py:build"        # also model = "python:my_model.py:build"
    options = { hidden = 64 }           # handed to build

`build` returns a `cuboid.Model`. What is known of it here (layers, parameters, how each is split) comes from that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from cuboid.errors import UserError
from cuboid.spec.coding import check_types
from cuboid.spec.model import Initialization, ModelSpec
from cuboid.spec.plugin import PREFIX, load_plugin, resolve


class BuiltModel(Protocol):
    """What `build` returns, as far as it can be spoken of without torch (`cuboid.model.custom.Model`)."""

    layers: int
    vocab: int
    data: Any
    evaluation_data: Any

    @property
    def tie_embeddings(self) -> bool: ...

    @property
    def parameters(self) -> int: ...

    def segment_parameters(self, prefix: str) -> int: ...

    def check_tensor_parallel(self, ranks: int) -> None: ...

    def costs(self, prefix: str, ranks: int, micro_batch: int, sequence: int, precision: str) -> Any: ...

    def estimated_costs(self, prefix: str, ranks: int, micro_batch: int, sequence: int, precision: str) -> Any: ...


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
    )


def dump_python_model(model: PythonModelSpec) -> dict[str, Any]:
    """The table that `build_python_model` turns back into an equal model."""
    table: dict[str, Any] = {"name": model.name, "python": model.python}
    return table | ({"options": dict(model.options)} if model.options else {})
