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

from dataclasses import asdict, dataclass, replace
from os.path import lexists
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cuboid.data.corpus import Origin, Sample
from cuboid.errors import UserError
from cuboid.model.huggingface import state_from_huggingface
from cuboid.model.weight_names import FAMILIES
from cuboid.readers import Unreadable, open_safetensors, read_json
from cuboid.spec.coding import decode
from cuboid.spec.model import ModelSpec
from cuboid.spec.plugin import PythonModelSpec
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
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Told:
    """`step.json`; None: as here."""

    loss: float
    learning_rate: float
    gradient_norm: float | None = None
    gradient_clip: float = 0.0
    precision: str = "float32"
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    weight_decay: float | None = None
    dp: int = 1
    micro_batches: int = 1


class Given:
    """The samples of the step, as a source."""

    def __init__(self, tokens: Tensor, labels: Tensor) -> None:
        self._tokens, self._labels = tokens, labels

    def at(self, position: int) -> Sample:
        return self._tokens[position], self._labels[position]

    def documents_at(self, position: int) -> Tensor:
        return torch.zeros_like(self._tokens[position])

    def origin(self, position: int) -> Origin | None:
        return None


def step_run(folder: str) -> tuple[Run, Told, Given]:
    """The run of one step that the folder describes, the rest of what it says, and the samples."""
    place = Path(folder)
    path = place / "step.json"
    try:
        told = decode(Told, read_json(path))
    except Unreadable:
        raise
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not (place / "model").is_dir():
        raise UserError(f"{place / 'model'} is no folder; write config.json and the weights before the step there")
    batch = _batch(place / "batch.safetensors")
    samples, length = batch["tokens"].shape
    dp, micro_batches = told.dp, told.micro_batches
    if dp < 1 or micro_batches < 1 or samples % (dp * micro_batches):
        raise UserError(
            f"{path}: dp={dp} × micro_batches={micro_batches} does not divide {samples} samples; use what did"
        )
    optimizer = {key: getattr(told, key) for key in OPTIMIZER}
    table: dict[str, Any] = {
        "model": str(place / "model"),
        "layout": f"dp={dp},micro_batch={samples // (dp * micro_batches)}",
        "training": {
            "steps": 1,
            "precision": told.precision,
            "global_batch": samples,
            "sequence": length,
            "gradient_clip": told.gradient_clip,
            "device": "cpu",
        },
        "optimizer": {key: value for key, value in optimizer.items() if value is not None},
        "learning_rate": {"peak": told.learning_rate, "schedule": "constant"},
        "data": {"source": "synthetic"},
    }
    run = build_run(table)
    if isinstance(run.model, PythonModelSpec):
        known = ", ".join(FAMILIES)
        raise UserError(f"{place / 'model'} is of a family that has no reference here; use one of {known}")
    if (mixture := run.model.mixture) is not None:
        # The loss that was written is that of the tokens alone, and nobody else chooses experts with this noise.
        plain = {"router_noise": 0.0, "balance_coefficient": 0.0, "z_coefficient": 0.0, "bias_rate": 0.0}
        run = replace(run, model=replace(run.model, mixture=replace(mixture, **plain)))  # type: ignore[arg-type]
    for name, values in batch.items():
        odd = values[(values < 0) | (values >= run.model.vocab)]
        odd = odd[odd != IGNORED] if name == "labels" else odd
        if len(odd):
            works = f"0 to {run.model.vocab - 1}" + (f", or {IGNORED} where none counts" if name == "labels" else "")
            raise UserError(f"{place / 'batch.safetensors'}: {name} hold {odd[0]}, no token of the model; use {works}")
    return run, told, Given(batch["tokens"], batch["labels"])


def _batch(path: Path) -> Tensors:
    batch = _tensors(path)
    shapes = {name: tuple(x.shape) for name, x in batch.items()}
    if shapes.keys() != {"tokens", "labels"} or len(shapes["tokens"]) != 2 or len(set(shapes.values())) > 1:
        raise UserError(f"{path} must hold tokens and labels, both (samples, length)")
    for name, values in batch.items():
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise UserError(f"{path}: {name} are {_type(values)}; write them as int64")
    if 0 in shapes["tokens"]:
        raise UserError(f"{path}: tokens of shape {shapes['tokens']} are no sample; write at least one")
    if (batch["labels"] == IGNORED).all():
        raise UserError(f"{path}: labels hold {IGNORED} alone, which does not count; write the token after each")
    return {name: values.long() for name, values in batch.items()}


def judge_step(_: int, folder: str) -> dict[str, Any]:
    """The verdict, located where it is bad."""
    run, told, source = step_run(folder)
    place = Path(folder)
    start = _of_folder(run.model, place / "model")
    gradients = _state(run.model, place / "gradients.safetensors")
    updated = lexists(place / "parameters.safetensors")
    after = _state(run.model, place / "parameters.safetensors") if updated else None
    traces, samples = recorded_references(run, 0, source, start)
    observed = replace(
        traces[0],
        losses=[told.loss],
        gradients=[gradients],
        gradient_norms=[norm(gradients) if told.gradient_norm is None else told.gradient_norm],
        parameters=[traces[0].parameters[0] if after is None else after],
    )
    exact, rounded = traces[-1], traces[:-1]
    if run.training.precision in ROUNDED:
        verdict: Verdict = compare_rounded(run, observed, rounded, exact)
    else:
        verdict = compare(run, observed, exact)
    if not verdict.passed:
        ranks = _records(run, observed, samples[0], updated)
        located = first_difference(Evidence(run, 0, observed, traces, samples, ranks, source))
        verdict = replace(verdict, located=None if located is None else asdict(located))
    return asdict(verdict)


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
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = _floats(path)
        for name, values in tensors.items():
            if name in found:
                raise UserError(f"{path} holds {name}, as another file beside it does; write each tensor once")
            if not values.isfinite().all():
                raise UserError(f"{path}: {name} holds numbers that are not finite; write the weights before the step")
        found |= tensors
    if not found:
        raise UserError(f"{folder} has no safetensors; write the weights before the step there")
    return state_from_huggingface(model, found)


def _state(model: ModelSpec, path: Path) -> Tensors:
    try:
        return state_from_huggingface(model, _floats(path))
    except UserError as error:
        raise error if isinstance(error, Unreadable) else UserError(f"{path}: {error}") from None


def _floats(path: Path) -> Tensors:
    tensors = _tensors(path)
    for name, values in tensors.items():
        if values.dtype not in PLAIN:
            raise UserError(f"{path}: {name} is {_type(values)}; write it as float32")
    return tensors


def _type(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _tensors(path: Path) -> Tensors:
    with open_safetensors(path) as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
