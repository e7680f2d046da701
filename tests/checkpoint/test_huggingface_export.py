"""What is exported loads in transformers and computes what was trained, whatever layout trained it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.huggingface.export import export_model
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import INDEX, Manifest
from cuboid.checkpoint.save import gather_index, write
from cuboid.checkpoint.storage import Staging
from cuboid.checkpoint.weights import Weights, whole
from cuboid.data.source import make_source
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.model.huggingface import parameter_shapes
from cuboid.model.transformer import IGNORED, Transformer
from cuboid.parallel.coordination import open_coordination
from cuboid.spec.run import Run, build_run, dump_run
from tests.cli.command import environment
from tests.parallel.cases import small_run

SIZES = ("training.precision=float32", "training.steps=4", "training.global_batch=8", "model.layers=4")
# What transformers computes of a plain batch: it is told of no documents.
SIZES += ("data.attention_within_documents=false", "data.positions_within_documents=false")
OLMO2 = ("model.family=olmo2", "model.windows=[]", "model.window_rope_theta=0")
QWEN2 = ("model.family=qwen2", "model.qkv_bias=true")
# transformers takes the best experts, as our evaluation does.
QUIET = ("model.mixture.router_noise=0",)
UNBIASED = (*QUIET, "model.mixture.bias_rate=0.0", "model.mixture.router_bias=false")
CASES = {
    "llama": ("tiny-llama", "tp=2,pp=2", ()),
    "llama-padded": ("tiny-llama", "tp=4", ("model.vocab=261",)),
    "llama-tied": ("tiny-llama", "pp=2,schedule=zbv,dp=2", ("model.tie_embeddings=true",)),
    "qwen3-tied": ("tiny-qwen3", "tp=4", ()),
    "qwen2": ("tiny-llama", "dp=4,zero=3", QWEN2),
    "gpt2": ("tiny-gpt2", "tp=2,dp=2,zero=1", ()),
    "mixtral": ("tiny-mixtral", "dp=2,ep=2", UNBIASED),
    "qwen3-moe": ("tiny-qwen3-moe", "tp=2,ep=2,zero=3,dp=2", UNBIASED),
    "deepseek-v3": ("tiny-deepseek", "dp=2,tp=2,ep=4", QUIET),
    "mistral": ("tiny-llama", "cp=2,tp=2", ("model.family=mistral", "model.windows=[5]")),
    "gemma2": ("tiny-gemma2", "tp=2,cp=2", ()),
    "gemma3": ("tiny-gemma3", "tp=2,pp=2", ()),
    "olmo2": ("tiny-olmo3", "tp=2,dp=2", OLMO2),
    "olmo3": ("tiny-olmo3", "cp=2,tp=2", ()),
    "gpt-oss": ("tiny-gpt-oss", "dp=2,tp=2,ep=4", UNBIASED),
    "gpt2-untied": ("tiny-gpt2", "dp=3,zero=2", ("model.tie_embeddings=false", "training.global_batch=12")),
}


def trained(pool: Pool, folder: Path, case: str) -> tuple[Run, float]:
    """Three steps and a checkpoint; the loss of the fourth is that of the checkpoint's weights."""
    model, layout, overrides = CASES[case]
    run = small_run(layout, *SIZES, *overrides, model=model)
    ranks = run.layout.world_size
    return run, pool.run("tests.checkpoint.jobs:train_part", (run, str(folder), 0, 3, None, 1), ranks=ranks)[0][-1]


