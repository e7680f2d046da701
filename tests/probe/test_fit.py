"""Constants come back out of samples that were made from them."""

from dataclasses import replace

import pytest

from cuboid.cost.constants import at_host_speed, chip_named, engine_named, fabric_named
from cuboid.cost.estimate import Machine, estimate_many
from cuboid.cost.inputs import Jobs, single
from cuboid.probe.fit import FACTORS, cases, fit_chip, fit_engine, fit_fabric, line, matmul_speed
from cuboid.probe.samples import Sample, merged, spread

SHAPES = ((32, 32, 32), (128, 128, 128), (512, 64, 512), (512, 256, 768), (512, 512, 2048))


def product(shape: tuple[int, int, int], rate: float, narrow: float, precision: str = "float32") -> Sample:
    rows, inner, columns = shape
    return Sample("matmul", shape, (6 * rows * inner * columns / rate * (1 + narrow / min(shape)),) * 3, precision)


def test_products_give_rate_and_loss_of_narrow_ones() -> None:
    speed = matmul_speed([product(shape, 4e10, 32) for shape in SHAPES])
    assert (speed.rate, speed.narrow) == (pytest.approx(4e10), 32)
    assert speed.error == pytest.approx(0, abs=1e-9)


def chip_samples(busy: float) -> list[Sample]:
    """Of a rank that has `busy` of its speed while all compute."""
    found = [product(shape, busy * 4e10, 16) for shape in SHAPES]
    found += [product((128, 128, 128), busy * rate, 16, name) for name, rate in (("bf16", 1e8), ("float64", 2e10))]
    found.append(replace(product(SHAPES[-1], 4e10, 16), way="alone"))
    for way, rate in (("alone", 1e10), ("together", busy * 1e10)):
        found.append(Sample("memory", (1 << 20,), (2 * (1 << 20) / rate,), way=way))
    forward = 4 * 0.5 * 1024**2 * 256 / (busy * 2e10)
    found.append(Sample("attention_forward", (1024, 4, 64), (forward,), "float32"))
    return [*found, Sample("attention_backward", (1024, 4, 64), (3.5 * forward,), "float32")]


def test_peaks_are_those_of_a_rank_alone() -> None:
    peaks, constants, bandwidth = fit_chip(chip_samples(0.25), "float32")
    assert peaks["float32"] == pytest.approx(4e10)
    assert peaks["bf16"] == pytest.approx(1e8)
    assert bandwidth == pytest.approx(1e10)
    assert constants["together"] == pytest.approx(0.25)
    assert constants["memory_efficiency"] == pytest.approx(0.25)
    # Attention is counted in shares of the 16-bit peak, whatever it is.
    assert constants["attention_forward"] == pytest.approx(0.25 * 2e10 / 1e8)
    assert constants["attention_backward"] == pytest.approx(0.25 * 2e10 / 1e8)


def test_copies_to_and_from_the_host_give_its_link() -> None:
    assert "host_link" not in fit_chip(chip_samples(1.0), "float32")[1]
    copies = [Sample("to_device", (10**9,), (0.02,)), Sample("to_host", (10**9,), (0.025,))]
    _, constants, _ = fit_chip([*chip_samples(1.0), *copies], "float32")
    assert constants["host_link"] == pytest.approx(4e10)


def test_a_slower_host_takes_all_its_seconds_longer() -> None:
    engine = engine_named("cuboid")
    found = at_host_speed(engine, 1.5 * engine.host_routing)
    assert found["host_mixture"] == pytest.approx(1.5 * engine.host_mixture)
    assert found["host_forward"] == pytest.approx(1.5 * engine.host_forward)
    assert at_host_speed(engine_named("megatron"), 1.0) == {}


def test_ranks_with_cores_of_their_own_do_not_slow_each_other() -> None:
    _, constants, _ = fit_chip(chip_samples(0.97), "float32")
    assert constants["together"] == 1.0


