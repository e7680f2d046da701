"""What the layers of a rank communicate while micro-batches pass through them.

Recomputation runs a layer again up to its last matmul, so that every collective of its forward pass before that one is
made once more."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from cuboid.planning.rank_step import Collective, RankStep
from cuboid.spec.layout import Recompute
from cuboid.spec.sharding import kv_head_of_query, kv_part_count
from cuboid.telemetry.communication_ledger import Kind

INTEGER = 8
"""Bytes of a count or an index."""


class LayerExchanges:
    """Of all layers of one kind: with routed experts or without, and of one recomputation."""

    def __init__(self, step: RankStep, routed: bool, recompute: Recompute) -> None:
        self._step, self._routed, self._recompute = step, routed, recompute
        self._layout, self._model = step.layout, step.model
        self._again = int(recompute != "none")
        kinds = [(step.model.has_experts(layer), step.recompute[layer]) for layer in step.layers]
        self._times = step.micro_batches * kinds.count((routed, recompute))

    def all(self) -> Iterator[Collective]:
        yield from self._attention()
        yield from self._context()
        if self._routed:
            yield from self._routing()
            yield from self._mixture()
        else:
            yield from self._enter(self._model.hidden)
            yield from self._leave(again=0)

    def _attention(self) -> Iterator[Collective]:
        latent = self._model.latent
        if latent is None:
            yield from self._enter(self._model.hidden)
        elif latent.q_rank:
            yield from self._enter(latent.q_rank + latent.kv_rank + latent.qk_rope_dim)
        else:
            yield from self._enter(self._model.hidden)
            yield from self._enter(latent.kv_rank + latent.qk_rope_dim)
        yield from self._leave(self._again)

    def _context(self) -> Iterator[Collective]:
        """Heads for tokens inside, keys and values between. Selective recomputation keeps what came of them, full
        makes all of the forward pass again."""
        layout, model = self._layout, self._model
        inner, outer = layout.cp_inner, layout.cp // layout.cp_inner
        forward = 2 if self._recompute == "full" else 1
        heads = shared = model.heads // layout.tp
        key = value = model.head_dim
        if model.latent is not None:
            key, value = model.latent.qk_nope_dim + model.latent.qk_rope_dim, model.latent.v_dim
        elif kv_head_of_query(model, layout.tp, self._step.place.tp) is None:
            shared = model.kv_heads // kv_part_count(model, layout.tp)
        shared = lcm(shared, inner)  # repeated, so that every rank gets those of its query heads
        both = (key + value) * shared
        for width, what in ((key * heads + both, "query, key and value heads"), (value * heads, "output heads")):
            size, formula = self._tokens(width)
            yield self._exchange("cp", "all-to-all", inner, forward + 1, size, f"{what}: {formula}")
        # After the collective of heads a rank has the tokens of its inner group and its part of the heads.
        size, formula = self._tokens(both)
        what = f"keys and values, and their gradients: {formula}"
        if layout.cp_method == "allgather":
            whole = f"{what} × {outer} ranks"
            yield self._exchange("cp", "all-gather", outer, forward + 1, outer * size, whole)
            yield self._exchange("cp", "reduce-scatter", outer, 1, outer * size, whole)
        else:
            yield self._exchange("cp", "send", outer, (outer - 1) * (forward + 2), size, what)

    def _mixture(self) -> Iterator[Collective]:
        """Each tensor rank routes its part of the tokens; shared experts are split like any feed-forward block."""
        mixture, layout = self._model.mixture, self._layout
        assert mixture is not None
        if mixture.shared_ffn:
            yield from self._enter(self._model.hidden)
            yield from self._leave(self._again)
        if not layout.sequence_parallel:  # parts put together: results forward, gradients backward
            yield self._tensor("all-gather", 2, self._model.hidden)
        rows = self._step.tokens // layout.tp * mixture.top_k
        what = f"rows to experts and back: {self._step.element} bytes × {rows:,} rows × {self._model.hidden:,} hidden"
        size = self._step.element * rows * self._model.hidden
        yield self._exchange("ep", "all-to-all", layout.ep, 4 + 2 * self._again, size, what)
        counts = INTEGER * mixture.experts
        what = f"rows of each expert: {INTEGER} bytes × {mixture.experts}"
        yield self._exchange("ep", "all-to-all", layout.ep, 1, counts, what)

    def _routing(self) -> Iterator[Collective]:
        """What routers must know of whole sequences."""
        mixture, layout = self._model.mixture, self._layout
        assert mixture is not None
        ranks, calls = layout.cp * layout.tp, 1 + self._again
        if mixture.balance_coefficient and mixture.balance_over == "sequence":
            size = self._step.wide * layout.micro_batch * mixture.experts
            what = f"load of experts: {self._step.wide} bytes × {layout.micro_batch} sequences × {mixture.experts}"
            yield self._exchange("sequence", "all-reduce", ranks, calls, size, what)
        if mixture.capacity_factor:
            tokens, width = self._step.tokens * layout.cp, 1 + mixture.top_k
            what = f"choices of tokens: {INTEGER} bytes × {tokens:,} tokens × {width}"
            yield self._exchange("sequence", "all-gather", ranks, calls, INTEGER * tokens * width, what)

    def _enter(self, width: int) -> Iterator[Collective]:
        """Into a region of split matrices: tokens gathered, or their gradient summed."""
        if self._layout.sequence_parallel:
            yield self._tensor("all-gather", 1 + self._again, width)
            yield self._tensor("reduce-scatter", 1, width)
        else:
            yield self._tensor("all-reduce", 1, width)

    def _leave(self, again: int) -> Iterator[Collective]:
        """Out of it: partial matmuls summed; the gradient gathered where tokens are split."""
        width = self._model.hidden
        if self._layout.sequence_parallel:
            yield self._tensor("reduce-scatter", 1 + again, width)
            yield self._tensor("all-gather", 1, width)
        else:
            yield self._tensor("all-reduce", 1 + again, width)

    def _tensor(self, kind: Kind, calls: int, width: int) -> Collective:
        size, formula = self._tokens(width)
        return self._exchange("tp", kind, self._layout.tp, calls, size, f"layer activations: {formula}")

    def _tokens(self, width: int) -> tuple[int, str]:
        """Bytes of so many elements for each token, and their formula."""
        element, tokens = self._step.element, self._step.tokens
        return element * tokens * width, f"{element} bytes × {tokens:,} tokens × {width:,}"

    def _exchange(self, dimension: str, kind: Kind, ranks: int, calls: int, size: int, what: str) -> Collective:
        return Collective(dimension, kind, ranks, self._times * calls, size, what)
