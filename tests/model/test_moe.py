"""Routing and balancing against their definitions, written out token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cuboid.kernels.recompute import with_recompute
from cuboid.model import moe as mixture_module
from cuboid.model.initialize import initial_tensor, initialize
from cuboid.model.load_balancing import Balance, Tokens, moved_bias
from cuboid.model.moe import MoE, grouped_matmul, grouped_outer
from cuboid.model.rope import make_positions
from cuboid.model.router import Router, Routing, permutation_of
from cuboid.model.transformer import Block, Transformer
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import load_model

CPU = torch.device("cpu")
PLAIN = MixtureSpec(experts=6, top_k=2, expert_ffn=8)
LENGTH, SEQUENCES = 10, 3


def make_router(**changes: object) -> Router:
    torch.manual_seed(0)
    router = Router(4, replace(PLAIN, **changes)).double()
    torch.nn.init.normal_(router.weight)
    if router.bias is not None:
        torch.nn.init.normal_(router.bias, std=0.2)
    return router


def tokens() -> Tensor:
    return torch.randn(SEQUENCES * LENGTH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_auxiliary_losses_are_as_defined(scoring: str) -> None:
    router = make_router(scoring=scoring, balance_coefficient=0.3, z_coefficient=0.7)
    x = tokens()
    logits = x @ router.weight.t()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    chosen = scores.topk(2).indices
    balance = torch.zeros((), dtype=torch.float64)
    for sequence in range(SEQUENCES):
        rows = range(sequence * LENGTH, (sequence + 1) * LENGTH)
        for expert in range(6):
            frequency = sum(int((chosen[row] == expert).sum()) for row in rows) * 6 / (2 * LENGTH)
            share = sum(scores[row, expert] / scores[row].sum() for row in rows) / LENGTH
            balance = balance + frequency * share
    z = logits.exp().sum(-1).log().square().sum()
    # As if this were half of a global batch.
    loss = 0.3 * balance / (2 * SEQUENCES) + 0.7 * z / (2 * SEQUENCES * LENGTH)
    (expected,) = torch.autograd.grad(loss, router.weight)

    router.balance = Balance(router.mixture, 1, 2 * SEQUENCES, 2 * SEQUENCES * LENGTH, CPU)
    routing = router(x, Tokens(LENGTH))
    (routing.weights * 0).sum().backward()  # nothing comes from the weights themselves
    torch.testing.assert_close(router.weight.grad, expected, rtol=1e-12, atol=0)
    asked, sums = router.balance.statistics[0, :6], router.balance.statistics[0, 6:]
    assert asked.tolist() == [int((chosen == expert).sum()) for expert in range(6)]
    torch.testing.assert_close(sums, torch.stack((balance.detach(), z.detach(), torch.zeros_like(z))))


def test_the_global_batch_is_that_of_the_step_before() -> None:
    router = make_router(balance_coefficient=0.3, balance_over="global_batch")
    router.balance = balance = Balance(router.mixture, 1, SEQUENCES, SEQUENCES * LENGTH, CPU)
    x = torch.randn(SEQUENCES * LENGTH, 4, dtype=torch.float64)
    weights = router(x, Tokens(LENGTH)).weights
    (gradient,) = torch.autograd.grad(weights, router.weight, torch.zeros_like(weights))
    assert gradient.abs().max() < 1e-12, "before the first step all experts count as equally busy"
    asked = torch.tensor([5.0, 1.0, 0.0, 2.0, 0.0, 4.0], dtype=torch.float64)
    balance.end_step(torch.cat((asked, torch.zeros(3))).unsqueeze(0))
    balance.end_step(torch.zeros(1, 9, dtype=torch.float64), counts=False)
    balance.begin_step()
    weights = router(x, Tokens(LENGTH)).weights
    (gradient,) = torch.autograd.grad(weights, router.weight, torch.zeros_like(weights))
    share = (x @ router.weight.t()).softmax(-1).mean(0)
    loss = 6 * (asked / 12 * share).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(0.3 * loss, router.weight)[0])
    assert balance.statistics[0, 6].item() / SEQUENCES == pytest.approx(loss.item())
    kept = Balance(router.mixture, 1, 1, 1, CPU)
    kept.restore(balance.values(), 2)
    assert kept.loads.equal(balance.loads), "exactly as it was"
    kept.restore([], 0)
    assert kept.loads.eq(1).all() and not kept.values()


def test_balance_loss_is_one_when_all_experts_are_equally_busy() -> None:
    router = make_router(balance_coefficient=1.0, experts=4, top_k=1)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4) * 1e-9)  # scores all but equal, choices by the largest number
    router.balance = Balance(router.mixture, 1, 1, 4, CPU)
    router(torch.eye(4, dtype=torch.float64), Tokens(4))
    assert router.balance.statistics[0].tolist() == pytest.approx([1, 1, 1, 1, 1, 0, 0])


def test_statistics_count_only_what_is_recorded() -> None:
    router = make_router(z_coefficient=1.0)
    router.balance = Balance(router.mixture, 1, 1, 1, CPU)
    router.balance.recording = False
    router(tokens(), Tokens(LENGTH))
    router.balance.recording = True
    with torch.no_grad():
        router(tokens(), Tokens(LENGTH))
    assert not router.balance.statistics.any(), "neither what is computed again nor an evaluation counts"


def test_experts_come_from_the_best_groups() -> None:
    for scoring, best in (("sigmoid", 2), ("softmax", 1)):
        router = make_router(scoring=scoring, groups=3, top_groups=1, router_bias=True)
        assert router.bias is not None
        scores = (tokens() @ router.weight.t()).sigmoid()
        for row, chosen in zip(scores + router.bias, router.choose(scores), strict=True):
            groups = [row[start : start + 2].topk(best).values.sum() for start in (0, 2, 4)]
            first = 2 * int(torch.stack(groups).argmax())
            assert sorted(chosen.tolist()) == [first, first + 1]


def test_the_bias_chooses_but_does_not_weigh() -> None:
    router = make_router(router_bias=True)
    assert router.bias is not None
    with torch.no_grad():
        router.bias.zero_()
        router.bias[3] = 100.0
    routing = router(tokens(), Tokens(LENGTH))
    assert bool((routing.chosen == 3).any(1).all())
    scores = (tokens() @ router.weight.t()).softmax(-1).gather(1, routing.chosen)
    torch.testing.assert_close(routing.weights, scores / scores.sum(-1, keepdim=True))


def test_biases_move_towards_balance_and_stay_on_the_mean() -> None:
    moved = moved_bias(torch.zeros(4), torch.tensor([3.0, 5.0, 4.0, 4.0]), 0.01)
    assert moved.tolist() == pytest.approx([0.01, -0.01, 0.0, 0.0])


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_capacity_keeps_the_first_assignments_of_each_sequence(factor: float) -> None:
    router = make_router(capacity_factor=factor)
    routing = router(tokens(), Tokens(LENGTH))
    assert routing.kept is not None
    room = -int(-factor * LENGTH * 2 // 6)
    for sequence in range(SEQUENCES):
        used = [0] * 6
        for row in range(sequence * LENGTH, (sequence + 1) * LENGTH):
            for choice, expert in enumerate(routing.chosen[row].tolist()):
                used[expert] += 1
                assert bool(routing.kept[row, choice]) == (used[expert] <= room)
    permutation = permutation_of(routing, 6)
    assert int(permutation.counts.sum()) == int(routing.kept.sum()) < routing.kept.numel()


@pytest.mark.parametrize("drops", [False, True])
def test_rows_go_to_their_experts_and_come_home(drops: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.rand(7, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(7)])
    kept = torch.rand(7, 2, generator=generator) < 0.6 if drops else None
    permutation = permutation_of(Routing(chosen, weights, kept), 4)
    factors = torch.arange(1.0, 5.0, dtype=torch.float64)
    by_row = factors.repeat_interleave(permutation.counts)
    # Nobody reads what becomes of rows that were not kept.
    by_row = torch.cat((by_row, torch.full((14 - len(by_row),), torch.nan, dtype=torch.float64)))

    def run(x: Tensor, weights: Tensor) -> Tensor:
        return permutation.unpermute(permutation.permute(x) * by_row.unsqueeze(1), weights)

    present = torch.ones(7, 2) if kept is None else kept
    expected = (weights * factors[chosen] * present).sum(1, keepdim=True) * x
    torch.testing.assert_close(run(x, weights), expected)
    assert torch.autograd.gradcheck(run, (x, weights))


def test_grouped_matmuls_are_the_matmuls_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's calls too: torch has it on the CPU in single precision, an empty group included."""
    counts = torch.tensor([3, 0, 5, 6])
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(16, 8, generator=generator), torch.randn(16, 24, generator=generator)
    weight = torch.randn(4, 24, 8, generator=generator)
    results = []
    for one_kernel in (False, True):
        monkeypatch.setattr(mixture_module, "takes_one_kernel", lambda *_, value=one_kernel: value)
        results.append(
            (
                grouped_matmul(x, weight, counts),
                grouped_matmul(y, weight.transpose(1, 2), counts),
                grouped_outer(y, x, counts),
            )
        )
    for plain, kernel in zip(*results, strict=True):  # the last two rows are nobody's
        torch.testing.assert_close(kernel[:14], plain[:14], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[0][0][3:8], x[3:8] @ weight[2].t())
    torch.testing.assert_close(results[0][2][3], y[8:14].t() @ x[8:14], rtol=1e-5, atol=1e-5)
    assert not results[0][2][1].any()


