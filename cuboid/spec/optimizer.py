"""The table of a run file that says what updates parameters: [optimizer]."""

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Literal

from cuboid.errors import UserError
from cuboid.spec.coding import check_types, require_in_range
from cuboid.spec.layout import Layout
from cuboid.spec.plugin import is_plugin


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """AdamW, Muon, or another by name or by a user's own factory."""

    kind: str = "adamw"
    """adamw; muon: the matrices of blocks by Muon, all else by AdamW; or another optimizer of torch.optim by its name
    in small letters: sgd, adam, nadam, rmsprop, …"""
    python: str = ""
    """A factory of one's own in place of `kind`: python:my_optimizer.py:build, called with groups of parameters and
    `options`; returns a torch.optim.Optimizer or a list of them."""
    options: dict[str, object] = field(default_factory=dict, hash=False)
    """Arguments of an optimizer that is not AdamW: { momentum = 0.9 }."""
    whole_parameters: bool = False
    """Of an optimizer that is not AdamW: it looks at whole matrices, not at each element by itself. Needs zero=0 and
    tp=1."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of their squares."""
    epsilon: float = 1e-8
    """Added to the root of the second mean."""
    weight_decay: float = 0.1
    """Of matrices; norms and biases are not decayed."""
    embedding_rate: float = 1.0
    """What multiplies the learning rate of the embedding's parameters. Their weight decay follows learning_rate.peak
    alone."""
    head_rate: float = 1.0
    """What multiplies the learning rate of the head's matrix, likewise; not for models that tie it to the embedding."""
    average: float = 0.0
    """Decay of a moving average of the weights, such as 0.999: after each update it is itself × this + weights × the
    rest. In float32, sharded as master weights, saved in checkpoints; 0: none."""
    momentum: float = 0.95
    """Of muon: decay of the mean of gradients of matrices."""
    nesterov: bool = True
    """Of muon: what is orthogonalised is the momentum as the next step would have it."""
    update_scale: Literal["rms", "spectral", "original"] = "rms"
    """Of muon: what multiplies the orthogonal update of a matrix m × n. rms: 0.2 √max(m, n), so that its elements are
    as large as AdamW's and one learning rate serves both (Moonlight); spectral: √(m / n); original: √max(1, m / n)."""
    matrix_rate: float = 1.0
    """Of muon: what multiplies the learning rate of matrices, as with update_scale=original, where AdamW's is smaller.
    Their weight decay follows learning_rate.peak alone."""
    newton_schulz_steps: int = 5
    """Of muon: iterations that orthogonalise a matrix."""
    newton_schulz_precision: Literal["auto", "bf16", "float32", "float64"] = "auto"
    """Of muon: the precision of these iterations, and of matrices on their way to the rank that makes them; auto: bf16
    where training.precision has 16 bits or fewer, else training.precision."""
    matrix_function: str = ""
    """Of muon: a function of one's own in place of Newton-Schulz, python:my_optimizer.py:name. It gets whole matrices
    on any layout, (matrices, m, n), and returns as many of the same shape."""
    per_head: bool = False
    """Of muon: every head of queries, keys and values is a matrix of its own."""
    normuon: bool = False
    """Of muon: each row of an orthogonal update is divided by the root of the mean of its squares, which decays by
    beta2, so that every neuron learns alike (NorMuon); the whole is as large as an orthogonal matrix."""
    qk_clip: float = 0.0
    """Of muon: the largest attention logit that the norms of a head's queries and keys allow, over the batch of a step.
    Weights of a head above it are scaled down after the update (QK-clip); 0 turns it off."""
    fused: dict[str, list[int]] = field(default_factory=dict, hash=False)
    """Of muon and a model of one's own: parameters that are several matrices, row after row, by the end of their names
    and the rows of each: { "qkv.weight" = [64, 32, 32] }."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        if self.python and not is_plugin(self.python):
            raise UserError(f"optimizer.python={self.python} names no factory; write python:my_optimizer.py:build")
        if self.python and self.kind != "adamw":
            raise UserError(f"optimizer.kind={self.kind} and optimizer.python both name an optimizer; use one of them")
        if not self.is_own and (self.options or self.whole_parameters):
            raise UserError(
                "optimizer.options and optimizer.whole_parameters mean nothing to AdamW and Muon; use optimizer.beta1, "
                "optimizer.momentum and the like, or another optimizer.kind"
            )
        decays = ("beta1", "beta2", "momentum", "average")
        require_in_range(self, "optimizer", (*decays, "epsilon", "weight_decay", "qk_clip"), low=0)
        for name in decays:
            if getattr(self, name) >= 1:
                raise UserError(f"optimizer.{name}={getattr(self, name)} never forgets; use a number below 1")
        for name in ("embedding_rate", "head_rate", "matrix_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"optimizer.{name}={getattr(self, name)} would not learn; use a number above 0, like 1")
        self._check_muon()

    def _check_muon(self) -> None:
        for each in fields(self) if not self.is_muon else ():
            usual = {} if each.default is MISSING else each.default
            if each.name in OF_MUON and getattr(self, each.name) != usual:
                instead = " or optimizer.options" if self.is_own else ""
                raise UserError(
                    f"optimizer.{each.name}={getattr(self, each.name)} means nothing to {self.called}; "
                    f"use optimizer.kind=muon{instead}"
                )
        require_in_range(self, "optimizer", ("newton_schulz_steps",), low=1, high=100)
        if self.matrix_function and not is_plugin(self.matrix_function):
            raise UserError(
                f"optimizer.matrix_function={self.matrix_function} names no function; write python:my_optimizer.py:name"
            )
        for name, rows in self.fused.items():
            if not rows or min(rows) < 1:
                raise UserError(f"optimizer.fused.{name}={rows} is no list of rows; write it like [64, 32, 32]")

    @property
    def is_muon(self) -> bool:
        """Whether matrices of blocks are updated by Muon."""
        return self.kind == "muon" and not self.python

    @property
    def is_own(self) -> bool:
        """Whether it is neither AdamW nor Muon as the engine has them."""
        return bool(self.python) or self.kind not in ("adamw", "muon")

    @property
    def has_own_code(self) -> bool:
        """Whether it must be tried before a training starts."""
        return self.is_own or bool(self.matrix_function)

    @property
    def called(self) -> str:
        """In a sentence."""
        return f"optimizer.python={self.python}" if self.python else f"optimizer.kind={self.kind}"

    def rate_of(self, name: str) -> float:
        """What multiplies the learning rate of a parameter, as the whole model calls it."""
        if name.startswith("embedding."):
            return self.embedding_rate
        return self.head_rate if name.startswith("head.") and not name.startswith("head.norm.") else 1.0

    def check_model(self, own: bool, qk_norm: bool, tied: bool) -> None:
        """Refuse a model that this optimizer cannot serve. `own`: it is the user's. `tied`: head and embedding are
        one matrix."""
        if tied and self.head_rate != 1:
            raise UserError(
                f"optimizer.head_rate={self.head_rate} has no matrix of its own in a model that ties embeddings; use "
                f"optimizer.embedding_rate={self.head_rate} for both or model.tie_embeddings=false"
            )
        if self.qk_clip and own:
            raise UserError(f"optimizer.qk_clip={self.qk_clip} is not for a model of one's own; use qk_clip=0")
        if self.qk_clip and qk_norm:
            raise UserError(
                f"optimizer.qk_clip={self.qk_clip} has nothing to clip with model.qk_norm=true, which bounds queries "
                "and keys already; use qk_clip=0"
            )
        if self.fused and not own:
            raise UserError(
                f"optimizer.fused={self.fused} is for a model of one's own: in those of the catalog every matrix is a "
                "parameter; omit it"
            )

    def check_layout(self, layout: Layout) -> None:
        """Refuse a layout that keeps parameters or state where this optimizer cannot use them."""
        if layout.offload and (self.is_own or self.is_muon):
            raise UserError(f"offload=true is for AdamW, not for {self.called}; use offload=false")
        if layout.offload and self.average:
            raise UserError(
                f"optimizer.average={self.average} is kept on the device, where offload=true keeps no such state; use "
                "offload=false or average=0"
            )
        if not self.is_own:
            return
        cuts = {"zero": layout.zero if layout.dp * layout.cp > 1 else 0, "tp": layout.tp - 1, "ep": layout.ep - 1}
        name = next((name for name, cut in cuts.items() if cut), "")
        if name and self.whole_parameters:
            raise UserError(
                f"optimizer.whole_parameters=true needs parameters that ranks hold whole, but {name}="
                f"{getattr(layout, name)} cuts them; use zero=0, tp=1 and ep=1"
            )


OF_MUON = (
    "momentum",
    "nesterov",
    "update_scale",
    "matrix_rate",
    "newton_schulz_steps",
    "newton_schulz_precision",
    "matrix_function",
    "per_head",
    "normuon",
    "qk_clip",
    "fused",
)
"""What another optimizer does not read."""
