"""What keeps experts equally busy: noise when they are chosen, two auxiliary losses, and the statistics from which the
routers' biases move.

**Noise.** A router that always takes the best experts can send all tokens to the same few of them while its scores are
all but equal: what decides is an order, and the loss below sees scores. Gumbel noise on the logarithms of scores draws
a token's experts in proportion to its scores instead (exactly so at scale 1), so the load of an expert follows its mean
score, and the gradient of the load-balancing loss moves loads. The noise is a function of seed, step, layer, position
and expert, so any layout chooses the same. Evaluation and generation take the best experts.

**Losses.**
Both are sums over tokens whose divisors are known beforehand (sequences and tokens of the global batch), so
that the parts of all ranks, micro-batches and chunks of a sequence simply add up. The load-balancing loss weighs each
expert's score by how busy it is, and the gradient does not pass through that weight:

- over a sequence: its load in this sequence, which ranks with parts of the sequence sum up.
- over the global batch: its load in the global batch of the step before. The load of this one is not known until all
  micro-batches have passed through all stages; that of the last one is known on every rank, because the statistics are
  summed at the end of each step. So no pass waits for a collective, and every layout computes the same loss.

How its coefficient compares with others' (all per layer, the value at perfect balance beside it):

    Cuboid                     1      summed over layers
    Switch, Megatron           1      summed over layers: the same coefficient
    DeepSeek-V2 and V3         1      summed over layers: the same coefficient
    Hugging Face transformers  top_k  mean over layers: the same gradient at coefficient × top_k / layers
    MegaBlocks                 1      mean over layers: the same gradient at coefficient / layers

A `config.json` carries the coefficient its authors trained with, in the sense of their trainer, so it is taken as it
stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuboid.model.initialize import hashed, key_number, shifted
from cuboid.spec.mixture import MixtureSpec

EXTRA = ("balance_loss", "z_loss", "dropped")
"""What a row of the statistics holds behind the assignments of each expert: sums over sequences, tokens and
assignments."""


@dataclass(frozen=True)
class Tokens:
    """Which tokens a router sees: the `index`-th of `parts` equal parts of some sequences, one after another."""

    length: int
    """Tokens of each sequence that the parts hold together."""
    index: int = 0
    parts: int = 1
    positions: Tensor | None = None
    """(sequences, length): where each token stands in its sequence; a first dimension of one stands for all sequences.
    None: in their order."""

    def sequences(self, tokens: int) -> int:
        return tokens * self.parts // self.length

    def numbers(self, x: Tensor) -> Tensor:
        """The number of each token in x among those of all parts."""
        return torch.arange(self.index * x.shape[0], (self.index + 1) * x.shape[0], device=x.device)

    def places(self, x: Tensor) -> Tensor:
        """The position of each token in x in its sequence."""
        if self.positions is None:
            return self.numbers(x) % self.length
        return self.positions.flatten().index_select(0, self.numbers(x) % self.positions.numel())


def counted(numbers: Tensor, many: int) -> Tensor:
    """How often each of 0, 1, … many - 1 occurs. As `bincount`, for which the host would wait for the device."""
    return numbers.new_zeros(many).scatter_add_(0, numbers, torch.ones_like(numbers))


class _WithLoss(torch.autograd.Function):
    """The first argument; its backward also begins that of the loss, whatever the gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, loss: Tensor) -> Tensor:
        context.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (one,) = context.saved_tensors
        return gradient, one


