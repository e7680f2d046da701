"""The router: which experts each token goes to, and with what weight.

Choosing is discrete: two layouts that round differently could choose differently where two scores are all but equal.
In float64 that does not happen; in bf16 the logits are taken in float32, as every public mixture was trained with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.kernels.precision import wide
from cuboid.kernels.recompute import keep_matmuls
from cuboid.model.load_balancing import Balance, Tokens, counted
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.sharding import BALANCE, PARTIAL, Split


@dataclass(frozen=True)
class Routing:
    chosen: Tensor
    """(tokens, top_k): the experts of each token."""
    weights: Tensor
    """(tokens, top_k)"""
    kept: Tensor | None = None
    """(tokens, top_k): False where an expert had no room left for a token; None: all are kept."""


class Router(nn.Module):
    # Each tensor rank routes its part of the tokens.
    sharding: Mapping[str, Split] = {"weight": PARTIAL, "bias": BALANCE, "logit_bias": PARTIAL}

    def __init__(self, hidden: int, mixture: MixtureSpec) -> None:
        super().__init__()
        self.mixture = mixture
        self.weight = nn.Parameter(torch.empty(mixture.experts, hidden))
        # Moved by the balance of the load and not by a gradient; a parameter, because it belongs to the model's state.
        self.bias = nn.Parameter(torch.empty(mixture.experts)) if mixture.router_bias else None
        self.logit_bias = nn.Parameter(torch.empty(mixture.experts)) if mixture.biases else None
        self.balance: Balance | None = None
        """Set while training; without it tokens are only routed."""
        self.row = 0
        """This layer's row in the statistics."""
        self.whole_sequences: Callable[[Tensor, Tokens], tuple[Tensor, Tensor]] = _already_whole
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=hidden**-0.5)
            if self.bias is not None:
                nn.init.zeros_(self.bias)
            if self.logit_bias is not None:
                nn.init.zeros_(self.logit_bias)

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        dtype = wide(x.dtype)
        logits = keep_matmuls(partial(functional.linear, x.to(dtype), self.weight.to(dtype)))
        if self.logit_bias is not None:
            logits = logits + self.logit_bias.to(dtype)
        scores = self._scores(logits)
        ranked = scores.detach()
        if self.balance is not None and self.balance.is_noisy:
            ranked = self._noisy(logits.detach(), ranked, self.balance.noise(self.row, tokens, logits))
        chosen = self.choose(ranked)
        weights = scores.gather(1, chosen)
        if self.mixture.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * self.mixture.scaling
        kept = self._within_capacity(chosen, tokens) if self.mixture.capacity_factor else None
        if self.balance is not None and torch.is_grad_enabled():
            weights = self.balance.attach(weights, self.row, logits, scores, chosen, tokens, kept)
        return Routing(chosen, weights, kept)

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.mixture.scoring == "softmax" else logits.sigmoid()

    def _noisy(self, logits: Tensor, scores: Tensor, noise: Tensor) -> Tensor:
        """Scores with noise on their logarithms, which of softmax is noise on logits."""
        on_logits = self.mixture.scoring == "softmax" or self.mixture.noise_on == "logits"
        return self._scores(logits + noise) if on_logits else scores * noise.exp()

    @torch.no_grad()
    def choose(self, scores: Tensor) -> Tensor:
        mixture = self.mixture
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        if mixture.groups > 1:
            grouped = scores.unflatten(1, (mixture.groups, -1))
            best = 2 if mixture.scoring == "sigmoid" else 1
            group_scores = grouped.topk(min(best, grouped.shape[2]), -1)[0].sum(-1)
            closed = torch.ones_like(group_scores, dtype=torch.bool)
            closed.scatter_(1, group_scores.topk(mixture.top_groups, -1)[1], False)
            scores = grouped.masked_fill(closed.unsqueeze(2), -torch.inf).flatten(1)
        return scores.topk(mixture.top_k, -1)[1]

    @torch.no_grad()
    def _within_capacity(self, chosen: Tensor, tokens: Tokens) -> Tensor:
        """Of a sequence's assignments to one expert the first ones are kept: per sequence, so that no layout and no
        micro-batching changes which."""
        whole, place = self.whole_sequences(chosen, tokens)
        sequences, length, top_k = whole.shape
        experts = self.mixture.experts
        asked = torch.zeros(sequences, length, experts, dtype=torch.int32, device=chosen.device)
        asked.scatter_(2, whole, 1)
        room = -int(-self.mixture.capacity_factor * length * top_k // experts)
        fits = asked.cumsum(1) <= room
        return fits.flatten(0, 1)[place].gather(1, chosen)


def _already_whole(chosen: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """(sequences, length, top_k) of all tokens of the sequences, and where in it each token of this rank stands."""
    return chosen.unflatten(0, (-1, tokens.length)), torch.arange(chosen.shape[0], device=chosen.device)


Quantised = tuple[Tensor, Tensor]
"""Values in fp8, and scales of rows, which are the last dimension."""
LONGEST = 16384
"""A row that one program of a kernel holds."""


def keep_rounded(rows: Tensor, rounded: Quantised) -> Tensor:
    """`rows`, made together with what they are in fp8. On the tensor, because autograd hands on nothing else."""
    rows.rounded = rounded  # type: ignore[attr-defined]
    return rows


def take_rounded(rows: Tensor) -> Quantised | None:
    """Once: the rows themselves may be kept for longer."""
    found: Quantised | None = rows.__dict__.pop("rounded", None)
    return found


def _room_for_rounded(rows: Tensor) -> Quantised:
    values = rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn)
    return values, rows.new_empty(rows.shape[0], dtype=torch.float32)


class _PermuteRounded(torch.autograd.Function):
    """As `_Permute`, in 16 bits and in fp8."""

    @staticmethod
    def forward(context: Any, x: Tensor, home: Tensor) -> tuple[Tensor, ...]:
        from cuboid.kernels.triton_fp8 import permute_rounded

        context.save_for_backward(home)
        x = x.contiguous()
        tokens, hidden = x.shape
        rows = x.new_empty(home.numel(), hidden)
        values, scales = _room_for_rounded(rows)
        if tokens:
            permute_rounded[(tokens,)](
                x, home, rows, values, scales, hidden, home.numel(), TOP_K=home.shape[1], **_whole_rows(hidden)
            )
        context.mark_non_differentiable(values, scales)
        context.set_materialize_grads(False)
        return rows, values, scales

    @staticmethod
    def backward(context: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, None]:
        (home,) = context.saved_tensors
        return None if gradient is None else _combined(gradient, home, None), None


def _whole_rows(width: int) -> dict[str, int]:
    block = 1 << (width - 1).bit_length()
    return {"BLOCK": block, "num_warps": 4 if block <= 4096 else 8}


class _Permute(torch.autograd.Function):
    """Each token once for each of its experts, in the order of experts. The gradient comes home by a gather and a sum
    over a token's experts, which is deterministic where adding at an index is not."""

    @staticmethod
    def forward(context: Any, x: Tensor, order: Tensor, home: Tensor) -> Tensor:
        context.save_for_backward(home)
        return x.index_select(0, order // home.shape[1])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (home,) = context.saved_tensors
        if fuses(gradient):
            return _combined(gradient, home, None), None, None
        return _rows_at(gradient, home).sum(1), None, None


class _Unpermute(torch.autograd.Function):
    """Rows in the order of experts → (tokens, top_k, hidden)."""

    @staticmethod
    def forward(context: Any, rows: Tensor, order: Tensor, home: Tensor) -> Tensor:
        context.save_for_backward(order)
        return _rows_at(rows, home)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = context.saved_tensors
        return gradient.flatten(0, 1).index_select(0, order), None, None


class Reorder(torch.autograd.Function):
    """Rows in another order; `inverse` undoes it, and so brings the gradient back without adding anything."""

    @staticmethod
    def forward(context: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        context.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = context.saved_tensors
        return gradient.index_select(0, inverse), None, None


def _rows_at(rows: Tensor, home: Tensor) -> Tensor:
    """(tokens, top_k, hidden); what was not kept has its home behind the last row and is zero."""
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    return padded.index_select(0, home.flatten()).unflatten(0, home.shape)


def fuses(x: Tensor) -> bool:
    """Whether kernels of our own serve: on a GPU, in two bytes. In float32 and float64 every sum is torch's."""
    return x.is_cuda and x.element_size() == 2


def _rounds(x: Tensor) -> bool:
    return fuses(x) and x.shape[1] <= LONGEST


COMBINE_BLOCK = 2048


def _combined(rows: Tensor, home: Tensor, weights: Tensor | None) -> Tensor:
    from cuboid.kernels.triton_kernels import combine_rows

    rows = rows.contiguous()
    tokens, top_k = home.shape
    hidden = rows.shape[1]
    result = rows.new_empty(tokens, hidden)
    grid = (tokens, -(-hidden // COMBINE_BLOCK))
    weighted = weights is not None
    combine_rows[grid](
        rows, home, weights, result, hidden, rows.shape[0], TOP_K=top_k, WEIGHTED=weighted, BLOCK=COMBINE_BLOCK
    )
    return result


class _Combine(torch.autograd.Function):
    """The weighted sum over each token's experts, without the (tokens, top_k, hidden) tensor in between."""

    @staticmethod
    def forward(context: Any, rows: Tensor, weights: Tensor, home: Tensor, rounds: bool) -> Tensor:
        weights = weights.contiguous()
        context.save_for_backward(rows, weights, home)
        context.rounds = rounds
        return _combined(rows, home, weights)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, home = context.saved_tensors
        rows, gradient = rows.contiguous(), gradient.contiguous()
        row_gradient, weight_gradient = torch.empty_like(rows), torch.empty_like(weights)
        if context.rounds:
            from cuboid.kernels.triton_fp8 import combine_gradients_rounded

            values, scales = _room_for_rounded(rows)
            hidden, (tokens, top_k) = rows.shape[1], home.shape
            made = (row_gradient, weight_gradient, values, scales)
            if tokens:
                combine_gradients_rounded[(tokens,)](
                    gradient, rows, home, weights, *made, hidden, len(rows), TOP_K=top_k, **_whole_rows(hidden)
                )
            return keep_rounded(row_gradient, (values, scales)), weight_gradient, None, None
        from cuboid.kernels.triton_kernels import combine_gradients

        combine_gradients[(home.numel(),)](
            gradient,
            rows,
            home,
            weights,
            row_gradient,
            weight_gradient,
            rows.shape[1],
            rows.shape[0],
            TOP_K=home.shape[1],
            BLOCK=COMBINE_BLOCK,
        )
        return row_gradient, weight_gradient, None, None


@dataclass(frozen=True)
class Permutation:
    """Where each assignment of a token to an expert stands in the order of experts."""

    order: Tensor
    """(rows): the assignment, token · top_k + choice, of each row. As many rows as assignments, so that the host need
    not know how many are kept: those that are not stand behind the last expert's, and nobody reads what becomes of
    them."""
    home: Tensor
    """(tokens, top_k): the row of each assignment; the number of rows where it was not kept."""
    counts: Tensor
    """(experts): rows of each."""

    def permute(self, x: Tensor, rounds: bool = False) -> Tensor:
        """`rounds`: experts multiply in fp8, and nothing lies between."""
        if rounds and _rounds(x):
            rows, *rounded = _PermuteRounded.apply(x, self.home)
            return keep_rounded(rows, tuple(rounded))
        return _Permute.apply(x, self.order, self.home)

    def unpermute(self, rows: Tensor, weights: Tensor, rounds: bool = False) -> Tensor:
        """The weighted sum over each token's experts. `rounds`: as in `permute`, of the gradient."""
        if fuses(rows):
            return _Combine.apply(rows, weights, self.home, rounds and _rounds(rows))
        returned = _Unpermute.apply(rows, self.order, self.home)
        return torch.bmm(weights.to(rows.dtype).unsqueeze(1), returned).squeeze(1)


@torch.no_grad()
def permutation_of(routing: Routing, experts: int) -> Permutation:
    wanted = routing.chosen.flatten()
    if routing.kept is not None:
        wanted = wanted.where(routing.kept.flatten(), experts)  # behind the last expert
    order, home, counts = _order_by_expert(wanted, experts)
    if routing.kept is not None:
        home = home.where(routing.kept.flatten(), order.numel())
    return Permutation(order, home.view(routing.chosen.shape), counts)


def _order_by_expert(wanted: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The stable order of assignments by expert, its inverse, and how many each expert has."""
    if wanted.is_cuda:
        from cuboid.kernels.triton_kernels import order_by_expert

        return order_by_expert(wanted, experts)
    order = wanted.argsort(stable=True)
    home = torch.empty_like(order)
    home[order] = torch.arange(order.numel(), device=order.device)
    return order, home, counted(wanted, experts + 1)[:experts]


def order_arrivals(arriving: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """From the order of (ranks, experts) to that of (experts, ranks), and its inverse. `arriving`: rows of each pair;
    `rows`: of all."""
    if arriving.is_cuda:
        from cuboid.kernels import triton_kernels

        return triton_kernels.order_arrivals(arriving, rows)
    expert = torch.arange(arriving.numel(), device=arriving.device) % arriving.shape[1]
    order = expert.repeat_interleave(arriving.flatten(), output_size=rows).argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(rows, device=arriving.device)
    return order, inverse
