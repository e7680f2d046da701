"""`cuboid verify --against FOLDER`: one step that another trainer took, beside the same step by one process here.

What the trainer wrote, tensors by their Hugging Face names:

    model/                    config.json, and the weights before the step as safetensors
    batch.safetensors         tokens and labels, each (samples, length); a label is that of the token at its place,
                              the next one, and -100 where it does not count
    step.json                 loss; learning_rate, beta1, beta2, epsilon, weight_decay, gradient_clip; precision;
                              gradient_norm; dp and micro_batches: how the samples were dealt, in order
    gradients.safetensors     of the mean loss, before clipping
    parameters.safetensors    after the step; may be missing"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cuboid.data.corpus import Origin, Sample
from cuboid.errors import UserError
from cuboid.model.huggingface import state_from_huggingface
from cuboid.readers import open_safetensors, read_json
from cuboid.spec.model import ModelSpec
from cuboid.spec.run import Run, build_run
from cuboid.spec.sharding import Part, Slice
from cuboid.verification.compare import Verdict, compare, compare_rounded
from cuboid.verification.evidence import Evidence
from cuboid.verification.follows import norm
from cuboid.verification.locate import first_difference, recorded_references
from cuboid.verification.record import Notes, RankRecord, SampleRecorder
from cuboid.verification.reference import Tensors, Trace
from cuboid.verification.rounding import ROUNDED

OPTIMIZER = ("beta1", "beta2", "epsilon", "weight_decay")
KNOWN = {"loss", "learning_rate", "gradient_clip", "gradient_norm", "precision", "dp", "micro_batches", *OPTIMIZER}


class Given:
    """The samples of the step, as a source."""

    def __init__(self, tokens: Tensor, labels: Tensor) -> None:
        self._tokens, self._labels = tokens.long(), labels.long()

    def at(self, position: int) -> Sample:
        return self._tokens[position], self._labels[position]

    def documents_at(self, position: int) -> Tensor:
        return torch.zeros_like(self._tokens[position])

    def origin(self, position: int) -> Origin | None:
        return None


def step_run(folder: str) -> tuple[Run, dict[str, Any]]:
    """The run of one step that the folder describes, and the rest of what it says."""
    place = Path(folder)
    told = read_json(place / "step.json")
    odd = sorted(told.keys() - KNOWN)
    if odd:
        raise UserError(f"{place / 'step.json'}: unknown key {odd[0]}; use {', '.join(sorted(KNOWN))}")
    for key in ("loss", "learning_rate"):
        if not isinstance(told.get(key), int | float):
            raise UserError(f"{place / 'step.json'} has no number {key}; write what the step used")
    batch = _tensors(place / "batch.safetensors")
    shapes = {name: tuple(x.shape) for name, x in batch.items()}
    if shapes.keys() != {"tokens", "labels"} or len(shapes["tokens"]) != 2 or len(set(shapes.values())) > 1:
        raise UserError(f"{place / 'batch.safetensors'} must hold tokens and labels, both (samples, length)")
    samples, length = batch["tokens"].shape
    dp, micro_batches = int(told.get("dp", 1)), int(told.get("micro_batches", 1))
    if dp < 1 or micro_batches < 1 or samples % (dp * micro_batches):
        raise UserError(f"dp={dp} × micro_batches={micro_batches} does not divide {samples} samples; use what did")
    table: dict[str, Any] = {
        "model": str(place / "model"),
        "layout": f"dp={dp},micro_batch={samples // (dp * micro_batches)}",
        "training": {
            "steps": 1,
            "precision": told.get("precision", "float32"),
            "global_batch": samples,
            "sequence": length,
            "gradient_clip": told.get("gradient_clip", 0.0),
            "device": "cpu",
        },
        "optimizer": {key: told[key] for key in OPTIMIZER if key in told},
        "learning_rate": {"peak": told["learning_rate"], "schedule": "constant"},
        "data": {"source": "synthetic"},
    }
    return build_run(table), {**told, "batch": batch}


def judge_step(_: int, folder: str) -> dict[str, Any]:
    """The verdict, located where it is bad."""
    run, told = step_run(folder)
    place, batch = Path(folder), told["batch"]
    start = _of_folder(run.model, place / "model")
    source = Given(batch["tokens"], batch["labels"])
    traces, samples = recorded_references(run, 0, source, start)
    observed = _observed(run, place, told, traces[0])
    exact, rounded = traces[-1], traces[:-1]
    if run.training.precision in ROUNDED:
        verdict: Verdict = compare_rounded(run, observed, rounded, exact)
    else:
        verdict = compare(run, observed, exact)
    if not verdict.passed:
        ranks = _records(run, observed, samples[0], (place / "parameters.safetensors").exists())
        located = first_difference(Evidence(run, 0, observed, traces, samples, ranks, source))
        verdict = replace(verdict, located=None if located is None else asdict(located))
    return asdict(verdict)


def _observed(run: Run, place: Path, told: dict[str, Any], reference: Trace) -> Trace:
    gradients = state_from_huggingface(run.model, _tensors(place / "gradients.safetensors"))
    after = reference.parameters[0]
    if (place / "parameters.safetensors").exists():
        after = state_from_huggingface(run.model, _tensors(place / "parameters.safetensors"))
    return replace(
        reference,
        losses=[float(told["loss"])],
        gradients=[gradients],
        gradient_norms=[float(told.get("gradient_norm", norm(gradients)))],
        parameters=[after],
        routers=reference.routers,
    )


def _records(run: Run, observed: Trace, recorder: SampleRecorder, updated: bool) -> list[RankRecord]:
    """As if each dp rank had computed its samples rightly: what was made of that is then told from its parts."""
    layout, records = run.layout, []
    many = run.training.global_batch // (layout.dp * layout.micro_batch)
    for rank in range(layout.dp):
        record = RankRecord(rank, Notes())
        for micro_batch in range(many):
            first = (rank * many + micro_batch) * layout.micro_batch
            places = range(first, first + layout.micro_batch)
            record.notes.forward["head", micro_batch] = sum(
                (recorder.notes.forward["head", place] for place in places), torch.zeros(())
            )
            for name in observed.gradients[0]:
                parts = [recorder.weight[name, place] for place in places if (name, place) in recorder.weight]
                if parts:
                    record.own[name, micro_batch] = torch.stack(parts).sum(0)
        for name, gradient in observed.gradients[0].items():
            whole = Slice(0, 0, gradient.shape[0], gradient.shape[0], "own", False)
            record.parts[name] = part = Part(name, tuple(gradient.shape), whole, 0)
            if rank == 0:
                record.reduced.append((part, 0, part.size, gradient.flatten()))
                if updated:
                    record.updated.append((part, 0, part.size, observed.parameters[0][name].flatten()))
        record.gradient_norm = observed.gradient_norms[0]
        records.append(record)
    return records


def _of_folder(model: ModelSpec, folder: Path) -> Tensors:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no safetensors; write the weights before the step there")
    return state_from_huggingface(model, {name: x for path in files for name, x in _tensors(path).items()})


def _tensors(path: Path) -> Tensors:
    with open_safetensors(path) as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