class Balance:
    """One for all routers of a rank."""

    def __init__(
        self, mixture: MixtureSpec, layers: int, sequences: int, tokens: int, device: torch.device, seed: int = 0
    ) -> None:
        """`layers`: those with experts; `sequences`, `tokens`: of the global batch."""
        self.mixture = mixture
        self.key = key_number(f"{seed}/router_noise")
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        """Steps done. On the device, where a CUDA graph reads it."""
        self.is_noisy = False
        """In the passes of a step, unless the mixture has no noise."""
        self.sequences, self.tokens = sequences, tokens
        self.statistics = torch.zeros(layers, mixture.experts + len(EXTRA), dtype=torch.float64, device=device)
        """A row per layer: assignments of each expert, and the sums of EXTRA."""
        self.counts = torch.zeros(layers, mixture.experts, dtype=torch.float64, device=device)
        """Assignments of each expert in the global batch of the last step that counted; zero before the first."""
        self.loads = torch.ones_like(self.counts)
        """The same over their mean. Both keep their memory: a CUDA graph reads them."""
        self.factor: Tensor | None = None
        """What all losses are multiplied by before their gradients are taken."""
        self.recording = True
        """Off while a forward pass is computed again."""
        self.over_sequence: Callable[[Tensor], Tensor] = _itself
        """Sums counts over the ranks that hold other chunks of the same sequences."""

    def begin_step(self, sequences: int = 0) -> None:
        """`sequences`: of this global batch, where it has another size than that before."""
        if sequences:
            self.tokens = self.tokens // self.sequences * sequences
            self.sequences = sequences
        self.statistics.zero_()
        self.is_noisy = self.mixture.router_noise > 0

    def end_passes(self) -> None:
        self.is_noisy = False

    @torch.no_grad()
    def end_step(self, statistics: Tensor, counts: Tensor | bool = True) -> None:
        """`statistics`: summed over all ranks. `counts`: false skips the step."""
        self.step += 1
        self._follow(torch.where(torch.as_tensor(counts), statistics[:, : self.mixture.experts], self.counts))

    def _follow(self, asked: Tensor) -> None:
        self.counts.copy_(asked)
        self.loads.copy_(torch.where(asked.any(1, keepdim=True), asked / asked.mean(1, keepdim=True), 1.0))

    def values(self) -> list[int]:
        """For a checkpoint: empty where no loss depends on the step before."""
        follows = self.mixture.balance_over == "global_batch" and self.counts.any()
        return [int(count) for count in self.counts.flatten().tolist()] if follows else []

    def restore(self, values: list[int], step: int) -> None:
        """As after `step` steps. No values: as before the first."""
        self.step.fill_(step)
        self._follow(self.counts.new_tensor(values or [0] * self.counts.numel()).view_as(self.counts))

    @torch.no_grad()
    def noise(self, row: int, tokens: Tokens, logits: Tensor) -> Tensor:
        """(tokens, experts)"""
        rows, experts = self.counts.shape
        places, offset = tokens.places(logits), self.step * rows + row
        if logits.is_cuda:
            return _noise_in_one_kernel(places, offset, experts, self.key, self.mixture.router_noise)
        places = (places * experts).unsqueeze(1) + torch.arange(experts, device=logits.device)
        bits = shifted(hashed(self.key, places + (offset << 34)), 41)
        uniform = (bits.float() + 0.5) * 2.0**-23  # neither 0 nor 1, all bits exact in float32
        return -self.mixture.router_noise * (-uniform.log()).log()

    def attach(
        self,
        weights: Tensor,
        row: int,
        logits: Tensor,
        scores: Tensor,
        chosen: Tensor,
        tokens: Tokens,
        kept: Tensor | None,
    ) -> Tensor:
        """The weights, whose backward also brings the gradients of the auxiliary losses of these tokens."""
        experts, top_k = self.mixture.experts, self.mixture.top_k
        place = tokens.numbers(chosen) // tokens.length
        with torch.no_grad():
            sequences = tokens.sequences(chosen.shape[0])
            asked = (place.unsqueeze(1) * experts + chosen).flatten()
            asked = counted(asked, sequences * experts).view(sequences, experts).to(scores.dtype)
        losses = []
        balance = z = None
        if self.mixture.balance_coefficient:
            probability = scores / scores.sum(-1, keepdim=True)
            if self.mixture.balance_over == "global_batch":
                load = self.loads[row].to(probability.dtype) * (self.sequences / self.tokens)
                balance = (probability * load).sum()
            else:
                whole = self.over_sequence(asked.clone())
                assignments = whole.sum(1, keepdim=True)
                frequency = whole * (experts * top_k) / assignments.square()  # the frequency of each, over its tokens
                balance = (probability * frequency.index_select(0, place)).sum()
            losses.append(balance * (self.mixture.balance_coefficient / self.sequences))
        if self.mixture.z_coefficient:
            z = logits.logsumexp(-1).square().sum()
            losses.append(z * (self.mixture.z_coefficient / self.tokens))
        if self.recording:
            self._record(row, asked.sum(0), balance, z, kept)
        if not losses:
            return weights
        loss = torch.stack(losses).sum()
        return _WithLoss.apply(weights, loss if self.factor is None else loss * self.factor.to(loss.dtype))

    @torch.no_grad()
    def _record(self, row: int, asked: Tensor, balance: Tensor | None, z: Tensor | None, kept: Tensor | None) -> None:
        zero = asked.new_zeros(())
        dropped = zero if kept is None else (~kept).sum().to(asked.dtype)
        sums = torch.stack([zero if value is None else value for value in (balance, z)] + [dropped])
        self.statistics[row] += torch.cat((asked, sums)).double()


def _noise_in_one_kernel(places: Tensor, offset: Tensor, experts: int, key: int, scale: float) -> Tensor:
    """The same bits as from torch's operations, of which there are two dozen."""
    from cuboid.kernels import triton_kernels

    result = torch.empty(len(places), experts, device=places.device)
    count = result.numel()
    grid = (-(-count // NOISE_BLOCK),)
    triton_kernels.gumbel[grid](places, offset, result, count, key, scale, EXPERTS=experts, BLOCK=NOISE_BLOCK)
    return result


NOISE_BLOCK = 1024


def _itself(x: Tensor) -> Tensor:
    return x


def moved_bias(bias: Tensor, asked: Tensor, rate: float) -> Tensor:
    """A router's bias after a step in which its experts were asked for so often."""
    lack = asked.sum() - asked * asked.numel()  # whole numbers: which side of the mean an expert is on is exact
    return bias + rate * lack.sign().to(bias.dtype)
