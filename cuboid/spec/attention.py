"""What attention can be beside plain: stretched rotary positions, and low-rank latents."""

from dataclasses import dataclass

from cuboid.errors import UserError, use
from cuboid.spec.coding import check_types, require_at_least


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
