"""What cannot be trained, refused by name before any process starts."""

from cuboid.errors import UserError
from cuboid.spec.run import Run


def check_supported(run: Run) -> None:
    """Returns when the engine can train the run."""
    if run.model.mixture is not None and run.model.mlp_bias:
        raise UserError("model.mlp_bias=true has no place in routed experts; use mlp_bias=false")
    if run.model.latent is not None:
        for name in ("qkv_bias", "output_bias", "qk_norm"):
            if getattr(run.model, name):
                raise UserError(f"model.{name}=true has no place in latent attention; use {name}=false")
