"""A model of the catalog as a `Model` of one's own, so that a part of it can be changed: its attention, its blocks.

    def build() -> Model:
        return family("llama3-8b", lambda block, layer: setattr(block.attention, "mix", my_attention))

Names, shapes, splits and first weights are those of the catalog's model: unchanged, it computes the same losses. A
parameter of another name or shape is what its module made it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cuboid.errors import UserError
from cuboid.model.custom import Batch, Model
from cuboid.model.initialize import initial_tensor, recipe_of
from cuboid.model.rope import Positions, make_positions
from cuboid.model.transformer import Block, Embedding, Head
from cuboid.spec.load import build_model, model_table
from cuboid.spec.model import ModelSpec
from cuboid.spec.sharding import TIED, segment_parameters

Change = Callable[[Block, int], None]


def family(model: str | Mapping[str, object], change: Change | None = None) -> Model:
    """`model`: a name of the catalog, or a table as a run has under [model]. `change`: given each block and its layer,
    may replace parts of it; what it puts there declares its sharding as any module does."""
    spec = build_model(model_table(model) if isinstance(model, str) else model)
    if spec.prediction_layers:
        raise UserError(
            f"family({spec.name}) has prediction_layers={spec.prediction_layers}, which a model of one's own cannot "
            "have; use prediction_layers=0"
        )
    if recipe_of(spec) == "mup":
        raise UserError(
            f"family({spec.name}) has initialization=mup, whose learning rates are those of the catalog's own blocks; "
            "use another"
        )

    def block(layer: int) -> Block:
        made = _Block(spec, layer)
        if change is not None:
            change(made, layer)
        return made

    prefixes = ["embedding", *(f"layers.{layer}" for layer in range(spec.layers)), "head"]
    shapes = {name: held.shape for prefix in prefixes for name, held in segment_parameters(spec, prefix).items()}

    def initial(name: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
        return initial_tensor(spec, name, shape, seed) if shapes.get(name) == shape else None

    return Model(
        embedding=lambda: _Embedding(spec),
        block=block,
        layers=spec.layers,
        head=lambda: _Head(spec),
        flow=("batch", "sequence", spec.hidden),
        vocab=spec.vocab,
        tied=(TIED, "head.output.weight") if spec.tie_embeddings else None,
        initial=initial,
    )


class _Places:
    """Positions of whole sequences, made once for each kind."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._made: dict[tuple[int, torch.dtype, torch.device], Positions] = {}

    def of(self, length: int, like: Tensor) -> Positions:
        key = (length, like.dtype, like.device)
        if key not in self._made:
            self._made[key] = make_positions(self._spec, *key)
        return self._made[key]


class _Embedding(Embedding):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._places = _Places(spec)

    def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
        tokens = batch["tokens"]
        return super().forward(tokens, self._places.of(tokens.shape[1], self.tokens.weight)).unflatten(0, tokens.shape)


class _Block(Block):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self._places = _Places(spec)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:  # type: ignore[override]
        """x: (micro-batch, length, hidden)."""
        return super().forward(x.flatten(0, 1), self._places.of(x.shape[1], x)).unflatten(0, x.shape[:2])


class _Head(Head):
    def forward(self, x: Tensor, batch: Batch) -> Tensor:  # type: ignore[override]
        """The summed loss."""
        return self.summed_loss(super().forward(x.flatten(0, 1)), batch["labels"].flatten())

    def logits(self, x: Tensor, batch: Batch) -> Tensor:
        """For generation: (micro-batch, length, vocabulary)."""
        return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])
