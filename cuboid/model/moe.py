"""A MoE in place of a feed-forward block: each token goes through its few routed experts, and through
the shared ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.kernels.compiler import uncompiled
from cuboid.kernels.recompute import keep_matmuls
from cuboid.model.feed_forward import GATINGS, FeedForward, Gating
from cuboid.model.load_balancing import Tokens
from cuboid.model.rope import Positions
from cuboid.model.router import Router, Routing, fuses, permutation_of
from cuboid.spec.model import ModelSpec
from cuboid.spec.sharding import EXPERT, Split

GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]
WholeExperts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(rows, gate, up, down, counts) -> rows"""


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows of x, `counts` consecutive ones per expert, each group times its expert's weight of shape (out, in). What
    comes of rows behind the last group has no meaning."""
    if takes_one_kernel(x, weight.shape[1]):
        return functional.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    *groups, rest = _groups(x, counts)
    made = [functional.linear(rows, each) for rows, each in zip(groups, weight.unbind(), strict=True)]
    return torch.cat([*made, rest.new_zeros(rest.shape[0], weight.shape[1])])


def grouped_outer(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """(experts, out, in): the gradient of a grouped matmul's weight, from that of its result and its input."""
    if takes_one_kernel(x, y.shape[1]):
        return functional.grouped_mm(y.t(), x, offs=counts.cumsum(0, dtype=torch.int32))
    pairs = zip(_groups(y, counts)[:-1], _groups(x, counts)[:-1], strict=True)
    return torch.stack([left.t() @ right for left, right in pairs])


def _groups(x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """The rows of each expert, and those that are no expert's."""
    sizes = counts.tolist()
    return x.split([*sizes, x.shape[0] - sum(sizes)])


def takes_one_kernel(x: Tensor, width: int) -> bool:
    """Torch's grouped matmul takes bf16 on CUDA, with rows of whole 16 bytes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0 and width % 8 == 0


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Experts are not compiled, so on a GPU a kernel of our own fuses it."""
    return _Swiglu.apply(gate, up) if fuses(gate) else functional.silu(gate) * up


class _Swiglu(torch.autograd.Function):
    """Gate and up lie each by itself, or side by side in the rows of one tensor; so do their gradients."""

    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor) -> Tensor:
        from cuboid.kernels import triton_kernels

        if not lie_side_by_side(gate, up):
            gate, up = gate.contiguous(), up.contiguous()
        context.save_for_backward(gate, up)
        result, count = gate.new_empty(gate.shape), gate.numel()
        triton_kernels.swiglu[(_blocks(count),)](gate, up, result, count, **_rows_of(gate), BLOCK=SWIGLU_BLOCK)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        from cuboid.kernels import triton_kernels

        gate, up = context.saved_tensors
        count = gate.numel()
        if lie_side_by_side(gate, up):
            gate_gradient, up_gradient = gate.new_empty(gate.shape[0], 2 * gate.shape[1]).chunk(2, dim=1)
        else:
            gate_gradient, up_gradient = torch.empty_like(gate), torch.empty_like(up)
        triton_kernels.swiglu_gradients[(_blocks(count),)](
            gradient.contiguous(), gate, up, gate_gradient, up_gradient, count, **_rows_of(gate), BLOCK=SWIGLU_BLOCK
        )
        return gate_gradient, up_gradient


def lie_side_by_side(left: Tensor, right: Tensor) -> bool:
    """Whether they are the two halves of the columns of one tensor."""
    halves = left.dim() == 2 and left.stride() == right.stride() == (2 * left.shape[1], 1)
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return halves and same and left.storage_offset() + left.shape[1] == right.storage_offset()


def _rows_of(gate: Tensor) -> dict[str, int]:
    if gate.is_contiguous():
        return {"WIDTH": 1, "STRIDE": 1}
    return {"WIDTH": gate.shape[1], "STRIDE": gate.stride(0)}


SWIGLU_BLOCK = 4096