def batch_of(run: Run, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source, size = make_source(run), run.training.global_batch
    tokens, labels = zip(*(source.at(step * size + place) for place in range(size)), strict=True)
    return torch.stack(tokens), torch.stack(labels)


def own_logits(run: Run, checkpoint: Location, tokens: torch.Tensor) -> torch.Tensor:
    model = Transformer(run.model)
    with torch.no_grad():
        Weights(checkpoint, run.model).read({name: whole(values.data) for name, values in model.named_parameters()})
        return model(tokens)  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_what_was_trained(pool: Pool, tmp_path: Path, case: str) -> None:
    run, next_loss = trained(pool, tmp_path, case)
    report = export_model(tmp_path, tmp_path / "out", shard_size=100_000)
    assert len(report.files) > 3 and report.dtype == "float32"
    theirs, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    tokens, labels = batch_of(run, 3)
    with torch.no_grad():
        logits = theirs(tokens).logits
    assert (logits - own_logits(run, checkpoint_path(tmp_path, 3), tokens)).abs().max() < 1e-5
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    assert loss.item() == pytest.approx(next_loss, abs=1e-5)


@pytest.fixture(scope="module")
def checkpoint(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    run = small_run("dp=2", *SIZES, "data.source=python-stdlib")
    pool.run("tests.checkpoint.jobs:train_part", (run, str(folder), 0, 1, None), ranks=2)
    return Path(str(checkpoint_path(folder, 1)))


def test_a_run_its_checkpoints_and_one_checkpoint_mean_the_same(checkpoint: Path, tmp_path: Path) -> None:
    written = []
    elsewhere = small_run("dp=2", *SIZES, f"checkpoint.folder={checkpoint.parent}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text(dump_run(elsewhere))
    sources = (checkpoint, checkpoint.parent, checkpoint.parent.parent, tmp_path / "run")
    for number, source in enumerate(sources):
        export_model(source, tmp_path / str(number))
        written.append(load_file(tmp_path / str(number) / "model.safetensors"))
    for other in written[1:]:
        assert all(torch.equal(other[name], values) for name, values in written[0].items())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_byte_tokenizer_goes_along(checkpoint: Path, tmp_path: Path) -> None:
    report = export_model(checkpoint, tmp_path / "out")
    assert report.tokenizer == "bytes, as in python-stdlib"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Grüße,\n\t世界 \x00\x7f  'll don't <s>"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer("a<|endoftext|>")["input_ids"] == [97, 256]
    assert (tokenizer.eos_token_id, len(tokenizer)) == (256, 257)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": 256}


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("float16", torch.float16)])
def test_other_dtypes_are_rounded_once(checkpoint: Path, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    export_model(checkpoint, tmp_path / "full")
    export_model(checkpoint, tmp_path / "half", dtype=name)
    full, half = (load_file(tmp_path / folder / "model.safetensors") for folder in ("full", "half"))
    assert all(torch.equal(half[tensor], values.to(dtype)) for tensor, values in full.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == dtype


def test_nothing_is_written_over_and_nothing_is_left(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="mine exists already"):
        export_model(checkpoint, tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"hf:.*/file/out cannot be written: Not a directory"):
        export_model(checkpoint, tmp_path / "file" / "out")
    with pytest.raises(UserError, match="holds no checkpoint"):
        export_model(tmp_path, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]


def test_an_index_without_a_parameter_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "step-00000001"
    copy.mkdir()
    for path in checkpoint.iterdir():
        os.link(path, copy / path.name)
    index = json.loads((copy / INDEX).read_text())
    del index["parameter/head.norm.weight"]
    (copy / INDEX).unlink()
    (copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{INDEX} lacks the parameter head.norm.weight"):
        Weights(locate(copy), small_run("dp=2", *SIZES).model)


MEASURED = """
import resource, sys
from pathlib import Path
from cuboid.checkpoint.huggingface.export import export_model

folder = Path(sys.argv[1])
export_model(folder, folder / "small", shard_size=1 << 20)  # of which imports and caches are a part
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = export_model(folder, folder / "out", shard_size=4 << 20)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(report.bytes, len(report.files), grown * 1024)
"""


def test_memory_holds_one_file_of_weights(tmp_path: Path) -> None:
    run = build_run({"model": "tiny-llama"}, ["model.layers=24", "model.hidden=256", "model.ffn=512"])
    state = {f"parameter/{name}": whole(torch.ones(shape)) for name, shape in parameter_shapes(run.model).items()}
    staging = Staging(state, torch.device("cpu"))
    staging.fill(state)
    alone, manifest = open_coordination(60), Manifest(1, 1, 16, "", "dp=1", dump_run(run))
    write(staging, checkpoint_path(tmp_path, 1), manifest, gather_index(staging, alone), alone)
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURED, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    size, files, grown = map(int, finished.stdout.split())
    assert size > 50e6 and files > 12
    assert grown < 16e6, "a file's weights, and its pages of the checkpoint"
