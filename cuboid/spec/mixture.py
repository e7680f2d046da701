"""`MixtureSpec`: routed experts in place of the feed-forward block, in numbers and switches."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from cuboid.errors import UserError, nearest_numbers, use
from cuboid.spec.coding import check_types, require_at_least, require_at_most

ROUTER_NOISE = 1.0
"""Of routers whose weights are drawn."""
BALANCING: dict[str, object] = {"balance_coefficient": 0.1, "balance_over": "sequence", "router_noise": ROUTER_NOISE}
"""How a mixture is balanced whose table says nothing of it; docs/learning.md has what was measured."""
BIAS_RATE = 0.001
"""Of a mixture with `router_bias` whose table says nothing of it: DeepSeek-V3's."""


def with_balancing(mixture: Mapping[str, object]) -> dict[str, object]:
    """The table of a mixture; none trains without balancing unless it says so, because without it all tokens soon go to
    the same few experts. A table that a run has saved says everything, and stays as it is; without `noise_on` it is of
    a run that began when noise was added to logits."""
    table = dict(mixture)
    is_saved = table.keys() - {"biases"} == {field.name for field in fields(MixtureSpec)} - {"noise_on", "biases"}
    if is_saved and table["scoring"] == "sigmoid":
        table["noise_on"] = "logits"
    if "balance_coefficient" not in table:
        table = {**BALANCING, **table}
    if table.get("router_bias") is True:
        table.setdefault("bias_rate", BIAS_RATE)
    return table


@dataclass(frozen=True, kw_only=True)
class MixtureSpec:
    """Routed experts in place of the feed-forward block."""

    experts: int
    """Routed experts of a layer."""
    top_k: int
    """Experts each token goes to."""
    expert_ffn: int
    """Width of one routed expert."""
    shared_experts: int = 0
    """Experts every token goes to."""
    shared_ffn: int = 0
    """Total width of the experts every token goes to."""
    first_dense_layers: int = 0
    """Leading layers with a plain feed-forward block of width `ModelSpec.ffn`."""
    router_bias: bool = False
    """One number per expert that is added to its score when experts are chosen, and only then (DeepSeek-V3)."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How a router's logits become scores."""
    normalized: bool = True
    """Whether the weights of a token's experts sum to one before `scaling`."""
    scaling: float = 1.0
    """Multiplies the weights of routed experts."""
    groups: int = 1
    """Groups of consecutive experts; a token's experts come from its `top_groups` best groups. A group scores what its
    two best experts sum to with sigmoid scoring (DeepSeek-V3), and what its best one has with softmax (DeepSeek-V2)."""
    top_groups: int = 1
    """How many of the groups a token may use."""
    balance_coefficient: float = 0.0
    """Of the load-balancing loss: experts × Σ (fraction of assignments × mean score), summed over layers. 1 is
    perfect balance. 0 turns it off."""
    balance_over: Literal["sequence", "global_batch"] = "sequence"
    """Where assignments are counted for that loss: in each sequence, or in the global batch of the step before. The
    second lets experts specialise, because one sequence need not use all of them."""
    z_coefficient: float = 0.0
    """Of the router z-loss: the square of the log-sum-exp of a token's logits, averaged over the tokens of the global
    batch and summed over layers."""
    router_noise: float = 0.0
    """Scale of the Gumbel noise that is added to the logarithms of scores when experts are chosen in training. With 1 a
    token's experts are drawn in proportion to its scores; 0 always takes the best, as evaluation and generation do."""
    noise_on: Literal["scores", "logits"] = "scores"
    """Where that noise is added: to the logarithms of scores, or to logits. Of softmax scores both are the same. Of
    sigmoid scores that are all but 1, noise on logits chooses the same experts for all tokens; runs that began with it
    keep it."""
    bias_rate: float = 0.0
    """By how much `router_bias` moves after each step: up for experts with fewer tokens of the global batch than the
    mean, down for those with more."""
    biases: bool = False
    """Of the router's logits and of all matrices of routed experts (GPT-OSS); gradients move them."""
    capacity_factor: float = 0.0
    """An expert takes at most this many times the mean of one sequence's assignments, the first ones; 0 takes all."""

    def __post_init__(self) -> None:
        check_types(self, "mixture")
        require_at_least(1, self, "mixture", ("experts", "top_k", "expert_ffn", "groups", "top_groups"))
        require_at_least(0, self, "mixture", ("shared_experts", "shared_ffn", "first_dense_layers", "capacity_factor"))
        require_at_least(0, self, "mixture", ("balance_coefficient", "z_coefficient", "router_noise", "bias_rate"))
        require_at_most({"experts": 1 << 16, "expert_ffn": 1 << 24, "shared_experts": 1 << 10}, self, "mixture")
        if self.top_k > self.experts:
            raise UserError(
                f"mixture.top_k={self.top_k} is more than experts={self.experts}; use top_k={self.experts} or less"
            )
        if (self.shared_experts > 0) != (self.shared_ffn > 0):
            raise UserError(
                f"mixture.shared_ffn={self.shared_ffn} does not fit shared_experts={self.shared_experts}; "
                f"use shared_ffn={self.shared_experts * self.expert_ffn}"
            )
        if self.scaling <= 0:
            raise UserError(f"mixture.scaling={self.scaling} is not positive; use a number above 0")
        if self.bias_rate and not self.router_bias:
            raise UserError(f"mixture.bias_rate={self.bias_rate} has no bias to move; use router_bias=true")
        self._check_groups()

    def _check_groups(self) -> None:
        if self.experts % self.groups:
            near = nearest_numbers(self.groups, lambda number: self.experts % number == 0, 1, self.experts)
            raise UserError(
                f"mixture.groups={self.groups} does not divide experts={self.experts}; {use('groups', near)}"
            )
        if self.top_groups > self.groups:
            raise UserError(
                f"mixture.top_groups={self.top_groups} is more than groups={self.groups}; "
                f"use top_groups={self.groups} or less"
            )
        open_to_all = self.experts // self.groups * self.top_groups
        if self.top_k > open_to_all:
            raise UserError(
                f"mixture.top_k={self.top_k} is more than the {open_to_all} experts of top_groups={self.top_groups}; "
                f"use top_k={open_to_all} or less"
            )
