"""Cuboid plans and trains models with data × tensor × pipeline parallelism.

What the commands do, and what a model of one's own needs, is here by name. Nothing is imported before it is asked for:

    plan = cuboid.plan("llama3-8b", "h100x64", global_batch=512, sequence=8192)
    from cuboid import ColumnLinear, Model, RowLinear
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PLACES = {
    **dict.fromkeys(("Batch", "Flow", "Model", "VocabularyLoss"), "cuboid.model.custom"),
    **dict.fromkeys(("ColumnLinear", "RowLinear", "VocabularyEmbedding"), "cuboid.model.linear"),
    **dict.fromkeys(("EXPERT", "PARTIAL", "REPLICATED", "VOCABULARY", "split"), "cuboid.spec.sharding"),
    "Dropout": "cuboid.model.dropout",
    "RoutedExperts": "cuboid.model.moe",
    **dict.fromkeys(("Router", "Routing"), "cuboid.model.router"),
    "Tokens": "cuboid.model.load_balancing",
    "MixtureSpec": "cuboid.spec.mixture",
    "family": "cuboid.model.family",
    "Callback": "cuboid.training.callbacks",
    "UserError": "cuboid.errors",
    **dict.fromkeys(("Trained", "make_run", "plan", "train", "verify"), "cuboid.api"),
    "load_checkpoint": "cuboid.checkpoint.weights",
}

if TYPE_CHECKING:
    from cuboid.api import Trained, make_run, plan, train, verify
    from cuboid.checkpoint.weights import load_checkpoint
    from cuboid.errors import UserError
    from cuboid.model.custom import Batch, Flow, Model, VocabularyLoss
    from cuboid.model.dropout import Dropout
    from cuboid.model.family import family
    from cuboid.model.linear import ColumnLinear, RowLinear, VocabularyEmbedding
    from cuboid.model.load_balancing import Tokens
    from cuboid.model.moe import RoutedExperts
    from cuboid.model.router import Router, Routing
    from cuboid.spec.mixture import MixtureSpec
    from cuboid.spec.sharding import EXPERT, PARTIAL, REPLICATED, VOCABULARY, split
    from cuboid.training.callbacks import Callback

__all__ = [
    "EXPERT",
    "PARTIAL",
    "REPLICATED",
    "VOCABULARY",
    "Batch",
    "Callback",
    "ColumnLinear",
    "Dropout",
    "Flow",
    "MixtureSpec",
    "Model",
    "RoutedExperts",
    "Router",
    "Routing",
    "RowLinear",
    "Tokens",
    "Trained",
    "UserError",
    "VocabularyEmbedding",
    "VocabularyLoss",
    "family",
    "load_checkpoint",
    "make_run",
    "plan",
    "split",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Torch is imported with the first name that needs it."""
    if name not in _PLACES:
        raise AttributeError(f"module 'cuboid' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
