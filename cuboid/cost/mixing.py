"""Layouts that recompute some layers of a stage more than the others: both kinds are costed, and mixed by how many
layers are of each. A layout whose layers are all alike costs to the bit what it costs without this."""

from dataclasses import dataclass, replace

import numpy as np

from cuboid.cost.inputs import Array, Jobs, number


def mixes(jobs: Jobs) -> bool:
    """Whether any of the layouts does."""
    return bool(np.any(jobs.recompute_layers > 0))


def heavier(jobs: Jobs) -> Jobs:
    """With all layers recomputed as those that are recomputed more."""
    return replace(jobs, recompute_layers=number(0))


def lighter(jobs: Jobs) -> Jobs:
    """… as those that are recomputed less."""
    return replace(jobs, recompute=np.maximum(jobs.recompute - 1, 0.0), recompute_layers=number(0))


def recomputed(jobs: Jobs, layers: Array) -> Array:
    """Of so many layers of a rank those that are recomputed more."""
    return np.where(jobs.recompute_layers > 0, np.minimum(jobs.recompute_layers * jobs.vpp, layers), layers)


def mixed(jobs: Jobs, layers: Array, more: Array, less: Array) -> Array:
    """The mean over the layers of a model, of what one takes that is recomputed more and one that is less."""
    share = np.minimum(jobs.recompute_layers * jobs.pp * jobs.vpp / layers, 1.0)
    return np.where(jobs.recompute_layers > 0, share * more + (1 - share) * less, more)


@dataclass(frozen=True)
class Kept:
    """What the layers of a rank keep of one micro-batch."""

    layers: Array
    """All of them."""
    layer: Array
    """One that is run backward, or again before."""
    last: Array
    """The same of those that are run backward first: the others are recomputed less."""
    spared: Array
    """Those of a stage that are recomputed less; they let go of it before the first ones are run again."""
