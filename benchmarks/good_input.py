"""Good input for `bad_input.py` to break: commands of every verb, and the folder of files that they read."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import shutil
import sys
import traceback
import types
from contextlib import suppress
from pathlib import Path

from cuboid.cli.main import main
from cuboid.spec.huggingface_writer import config_from_model
from cuboid.spec.model import load_model

RUN = """
layout = "dp=1"
[model]
base = "model.toml"
[training]
steps = 4
global_batch = 4
sequence = 32
device = "cpu"
[checkpoint]
every = 2
[evaluation]
every = 2
batches = 1
[data]
validation_fraction = 0.1
[output]
folder = "runs/seed"
keep_timing = true
count_communication = true
"""
MODEL = """
base = "tiny-llama"
layers = 2
hidden = 32
heads = 2
kv_heads = 2
head_dim = 16
ffn = 64
"""
CLUSTER = 'accelerator = "cpu"\nnodes = 1\naccelerators_per_node = 4\n'
DEEPSPEED = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
    "gradient_clipping": 1.0,
}
MIXED = """
layout = "dp=1"
model = "tiny-deepseek"
[training]
steps = 2
global_batch = 2
sequence = 16
device = "cpu"
[checkpoint]
every = 2
[samples]
every = 2
max_tokens = 2
prompts = ["a"]
[output]
folder = "runs/mixed"
layer_norms = true
track = "jsonl"
"""
GROWING = """
layout = "dp=1"
model = "tiny-gemma3"
[training]
steps = 3
global_batch = 4
batch_ramp = "2x1"
sequence = 16
sequence_ramp = "8x1"
z_loss = 1e-4
device = "cpu"
[optimizer]
kind = "muon"
average = 0.9
normuon = true
per_head = true
[learning_rate]
python = "python:own.py:halves"
[checkpoint]
every = 2
folder = "kept"
[output]
folder = "runs/growing"
"""
AHEAD = """
layout = "dp=1"
[model]
base = "tiny-deepseek"
layers = 2
prediction_layers = 1
[training]
steps = 2
global_batch = 2
sequence = 16
device = "cpu"
dropout = 0.1
prediction_loss = 0.2
precision = "bf16"
gradient_sums = "bf16"
[data]
attention_within_documents = true
assignment = "work"
[checkpoint]
every = 2
[output]
folder = "runs/ahead"
"""
ISLANDS = """
[islands]
count = 2
every = 2
fragments = 2
delay = 1
mix = 0.5
rate = 0.7
momentum = 0.9
bits = 8
quorum = 1
grace_seconds = 0.1
"""
SITES = """
[[groups]]
name = "left"
accelerator = "cpu"
accelerators_per_node = 2
uplink_gbit = 1.0
price = 2.0
spot_price = 1.0
life_hours = 20
[[groups]]
name = "right"
accelerator = "cpu"
accelerators_per_node = 1
price = 1.0
watts = 100.0
[[links]]
between = ["left", "right"]
bandwidth_gbit = 1.0
latency_ms = 1.0
"""
KIND = """
[[groups]]
name = "{}"
site = "here"
accelerator = "cpu"
accelerators_per_node = 1
peak_tflops = {{float32 = {}}}
tiers = [{{name = "network", size = 1, bandwidth = 0.1, latency = 100.0}}]
"""
KINDS = (
    KIND.format("fast", 0.05)
    + KIND.format("slow", 0.02)
    + """