def _blocks(count: int) -> int:
    """At least one, which finds nothing to do: an expert rank may have been sent no row at all."""
    return max(1, -(-count // SWIGLU_BLOCK))


def add_biases(rows: Tensor, biases: Tensor | None, counts: Tensor) -> Tensor:
    """To each row the bias of its expert; rows behind the last group stay as they are."""
    if biases is None:
        return rows
    # A matmul with zeros and ones, whose gradient adds in the same order every time.
    edges = counts.cumsum(0)
    place = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
    own = (place >= edges - counts) & (place < edges)
    return rows + own.to(rows.dtype) @ biases


class Experts(nn.Module):
    """The routed experts, stacked; how many it holds comes from the weights."""

    sharding: Mapping[str, Split] = {"gate*": EXPERT, "up*": EXPERT, "down*": EXPERT}

    def __init__(self, model: ModelSpec, experts: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, width, model.hidden)) if model.is_gated else None
        self.up = nn.Parameter(torch.empty(experts, width, model.hidden))
        self.down = nn.Parameter(torch.empty(experts, model.hidden, width))
        biased = model.mixture is not None and model.mixture.biases
        self.gate_bias = nn.Parameter(torch.empty(experts, width)) if biased and model.is_gated else None
        self.up_bias = nn.Parameter(torch.empty(experts, width)) if biased else None
        self.down_bias = nn.Parameter(torch.empty(experts, model.hidden)) if biased else None
        self.matmul: GroupedMatmul = grouped_matmul
        self.whole: WholeExperts | None = None
        """All of it in fp8, which takes rows that are rounded already."""
        self.swiglu: Gating = swiglu if model.activation == "swiglu" else GATINGS.get(model.activation, swiglu)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x: rows in the order of experts, `counts` of each."""
        if self.whole is not None and self.gate is not None:
            return self.whole(x, self.gate, self.up, self.down, counts)
        if self.gate is None:
            up = add_biases(self.matmul(x, self.up, counts), self.up_bias, counts)
            inner = functional.gelu(up, approximate="tanh")
        else:
            up, gate = self.matmul(x, self.up, counts), self.matmul(x, self.gate, counts)
            gate, up = add_biases(gate, self.gate_bias, counts), add_biases(up, self.up_bias, counts)
            inner = self.swiglu(gate, up)
        return add_biases(self.matmul(inner, self.down, counts), self.down_bias, counts)


class TokenDispatch(Protocol):
    """Rows on their way to their experts. How many each expert gets is known before the rows themselves are there."""

    def leave(self, rows: Tensor) -> None:
        """Begin, with rows in the order of experts."""

    def arrive(self) -> tuple[Tensor, Tensor]:
        """The rows for the experts held here, in their order, and how many each has."""

    def go_back(self, rows: Tensor) -> Tensor:
        """What the experts made of the rows, where these came from."""


@dataclass
class LocalDispatch:
    """The journey of rows whose experts are all here."""

    counts: Tensor

    def leave(self, rows: Tensor) -> None:
        self.rows = rows

    def arrive(self) -> tuple[Tensor, Tensor]:
        return self.rows, self.counts

    def go_back(self, rows: Tensor) -> Tensor:
        return rows


class RoutedExperts(nn.Module):
    """Sends each token to some of its experts and back, over the ranks that hold them. What derives from it declares
    parameters of shape (experts, …) as EXPERT, and says in `route` where tokens go and in `compute` what experts do."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.count = experts
        self.matmul: GroupedMatmul = grouped_matmul
        """(rows, weight of shape (experts, out, in), counts) -> rows"""
        self.depart: Callable[[Tensor], TokenDispatch] = LocalDispatch
        self.take_part: Callable[[Tensor], Tensor] = _itself
        """The tokens that this rank routes, of those it holds."""
        self.put_together: Callable[[Tensor], Tensor] = _itself
        self.part = (0, 1)
        """Index and number of the parts in which tokens of whole sequences are routed."""

    def route(self, x: Tensor, tokens: Tokens) -> Routing:
        """x: (tokens, hidden), the part of them that this rank routes: what is used here is PARTIAL."""
        raise NotImplementedError

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: in the order of the experts held here, `counts` of each."""
        raise NotImplementedError

    def takes_rounded(self) -> bool:
        """Rows that are in fp8 already."""
        return False

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """x: (sequences, length, hidden)"""
        return self.routed(x.flatten(0, 1), Tokens(x.shape[1], *self.part)).view_as(x)

    def routed(self, x: Tensor, tokens: Tokens, shared: Callable[[], Tensor] | None = None) -> Tensor:
        """`shared`: computed while rows travel, and added."""
        mine = self.take_part(x)
        routing = self.route(mine, tokens)
        permutation = permutation_of(routing, self.count)
        journey = self.depart(permutation.counts)
        rounds = self.takes_rounded() and isinstance(journey, LocalDispatch)
        journey.leave(permutation.permute(mine, rounds))
        beside = None if shared is None else keep_matmuls(shared)
        rows, counts = journey.arrive()
        rows = journey.go_back(keep_matmuls(partial(self.compute, rows, counts)))
        result = self.put_together(permutation.unpermute(rows, routing.weights, rounds))
        return result if beside is None else result + beside


class MoE(RoutedExperts):
    def __init__(self, model: ModelSpec) -> None:
        assert model.mixture is not None
        mixture = model.mixture
        super().__init__(mixture.experts)
        self.router = Router(model.hidden, mixture)
        self.experts = Experts(model, mixture.experts, mixture.expert_ffn)
        self.shared = FeedForward(model, mixture.shared_ffn) if mixture.shared_ffn else None

    def route(self, x: Tensor, tokens: Tokens) -> Routing:
        routing: Routing = self.router(x, tokens)
        return routing

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.experts(rows, counts)

    def takes_rounded(self) -> bool:
        return self.experts.whole is not None

    @uncompiled
    def forward(self, x: Tensor, positions: Positions) -> Tensor:  # type: ignore[override]
        """Not for the compiler: how many rows each expert gets is another number every time."""
        shared = None if self.shared is None else partial(self.shared, x, positions)
        return self.routed(x, Tokens(positions.length, *self.part, positions.index), shared)


def _itself(x: Tensor) -> Tensor:
    return x
