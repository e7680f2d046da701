"""What a run says about its data: where tokens come from, how they become samples, what is held out."""

from dataclasses import dataclass, field
from typing import Literal

from cuboid.errors import UserError
from cuboid.spec.coding import check_types

OWN_DATA = "model"
"""The source of a model of one's own that brings its data set."""
BUILT_IN = ("python-stdlib", "synthetic")
"""Sources that need no file: bytes of the standard library's own source; random tokens with masked labels."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where tokens come from. Paths are relative to the folder the command runs in, as output.folder is."""

    source: str = "python-stdlib"
    """python-stdlib, synthetic, a store that `cuboid data build` wrote, the prefix of a Megatron .bin/.idx pair, a data
    set of one's own (python:my_data.py:dataset), or the one that a model of one's own brings (model)."""
    mixture: dict[str, float] | None = field(default=None, hash=False)
    """Source -> weight, in place of `source`. A weight is a share of the samples; weights need not sum to one."""
    packing: Literal["packed", "padded"] = "packed"
    """packed: documents one after another, cut every `sequence` tokens. padded: a document per sample, cut at its end
    or filled up."""
    mask_across_documents: bool = False
    """Leave out of the loss the first token of each document, which no earlier token of its own document predicts.
    What attention sees is decided below."""
    attention_within_documents: bool = False
    """Tokens of a packed sample see only those of their own document."""
    positions_within_documents: bool = False
    """Positions count from the start of each document, as Hugging Face's packed collators and Megatron's
    reset-position-ids do. Rotary positions are relative: to them it matters only where attention crosses documents."""
    validation: str = ""
    """A source of its own for evaluation."""
    validation_fraction: float = 0.0
    """Which part of the documents is held out for evaluation, spread evenly over the source; training never sees
    them."""

    def __post_init__(self) -> None:
        check_types(self, "data")
        if not self.source:
            raise UserError('data.source="" names no data; use python-stdlib or the path of a store')
        if self.mixture is not None:
            self._check_mixture(self.mixture)
        if not 0 <= self.validation_fraction < 1:
            raise UserError(
                f"data.validation_fraction={self.validation_fraction} is no part of the documents; "
                "use 0.01, or 0 for none"
            )
        if self.validation and self.validation_fraction:
            raise UserError(
                f"data.validation={self.validation} and data.validation_fraction={self.validation_fraction} both "
                "choose the held-out data; use one of them"
            )
        if self.validation_fraction and "synthetic" in self.sources:
            raise UserError("data.source=synthetic has no documents to hold out; use validation_fraction=0")

    def _check_mixture(self, mixture: dict[str, float]) -> None:
        if not mixture:
            raise UserError(
                'data.mixture={} names no source; write mixture = { "stores/web" = 0.7, "stores/code" = 0.3 }'
            )
        if self.source != "python-stdlib":
            raise UserError(f"data.source={self.source} and data.mixture both name sources; use one of them")
        for name, weight in mixture.items():
            if weight <= 0:
                raise UserError(f"data.mixture.{name}={weight} is no weight; use a number above 0, or omit it")

    @property
    def weights(self) -> dict[str, float]:
        """Every source with its weight."""
        return self.mixture if self.mixture is not None else {self.source: 1.0}

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.weights)

    @property
    def uses_documents(self) -> bool:
        """Whether the model must know where documents begin."""
        return self.attention_within_documents or self.positions_within_documents

    @property
    def holds_out(self) -> bool:
        """Whether there is data to evaluate on."""
        return bool(self.validation or self.validation_fraction)


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """The loss on held-out data, now and then during training."""

    every: int = 0
    """Steps between evaluations; 0 is never."""
    batches: int = 8
    """How many global batches one evaluation takes at most: the same samples each time, each once."""

    def __post_init__(self) -> None:
        check_types(self, "evaluation")
        if self.every < 0:
            raise UserError(f"evaluation.every={self.every} is too small; use every=0 for never, or every=100")
        if self.batches < 1:
            raise UserError(f"evaluation.batches={self.batches} is too small; use batches=1 or more")
