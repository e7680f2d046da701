"""One rank of a larger job, run alone: its bytes are those the planner predicts, line by line."""

import json
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.telemetry.heartbeat import Heartbeat

JOB = ["--model", "tiny-llama", "--global-batch", "8", "--sequence", "64", "--device", "cpu"]


def report(capsys: pytest.CaptureFixture[str], rank: int, layout: str) -> tuple[dict[str, float], dict[str, float]]:
    assert main(["probe", "--rank", str(rank), "--layout", layout, *JOB, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert min(found["measured"]["every_step"]) > 0
    assert found["predicted"]["seconds"] > 0
    return found["measured"]["memory"], found["predicted"]["memory"]


@pytest.mark.parametrize(
    ("rank", "layout"), [(0, "dp=8"), (900, "dp=4,tp=4,pp=8,cp=8,zero=1"), (5, "dp=2,tp=2,pp=2"), (3, "dp=4,zero=2")]
)
def test_state_is_as_predicted(capsys: pytest.CaptureFixture[str], rank: int, layout: str) -> None:
    measured, predicted = report(capsys, rank, layout)
    for kind in ("parameters", "gradients", "optimizer"):
        assert measured[kind] == pytest.approx(predicted[kind], rel=0.1, abs=20_000), kind
    assert 0.3 * predicted["activations"] < measured["activations"] < 3 * predicted["activations"]


def test_what_is_sharded_is_not_held(capsys: pytest.CaptureFixture[str]) -> None:
    whole, _ = report(capsys, 1, "dp=8")
    sharded, predicted = report(capsys, 1, "dp=8,zero=3")
    assert sharded["optimizer"] < 0.2 * whole["optimizer"]
    assert sharded["gradients"] < 0.2 * whole["gradients"]
    # At its fullest moment a rank also holds a unit or two that were gathered.
    assert predicted["parameters"] < sharded["parameters"] < 0.6 * whole["parameters"]


def test_recomputation_keeps_less(capsys: pytest.CaptureFixture[str]) -> None:
    kept, _ = report(capsys, 0, "dp=8")
    some, _ = report(capsys, 0, "dp=8,recompute=full,recompute_layers=2")
    again, _ = report(capsys, 0, "dp=8,recompute=full")
    assert again["activations"] < 0.5 * kept["activations"]
    assert again["activations"] < some["activations"] < kept["activations"]


def test_what_was_sent_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a micro-batch on its way a stage keeps the input of each of its layers, not what it gave the next stage."""
    layers, tokens = 2, 64
    one = 4 * tokens * 64  # bytes of what goes from layer to layer
    kept = []
    for count in (2, 3):
        layout = "dp=1,pp=4,recompute=full"
        job = [*JOB, "--global-batch", str(count), "--json"]
        assert main(["probe", "--rank", "1", "--layout", layout, *job]) == 0
        kept.append(json.loads(capsys.readouterr().out)["measured"]["memory"]["activations"])
    assert kept[1] - kept[0] == layers * one


@pytest.mark.parametrize(
    "layout", ["dp=8,ep=8", "dp=4,tp=2,ep=4,zero=1", "dp=4,pp=2,ep=2,schedule=dualpipev,recompute=full"]
)
def test_experts_of_a_rank_get_balanced_loads(capsys: pytest.CaptureFixture[str], layout: str) -> None:
    job = ["--model", "tiny-mixtral", "--global-batch", "8", "--sequence", "64", "--device", "cpu", "--json"]
    assert main(["probe", "--rank", "1", "--layout", layout, *job]) == 0
    found = json.loads(capsys.readouterr().out)
    measured, predicted = found["measured"]["memory"], found["predicted"]["memory"]
    for kind in ("parameters", "gradients", "optimizer"):
        assert measured[kind] == pytest.approx(predicted[kind], rel=0.1, abs=20_000), kind
    assert 0.5 * predicted["activations"] < measured["activations"] < 2 * predicted["activations"]


def test_what_cannot_be_run_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--rank", "8", "--layout", "dp=8", *JOB]) == 2
    assert "use rank=0 to rank=7" in capsys.readouterr().err
    assert main(["probe", "--rank", "0"]) == 2
    assert "--layout" in capsys.readouterr().err
    assert main(["probe", "--rank", "0", "--layout", "dp=2", *JOB, "--cluster", "h100x1"]) == 2
    assert "cluster=h100x1 has 1 of the 2 accelerators that layout=dp=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--layout dp=8", "--micro-batch 2", "--global-batch 16", "--seq 256", "--precision bf16"]
)
def test_options_of_a_job_need_a_rank(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["probe", *option.split()]) == 2
    assert f"{option.split()[1]} is of a job, of which one rank is run; add --rank 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--output here.toml", "--ranks 2", "--seconds 2.5", "--nodes 1", "--rendezvous a:1", "--interface lo"]
)
def test_options_of_a_measurement_are_refused_with_a_rank(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["probe", "--rank", "1", "--layout", "dp=8", *JOB, *option.split()]) == 2
    said = option.removeprefix("--").replace(" ", "=")
    assert f"{said} is for measuring this machine, not rank=1 of a job" in capsys.readouterr().err


def test_a_rank_that_does_not_fit_says_so_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = Heartbeat()  # as in a process of its own, where no other test has taken steps
    monkeypatch.setattr("cuboid.launch.oom.HEARTBEAT", fresh)
    monkeypatch.setattr("cuboid.probe.one_rank.HEARTBEAT", fresh)
    model = tmp_path / "huge.toml"
    sizes = {"hidden": 2**20, "layers": 1, "heads": 8, "kv_heads": 4, "ffn": 192, "vocab": 2**24}
    model.write_text("\n".join(['family = "llama"', *(f"{name} = {size}" for name, size in sizes.items())]))
    assert main(["probe", "--rank", "0", "--layout", "dp=2", *JOB, "--model", str(model)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: rank 0 of dp=2,tp=1,pp=1 ran out of memory in set-up: it wanted 65536.00 GiB more")
    assert told.count("\n") == 1


def test_a_prediction_says_that_it_is_of_another_precision(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--global-batch", "2", "--sequence", "16"]
    assert main(["probe", "--rank", "0", "--layout", "dp=2", *JOB, *small, "--precision", "float64"]) == 0
    assert "predicted in float32" in capsys.readouterr().out
