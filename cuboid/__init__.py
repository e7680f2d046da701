"""Cuboid plans and trains models with data × tensor × pipeline parallelism.

What a model of one's own needs is here by name, and nothing is imported before it is asked for:
`from cuboid import Model, ColumnLinear, RowLinear`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_OF_MODELS = (
    "Batch",
    "ColumnLinear",
    "Flow",
    "Model",
    "PARTIAL",
    "REPLICATED",
    "RowLinear",
    "VOCABULARY",
    "VocabularyEmbedding",
    "VocabularyLoss",
    "split",
)
_PLACES = {
    **dict.fromkeys(_OF_MODELS, "cuboid.model.custom"),
    "Callback": "cuboid.train.callbacks",
    "load_checkpoint": "cuboid.checkpoint.weights",
}

if TYPE_CHECKING:
    from cuboid.checkpoint.weights import load_checkpoint
    from cuboid.model.custom import (
        PARTIAL,
        REPLICATED,
        VOCABULARY,
        Batch,
        ColumnLinear,
        Flow,
        Model,
        RowLinear,
        VocabularyEmbedding,
        VocabularyLoss,
        split,
    )
    from cuboid.train.callbacks import Callback

__all__ = [
    "PARTIAL",
    "REPLICATED",
    "VOCABULARY",
    "Batch",
    "Callback",
    "ColumnLinear",
    "Flow",
    "Model",
    "RowLinear",
    "VocabularyEmbedding",
    "VocabularyLoss",
    "load_checkpoint",
    "split",
]


def __getattr__(name: str) -> Any:
    """Torch is imported with the first name that needs it."""
    if name not in _PLACES:
        raise AttributeError(f"module 'cuboid' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
