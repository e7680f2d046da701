"""Some layers recomputed more than the others: between both ends in memory and time, and nothing else changes."""

import numpy as np
import pytest

from cuboid.cost.constants import Engine, chip_named, engine_for, engine_named, fabric_named
from cuboid.cost.estimate import Estimates, Machine, estimate_shapes
from cuboid.cost.inputs import Jobs, Shape
from cuboid.planning.stages import stage_costs
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model

H100 = Machine(chip_named("h100-80g"), fabric_named("h100"))
LLAMA = load_model("llama3-8b")
ENGINES = [engine_for("cuboid", H100.chip), engine_named("cuboid@cpu"), engine_named("megatron")]
SIZES = {"tp": 2, "pp": 4, "dp": 2, "micro_batch": 2, "global_batch": 64, "sequence": 4096}


def estimates(engine: Engine, model: str = "llama3-8b", **values: object) -> Estimates:
    return estimate_shapes(Shape.of(load_model(model)), Jobs.make(**{**SIZES, **values}), H100, engine)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("model", ["llama3-8b", "deepseek-v3"])
def test_memory_falls_and_time_grows_with_every_layer(engine: Engine, kind: int, model: str) -> None:
    """Eight layers a stage of one model; fifteen or sixteen of the other, whose first three have no experts."""
    numbers = np.arange(1, 8)
    some = estimates(engine, model, recompute=kind, recompute_layers=numbers)
    less, all_of_them = (estimates(engine, model, recompute=number) for number in (kind - 1, kind))
    # Where few layers are spared, sparing one more is free: it has let go before the others are run again.
    tail = 2 * 4096 * 4096 * 2 * 8
    assert np.all(np.diff(np.concatenate([[less.memory.item()], some.memory])) < tail)
    if kind == 1 or not engine.compiled:
        assert all_of_them.memory.item() <= some.memory[-1] + tail
    assert np.all(np.diff(np.concatenate([[less.seconds.item()], some.seconds])) >= -1e-12)
    assert all_of_them.seconds.item() >= some.seconds[-1] * (1 - 1e-12)
    activations = some.memory_table["first"].activations
    assert np.all(np.diff(activations) <= 0)


def test_what_is_recomputed_alike_costs_what_it_did() -> None:
    """To the bit, also beside a layout that mixes; and as many layers as a stage has are all of them."""
    engine = ENGINES[0]
    kinds = np.array([0, 1, 2, 2, 2])
    together = estimates(engine, recompute=kinds, recompute_layers=np.array([0, 0, 0, 8, 3]))
    for place, kind in enumerate((0, 1, 2, 2)):
        alone = estimates(engine, recompute=kind)
        assert together.memory[place] == alone.memory.item()
        assert together.seconds[place] == alone.seconds.item()


def test_each_stage_takes_as_long_as_its_own_layers() -> None:
    """Stages of nine, nine, nine and five layers, of which seven are recomputed, all in the last one."""
    layers = (9, 9, 9, 5)

    def seconds(text: str) -> list[float]:
        layout = Layout.parse(f"dp=2,tp=2,pp=4,micro_batch=2,{text}")
        costs, _ = stage_costs(LLAMA, H100, layout, global_batch=64, sequence=4096, layers=layers)
        return [sum(each) for each in zip(costs.forward, costs.input_backward, costs.weight_backward, strict=True)]

    some, less, more = (seconds(f"recompute={kind}") for kind in ("full,recompute_layers=7", "selective", "full"))
    for stage in range(3):
        assert some[stage] == pytest.approx(less[stage] + 7 / 9 * (more[stage] - less[stage]))
    assert some[3] == pytest.approx(more[3])