def test_auxiliary_losses_need_no_share_of_the_loss() -> None:
    """Their gradient does not depend on how the loss is scaled."""
    model = load_model("tiny-mixtral")
    block = Block(model, 0).double()
    for name, parameter in block.named_parameters():
        parameter.data.copy_(initial_tensor(model, f"layers.0.{name}", tuple(parameter.shape), 0))
    assert model.mixture is not None
    router = block.feed_forward.router
    router.balance = Balance(model.mixture, 1, 1, 8, CPU)
    x = torch.randn(8, model.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    positions = make_positions(model, 8, torch.float64, CPU)
    gradients = []
    for scale in (0.0, 1e-9):
        (block(x, positions).sum() * scale).backward()
        gradients.append(router.weight.grad.clone())
        router.weight.grad = None
    assert gradients[0].abs().max() > 1e-6
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-9)


def test_each_expert_is_drawn_by_itself() -> None:
    model = load_model("tiny-mixtral")
    name = "layers.2.feed_forward.experts.down"
    many, few = (initial_tensor(model, name, (8, 64, 48), 5, wanted) for wanted in (None, (0, range(2, 5))))
    assert torch.equal(many[2:5], few)
    assert not torch.equal(many[0], many[1])
    whole = Transformer(model)
    initialize(model, whole, 5)
    assert torch.equal(dict(whole.named_parameters())[name], many)


