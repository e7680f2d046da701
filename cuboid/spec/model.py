"""`ModelSpec`: the shape of a decoder-only transformer, in numbers and switches."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from cuboid.errors import UserError, nearest_numbers, use
from cuboid.spec.coding import check_types, require_at_least, require_at_most
from cuboid.spec.mixture import MixtureSpec

MOST = {
    "layers": 10_000,
    "hidden": 1 << 20,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "ffn": 1 << 24,
    "vocab": 1 << 24,
    "max_positions": 1 << 31,
    "base_width": 1 << 24,
    "prediction_layers": 64,
}
"""Sizes of a model a hundred times beyond any that was trained; above them memory and time of planning end too."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretch of rotary frequencies beyond the length the model was first trained on."""

    factor: float
    """How many times longer sequences become."""
    low_frequency_factor: float
    """Waves longer than original_positions over this are stretched whole."""
    high_frequency_factor: float
    """Waves shorter than original_positions over this are left as they are."""
    original_positions: int
    """Sequence length of the first training."""

    def __post_init__(self) -> None:
        check_types(self, "rope_scaling")
        require_at_least(1, self, "rope_scaling", ("original_positions",))
        if self.factor < 1:
            raise UserError(f"rope_scaling.factor={self.factor} shrinks the positions; use factor=1.0 or more")
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise UserError(
                f"rope_scaling.high_frequency_factor={self.high_frequency_factor} is not above "
                f"low_frequency_factor={self.low_frequency_factor}; "
                f"{use('high_frequency_factor', [4 * self.low_frequency_factor])}"
            )


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN's stretch of rotary positions (arXiv 2309.00071), with the two factors DeepSeek adds to it."""

    factor: float
    """How many times longer sequences become."""
    original_positions: int
    """Sequence length of the first training."""
    beta_fast: float = 32.0
    """Numbers that rotate at least so often within the original positions keep their frequency."""
    beta_slow: float = 1.0
    """Numbers that rotate less often are slowed by `factor`."""
    attention_factor: float = 0.0
    """Multiplies rotated queries and keys; 0: what follows from `factor` and the two below."""
    mscale: float = 0.0
    """DeepSeek's factor of rotated queries and keys, over that of mscale_all_dim."""
    mscale_all_dim: float = 0.0
    """Above 0, latent attention multiplies its logits by (0.1 · mscale_all_dim · log(factor) + 1)²."""
    truncate: bool = True
    """Round the range of numbers between fast and slow to whole ones."""

    def __post_init__(self) -> None:
        check_types(self, "yarn")
        require_at_least(1, self, "yarn", ("factor", "original_positions"))
        require_at_least(0, self, "yarn", ("attention_factor", "mscale", "mscale_all_dim"))
        if not 0 < self.beta_slow < self.beta_fast:
            raise UserError(
                f"yarn.beta_fast={self.beta_fast} is not above beta_slow={self.beta_slow}; "
                f"{use('beta_fast', [32 * self.beta_slow])}"
            )


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Attention through low-rank latents (DeepSeek's MLA)."""

    q_rank: int
    """Rank of the query latent; 0 means queries are projected directly."""
    kv_rank: int
    """Rank of the latent that keys and values come from."""
    qk_nope_dim: int
    """Numbers of a query or key head that RoPE does not rotate."""
    qk_rope_dim: int
    """Numbers that RoPE rotates; shared by all key heads."""
    v_dim: int
    """Width of a value head."""
    interleaved: bool = True
    """Whether RoPE rotates neighbours, as DeepSeek's weights lie, or numbers half a head apart."""

    def __post_init__(self) -> None:
        check_types(self, "latent")
        require_at_least(0, self, "latent", ("q_rank",))
        require_at_least(1, self, "latent", ("kv_rank", "qk_nope_dim", "qk_rope_dim", "v_dim"))


__all__ = [
    "Family",
    "Initialization",
    "LatentAttentionSpec",
    "ModelSpec",
    "RopeScaling",
    "YarnScaling",
    "load_model",
]

Family = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "gpt_oss",
]
INITIAL_STD = 0.02
NEED_ROPE = ("window_rope_theta", "prediction_layers")
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
    """0: as many as heads."""
    head_dim: int = 0
    """0: hidden // heads."""
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
    norms: Literal["before", "after", "both"] = "before"
    """Where norms of a layer stand: before attention and feed-forward block, after each of them, where it adds to the
    residual stream (OLMo 2 and 3), or both (Gemma 2 and 3)."""
    unit_norms: bool = False
    """Norms multiply by 1 + weight, and their weights begin at zero (Gemma 2 and 3)."""
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
    rope_factor: float = 1.0
    """Rotary positions are divided by it (Gemma 3: 8)."""
    window_rope_theta: float = 0.0
    """Base of rotary frequencies in layers with a window, where nothing stretches them; 0: as in all other layers."""
    activation: Literal["swiglu", "gelu", "geglu", "clamped_swiglu"] = "swiglu"
    """gelu is the tanh approximation, as in GPT-2; geglu is gated by it. clamped_swiglu is GPT-OSS's: gate and up are
    kept within 7, the sigmoid is of 1.702 gates, and one is added to up."""
    embedding_scale: float = 1.0
    """What embedded tokens are multiplied by (Gemma 2 and 3: the root of hidden)."""
    query_scale: float = 0.0
    """What scores of attention are multiplied by; 0: 1/√head_dim."""
    attention_softcap: float = 0.0
    """Scores of attention become this times tanh(scores / this) (Gemma 2: 50); 0: they stay as they are. Attention is
    then computed by plain matmuls on GPUs, which write its scores out."""
    logit_softcap: float = 0.0
    """The same of the head's logits (Gemma 2: 30)."""
    qkv_bias: bool = False
    """Biases of queries, keys and values."""
    output_bias: bool = False
    """Bias of attention's output."""
    mlp_bias: bool = False
    """Biases of the feed-forward block."""
    qk_norm: bool = False
    """Norms of queries and keys in each head."""
    qk_norm_whole: bool = False
    """Those norms are of all heads together (OLMo 2 and 3)."""
    windows: tuple[int, ...] = ()
    """Tokens that a query sees, itself included, layer by layer and from the beginning again where there are more
    layers; 0 is all before it. [1024, 1024, 0]: each third layer sees everything. Empty: every layer does."""
    sinks: bool = False
    """One learned logit for each head, which takes part in the softmax of attention and has no value (GPT-OSS)."""
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
    prediction_layers: int = 0
    """Layers behind the others that predict further tokens, with the model's embedding and head (DeepSeek-V3)."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        require_at_least(1, self, "model", ("hidden", "layers", "heads", "ffn", "vocab", "max_positions", "base_width"))
        require_at_least(0, self, "model", ("kv_heads", "head_dim", "prediction_layers"))
        require_at_most(MOST, self, "model")
        self._resolve_heads()
        for name in ("norm_epsilon", "rope_theta", "initial_std", "embedding_scale", "rope_factor"):
            if getattr(self, name) <= 0:
                raise UserError(f"model.{name}={getattr(self, name)} is not positive; use a number above 0")
        if self.positions == "rope" and self.rope_dim % 2:
            name = "latent.qk_rope_dim" if self.latent else "head_dim"
            raise UserError(
                f"model.{name}={self.rope_dim} is odd and RoPE rotates pairs; {use(name, [self.rope_dim + 1])}"
            )
        self._check_initialization()
        self._check_windows()
        stretches = {"rope_scaling": self.rope_scaling, "yarn": self.yarn, "rope_factor": self.rope_factor != 1}
        for name, is_set in {**stretches, **{name: getattr(self, name) for name in NEED_ROPE}}.items():
            if is_set and self.positions != "rope":
                raise UserError(f"model.{name} does nothing with positions={self.positions}; use positions=rope")
        several = [name for name, is_set in stretches.items() if is_set]
        if len(several) > 1:
            raise UserError(f"model.{several[1]} and model.{several[0]} stretch the same positions; keep one of them")
        if self.mixture and self.mixture.first_dense_layers > self.layers:
            raise UserError(
                f"mixture.first_dense_layers={self.mixture.first_dense_layers} is more than layers={self.layers}; "
                f"{use('first_dense_layers', [self.layers])} or less"
            )

    def _check_windows(self) -> None:
        shown = list(self.windows)
        if any(not 0 <= window <= MOST["max_positions"] for window in self.windows):
            raise UserError(f"model.windows={shown} has a number that is no window; use 0 for all tokens, or more")
        for name in ("windows", "sinks", "query_scale", "qk_norm_whole", "attention_softcap"):
            if getattr(self, name) and self.latent is not None:
                raise UserError(f"model.{name} is not for attention through latents; use a model without latent")
        for name in ("window_rope_theta", "query_scale", "attention_softcap", "logit_softcap"):
            if getattr(self, name) < 0:
                raise UserError(f"model.{name}={getattr(self, name)} is negative; use {name}=0 or more")
        if self.window_rope_theta and not any(self.windows):
            raise UserError(
                f"model.window_rope_theta={self.window_rope_theta} has no layer with a window; use window_rope_theta=0"
            )
        if self.qk_norm_whole and not self.qk_norm:
            raise UserError("model.qk_norm_whole=true has no norms to widen; use qk_norm=true")
        if self.unit_norms and self.norm != "rmsnorm":
            raise UserError(
                f"model.unit_norms=true is for norm=rmsnorm, not for norm={self.norm}; use unit_norms=false"
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
        if self.hidden % self.heads and self.latent is None:  # whose heads have widths of their own
            near = nearest_numbers(self.heads, lambda number: self.hidden % number == 0, 1, self.hidden)
            raise UserError(
                f"model.heads={self.heads} does not divide hidden={self.hidden} and head_dim is not given; "
                f"{use('heads', near)}"
            )
        object.__setattr__(self, "head_dim", max(1, self.hidden // self.heads))

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that RoPE rotates."""
        return self.latent.qk_rope_dim if self.latent else self.head_dim

    @property
    def is_gated(self) -> bool:
        """Whether feed-forward blocks have a gate."""
        return self.activation != "gelu"

    @property
    def is_routed(self) -> bool:
        """Whether some layers have experts that can be spread over ranks."""
        return self.mixture is not None

    @property
    def all_layers(self) -> int:
        """Transformer blocks, those of prediction layers among them, which are numbered behind the others."""
        return self.layers + self.prediction_layers

    @property
    def routed_layers(self) -> int:
        """How many of them route their tokens to experts."""
        return self.all_layers - (self.mixture.first_dense_layers if self.mixture else self.all_layers)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer routes its tokens to experts."""
        return self.mixture is not None and layer >= self.mixture.first_dense_layers

    def window_of(self, layer: int) -> int:
        """Tokens that a query of this layer sees, itself included; 0: all before it."""
        return self.windows[layer % len(self.windows)] if self.windows else 0

    # Counts come from the tables of `spec.sharding`, which build on this file: hence imported where they are used.

    @cached_property
    def parameters(self) -> int:
        """Exact number of parameters, learned positions included, a tied embedding counted once."""
        from cuboid.spec.sharding import count, embedding_parameters, head_parameters

        layers = sum(self.layer_parameters(layer) for layer in range(self.all_layers))
        return layers + count(embedding_parameters(self) | head_parameters(self))

    @property
    def active_parameters(self) -> int:
        """Parameters that touch one token: as `parameters`, with only the experts a token goes to."""
        if self.mixture is None:
            return self.parameters
        from cuboid.spec.sharding import block_parameters, count

        last = block_parameters(self, self.layers - 1)
        routed = count({name: declared for name, declared in last.items() if declared.split.kind == "expert"})
        idle = routed // self.mixture.experts * (self.mixture.experts - self.mixture.top_k)
        return self.parameters - self.routed_layers * idle

    def layer_parameters(self, layer: int) -> int:
        """Parameters of one transformer layer; they differ where leading layers of a mixture are dense."""
        from cuboid.spec.sharding import block_parameters, count, prediction_parameters

        return count(block_parameters(self, layer) | prediction_parameters(self, layer))

    def attention_parameters(self) -> int:
        """Parameters of one attention block, without the norm before it."""
        from cuboid.spec.sharding import attention_parameters, count

        return count(attention_parameters(self, "attention"))


def load_model(text: str, folder: Path = Path()) -> ModelSpec:
    """A model from a catalog name, a TOML file, a Hugging Face `config.json` or a folder that holds one."""
    from cuboid.spec.load import build_model, model_table  # here, because loading builds on this file

    return build_model(model_table(text, folder), folder)
