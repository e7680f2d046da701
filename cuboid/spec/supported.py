"""What cannot be trained, refused by name before any process starts."""

from cuboid.errors import UserError
from cuboid.spec.run import Run

BYTE_TOKENS = 257
"""What the bytes of Python's own source need: 256 values, and one that ends a file."""


def check_supported(run: Run) -> None:
    """Returns when the engine can train the run."""
    for name, value in (("cp", run.layout.cp), ("ep", run.layout.ep)):
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
    check_vocabulary(run)


def check_vocabulary(run: Run) -> None:
    """Every token of the data needs its row in the embedding."""
    if run.data.source == "python-stdlib" and run.model.vocab < BYTE_TOKENS:
        raise UserError(
            f"model.vocab={run.model.vocab} is smaller than the {BYTE_TOKENS} tokens of "
            f"data.source=python-stdlib; use vocab={BYTE_TOKENS} or more"
        )