@pytest.mark.parametrize("capacity_factor", [0.0, 0.75])
def test_the_host_never_asks_the_device(monkeypatch: pytest.MonkeyPatch, capacity_factor: float) -> None:
    """Fake tensors have no values: whatever asks for one, or for a size that depends on one, fails."""
    monkeypatch.setattr(mixture_module, "takes_one_kernel", lambda x, width: True)  # as on a GPU in bf16
    model = load_model("tiny-deepseek")
    assert model.mixture is not None
    mixture = replace(model.mixture, capacity_factor=capacity_factor)
    with FakeTensorMode():
        layer = MoE(replace(model, mixture=mixture))
        for module in layer.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(parameter.detach().bfloat16()))
        layer.router.balance = Balance(mixture, 1, 2, 16, CPU)
        positions = make_positions(model, 8, torch.bfloat16, CPU)
        x = torch.empty(16, model.hidden, dtype=torch.bfloat16, requires_grad=True)
        layer(x, positions).sum().backward()
        assert layer.experts.up.grad is not None and x.grad is not None


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_noise_draws_experts_in_proportion_to_their_scores(scoring: Literal["softmax", "sigmoid"]) -> None:
    router = make_router(router_noise=1.0, experts=4, top_k=1, scoring=scoring)
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    logits = scores.log() if scoring == "softmax" else scores.logit()
    with torch.no_grad():
        router.weight.copy_(logits.unsqueeze(1).expand(4, router.weight.shape[1]) / router.weight.shape[1])
    x = torch.ones(20_000, router.weight.shape[1], dtype=torch.float64)
    balance = router.balance = Balance(router.mixture, 1, 1, 20_000, CPU)
    balance.begin_step()
    chosen = router(x, Tokens(20_000)).chosen.flatten()
    drawn = torch.bincount(chosen, minlength=4) / 20_000
    assert (drawn - scores).abs().max() < 0.015  # four deviations of a binomial count
    assert torch.equal(router(x, Tokens(20_000)).chosen.flatten(), chosen), "a recomputed pass must choose the same"
    balance.end_step(balance.statistics)
    assert not torch.equal(router(x, Tokens(20_000)).chosen.flatten(), chosen), "another step, other noise"
    balance.restore([], 0)
    assert torch.equal(router(x, Tokens(20_000)).chosen.flatten(), chosen), "as after a resume"
    balance.end_passes()
    assert not router(x, Tokens(20_000)).chosen.any(), "evaluation takes the best"


