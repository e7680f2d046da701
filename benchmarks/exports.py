"""Plans for other engines, read by those engines: does each export parse, and does it mean what the plan means?

    python benchmarks/exports.py --megatron CHECKOUT [--megatron CHECKOUT …] --nanotron CHECKOUT [--python PYTHON]

Every case is planned by `cuboid plan --for-engine` and exported; the engine's own parser reads the file, and every
field it states is compared with the plan. A field may differ only where the file's own notes name it. Needs checkouts
of Megatron-LM (any number of versions) and nanotron, which are no packages, and a Python with

    pip install torch deepspeed transformers dacite six packaging typing_extensions tensorboard pillow
    pip install multiprocess dill xxhash pyarrow pandas httpx
    pip install --no-deps torchtitan==0.2.2 tyro docstring_parser typeguard torchdata datasets triton

which take more room than a test suite should ask for, so this is no test. `--only megatron` looks at one engine. Fails
where anything fails.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuboid.cli.main import main as cuboid
from cuboid.planning.export.engines import notes
from cuboid.planning.plan import Plan, load_plan

PARSERS = Path(__file__).parent / "parsers"
ENDINGS = {"megatron": "sh", "deepspeed": "json", "torchtitan": "toml", "nanotron": "yaml"}


@dataclass(frozen=True)
class Case:
    """A question for `cuboid plan`."""

    target: str
    model: str
    cluster: str
    global_batch: int
    sequence: int
    fix: str = ""
    precision: str = "bf16"

    @property
    def words(self) -> list[str]:
        words = [
            "plan",
            self.model,
            self.cluster,
            "--global-batch",
            str(self.global_batch),
            "--seq",
            str(self.sequence),
        ]
        words += ["--for-engine", self.target, "--precision", self.precision]
        return words + (["--fix", self.fix] if self.fix else [])

    def __str__(self) -> str:
        return f"{self.target} {self.model} {self.cluster} {self.fix} {self.precision}"


def of(target: str, model: str, cluster: str, global_batch: int, sequence: int, *fixes: str) -> list[Case]:
    """A case for each fix; `!fp8` at its end says the precision."""
    found = []
    for text in fixes or ("",):
        fix, _, precision = text.partition("!")
        found.append(Case(target, model, cluster, global_batch, sequence, fix, precision or "bf16"))
    return found


CASES = [
    # Dense: every kind of context parallelism, pipeline, ZeRO, recomputation and precision.
    *of("megatron", "llama3.1-8b", "h100x64", 256, 8192, "", "cp=4,cp_method=ring", "cp=4,cp_method=ulysses"),
    *of(
        "megatron", "llama3.1-8b", "h100x64", 256, 8192, "cp=8,cp_method=hybrid,cp_inner=2", "cp=4,cp_method=allgather"
    ),
    *of("megatron", "llama3.1-8b", "h100x64", 256, 8192, "zero=0", "zero=1,pp=4", "zero=2", "zero=3", "tp=2,zero=3"),
    *of("megatron", "llama3.1-8b", "h100x64", 256, 8192, "zero=1,shard=8", "zero=3,shard=8", "zero=1,offload=true"),
    *of("megatron", "llama3.1-8b", "h100x64", 256, 8192, "!fp8", "pp=4!fp8", "recompute=full", "recompute=selective"),
    *of("megatron", "llama3.1-8b", "h100x64", 256, 8192, "!float32", "!fp16", "tp=8,sequence_parallel=false"),
    *of("megatron", "llama3-70b", "h100x512", 512, 8192, "", "schedule=interleaved,pp=4,vpp=5", "pp=16"),
    *of("megatron", "llama3-70b", "h100x512", 512, 8192, "schedule=interleaved,pp=8", "pp=32,tp=4"),
    *of("megatron", "gpt3-175b", "a100-80gx1024", 1536, 2048, "", "schedule=interleaved,pp=16,tp=8"),
    *of("megatron", "qwen3-8b", "h100x32", 128, 4096),
    *of("megatron", "qwen2.5-7b", "h100x32", 128, 4096),
    # GPT-2: learned positions, LayerNorm, GELU, biases, one matrix for embedding and head.
    *of("megatron", "gpt2", "a100-80gx8", 64, 1024, "", "tp=2,pp=2", "schedule=interleaved,pp=2", "zero=3!fp16"),
    *of("megatron", "gpt2-medium", "h100x8", 64, 1024, "cp=2", "recompute=full", "!fp8"),
    *of("megatron", "gpt2-large", "v100-32gx16", 64, 1024, "!fp16", "pp=4!fp16"),
    *of("megatron", "gpt2-xl", "a100-80gx40", 80, 1024, "", "tp=5", "pp=8", "zero=1,offload=true"),
    *of("megatron", "llama3.2-1b", "h100x8", 64, 8192, "", "tp=2,pp=2"),
    *of("megatron", "qwen2.5-0.5b", "h100x8", 64, 4096, "", "pp=4"),
    *of("megatron", "gpt-1t", "h100x2048", 2048, 2048),
    *of("deepspeed", "gpt2-xl", "v100-32gx16", 64, 1024, "!fp16", "zero=2!fp16", "zero=3!fp16"),
    # Experts, and latent attention.
    *of("megatron", "mixtral-8x7b", "h100x64", 256, 4096, "", "ep=8", "tp=4,ep=8", "ep=8,cp=2!fp8", "ep=8,pp=4"),
    *of("megatron", "qwen3-30b-a3b", "h100x64", 256, 4096, "", "ep=16,schedule=interleaved,pp=4"),
    *of("megatron", "qwen3-235b-a22b", "h100x256", 512, 4096),
    *of("megatron", "deepseek-v2", "h100x256", 512, 4096),
    *of("megatron", "deepseek-v3", "h100x512", 2048, 4096, "", "pp=16,ep=32!fp8", "schedule=interleaved,pp=4"),
    *of("megatron", "moe-1t", "h100x1024", 2048, 4096),
    *of("deepspeed", "llama3.1-8b", "h100x64", 256, 4096, "", "zero=0", "zero=1", "zero=2", "zero=3", "tp=2", "pp=4"),
    *of("deepspeed", "llama3.1-8b", "h100x64", 256, 4096, "zero=1,offload=true", "recompute=full", "!fp16", "!float32"),
    *of("deepspeed", "llama3-70b", "h100x512", 512, 4096, "", "pp=8", "tp=8"),
    *of("deepspeed", "mixtral-8x7b", "h100x64", 256, 4096, "", "ep=8"),
    *of("deepspeed", "qwen3-30b-a3b", "h100x64", 256, 4096),
    *of("torchtitan", "llama3.1-8b", "h100x64", 256, 8192, "", "zero=0", "zero=2", "zero=3", "zero=3,shard=8"),
    *of("torchtitan", "llama3.1-8b", "h100x64", 256, 8192, "cp=4", "dp=1,cp=64", "pp=4", "recompute=full", "!float32"),
    *of("torchtitan", "llama3.1-8b", "h100x64", 256, 8192, "schedule=interleaved,pp=2", "schedule=dualpipev,pp=4"),
    *of("torchtitan", "llama3.1-8b", "h100x64", 256, 4096, "schedule=gpipe,pp=2,recompute=full"),
    *of("torchtitan", "llama3.1-70b", "h100x512", 512, 8192, "", "!fp8", "schedule=1f1b,pp=8"),
    *of("torchtitan", "llama3.1-405b", "h100x1024", 512, 8192),
    *of("torchtitan", "llama3-8b", "h100x64", 256, 8192),
    *of("torchtitan", "qwen3-8b", "h100x32", 128, 4096),
    *of("torchtitan", "qwen3-32b", "h100x128", 128, 4096),
    *of("torchtitan", "qwen3-30b-a3b", "h100x64", 256, 4096, "", "ep=8"),
    *of("torchtitan", "deepseek-v3", "h100x512", 2048, 4096, "", "ep=32,pp=8"),
    *of("torchtitan", "llama3.3-70b", "h100x512", 512, 8192),
    *of("torchtitan", "qwen3-235b-a22b", "h100x512", 512, 4096),
    *of("torchtitan", "deepseek-v2", "h100x256", 512, 8192, "", "pp=4"),
    # Models without a flavor, registered as the head of the file says.
    *of("torchtitan", "llama2-7b", "h100x64", 256, 4096, "", "pp=4,schedule=zbv", "cp=2"),
    *of("torchtitan", "llama2-70b", "h100x512", 512, 4096),
    *of("torchtitan", "mixtral-8x7b", "h100x64", 256, 4096, "", "ep=8"),
    *of("torchtitan", "moe-1t", "h100x1024", 2048, 8192),
    *of("nanotron", "llama2-7b", "h100x64", 256, 4096, "", "zero=0", "zero=1", "tp=4", "pp=4", "schedule=gpipe,pp=4"),
    *of("nanotron", "llama2-7b", "h100x64", 256, 4096, "recompute=full", "!float32", "tp=8,sequence_parallel=false"),
    *of("nanotron", "llama2-70b", "h100x512", 512, 4096, "", "tp=8"),
    *of("nanotron", "llama2-13b", "h100x64", 256, 4096),
    *of("nanotron", "llama3-8b", "h100x64", 256, 4096),
]
REFUSED = {
    ("torchtitan", "gpt2"): "its models lack positions=learned, norm=layernorm, activation=gelu",
    ("torchtitan", "qwen2.5-7b"): "its models lack qkv_bias=true",
    ("torchtitan", "llama3.2-1b"): "its models lack tie_embeddings=true",
    ("nanotron", "gpt2"): "it has but a dense llama",
    ("nanotron", "mixtral-8x7b"): "it has but a dense llama",
    ("nanotron", "llama3.1-8b"): "model.rope_scaling",
}
"""Target and model -> what its refusal says."""
STARTED = ("dp=2,zero=0", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "pp=2", "tp=2", "dp=2,zero=1,offload=true")
"""Layouts of two ranks that `deepspeed.initialize` starts."""


def meaning(plan: Plan) -> dict[str, Any]:
    """Every field of a plan that some engine has a word for."""
    layout, question, run = plan.layout, plan.question, plan.run
    model, rate, optimizer = question.model, run.learning_rate, run.optimizer
    found: dict[str, Any] = {
        "world": layout.world_size,
        **{name: getattr(layout, name) for name in ("dp", "tp", "pp", "cp", "ep", "sequence_parallel", "zero")},
        "shard": layout.shard_size,
        "offload": layout.offload,
        "micro_batch": layout.micro_batch,
        "micro_batches": plan.micro_batches,
        "global_batch": question.global_batch,
        "sequence": question.sequence,
        "recompute": layout.recompute,
        "cp_method": layout.cp_method if layout.cp > 1 else None,
        "cp_inner": layout.cp_inner,
        "schedule": layout.schedule if layout.pp > 1 else None,
        "stages": list(plan.layers),
        "precision": question.precision,
        "steps": run.training.steps,
        "learning_rate": rate.peak,
        "least_learning_rate": rate.peak * rate.minimum_ratio,
        "decay": rate.schedule,
        "warmup_steps": rate.warmup_steps,
        "weight_decay": optimizer.weight_decay,
        "betas": [optimizer.beta1, optimizer.beta2],
        "epsilon": optimizer.epsilon,
        "gradient_clip": run.training.gradient_clip,
        "model.dropout": 0.0,
        "latent.norms": True,
        "model.rope_scaling": model.rope_scaling.factor if model.rope_scaling else None,
    }
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "norm", "norm_epsilon"):
        found[f"model.{name}"] = getattr(model, name)
    for name in ("activation", "positions", "rope_theta", "tie_embeddings", "qkv_bias", "mlp_bias", "qk_norm"):
        found[f"model.{name}"] = getattr(model, name)
    found["model.initial_std"] = model.initial_std
    for part, spec in (("latent", model.latent), ("yarn", model.yarn), ("mixture", model.mixture)):
        found |= {f"{part}.{name}": value for name, value in vars(spec).items()} if spec else {}
    found.setdefault("yarn.factor", None)
    return found


def differences(plan: Plan, target: str, found: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Fields that differ without a word, and those that the file's notes name."""
    said = meaning(plan)
    noted = {note.field: note.there for note in notes(plan, target)}
    silent, named = [], []
    for name, value in found.items():
        planned = said[name]
        if layout_says_nothing(name, plan, value) or same(planned, value):
            continue
        if name in noted and same(noted[name], value):
            named.append(name)
        else:
            silent.append(f"{name}: {value} there, {planned} planned")
    return silent, named


