"""A training that starts from given weights: the loss is theirs on any layout, and no rank reads more than it keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.huggingface.export import export_model
from cuboid.checkpoint.weights import check_start
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.spec.generation import GenerationSpec
from cuboid.spec.run import Run
from cuboid.training.run_folder import checkpoint_folder, prepare_folder
from tests.checkpoint.pretrained import CASES, run_from, save_pretrained, their_loss
from tests.matrix import crossed

LAYOUTS = {
    "mixtral": "dp=2,ep=2,tp=2",
    "deepseek-v3": "dp=2,ep=2,pp=2,zero=3",
    "llama": "tp=2,pp=2",
    "llama-tied": "pp=2,dp=2,zero=3,schedule=zbv",
    "qwen2": "dp=4,zero=2",
    "qwen3": "tp=4",
    "gpt2": "tp=2,dp=2,zero=1",
    "gpt2-untied": "pp=4,schedule=1f1b",
    "mistral": "cp=2,dp=2",
    "gemma2": "tp=2,pp=2",
    "gemma3": "tp=2,cp=2,cp_method=ulysses",
    "olmo2": "tp=4",
    "olmo3": "tp=2,pp=2",
    "gpt-oss": "dp=2,ep=2,tp=2,zero=3",
}


def first_loss(pool: Pool, run: Run) -> float:
    pool.run("tests.training.cases:train_rank", (run,), ranks=run.layout.world_size)
    rows = (Path(run.output.folder) / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(rows[0])["loss"])


def checked(run: Run, overwrite: bool = False) -> list[str]:
    return check_start(run, checkpoint_folder(run), overwrite)


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_that_of_transformers_on_any_layout(pool: Pool, tmp_path: Path, case: str) -> None:
    folder = save_pretrained(tmp_path / "model", case)
    losses = []
    for number, layout in enumerate(("dp=1", LAYOUTS[case])):
        where = f"output.folder={tmp_path / str(number)}"
        run = run_from(f"hf:{folder}", layout, where, "training.precision=float64", "training.steps=1")
        losses.append(first_loss(pool, run))
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    # Their RMSNorm computes in float32 whatever the model's precision.
    exact = 1e-9 if case.startswith("gpt2") else 1e-6
    assert losses[0] == pytest.approx(their_loss(folder, run, torch.float64), rel=exact)
    assert losses[0] == pytest.approx(their_loss(folder, run, torch.float32), abs=1e-5)


@pytest.mark.parametrize(
    ("case", "dtype"),
    crossed(["llama-tied", "qwen3", "qwen2", "gpt2", "gemma2", "gemma3", "olmo3"], [torch.float32, torch.bfloat16]),
)
def test_there_and_back_not_a_bit_changes(pool: Pool, tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    folder = save_pretrained(tmp_path / "model", case, shard="1GB", dtype=dtype)
    run = run_from(f"hf:{folder}", LAYOUTS[case])
    arguments = (run, str(tmp_path / "checkpoints"), f"hf:{folder}")
    told = pool.run("tests.checkpoint.jobs:start_and_save", arguments, ranks=run.layout.world_size)
    export_model(tmp_path, tmp_path / "out", dtype="bf16" if dtype == torch.bfloat16 else "float32")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in after)
    for started, kept, largest in told:
        assert started.bytes == kept * dtype.itemsize, "a rank reads what it keeps and nothing else"
        assert started.largest <= largest * dtype.itemsize
        assert kept < run.model.parameters or run.layout.zero == 0


def test_a_run_of_cuboid_gives_its_weights_and_nothing_else(pool: Pool, tmp_path: Path) -> None:
    folder = save_pretrained(tmp_path / "model", "gpt2")
    common = ("training.precision=float64", "checkpoint.every=2")
    first = run_from(f"hf:{folder}", "dp=2,zero=1", *common, f"output.folder={tmp_path / 'first'}")
    prepare_folder(first)
    first_loss(pool, first)
    losses = []
    for number, place in enumerate((tmp_path / "first", checkpoint_path(tmp_path / "first" / "checkpoints", 2))):
        output = f"output.folder={tmp_path / str(number)}"
        second = run_from(str(place), "tp=2,pp=2", *common, output, model=str(folder))
        assert checked(second) == []
        losses.append(first_loss(pool, second))
    export_model(tmp_path / "first", tmp_path / "out", dtype="float64")
    expected = their_loss(tmp_path / "out", second, torch.float64)
    assert losses == pytest.approx([expected, expected], rel=1e-9)


def test_one_rank_looks_at_all_and_the_others_open_what_they_read(pool: Pool, tmp_path: Path) -> None:
    folder = save_pretrained(tmp_path / "model", "llama")
    files = len(list(folder.glob("*.safetensors")))
    run = run_from(f"hf:{folder}", "pp=4")
    pool.run("tests.checkpoint.jobs:start_and_save", (run, str(tmp_path / "own"), f"hf:{folder}"), ranks=4)
    looks = []
    for place in (f"hf:{folder}", str(checkpoint_path(tmp_path / "own", 0))):
        spec = GenerationSpec(model=run.model, layout=run.layout, length=64, slots=2, weights=place)
        looks.append(pool.run("tests.checkpoint.jobs:files_opened_to_generate", (spec,), ranks=4))
    assert looks[0][0] == (0, files) and all(0 < opened < files for _, opened in looks[0][1:])
    assert looks[1] == [(1, 0), (0, 0), (0, 0), (0, 0)]


def test_going_on_needs_the_same_start_but_not_its_folder(pool: Pool, tmp_path: Path) -> None:
    folder = save_pretrained(tmp_path / "model", "qwen2")
    common = ("checkpoint.every=1", f"output.folder={tmp_path / 'run'}", "learning_rate.schedule=constant")
    begun = run_from(f"hf:{folder}", "dp=2", *common)
    prepare_folder(begun)
    pool.run("tests.training.cases:train_rank", (begun,), ranks=2)
    longer = run_from(f"hf:{folder}", "tp=2", *common, "training.steps=3")
    with pytest.raises(UserError, match=r"training\.start_from= is not hf:"):
        prepare_folder(run_from(f"hf:{folder}", "tp=2", *common, "training.start_from="))
    shutil.copy(folder / "config.json", tmp_path)
    shutil.rmtree(folder)
    assert checked(longer) == []
    prepare_folder(longer)
    pool.run("tests.training.cases:train_rank", (longer,), ranks=2)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    with pytest.raises(UserError, match="is no folder"):
        checked(longer, overwrite=True)
    again = run_from(str(tmp_path / "run"), "tp=2", *common, model=str(tmp_path / "config.json"))
    with pytest.raises(UserError, match="is what --overwrite removes"):
        checked(again, overwrite=True)


def test_what_differs_from_the_folder_is_said(tmp_path: Path) -> None:
    folder = save_pretrained(tmp_path / "model", "llama")
    assert checked(run_from(f"hf:{folder}", "dp=1")) == []
    notes = checked(run_from(f"hf:{folder}", "dp=1", "model.rope_theta=500.0"))
    assert notes == [f"model.rope_theta=500.0 is not 10000.0, with which training.start_from=hf:{folder} was made"]
    with pytest.raises(UserError, match=r"model\.layers\.3\..* has no place"):
        checked(run_from(f"hf:{folder}", "dp=1", "model.layers=3"))
    with pytest.raises(UserError, match=r"has shape \(259, 32\), not \(300, 32\)"):
        checked(run_from(f"hf:{folder}", "dp=1", "model.vocab=300"))


def test_interleaved_experts_go_there_and_back(pool: Pool, tmp_path: Path) -> None:
    """Gate and up of all experts lie in one tensor, of which a rank with some experts reads these."""
    folder = save_pretrained(tmp_path / "model", "gpt-oss", shard="1GB")
    run = run_from(f"hf:{folder}", LAYOUTS["gpt-oss"])
    arguments = (run, str(tmp_path / "checkpoints"), f"hf:{folder}")
    pool.run("tests.checkpoint.jobs:start_and_save", arguments, ranks=run.layout.world_size)
    export_model(tmp_path, tmp_path / "out", dtype="float32")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)
