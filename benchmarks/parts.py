"""Proves every part of a recipe on every kind of layout: the table of `docs/prove.md`, "Parts of recipes".

    python benchmarks/parts.py                                  # all of it: more than an hour of two cores
    python benchmarks/parts.py --jobs 8                         # of 16 cores: eight parts at a time
    python benchmarks/parts.py --only dropout muon --on tp 5d   # some parts on some layouts
    python benchmarks/parts.py --device cuda --backend nccl     # over NCCL, ranks sharing a GPU
    python benchmarks/parts.py --on resume --json resume.json

A case is what `cuboid verify` proves: two clipped optimizer steps of a tiny model against one process, in float64 to
1e-9, moments and averages with them where the layout changes in between (`resume`), and collectives as the planner
counts them. Ranks stay from case to case, and a reference is computed once for all layouts. A part is one line of
`PARTS`. What is refused on a layout is told with its sentence. The exit code is 1 if anything differs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from at_once import Place, tried

from cuboid.cli.verify import verification_run
from cuboid.errors import RankError, UserError
from cuboid.launch.pool import Pool
from cuboid.spec.layout import CONTEXT_METHODS, SCHEDULES
from cuboid.spec.run import Run, check_supported
from cuboid.verification.make import check_provable

SECONDS = 300


@dataclass(frozen=True)
class Part:
    settings: tuple[str, ...]
    model: str = "tiny-llama"
    experts: str = "tiny-mixtral"
    """The model on layouts with expert parallelism."""
    precision: str = "float64"


MUON = "optimizer.kind=muon"
TOGETHER = (
    *("optimizer.normuon=true", "optimizer.qk_clip=0.05", "optimizer.average=0.7", "training.z_loss=0.1"),
    *("training.batch_ramp=4x1", "training.sequence_ramp=4x1", "training.dropout=0.1", "model.windows=[5,0]"),
    *("optimizer.embedding_rate=0.3", "optimizer.head_rate=5"),
)
PARTS = {
    "adamw": Part(()),
    "muon": Part((MUON,), experts="tiny-deepseek"),
    "normuon": Part((MUON, "optimizer.normuon=true", "optimizer.beta2=0.8")),
    "per-head": Part((MUON, "optimizer.per_head=true"), experts="tiny-deepseek"),
    "spectral": Part((MUON, "optimizer.update_scale=spectral", "optimizer.nesterov=false")),
    "original": Part((MUON, "optimizer.update_scale=original", "optimizer.matrix_rate=20")),
    "qk-clip": Part((MUON, "optimizer.qk_clip=0.05"), experts="tiny-deepseek"),
    "windows": Part(("model.windows=[5,0]",)),
    "sinks": Part((), model="tiny-gpt-oss", experts="tiny-gpt-oss"),
    "batch-ramp": Part(("training.batch_ramp=4x1",)),
    "sequence-ramp": Part(("training.sequence_ramp=4x1",)),
    "average": Part(("optimizer.average=0.7",)),
    "z-loss": Part(("training.z_loss=0.1",)),
    "rates": Part(("optimizer.embedding_rate=0.3", "optimizer.head_rate=5")),
    "dropout": Part(("training.dropout=0.3",), experts="tiny-deepseek"),
    "bf16-sums": Part(("training.gradient_sums=bf16",), precision="bf16"),
    "predictions": Part(("model.prediction_layers=1", "training.dropout=0.1")),
    "assignment": Part(("data.assignment=work", "training.dropout=0.1")),
    "documents": Part(("data.positions_within_documents=false",)),
    "no-documents": Part(("data.attention_within_documents=false", "data.positions_within_documents=false")),
    "all": Part((MUON, *TOGETHER)),
}
LAYOUTS = {
    "tp": ["tp=4", "tp=4,sequence_parallel=false"],
    "pp": [f"pp=2,schedule={schedule}" for schedule in SCHEDULES],
    "cp": [f"cp=4,cp_method={method}" for method in CONTEXT_METHODS],
    "ep": ["dp=2,ep=2", "dp=2,tp=2,ep=4,zero=3"],
    "zero": [f"dp=4,zero={stage}" for stage in range(4)],
    "hybrid": [f"dp=4,zero={stage},shard=2" for stage in (1, 2, 3)],
    "4d": ["dp=2,tp=2,cp=2,ep=2,zero=3,recompute=selective", "dp=2,tp=2,pp=2,ep=2,zero=1,schedule=zbv"],
    "5d": [
        "dp=2,tp=2,pp=2,cp=2,ep=2,zero=1,schedule=dualpipev,recompute=full",
        "dp=2,tp=2,pp=2,cp=2,ep=4,zero=3,schedule=zbv",
        "dp=2,tp=2,pp=2,cp=2,ep=2,zero=2,schedule=interleaved",
    ],
}
CHAINS = {"resume": ["dp=2,tp=2,zero=3", "tp=2,pp=2,schedule=zbv", "dp=4,zero=1,shard=2", "dp=2,cp=2,zero=2"]}
GROUPS = [*LAYOUTS, *CHAINS]


@dataclass(frozen=True)
class Case:
    part: str
    group: str
    layouts: tuple[str, ...]
    """Several are a chain."""

    def runs(self, device: str = "cpu", backend: str = "auto") -> list[Run]:
        part = PARTS[self.part]
        spread = any(",ep=" in layout for layout in self.layouts)
        common = ("training.global_batch=8", "training.sequence=16", f"training.device={device}")
        settings = (*common, f"training.backend={backend}", "model.layers=5", *part.settings)
        model, steps = part.experts if spread else part.model, max(2, len(self.layouts))
        runs = [verification_run(layout, model, settings, steps, part.precision) for layout in self.layouts]
        for run in runs:
            check_supported(run)
            check_provable(run, chain=len(runs) > 1)
        return runs


def cases(parts: Iterable[str], groups: Iterable[str]) -> Iterator[Case]:
    """Those of one part after another, so that they share a reference."""
    wanted = list(groups)
    for part in parts:
        for group in wanted:
            for layout in LAYOUTS.get(group, ()):
                yield Case(part, group, (layout,))
            if group in CHAINS:
                yield Case(part, group, tuple(CHAINS[group]))


def prove(pool: Pool, case: Case, device: str = "cpu", backend: str = "auto") -> dict[str, Any]:
    """`error` of what differs most, over its tolerance; `refused`, `failed` and `differs` say why it is no proof."""
    found: dict[str, Any] = {"part": case.part, "group": case.group, "layouts": case.layouts, "error": 0.0}
    start = time.perf_counter()
    try:
        runs = case.runs(device, backend)
        verdict = _chain(pool, runs, device, backend) if len(runs) > 1 else _one(pool, runs[0], device, backend)
    except UserError as error:
        return {**found, "refused": str(error)}
    except RankError as error:
        return {**found, "failed": str(error)}
    found["seconds"] = round(time.perf_counter() - start, 2)
    # A chain is judged by the leg that differs most, each by what differs most in it.
    judged = verdict.get("legs", [verdict])
    for each in judged:
        for kind in (name for name in each if name.endswith("_error") and each[name] is not None):
            allowed = verdict.get("tolerances", {}).get(kind.removesuffix("_error"), verdict["tolerance"])
            ratio = each[kind] / allowed
            if ratio > found["error"]:
                found |= {"error": ratio, "worst": f"{kind} {each[kind]:.1e} on {each['layout']}"}
    if not verdict["passed"] or verdict.get("unforeseen"):
        found["differs"] = (verdict.get("unforeseen") or [found.get("worst", "")])[0]
    return found


def _one(pool: Pool, run: Run, device: str, backend: str) -> dict[str, Any]:
    job, options = "cuboid.verification.compare:verify_rank", {"device": device, "backend": backend}
    verdict: dict[str, Any] = pool.run(job, (run,), ranks=run.layout.world_size, timeout=SECONDS, **options)[0]
    return verdict


def _chain(pool: Pool, runs: list[Run], device: str, backend: str) -> dict[str, Any]:
    options: dict[str, Any] = {"timeout": SECONDS, "device": device, "backend": backend}
    with TemporaryDirectory(prefix="cuboid-") as folder:
        losses = []
        for step, run in enumerate(runs):
            leg = (run, folder, step, step + 1)
            losses.append(
                pool.run("cuboid.verification.resume:train_leg", leg, ranks=run.layout.world_size, **options)[0]
            )
        judge = "cuboid.verification.resume:judge_chain"
        verdict: dict[str, Any] = pool.run(judge, (runs, folder, losses), ranks=1, **options)[0]
    return verdict


def show(found: list[dict[str, Any]], groups: list[str]) -> None:
    """A row for each part; in each field how many layouts are equal, and the largest error over what is allowed."""
    print(f"\n| part | {' | '.join(groups)} |\n|---|{'---|' * len(groups)}")
    for part in dict.fromkeys(each["part"] for each in found):
        fields = []
        for group in groups:
            own = [each for each in found if (each["part"], each["group"]) == (part, group)]
            equal = [each for each in own if not {"differs", "failed", "refused"} & each.keys()]
            refused = sum("refused" in each for each in own)
            worst = f" ({max(each['error'] for each in equal):.0e})" if equal else ""
            fields.append(f"{len(equal)} of {len(own) - refused}{worst}" if len(own) > refused else "–")
        print(f"| {part} | {' | '.join(fields)} |")
    for sentence in dict.fromkeys(f"{each['part']}: {each['refused']}" for each in found if "refused" in each):
        print(f"refused: {sentence}")


def prove_part(given: argparse.Namespace, place: Place, part: str) -> list[dict[str, Any]]:
    """All cases of a part, each told as it ends, by ranks that stay."""
    found = []
    for case in cases([part], given.on):
        found.append(prove(place.pool, case, given.device, given.backend))
        row = found[-1]
        wrong = next((f"{word.upper()} {row[word]}" for word in ("differs", "failed") if word in row), "")
        told = wrong or ("refused" if "refused" in row else f"equal, {row['error']:.0e} of the bound")
        print(f"{case.part:<14} {' -> '.join(case.layouts):<66} {told}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--on", nargs="+", choices=GROUPS, default=GROUPS, metavar="GROUP")
    parser.add_argument("--jobs", type=int, default=1, help="parts at a time, each with ranks of its own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for rows in tried(given.only, given.jobs, partial(prove_part, given)):
        found += rows
        if given.json:  # as soon as it is known, for one who ends this before its end
            given.json.write_text(json.dumps(found, indent=1))
    show(found, given.on)
    return int(any("differs" in each or "failed" in each for each in found))


if __name__ == "__main__":
    sys.exit(main())