def test_noise_on_logits_is_what_runs_of_before_drew() -> None:
    router = make_router(router_noise=1.0, scoring="sigmoid", noise_on="logits")
    logits, noise = torch.randn(64, 8), torch.randn(64, 8)
    assert torch.equal(router._noisy(logits, logits.sigmoid(), noise), (logits + noise).sigmoid())


def test_noise_goes_by_the_position_of_a_token_wherever_it_is_computed() -> None:
    router = make_router(router_noise=1.0)
    balance = router.balance = Balance(router.mixture, 1, SEQUENCES, SEQUENCES * LENGTH, CPU)
    balance.begin_step()
    x = tokens()
    positions = torch.arange(LENGTH).unsqueeze(0)
    whole = router(x, Tokens(LENGTH, positions=positions)).chosen
    half = len(x) // 2
    parts = [router(x[:half], Tokens(LENGTH, 0, 2, positions)), router(x[half:], Tokens(LENGTH, 1, 2, positions))]
    assert torch.equal(torch.cat([part.chosen for part in parts]), whole)
    order = torch.arange(LENGTH).flip(0)  # as ranks of a context group hold other positions of a sequence
    turned = router(x[:LENGTH][order], Tokens(LENGTH, positions=order.unsqueeze(0))).chosen
    assert torch.equal(turned[order], whole[:LENGTH])


class _Matmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += operation in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return operation(*arguments, **(options or {}))


def test_selective_recomputation_keeps_matmuls_of_experts_where_only_marks_are_looked_at() -> None:
    model = load_model("tiny-deepseek")
    torch.manual_seed(0)
    mixture = MoE(model).double()
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(12, model.hidden, dtype=torch.float64)
    positions = make_positions(model, 12, torch.float64, CPU)

    def gradients(run: Callable[..., Tensor]) -> tuple[tuple[Tensor, ...], int]:
        used = [parameter for parameter in mixture.parameters() if parameter is not mixture.router.bias]
        result = run(x, positions)
        with _Matmuls() as matmuls:
            return torch.autograd.grad(result.square().sum(), used, allow_unused=True), matmuls.count

    expected, needed = gradients(mixture)
    found, counted = gradients(with_recompute(mixture, "selective", marked=True))
    for one, other in zip(expected, found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    _, again = gradients(with_recompute(mixture, "full"))
    # The sum over a token's experts, a bmm, lies outside of the marks.
    assert needed <= counted <= needed + 1 < again
