"""`ModelSpec`: the shape of a decoder-only transformer, in numbers and switches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cuboid.errors import UserError, nearest_numbers, use
from cuboid.spec.attention import LatentAttentionSpec, RopeScaling, YarnScaling
from cuboid.spec.coding import check_types, require_at_least
from cuboid.spec.mixture import MixtureSpec

__all__ = [
    "Family",
    "Initialization",
    "LatentAttentionSpec",
    "MixtureSpec",
    "ModelSpec",
    "RopeScaling",
    "YarnScaling",
    "load_model",
]

Family = Literal["llama", "qwen2", "qwen3", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3"]
INITIAL_STD = 0.02
Initialization = Literal["auto", "megatron", "flat", "depth", "width", "fan_in", "zero_output", "mup"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that decides which function a model computes, apart from the values of its parameters."""

    name: str = "custom"
    """What reports call it."""
    family: Family = "llama"
    """Whose parameter names a Hugging Face checkpoint of it has."""
    hidden: int
    """Width of the residual stream."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Attention heads of queries."""
    kv_heads: int = 0
    """Left out (0): as many as heads."""
    head_dim: int = 0
    """Left out (0): hidden // heads."""
    ffn: int
    """Width inside the feed-forward block."""
    vocab: int
    """Tokens there are."""
    tie_embeddings: bool = False
    """One matrix for embedding and head."""
    max_positions: int = 131072
    """Longest sequence."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Which norm stands before attention, feed-forward and head."""
    norm_epsilon: float = 1e-5
    """Added inside its root."""
    positions: Literal["rope", "learned"] = "rope"
    """How tokens know their place."""
    rope_theta: float = 10000.0
    """Base of rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama 3's stretch of rotary frequencies."""
    yarn: YarnScaling | None = None
    """YaRN's stretch of them."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """gelu is the tanh approximation, as in GPT-2."""
    qkv_bias: bool = False
    """Biases of queries, keys and values."""
    output_bias: bool = False
    """Bias of attention's output."""
    mlp_bias: bool = False
    """Biases of the feed-forward block."""
    qk_norm: bool = False
    """Norms of queries and keys in each head."""
    initialization: Initialization = "auto"
    """How wide each parameter is drawn, by its role. auto: the default of the family, or depth where `initial_std` is
    given. megatron: `initial_std`, divided by √(2 · layers) where a matrix adds to the residual stream. flat:
    `initial_std` for all. depth (torchtitan): `initial_std`, divided by √(2 · (layer + 1)) for up, down, attention's
    output and routers; embedding 1, head 1/√hidden. width: as depth with 1/√hidden in place of `initial_std`, not
    divided for up, and a head of 16/hidden where that is smaller. fan_in: 1/√fan-in, divided by √(2 · layers) where a
    matrix adds to the residual stream; embedding 1. zero_output: like fan_in, but these matrices start at zero. Tied
    embeddings have `initial_std` in all of them. mup: the maximal-update parametrisation for AdamW, whose best learning
    rate does not move with width."""
    base_width: int = 256
    """With mup: the fan-in of a matrix that learns at `learning_rate.peak`, and at which mup draws as fan_in does."""
    initial_std: float = INITIAL_STD
    """Standard deviation of the first parameters, in recipes of `initialization` that use it."""
    mixture: MixtureSpec | None = None
    """Routed experts in place of feed-forward blocks."""
    latent: LatentAttentionSpec | None = None
    """Attention through low-rank latents."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        require_at_least(1, self, "model", ("hidden", "layers", "heads", "ffn", "vocab", "max_positions", "base_width"))
        require_at_least(0, self, "model", ("kv_heads", "head_dim"))
        self._resolve_heads()
        for name in ("norm_epsilon", "rope_theta", "initial_std"):
            if getattr(self, name) <= 0:
                raise UserError(f"model.{name}={getattr(self, name)} is not positive; use a number above 0")
        if self.positions == "rope" and self.rope_dim % 2:
            name = "latent.qk_rope_dim" if self.latent else "head_dim"
            raise UserError(
                f"model.{name}={self.rope_dim} is odd and RoPE rotates pairs; {use(name, [self.rope_dim + 1])}"
            )
        self._check_initialization()
        for name in ("rope_scaling", "yarn"):
            if getattr(self, name) and self.positions != "rope":
                raise UserError(f"model.{name} does nothing with positions={self.positions}; use positions=rope")
        if self.rope_scaling and self.yarn:
            raise UserError("model.yarn and model.rope_scaling stretch the same positions; keep one of them")
        if self.mixture and self.mixture.first_dense_layers > self.layers:
            raise UserError(
                f"mixture.first_dense_layers={self.mixture.first_dense_layers} is more than layers={self.layers}; "
                f"{use('first_dense_layers', [self.layers])} or less"
            )

    def _check_initialization(self) -> None:
        reasons = {
            "zero_output": "makes every token predict itself at first",
            "mup": "asks for two learning rates of one matrix",
        }
        if self.tie_embeddings and self.initialization in reasons:
            raise UserError(
                f"model.initialization={self.initialization} with tie_embeddings=true {reasons[self.initialization]}; "
                "use initialization=fan_in or tie_embeddings=false"
            )
        if self.base_width != ModelSpec.base_width and self.initialization != "mup":
            raise UserError(
                f"model.base_width={self.base_width} does nothing with initialization={self.initialization}; "
                "use initialization=mup"
            )

    def _resolve_heads(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.heads % self.kv_heads:
            near = nearest_numbers(self.kv_heads, lambda number: self.heads % number == 0, 1, self.heads)
            raise UserError(
                f"model.kv_heads={self.kv_heads} does not divide heads={self.heads}; {use('kv_heads', near)}"
            )
        if self.head_dim:
            return
        if self.hidden % self.heads:
            near = nearest_numbers(self.heads, lambda number: self.hidden % number == 0, 1, self.hidden)
            raise UserError(
                f"model.heads={self.heads} does not divide hidden={self.hidden} and head_dim is not given; "
                f"{use('heads', near)}"
            )
        object.__setattr__(self, "head_dim", self.hidden // self.heads)

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that RoPE rotates."""
        return self.latent.qk_rope_dim if self.latent else self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether a layer routes its tokens to experts."""
        return self.mixture is not None and layer >= self.mixture.first_dense_layers

    @property
    def parameters(self) -> int:
        """Exact number of parameters, learned positions included, a tied embedding counted once."""
        return self._outside_parameters() + sum(self.layer_parameters(layer) for layer in range(self.layers))

    @property
    def active_parameters(self) -> int:
        """Parameters that touch one token: as `parameters`, with only the experts a token goes to."""
        if self.mixture is None:
            return self.parameters
        idle = (self.mixture.experts - self.mixture.top_k) * self._feed_forward_parameters(self.mixture.expert_ffn)
        return self.parameters - (self.layers - self.mixture.first_dense_layers) * idle

    def layer_parameters(self, layer: int) -> int:
        """Parameters of one transformer layer; they differ where leading layers of a mixture are dense."""
        mixture = self.mixture
        if mixture is None or not self.has_experts(layer):
            feed_forward = self._feed_forward_parameters(self.ffn)
        else:
            feed_forward = mixture.experts * self._feed_forward_parameters(mixture.expert_ffn)
            feed_forward += self._feed_forward_parameters(mixture.shared_ffn) if mixture.shared_ffn else 0
            feed_forward += self.hidden * mixture.experts + (mixture.experts if mixture.router_bias else 0)
        return 2 * self._norm_parameters() + self.attention_parameters() + feed_forward

    def attention_parameters(self) -> int:
        """Parameters of one attention block, without the norm before it."""
        if self.latent:
            return self._latent_parameters(self.latent)
        query, key_value = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        matrices = self.hidden * (query + key_value) + query * self.hidden
        biases = (query + key_value if self.qkv_bias else 0) + (self.hidden if self.output_bias else 0)
        return matrices + biases + (2 * self.head_dim if self.qk_norm else 0)

    def _latent_parameters(self, latent: LatentAttentionSpec) -> int:
        query_width = self.heads * (latent.qk_nope_dim + latent.qk_rope_dim)
        query = (self.hidden + 1 + query_width) * latent.q_rank if latent.q_rank else self.hidden * query_width
        down = self.hidden * (latent.kv_rank + latent.qk_rope_dim) + latent.kv_rank
        up = latent.kv_rank * self.heads * (latent.qk_nope_dim + latent.v_dim)
        return query + down + up + self.heads * latent.v_dim * self.hidden

    def _feed_forward_parameters(self, width: int) -> int:
        inner = 2 * width if self.activation == "swiglu" else width
        return self.hidden * (inner + width) + (inner + self.hidden if self.mlp_bias else 0)

    def _norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    def _outside_parameters(self) -> int:
        tables = self.vocab * (1 if self.tie_embeddings else 2)
        tables += self.max_positions if self.positions == "learned" else 0
        return self.hidden * tables + self._norm_parameters()


def load_model(text: str, folder: Path = Path()) -> ModelSpec:
    """A model from a catalog name, a TOML file, a Hugging Face `config.json` or a folder that holds one."""
    from cuboid.spec.load import build_model, model_table  # here, because loading builds on this file

    return build_model(model_table(text, folder), folder)
