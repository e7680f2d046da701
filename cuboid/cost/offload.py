"""Optimizer state in CPU memory: what it takes there, and what bringing it to the accelerator and back costs."""

import numpy as np

from cuboid.cost.communication import ONE
from cuboid.cost.constants import Chip, Engine
from cuboid.cost.inputs import Array, Jobs, Shape
from cuboid.cost.pipeline import partition, turns_back
from cuboid.cost.sharding import RankParameters, owned_parameters, rank_parameters


def host_bytes(shape: Shape, jobs: Jobs, engine: Engine) -> Array:
    """Bytes that the first pipeline rank, which holds the most parameters, keeps in its host's memory."""
    held = rank_parameters(shape, jobs, partition(shape, jobs, engine).first, ONE, turns_back(jobs))
    return np.asarray(jobs.offload * engine.optimizer_bytes * owned_parameters(jobs, held))


def brought_bytes(jobs: Jobs, engine: Engine, held: RankParameters) -> Array:
    """Bytes of offloaded state that are on the accelerator at once; none where it lies there."""
    elements = jobs.offload * np.minimum(engine.offload_elements, owned_parameters(jobs, held))
    return np.asarray(engine.optimizer_bytes * elements)


def offloaded_update(chip: Chip, engine: Engine, owned: Array, here: Array, forward: Array) -> Array:
    """Seconds of an update whose state is in CPU memory that nothing hides. `here`: those of one whose state is
    on the accelerator; `forward`: of the forward pass that follows."""
    if not engine.offload_elements:  # gradients go to the host, which updates, and weights come back
        moved = engine.gradient_wire + engine.parameter_wire + engine.optimizer_passes
        return np.asarray(moved * owned / chip.host_link)
    # Both ways at once; the pass that follows starts as soon as its first weights are there.
    whole = np.maximum(engine.optimizer_bytes * owned / chip.host_link, here)
    return np.asarray(np.maximum(whole - forward, 0.05 * whole))


def optimizer_time(jobs: Jobs, chip: Chip, engine: Engine, held: RankParameters, forward: Array) -> Array:
    """Seconds of the optimizer step. `forward`: of one micro-batch's forward pass, under which an offloaded update
    continues."""
    bandwidth = chip.memory_bandwidth * chip.memory_efficiency
    owned = owned_parameters(jobs, held)
    here = engine.optimizer_passes * owned / bandwidth
    there = offloaded_update(chip, engine, owned, here, forward)
    return np.asarray(np.where(jobs.offload > 0, there, here) + 4 * held.total / bandwidth)