def layout_says_nothing(name: str, plan: Plan, value: Any) -> bool:
    """ZeRO over a single replica splits nothing, so any stage means the same; stages of a pipeline without one."""
    alone = plan.layout.dp * plan.layout.cp == 1 and name in ("zero", "shard")
    return alone or (name == "stages" and plan.layout.pp == 1 and (value is None or len(value) == 1))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return bool(one == other)


def written(case: Case, folder: Path, index: int) -> tuple[Path, Plan]:
    """The exported file, and the plan it was made from."""
    plan = folder / f"{index}.plan.toml"
    file = folder / f"{index}.{ENDINGS[case.target]}"
    for words in ([*case.words, "-o", str(plan)], ["export", str(plan), "--to", case.target, "-o", str(file)]):
        said = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            status = cuboid(words)
        if status:
            raise RuntimeError(f"cuboid {words[0]}: {said.getvalue().strip()}")
    return file, load_plan(plan)


def refuses(target: str, model: str, reason: str) -> bool:
    """Whether a plan for a target that lacks the model is refused, and for that reason."""
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        status = cuboid(Case(target, model, "h100x64", 64, 1024).words)
    good = status == 2 and reason in said.getvalue()
    print(f"{target} refuses {model}: {'yes' if good else said.getvalue().strip() or 'no'}")
    return good


