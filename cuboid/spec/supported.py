"""What cannot be trained, refused by name before any process starts."""

from cuboid.errors import UserError
from cuboid.spec.run import Run


def check_supported(run: Run) -> None:
    """Returns when the engine can train the run."""
    for name, value in (("ep", run.layout.ep),):
        if value > 1:
            raise UserError(f"layout.{name}={value} cannot be trained yet; use {name}=1")
    if run.model.mixture is not None:
        raise UserError(
            f"model={run.model.name} has a mixture of experts, which cannot be trained yet; use a dense model"
        )
    if run.model.latent is not None:
        raise UserError(
            f"model={run.model.name} has latent attention, which cannot be trained yet; use a model without"
        )