[[links]]
between = ["here", "here"]
bandwidth_gbit = 10.0
latency_ms = 0.1
"""
)
CHECKED = """
[checks]
every = 2
share = 1.0
first = 1
only = "data, updates, sums"
"""
STEP = {"loss": 5.5, "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
STEP |= {"gradient_clip": 1.0, "gradient_norm": 1.0, "precision": "float32", "dp": 2, "micro_batches": 1}
OWN = "def halves(step, steps):\n    return 0.5**step\n"
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
FAILURE = {"time": "2026-01-01T00:00:00", "reason": "rank 0 was killed", "checkpoint": 2, "restarted": True}
BAD_STEP = {"step": 3, "reason": "a spike", "loss": 1.0, "gradient_norm": "inf", "layout": "dp=1", "batch": 2}
RANK_TIMES = {"step": 4, "time": 1.0, "ranks": [{"rank": 0, "compute": 1.0, "wait": 0.0, "data": 0.1, "save": 0.0}]}

SEED_RUN = "runs/seed/*"
CHECKPOINTS = "runs/seed/checkpoints/*/*"
ISLAND = "runs/islands/island-0/*"
MET = "--island 0 --islands-rendezvous 127.0.0.1:PORT"
PRICED = "plan tiny-llama sites.toml --global-batch 8 --seq 64 --tokens 1e6"
ONE_JOB = "plan tiny-llama kinds.toml --one-job --global-batch 12 --seq 64 --precision float32 --fix pp=2,micro_batch=1"
CHOSEN = " --set data.source=python-stdlib --set checkpoint.every=2"
SCENARIOS: list[tuple[str, tuple[str, ...]]] = [
    ("plan model.toml cluster.toml --global-batch 8 --seq 64 -o out.toml", ("model.toml", "cluster.toml")),
    ("plan hf/config.json h100x16 --global-batch 64 --seq 64", ("hf/config.json",)),
    ("plan configs/mixed/config.json h100x16 --global-batch 64 --seq 64", ("configs/*/config.json",)),
    ("plan configs/yarn/config.json h100x64 --global-batch 64 --seq 64", ("configs/yarn/config.json",)),
    ("plan configs/gemma/config.json h100x16 --global-batch 64 --seq 64", ("configs/gemma/config.json",)),
    ("explain configs/oss/config.json h100x8 --layout dp=8 --global-batch 64 --seq 64", ("configs/oss/config.json",)),
    ("plan configs/olmo/config.json h100x16 --global-batch 64 --seq 64", ("configs/olmo/config.json",)),
    ("plan tiny-mixtral h100x8 --global-batch 64 --seq 64 --for generate", ()),
    ("explain plan.toml", ("plan.toml",)),
    ("explain tiny-llama cluster.toml --layout dp=4 --global-batch 8 --seq 64", ("cluster.toml",)),
    ("simulate plan.toml --trace out.json --picture out.svg", ("plan.toml",)),
    ("map plan.toml", ("plan.toml",)),
    ("map --layout dp=2,tp=2 --cluster cluster.toml --model model.toml", ("cluster.toml", "model.toml")),
    ("goodput run.toml", ("run.toml", "runs/seed/metrics.jsonl", "runs/seed/failures.jsonl", "runs/seed/goodput.json")),
    ("goodput --gpus 1024 --failures llama3", ()),
    ("probe --rank 0 --layout dp=1 --model model.toml --seq 16 --global-batch 2 --cluster cluster.toml", ("*l.toml",)),
    ("probe --rank 1 --layout dp=2,tp=2 --model hf/config.json --seq 16 --global-batch 2", ("hf/config.json",)),
    ("estimate --rows rows.csv -o out.csv", ("rows.csv",)),
    ("models", ()),
    ("train run.toml --overwrite", ("run.toml", "model.toml")),
    ("train run.toml --set training.steps=6", ("run.toml", SEED_RUN, SEED_RUN, CHECKPOINTS, CHECKPOINTS)),
    ("train run.toml --layout dp=2 --set training.steps=6", (SEED_RUN, CHECKPOINTS)),
    ("train mixed.toml --set training.steps=3", ("mixed.toml", "runs/mixed/*")),
    ("train growing.toml --set training.steps=4", ("growing.toml", "runs/growing/*", "kept/*", "kept/*/*")),
    ("train stored.toml", ("stored.toml", "store/*", "store/*")),
    ("train tune.toml", ("tune.toml", "hf/*", "hf/*")),
    ("launch slurm run.toml --gpus-per-node 1", ("run.toml",)),
    ("launch kubernetes plan.toml --image x --claim y -o out.yaml", ("plan.toml",)),
    ("data build corpus -o built --tokenizer hf/tokenizer.json", ("corpus/*", "corpus/*", "hf/tokenizer*.json")),
    ("data build corpus/b.jsonl corpus/c.jsonl.gz -o built --workers 1", ("corpus/b.jsonl", "corpus/c.jsonl.gz")),
    ("data build chats.jsonl -o built --completions --workers 1", ("chats.jsonl",)),
    ("data build talk.jsonl -o built --completions --workers 1 --tokenizer chat", ("talk.jsonl", "chat/*")),
    ("data build dataset -o built --workers 1", ("dataset/*",)),
    ("data show store", ("store/*",)),
    ("data verify store", ("store/*",)),
    ("checkpoint ls runs/seed --deep", ("runs/seed/run.toml", CHECKPOINTS)),
    ("checkpoint verify runs/seed", (CHECKPOINTS,)),
    ("checkpoint show runs/seed", (CHECKPOINTS,)),
    ("checkpoint copy runs/seed copied", (CHECKPOINTS,)),
    ("checkpoint prune runs/seed --keep 1", (CHECKPOINTS,)),
    ("import hf:hf -o out.toml", ("hf/*",)),
    ("import-deepspeed ds.json --model model.toml --world-size 4 -o out.toml", ("ds.json", "ds.json", "model.toml")),
    ("verify --layout dp=1 --model model.toml --steps 1", ("model.toml",)),
    ("verify --against step", ("step/*", "step/*", "step/*", "step/*", "step/model/*")),
    ('verify --islands "dp=1; dp=1" --model model.toml --set islands.fragments=2', ("model.toml",)),
    ("verify --layout dp=1 --model model.toml --steps 1 --set model.prediction_layers=1", ("model.toml",)),
    ("train ahead.toml --set training.steps=3", ("ahead.toml", "runs/ahead/*", "runs/ahead/checkpoints/*/*")),
    ("train run.toml --overwrite --set training.precision=fp8 --set training.fp8_scaling=block", ("model.toml",)),
    ("plan model.toml h100x8 --global-batch 8 --seq 64 --precision fp8 --fp8-scaling block", ("model.toml",)),
    ("train islands.toml --overwrite --island 0 --islands-rendezvous 127.0.0.1:PORT", ("islands.toml",)),
    ("explain configs/ahead/config.json h100x8 --layout dp=8 --global-batch 64 --seq 64", ("configs/ahead/*",)),
    ("generate runs/ahead --prompt a --max-tokens 4 --draft 1", ("runs/ahead/run.toml", "runs/ahead/checkpoints/*/*")),
    ("generate hf:further --prompt a --max-tokens 4 --draft 1 --tokenizer byte", ("further/*", "further/*")),
    ("import hf:further -o out.toml", ("further/*",)),
    ("evaluate hf:further --data corpus/a.txt --tokens 64 --tokenizer byte", ("further/*",)),
    ("export runs/ahead --to hf:out", ("runs/ahead/run.toml", "runs/ahead/checkpoints/*/*")),
    ("replay runs/seed --step 3", (SEED_RUN, "runs/seed/metrics.jsonl", "runs/seed/bad_steps.jsonl", CHECKPOINTS)),
    ("report runs/seed --no-search -o out.html", (SEED_RUN,)),
    ("report runs/mixed --no-search -o out.html", ("runs/mixed/*",)),
    ("report plan.toml -o out.html --no-search", ("plan.toml",)),
    ("watch runs/seed --once", (SEED_RUN, "runs/seed/metrics.jsonl")),
    ("watch runs/mixed --once", ("runs/mixed/*",)),
    ("watch runs/seed --json", (SEED_RUN, "runs/seed/metrics.jsonl")),
    ("compare runs/seed runs/other", (SEED_RUN, "runs/seed/metrics.jsonl")),
    ("generate runs/seed --prompt a --max-tokens 2", ("runs/seed/run.toml", CHECKPOINTS)),
    ("generate hf:hf --prompts prompts.jsonl --max-tokens 2 -o out.jsonl", ("hf/*", "hf/*", "prompts.jsonl")),
    ("generate hf:hf --prompts prompts.txt --max-tokens 2 --tokenizer hf/tokenizer.json", ("hf/tok*", "prompts.txt")),
    ("generate runs/seed --prompts prompts.txt --max-tokens 2 -o done.jsonl", ("done.jsonl",)),
    ("evaluate runs/seed --data corpus/a.txt --tokens 64", ("corpus/a.txt", CHECKPOINTS)),
    ("evaluate runs/seed --data store --tokens 64", ("store/*",)),
    ("evaluate hf:hf --choices choices.jsonl", ("choices.jsonl", "hf/*")),
    ("export runs/seed --to hf:out", ("runs/seed/run.toml", CHECKPOINTS, CHECKPOINTS)),
    ("export plan.toml --to megatron", ("plan.toml",)),
    ("export plan.toml --to torchtitan -o out.toml", ("plan.toml",)),
    ("clusters sites.toml", ("sites.toml",)),
    ("plan tiny-llama sites.toml --global-batch 8 --seq 64 -o out.toml", ("sites.toml",)),
    (PRICED + " --objective cost --deadline 900 --front out.svg -o out.toml", ("sites.toml",)),
    (ONE_JOB + " -o out.toml", ("kinds.toml",)),
    *((f"{verb} isles.toml", ("isles.toml",)) for verb in ("explain", "simulate", "goodput", "simulate --island 0")),
    *((f"{verb} kinds-plan.toml", ("kinds-plan.toml",)) for verb in ("explain", "simulate", "map")),
    ("train kinds-plan.toml --group slow --nodes 3 --rendezvous 127.0.0.1:PORT", ("kinds-plan.toml",)),
    ("launch slurm isles.toml --island 1 --islands-rendezvous a:1 --gpus-per-node 1" + CHOSEN, ("isles.toml",)),
    ("train checked.toml --set training.steps=6", ("checked.toml", "runs/checked/*", "runs/checked/*/*/*")),
    ("report runs/checked --no-search -o out.html", ("runs/checked/*",)),
    ("export runs/growing --to hf:out --average", ("runs/growing/run.toml", "kept/*/*")),
    (f"train islands.toml {MET} --set training.steps=6", (ISLAND, "runs/islands/island-0/checkpoints/*/*")),
    ("report runs/islands/island-0 --no-search -o out.html", (ISLAND,)),
    ("watch runs/islands/island-0 --json", (ISLAND,)),
    ("compare runs/seed runs/islands/island-0 runs/checked", (ISLAND, "runs/checked/*")),
]
"""A good command, and patterns of the files it reads; a pattern that is there twice is broken twice as often."""


def make_good(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    os.chdir(folder)
    files = {
        "run.toml": RUN,
        "model.toml": MODEL,
        "cluster.toml": CLUSTER,
        "ds.json": json.dumps(DEEPSPEED),
        "prompts.txt": "def main(\nimport os\n",
        "prompts.jsonl": '{"prompt": "def main("}\n{"prompt": "x", "seed": 1}\n',
        "choices.jsonl": '{"prompt": "a", "choices": ["b", "c"], "answer": 0}\n' * 2,
        "mixed.toml": MIXED,
        "growing.toml": GROWING,
        "own.py": OWN,
        "ahead.toml": AHEAD,
        "islands.toml": RUN.replace("runs/seed", "runs/islands") + ISLANDS,
        "sites.toml": SITES,
        "kinds.toml": KINDS,
        "checked.toml": RUN.replace("runs/seed", "runs/checked") + CHECKED,
        "talk.jsonl": (json.dumps({"messages": TALK}) + "\n") * 2,
        "chats.jsonl": '{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n',
        "corpus/a.txt": "A text of a few words, to be tokenised.\n" * 20,
        "corpus/b.jsonl": '{"text": "one row"}\n{"text": "another row"}\n' * 5,
    }
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    rows = Path("corpus/b.jsonl").read_bytes()
    Path("corpus/c.jsonl.gz").write_bytes(gzip.compress(rows))
    with suppress(ImportError):
        import zstandard

        Path("corpus/d.jsonl.zst").write_bytes(zstandard.compress(rows))
    with suppress(ImportError):
        _make_tables()
    published = (Path(__file__).parent / "published/runs.csv").read_text().splitlines()
    Path("rows.csv").write_text("\n".join(published[:6]))
    for command in (
        "train run.toml",
        "train mixed.toml",
        "train growing.toml",
        "train ahead.toml",
        "train checked.toml",
        f"train islands.toml {MET}".replace("PORT", "29599"),
        "export runs/ahead --to hf:further",
        "export runs/seed --to hf:hf",
        "plan tiny-llama cpux8 --global-batch 8 --seq 64 -o plan.toml",
        "plan tiny-llama sites.toml --global-batch 8 --seq 64 -o isles.toml",
        f"{ONE_JOB} -o kinds-plan.toml",
        "import hf:hf -o tune.toml --set training.steps=2 --set training.global_batch=2 --set training.sequence=16",
        "generate runs/seed --prompts prompts.txt --max-tokens 2 -o done.jsonl",
    ):
        assert quietly(command) == 0, command
    small = Tokenizer(models.BPE())
    small.pre_tokenizer, small.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    small.train_from_iterator(
        files["corpus/a.txt"].splitlines(),
        trainers.BpeTrainer(
            vocab_size=258, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    small.save("hf/tokenizer.json")
    assert quietly("data build corpus/a.txt -o store --tokenizer hf/tokenizer.json --workers 1") == 0
    stored = RUN.replace("[data]", '[data]\nsource = "store"').replace("runs/seed", "runs/stored")
    Path("stored.toml").write_text(
        stored.replace("sequence = 32", "sequence = 8")
        .replace("validation_fraction = 0.1", "")
        .replace("every = 2\nbatches = 1", "")
    )
    Path("runs/seed/failures.jsonl").write_text(json.dumps(FAILURE) + "\n")
    bad = {**BAD_STEP, "squared_norms": [1.0, "nan"], "skipped": [1]}
    Path("runs/seed/bad_steps.jsonl").write_text(json.dumps(bad) + "\n")
    Path("runs/seed/ranks-00000.jsonl").write_text(json.dumps(RANK_TIMES) + "\n")
    shutil.copytree("hf", "chat", ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    Path("chat/tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT, "eos_token": "<|endoftext|>"}))
    configs = {"mixed": "tiny-deepseek", "yarn": "deepseek-v3", "moe": "qwen3-30b-a3b"}
    for name, model in (configs | {"gemma": "tiny-gemma3", "oss": "gpt-oss-20b", "olmo": "tiny-olmo3"}).items():
        Path("configs", name).mkdir(parents=True)
        Path("configs", name, "config.json").write_text(json.dumps(config_from_model(load_model(model))))
    shutil.copytree("runs/seed", "runs/other")
    shutil.copytree("further", "configs/ahead", ignore=shutil.ignore_patterns("*.safetensors", "tok*"))
    _make_step(Path("step"))


def _make_tables() -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    table = pyarrow.table({"text": ["a row of a table", "another"] * 10})
    parquet.write_table(table, "corpus/e.parquet")
    Path("dataset").mkdir()
    with (
        pyarrow.OSFile("dataset/data-00000-of-00001.arrow", "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    Path("dataset/state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    Path("dataset/dataset_info.json").write_text("{}")


def _make_step(folder: Path) -> None:
    """Of another trainer, which computed it wrongly: so what is wrong is located too."""
    import numpy
    from safetensors.numpy import save_file

    shutil.copytree("hf", folder / "model", ignore=shutil.ignore_patterns("tok*"))
    for name in ("gradients", "parameters"):
        shutil.copy("hf/model.safetensors", folder / f"{name}.safetensors")
    tokens = numpy.arange(32, dtype=numpy.int64).reshape(4, 8)
    save_file({"tokens": tokens, "labels": tokens + 1}, folder / "batch.safetensors")
    (folder / "step.json").write_text(json.dumps(STEP))


def quietly(command: str) -> int:
    """The exit code of a command in a process of its own, which leaves nothing behind in this one."""
    child = os.fork()
    if not child:
        os.dup2(os.open("good.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        os._exit(status_of(shlex.split(command)))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        print(Path("good.log").read_text()[-3000:], file=sys.stderr)
    Path("good.log").unlink()
    return code


def status_of(arguments: list[str]) -> int:
    """As a process of its own would end."""
    sys.argv = ["cuboid", *arguments]
    # Processes that this one starts import the main module; that of a command is the program, not this file.
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        status = main(arguments)
    except BaseException:
        traceback.print_exc()
        status = 70
    try:
        sys.stdout.flush()
    except Exception:
        traceback.print_exc()
        status = 71
    sys.stderr.flush()
    return status
