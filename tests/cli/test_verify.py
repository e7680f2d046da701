"""`cuboid verify`: the proof as a command, what it prints and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.cli.verify import verification_run

SMALL = ["--steps", "2", "--set", "training.sequence=8", "--set", "training.global_batch=2"]
PROMISED = [
    "layout",
    "world_size",
    "steps",
    "loss_error",
    "gradient_error",
    "gradient_norm_error",
    "parameter_error",
    "passed",
]


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["verify", *arguments, *SMALL, "--json"]) == 0
    shown = capsys.readouterr()
    assert (shown.out.count("\n"), shown.err) == (1, "")
    found = json.loads(shown.out)
    assert isinstance(found, dict)
    return found


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = verified(capsys, "--layout", "dp=2", "--seed", "3", "--set", "model.layers=3")
    assert [key for key in found if key in PROMISED] == PROMISED
    assert (found["layout"], found["world_size"], found["steps"]) == ("dp=2,tp=1,pp=1", 2, 2)
    assert (found["passed"], found["seed"], found["dtype"]) == (True, 3, "float64")
    assert (found["backend"], found["gpus"], found["gpu_shared"]) == ("gloo", 0, False)
    assert found.pop("router_error") is None, "a dense model has no routers"
    errors = [found[key] for key in found if key.endswith("_error")]
    assert all(isinstance(error, float) and 0 <= error <= 1e-9 for error in errors)
    assert any(errors), "the layout rounds differently, so an error of exactly zero everywhere would mean no comparison"


def test_a_model_of_ones_own_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.toml"
    path.write_text('base = "tiny-qwen3"\nlayers = 3\nvocab = 61\n')
    found = verified(capsys, "--layout", "pp=2", "--model", str(path), "--precision", "float32")
    assert (found["model"], found["passed"], found["dtype"], found["tolerance"]) == ("odd", True, "float32", 1e-3)
    assert found["gradient_error"] > 1e-9  # type: ignore[operator]


def test_a_model_and_a_precision_that_are_set_are_proved_as_those_of_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = verified(capsys, "--layout", "pp=2", "--model", "tiny-mixtral", "--precision", "bf16")
    found = verified(capsys, "--layout", "pp=2", "--set", "model=tiny-mixtral", "--set", "training.precision=bf16")
    assert (found["model"], found["dtype"], found["steps"]) == ("tiny-mixtral", "bf16", 1)
    assert found["tolerances"] == given["tolerances"]


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_fewer_bits_to_a_multiple_of_their_own_rounding(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--steps", "2", "--set", "model.layers=2", "--set", "training.global_batch=2", "--json"]
    assert main(["verify", "--layout", "dp=2,tp=2,zero=3", "--precision", precision, *few]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dtype"], found["passed"], found["unforeseen"]) == (precision, True, [])
    assert found["loss_error"] < 1e-2 and found["gradient_error"] > 1e-5


def test_bf16_to_a_multiple_of_its_own_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--set", "model.layers=2", "--set", "model.hidden=32", "--set", "model.ffn=48", "--set", "model.vocab=64"]
    found = verified(capsys, "--layout", "dp=2,tp=2,zero=1", "--precision", "bf16", *few)
    assert (found["dtype"], found["passed"], found["unforeseen"]) == ("bf16", True, [])
    tolerances = found["tolerances"]
    assert isinstance(tolerances, dict) and tolerances.keys() == {"loss", "gradient", "gradient_norm", "parameter"}
    for name, tolerance in tolerances.items():
        error = found[f"{name}_error"]
        assert isinstance(error, float) and 0 <= error <= tolerance and 4 * 2**-8 <= tolerance < 0.3, (name, found)
    assert found["gradient_error"] > 1e-4, "it was bf16"  # type: ignore[operator]


def test_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--layout", "tp=2", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny-llama on dp=1,tp=2,pp=1 (2 processes) against one process, float64"
    assert lines[1] == "backend: gloo, 2 ranks on CPUs"
    assert [line.split("equal")[0].strip() for line in lines[2:6]] == ["loss", "gradient", "gradient norm", "parameter"]
    assert lines[6] == "The layout changed nothing but speed: all within 1e-09 over 2 clipped optimizer steps."


def test_a_difference_is_exit_status_one(capsys: pytest.CaptureFixture[str]) -> None:
    # Float32 differs from layout to layout in the last digits; an absurd learning rate makes them the first.
    overrides = ["--set", "optimizer.epsilon=1e-30", "--set", "learning_rate.peak=100.0"]
    status = main(["verify", "--layout", "dp=2", "--precision", "float32", "--steps", "2", *overrides])
    lines = capsys.readouterr().out.splitlines()
    assert status == 1, lines
    assert any("DIFFERS" in line for line in lines)
    assert lines[-1] == "The layout is NOT equal to one process within 1e-03 over 2 clipped optimizer steps."


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layout", "tp=3"], "error: tp=3 does not divide heads=8; use tp=2 or tp=4"),
        (
            ["--layout", "cp=16,cp_method=ulysses"],
            "error: cp=16 does not divide heads=8, which cp_method=ulysses shards; use cp=8 or cp_method=ring",
        ),
        (["--steps", "0"], "error: training.steps=0 is too small; use steps=1 or more"),
        (["--seed", "-1"], "error: training.seed=-1 is too small; use seed=0 or more"),
        (
            ["--precision", "int8"],
            "error: Invalid value for '--precision': 'int8' is not one of 'float64', 'flo",
        ),
        (
            ["--set", "data.source=python-stdlib", "--set", "model.vocab=99"],
            "error: model.vocab=99 is smaller than the",
        ),
        (
            ["--backend", "nccl", "--device", "cpu"],
            "error: training.backend=nccl needs GPUs, not training.device=cpu; ",
        ),
        (["--device", "cuda"], "error: --device=cuda but this machine has no usable GPU; use --device=cpu or --device"),
        (["--resume", "dp=1 -> dp=2", "--device", "cuda"], "error: --device=cuda but this machine has no usable GPU; "),
        (["--set", "training.device=cuda"], "error: training.device=cuda but this machine has no usable GPU; use dev"),
        (["--backend", "nccl"], "error: --backend=nccl needs a GPU for every rank, and a rank has none; use --backend"),
        (["--nodes", "2"], "error: nodes=2 needs a place where nodes meet; add --rendezvous HOST:PORT"),
        (["--nodes", "3", "--rendezvous", "127.0.0.1:29400"], "error: nodes=3 do not divide the 8 ranks of dp=2,tp=2,"),
        (
            ["--set", "learning_rate.python=python:builtins:object"],
            "error: learning_rate.python=python:builtins:object gives no number for step=",
        ),
        (["--model", "tiny-lama"], "error: unknown model=tiny-lama; did you mean tiny-llama"),
    ],
)
def test_what_cannot_be_proved_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(sentence)
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("layout", ["dp=1", "dp=3,micro_batch=2", "tp=4,pp=2", "dp=2,tp=8,sequence_parallel=false"])
def test_the_run_that_is_proved_fits_any_layout(layout: str) -> None:
    run = verification_run(layout, seed=5, steps=4)
    assert run.micro_batches == 4
    assert run.training.sequence % run.layout.tp == 0
    assert (run.training.seed, run.training.steps, run.data.source) == (5, 4, "synthetic")


CHAIN = "dp=2,tp=2 -> pp=2,dp=2,zero=3,schedule=zbv -> dp=1"


def test_a_chain_of_layouts_goes_on_as_if_never_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--resume", CHAIN, "--model", "tiny-qwen3", "--steps", "2", "--json"]) == 0
    shown = capsys.readouterr()
    assert (shown.out.count("\n"), shown.err) == (1, "")
    found = json.loads(shown.out)
    assert (found["passed"], found["steps"], found["model"], len(found["losses"])) == (True, 6, "tiny-qwen3", 6)
    assert [leg["layout"] for leg in found["legs"]] == [
        "dp=2,tp=2,pp=1",
        "dp=2,tp=1,pp=2,zero=3,schedule=zbv",
        "dp=1,tp=1,pp=1",
    ]
    assert [(leg["first_step"], leg["last_step"]) for leg in found["legs"]] == [(1, 2), (3, 4), (5, 6)]
    for leg in found["legs"]:
        for name in ("loss", "parameter", "first_moment", "second_moment"):
            assert 0 <= leg[f"{name}_error"] <= 1e-9
        assert leg["parameter_error"] and leg["second_moment_error"], "zero would mean that nothing was compared"


def test_a_chain_is_told_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "1", "--precision", "float32", "--set", "model.layers=2", "--set", "training.sequence=8"]
    assert main(["verify", "--resume", "dp=2 -> dp=1", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny-llama, 1 steps on each layout, against one uninterrupted process, float32"
    assert lines[1] == "backend: gloo, 2 ranks on CPUs"
    assert lines[2].split()[:4] == ["steps", "1-1", "dp=2,tp=1,pp=1", "equal"]
    assert lines[3].split()[:4] == ["steps", "2-2", "dp=1,tp=1,pp=1", "equal"]
    assert lines[-1].startswith("The changes of layout lost nothing")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["dp=2"], 'error: --resume "dp=2" is no chain of layouts; write it like '),
        (["dp=2 -> "], 'error: --resume "dp=2 -> " is no chain of layouts; write it like '),
        (["dp=2 -> pd=1"], "error: layout 2 of --resume, pd=1: unknown key pd;"),
        (["dp=2 -> pp=16"], "error: layout 2 of --resume, pp=16: pp=16 makes more stages than layers=8; use pp=8"),
        (["dp=2 -> dp=1", "--layout", "dp=2"], "error: --layout proves one layout and --resume a chain of them; "),
        (["dp=2 -> dp=1", "--nodes", "2"], "error: --resume starts other ranks for each layout; use it on one machine"),
        (["dp=2 -> dp=1", "--set", "training.precision=fp16"], "error: training.precision=fp16 is too coarse"),
        (["dp=2 -> dp=1", "--steps", "0"], "error: layout 1 of --resume, dp=2: training.steps=0 is too small"),
    ],
)
def test_a_bad_chain_is_one_sentence(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--resume", *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.startswith(sentence), shown.err


@pytest.mark.parametrize(
    ("layouts", "sentence"),
    [
        ("dp=1; ", 'error: --islands "dp=1; " is no list of layouts; write it like '),
        ("dp=1; dp=x", "error: island 1 of --islands, dp=x: dp=x has the wrong type; it must be an integer"),
        ("dp=1; pp=16", "error: island 1 of --islands, pp=16: pp=16 makes more stages than layers=8; use pp=8"),
        (";".join(["dp=1"] * 1025), "error: --islands names 1025 layouts; use 1024 or fewer"),
        ("dp=1000; dp=1000", "error: --islands of 2 layouts starts 2000 ranks on this machine"),
    ],
)
def test_bad_islands_are_one_sentence(layouts: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--islands", layouts]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(sentence), shown.err