def parsed(python: str, reader: str, *words: str) -> dict[str, Any]:
    """What a reader prints."""
    done = subprocess.run([python, PARSERS / reader, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def started(python: str, folder: Path) -> list[str]:
    """What fails of `deepspeed.initialize` and a step on two ranks."""
    failed = []
    for fix in STARTED:
        case = Case("deepspeed", "tiny-llama", "h100x2", 8, 64, fix)
        file, plan = written(case, folder, 1000 + STARTED.index(fix))
        words = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", PARSERS / "read_deepspeed.py", "start"]
        done = subprocess.run([*words, file], capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("STARTED ")]
        found = json.loads(lines[0].removeprefix("STARTED ")) if lines else {}
        expected = {name: meaning(plan)[name] for name in ("zero", "micro_batch", "micro_batches")}
        good = bool(found) and all(found[name] == value for name, value in expected.items())
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        print(f"deepspeed.initialize {fix:26} {'starts' if good else (errors or [str(found)])[0]}")
        failed += [] if good else [fix]
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", action="append", default=[], metavar="CHECKOUT")
    parser.add_argument("--nanotron", metavar="CHECKOUT")
    parser.add_argument("--python", default=sys.executable, help="The Python that has the engines' packages.")
    parser.add_argument("--only", choices=tuple(ENDINGS))
    given = parser.parse_args()
    if not given.only and not (given.megatron and given.nanotron):
        parser.error("needs --megatron and --nanotron, or --only")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(check(given, Path(folder)))


def check(given: argparse.Namespace, folder: Path) -> int:
    """Plans, exports, parses and compares; returns how many failed."""
    made: dict[str, tuple[Case, Path, Plan]] = {}
    failed = 0
    for index, case in enumerate(CASES):
        if given.only in (None, case.target):
            try:
                file, plan = written(case, folder, index)
                made[file.name] = (case, file, plan)
            except RuntimeError as error:
                failed += 1
                print(f"REFUSED {case}: {error}")
    for (target, model), reason in REFUSED.items():
        if given.only in (None, target):
            failed += not refuses(target, model, reason)
    for target in ENDINGS:
        files = {name: entry for name, entry in made.items() if entry[0].target == target}
        sized = [f"{file}@{plan.layout.world_size}" for _, file, plan in files.values()]
        plain = [str(file) for _, file, _ in files.values()]
        readers = {
            "megatron": [("read_megatron.py", checkout, *plain) for checkout in given.megatron],
            "nanotron": [("read_nanotron.py", given.nanotron, *plain)],
            "deepspeed": [("read_deepspeed.py", *sized)],
            "torchtitan": [("read_torchtitan.py", *sized)],
        }[target]
        for words in readers if files else []:
            bad, noted, fields = 0, 0, 0
            for name, found in parsed(given.python, *words).items():
                silent, named = ([found["error"]], []) if "error" in found else ([], [])
                if not silent:
                    silent, named = differences(files[name][2], target, found)
                    fields += len(found)
                bad, noted = bad + bool(silent), noted + bool(named)
                for line in silent:
                    print(f"FAILED {files[name][0]} [{files[name][2].layout}]: {line}")
            where = Path(words[1]).name if target in ("megatron", "nanotron") else "installed package"
            print(
                f"{target:10} {where:14} {len(files)} plans, {bad} fail, {fields} fields compared, {noted} with notes"
            )
            failed += bad
    if given.only in (None, "deepspeed"):
        failed += len(started(given.python, folder))
    print(f"{len(made)} plans exported; {failed} failures")
    return min(failed, 1)


if __name__ == "__main__":
    main()
