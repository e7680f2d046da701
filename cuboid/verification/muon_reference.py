"""Muon on one device, written without any part of the parallel engine: what every layout must equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cuboid.model.attention import Attention, HeadPeaks
from cuboid.model.linear import Linear
from cuboid.model.mla import MultiLatentAttention
from cuboid.spec.matrix_owners import Rows, is_muon, matrices_of, wire_precision
from cuboid.spec.run import Run
from cuboid.spec.sharding import units
from cuboid.training.own_optimizer import load_matrix_function

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class MuonUpdates:
    """Muon as its papers write it, one whole matrix after another: those among `parameters` that it updates."""

    def __init__(self, run: Run, parameters: Mapping[str, Tensor]) -> None:
        self._run, self._parameters = run, parameters
        self._matrices: dict[str, list[Rows]] = {}
        for layer in range(run.model.all_layers):
            for unit in units(run.model, [layer], first=False, last=False):
                for name, declared in unit.parameters.items():
                    if is_muon(unit.name, declared) and name in parameters:
                        self._matrices[name] = matrices_of(run, name, declared.shape)
        self._momentum = {name: torch.zeros_like(parameters[name]) for name in self._matrices}
        self.names = self._matrices.keys()
        own = run.optimizer.matrix_function
        self._function = load_matrix_function(own) if own else None
        flat = {name: parameters[name].flatten(0, -2) for name in self._matrices if run.optimizer.normuon}
        self._squares = {name: torch.zeros_like(value[:, 0]) for name, value in flat.items()}

    def state(self) -> dict[str, Tensor]:
        momentum = {f"momentum_buffer/{name}": x for name, x in self._momentum.items()}
        return {**momentum, **{f"row_avg_sq/{name}": x for name, x in self._squares.items()}}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        spec, dtype = self._run.optimizer, DTYPES[wire_precision(self._run)]
        for name, matrices in self._matrices.items():
            parameter, momentum = self._parameters[name], self._momentum[name]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            momentum.mul_(spec.momentum).add_(gradient, alpha=1 - spec.momentum)
            lead = (1 - spec.momentum) * gradient + spec.momentum * momentum if spec.nesterov else momentum
            flat, weight = lead.flatten(0, -2).to(dtype), parameter.view(-1, parameter.shape[-1])
            for rows in matrices:
                chosen = torch.cat([torch.arange(*run) for run in rows]).to(flat.device)
                x = flat[chosen]
                x = x.float() if x.device.type == "cpu" and x.element_size() == 2 else x
                m, n = x.shape
                x = self._function(x[None])[0] if self._function else _newton_schulz(x, spec.newton_schulz_steps)
                if spec.normuon:
                    x, squares = x.to(weight.dtype), self._squares[name]
                    whole = min(min(m, n) ** 0.5, 4 * torch.linalg.matrix_norm(x).item())
                    squares[chosen] = spec.beta2 * squares[chosen] + (1 - spec.beta2) * x.square().mean(1)
                    x = x / (squares[chosen].sqrt() + spec.epsilon)[:, None]
                    x = x * (whole / max(torch.linalg.matrix_norm(x).item(), spec.epsilon))
                size = {"rms": 0.2 * max(m, n) ** 0.5, "spectral": (m / n) ** 0.5, "original": max(1, m / n) ** 0.5}
                step = rate * spec.matrix_rate * size[spec.update_scale] * x.to(weight.dtype)
                weight[chosen] = weight[chosen] * (1 - rate * spec.weight_decay) - step


def _newton_schulz(x: Tensor, steps: int) -> Tensor:
    m, n = x.shape
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(steps):
        gram = x @ x.T if m <= n else x.T @ x
        inner = -4.7750 * gram + 2.0315 * gram @ gram
        x = 3.4445 * x + (inner @ x if m <= n else x @ inner)
    return x


class HeadClip:
    """QK-clip as its paper writes it, head by head, with the bound that norms of queries and keys give."""

    def __init__(self, run: Run, computing: nn.Module, kept: nn.Module) -> None:
        self._limit, self._latent, self._width = run.optimizer.qk_clip, run.model.latent, run.model.head_dim
        spec, first = run.model, next(kept.parameters())
        self._pairs = []
        for name, module in computing.named_modules():
            if isinstance(module, Attention | MultiLatentAttention):
                keys = spec.kv_heads if isinstance(module, Attention) else spec.heads
                module.peaks = HeadPeaks(first.new_zeros(spec.heads), first.new_zeros(keys))
                self._pairs.append((module.peaks, kept.get_submodule(name)))

    def begin_step(self) -> None:
        for peaks, _ in self._pairs:
            peaks.query.zero_(), peaks.key.zero_()

    @torch.no_grad()
    def step(self) -> None:
        for peaks, attention in self._pairs:
            queries = peaks.query.sqrt().view(len(peaks.key), -1)
            for group, key in enumerate(peaks.key.sqrt()):
                if isinstance(attention, Attention):
                    self._clip_group(attention, group, (queries[group] * key).tolist())
                elif isinstance(attention, MultiLatentAttention):
                    self._clip_latent(attention, group, (queries[group] * key).item())

    def _keep(self, bound: float, width: int) -> float:
        return min(1.0, self._limit / (bound / width**0.5)) if bound else 1.0

    def _clip_group(self, attention: Attention, group: int, bounds: list[float]) -> None:
        """Heads that read one key head: it is scaled as the largest needs, and each head's logits by what it needs."""
        width = self._width
        keeps = [self._keep(bound, width) for bound in bounds]
        root = min(keeps) ** 0.5
        for place, keep in enumerate(keeps):
            head = group * len(keeps) + place
            _scale(attention.query, head * width, width, keep / root)
        _scale(attention.key, group * width, width, root)

    def _clip_latent(self, attention: MultiLatentAttention, head: int, bound: float) -> None:
        latent = self._latent
        assert latent is not None
        nope, rope = latent.qk_nope_dim, latent.qk_rope_dim
        keep = self._keep(bound, nope + rope)
        query, first = attention.query_up if latent.q_rank else attention.query, head * (nope + rope)
        _scale(query, first, nope, keep**0.5)
        _scale(query, first + nope, rope, keep)
        _scale(attention.key_value_up, head * (nope + latent.v_dim), nope, keep**0.5)


def _scale(linear: Linear, first: int, rows: int, factor: float) -> None:
    for tensor in (linear.weight, linear.bias):
        if tensor is not None:
            tensor[first : first + rows] *= factor