def test_steps_give_what_layers_cost_beside_products() -> None:
    chip = replace(chip_named("cpu"), kernel_floor=0.0)
    plain = replace(engine_named("cuboid@cpu"), linear_scale=1.0, attention_scale=1.0)
    real = replace(plain, hidden_traffic=80.0, ffn_traffic=12.0, loss_traffic=48.0)
    bandwidth = chip.memory_bandwidth * chip.memory_efficiency
    samples = []
    for number, run in enumerate(cases()):
        jobs = Jobs.of([run.layout], global_batch=1, sequence=run.training.sequence)
        machine = Machine(replace(chip, kernel_floor=2e-4), fabric_named("cpu"))
        seconds = single(estimate_many(run.model, machine, jobs, real, "float32").time.compute)
        samples.append(Sample("gradients", (number,), (seconds,), "float32"))
        samples.append(Sample("update", (number,), (104 * run.model.parameters / bandwidth,), "float32"))
    found, floor = fit_engine(samples, chip)
    assert floor == pytest.approx(2e-4)
    assert found["hidden_traffic"] == pytest.approx(80)
    assert found["ffn_traffic"] == pytest.approx(12)
    assert found["loss_traffic"] == pytest.approx(48)
    assert found["optimizer_passes"] == pytest.approx(100)


def test_samples_of_several_ranks_become_one_with_their_range() -> None:
    (sample,) = merged([Sample("memory", (8,), (1.0, 2.0)), Sample("memory", (8,), (4.0,))])
    row = sample.row()
    assert (row["low"], row["seconds"], row["high"]) == (1.0, 2.0, 4.0)
    assert row["size"] == (8,) and "precision" not in row


def test_time_on_a_core_becomes_time_by_the_clock() -> None:
    samples = [
        Sample("matmul", (8, 8, 8), (1.0,)),
        Sample("matmul", (8, 8, 8), (1.0,), way="alone"),
        Sample("core_fraction", (), (0.2, 0.3)),
        Sample("core_fraction", (), (1.0,), way="alone"),
        Sample("all_reduce", (8,), (1.0,), ranks=2),
    ]
    assert [sample.seconds for sample in spread(samples) if sample.kind != "core_fraction"] == [4.0, 1.0, 1.0]


SIZES = (4096, 65536, 1 << 20)


def ring(kind: str, ranks: int, nodes: int, start: float, bandwidth: float) -> list[Sample]:
    factor = FACTORS.get(kind, 1.0)
    return [
        Sample(kind, (size,), (factor * (start + (ranks - 1) / ranks * size / bandwidth),), "", ranks, nodes)
        for size in SIZES
    ]


def test_one_host_has_one_tier() -> None:
    samples = [sample for kind in FACTORS for sample in ring(kind, 4, 1, 3 * 2e-4, 1e9)]
    found = fit_fabric(samples, local=4, nodes=1)
    assert found["inner_latency"] == pytest.approx(2e-4)
    assert found["inner_bandwidth"] == pytest.approx(1e9)
    assert "outer_bandwidth" not in found


def test_several_hosts_have_curves_by_the_number_of_hosts() -> None:
    samples = [sample for kind in FACTORS for sample in ring(kind, 2, 1, 2e-4, 1e9)]
    for span, start, bandwidth in ((2, 1e-3, 1e8), (4, 3e-3, 5e7)):
        for kind in (*FACTORS, "all_to_all"):
            samples += ring(kind, 2 * span, span, start, bandwidth)
    for way, bandwidth in (("facing", 5e7), ("alone", 1e8)):
        samples += [Sample("shift", (size,), (1e-3 + size / bandwidth,), "", 4, 4, way) for size in SIZES]
    found = fit_fabric(samples, local=2, nodes=4)
    assert found["outer_bandwidth"] == pytest.approx(5e7)
    assert found["alone"] == pytest.approx(1e8)
    assert found["curve"]["all_gather"] == pytest.approx([0.1, 0.1, 0.05])  # type: ignore[index]
    assert found["delay"]["all_reduce"] == pytest.approx([1e-3, 1e-3, 3e-3])  # type: ignore[index]


def test_noise_never_makes_time_negative() -> None:
    falling = [Sample("shift", (size,), (seconds,)) for size, seconds in zip(SIZES, (3e-3, 2e-3, 1e-3), strict=True)]
    start, slope = line(falling, [1.0] * 3, [float(size) for size in SIZES])
    assert start > 0 and slope > 0
    below = [Sample("shift", (size,), (size / 1e9 * size / 1e6,)) for size in SIZES]
    start, slope = line(below, [1.0] * 3, [float(size) for size in SIZES])
    assert start > 0 and slope > 0
