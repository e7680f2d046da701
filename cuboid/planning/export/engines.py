"""Plans in the words of other engines: every target by name, which layouts its files can say, what they have no key
for.

What a target cannot say of a plan is refused in one sentence that names all of it, or noted at the head of the file.
`plan --for-engine` searches only what the files can say; each writer checks a single plan again."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuboid.errors import UserError, either, nearest_names
from cuboid.planning.plan import Plan
from cuboid.planning.question import Question
from cuboid.spec.layout import CONTEXT_METHODS, RECOMPUTE, SCHEDULES, Layout, format_weights
from cuboid.spec.model import ModelSpec
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.run import Run
from cuboid.spec.training import TrainingSpec


@dataclass(frozen=True)
class Note:
    """A field that the target has in its own way, whatever the plan says; the work of a step is the same."""

    field: str
    here: Any
    there: Any

    def __str__(self) -> str:
        return f"{self.field}={self.there} (planned: {self.here})"


def noted(notes: list[Note]) -> str:
    """Notes as a comment at the head of a file."""
    return "".join(f"# Otherwise there: {note}\n" for note in notes)


def router_notes(model: ModelSpec) -> list[Note]:
    """Noise on a router's logits, and a bound of each sequence's assignments, are Cuboid's own."""
    if model.mixture is None:
        return []
    named = [("mixture.router_noise", model.mixture.router_noise, 0.0)]
    named.append(("mixture.capacity_factor", model.mixture.capacity_factor, 0.0))
    return [Note(*entry) for entry in named if entry[1] != entry[2]]


class Lost:
    """Keys of a plan that a target cannot express."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.found: list[str] = []

    def unless(self, works: bool, key: str, value: object, instead: str) -> None:
        """Notes that the key is lost unless the condition holds."""
        if not works:
            shown = str(value).lower() if isinstance(value, bool) else value
            self.found.append(f"{key}={shown} ({instead})")

    def unless_equal(self, layout: Layout) -> None:
        """No other engine gives replicas unequal parts of a batch, or of what ZeRO splits."""
        batch, shards = format_weights(layout.batch_weights), format_weights(layout.shard_weights)
        self.unless(not batch, "batch_weights", batch, "its replicas take equal parts of a batch; leave it out")
        self.unless(not shards, "shard_weights", shards, "its replicas keep equal shards; leave it out")

    def unless_balanced(self, layout: Layout) -> None:
        """Files that do not say which layers a stage holds."""
        layers = format_weights(layout.layers)
        self.unless(not layers, "layers", layers, "it divides layers in its own way; leave it out")

    def refuse(self) -> None:
        """Raises when anything was lost."""
        if self.found:
            again = not all(each.startswith(("model", "mixture")) for each in self.found)  # what no layout mends
            raise UserError(
                f"{self.target} has no key for {', '.join(self.found)}{'; plan again with --fix' if again else ''}"
            )


UNWRITTEN = (
    "windows",
    "sinks",
    "norms",
    "unit_norms",
    "rope_factor",
    "window_rope_theta",
    "embedding_scale",
    "query_scale",
    "attention_softcap",
    "logit_softcap",
    "qk_norm_whole",
    "prediction_layers",
)
"""Fields of a model that no writer has words for."""
Columns = dict[str, NDArray[np.int64]]
FIXED: dict[str, dict[str, Any]] = {
    "megatron": {"recompute_layers": 0},
    "deepspeed": {"recompute_layers": 0, "sequence_parallel": False, "cp": 1},
    "torchtitan": {"recompute_layers": 0, "offload": False},
    "nanotron": {"recompute_layers": 0, "cp": 1, "ep": 1, "offload": False},
}
"""Target -> fields that it leaves no choice of."""
TARGETS = tuple(FIXED)
KNOWN = {
    "megatron": ("1f1b", "interleaved"),
    "deepspeed": ("1f1b",),
    "torchtitan": ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev"),
    "nanotron": ("1f1b", "gpipe"),
}
"""Target -> its schedules."""


def sayable(target: str, columns: Columns, global_batch: int, model: ModelSpec) -> NDArray[np.bool_]:
    """Which of the layouts of a model the target has words for."""
    dp, tp, pp, zero, recompute = (columns[name] for name in ("dp", "tp", "pp", "zero", "recompute"))
    schedule, count = columns["schedule"], global_batch // (columns["dp"] * columns["micro_batch"])
    works = np.isin(schedule, [SCHEDULES.index(name) for name in KNOWN[target]])
    interleaved = (pp > 1) & (schedule == SCHEDULES.index("interleaved"))
    works &= ~interleaved | (count % pp == 0)
    whole = (columns["shard"] == 0) | (columns["shard"] == dp) | (zero == 0)
    selective = recompute == RECOMPUTE.index("selective")
    away = columns["offload"] > 0
    if target == "megatron":
        works &= (columns["cp"] == 1) | (model.prediction_layers == 0)
        works &= ((zero < 2) | (pp == 1)) & (~away | (zero == 1))
    elif target == "deepspeed":
        works &= ((zero < 2) | (pp == 1)) & ((zero < 3) | (tp == 1)) & ~selective & whole
        works &= (~away | (zero > 0)) & ((tp == 1) | (pp == 1))
    elif target == "torchtitan":
        from cuboid.planning.export.torchtitan import CONTEXT, PIPELINED, flavor_of

        flavor = flavor_of(model)
        name = flavor.family if flavor else ""
        works &= (pp == 1) | (name in PIPELINED)
        works &= (columns["cp"] == 1) | ((name in CONTEXT) & (zero >= 2))
        alone = (tp == 1) & (pp == 1) & (columns["cp"] == 1)
        works &= (dp == 1) | (zero >= 2) | ((zero == 0) & alone)
        works &= (tp == 1) | (columns["sequence_parallel"] > 0)
        works &= (columns["cp"] == 1) | (columns["cp_method"] == CONTEXT_METHODS.index("allgather"))
        works &= (schedule != SCHEDULES.index("dualpipev")) | (count >= 2 * pp)
    else:
        works &= (zero < 2) & ~selective & whole & (tp <= model.kv_heads)
    return np.asarray(works)


def refuse_recipe(run: Run, target: str) -> None:
    """Raises where a run file asks for what no plan knows, and so no file for `target` would say."""
    training, usual = run.training, TrainingSpec()
    for name in ("dropout", "z_loss", "batch_ramp", "sequence_ramp"):
        asked = getattr(training, name)
        if asked != getattr(usual, name):
            more = f" and add --hidden-dropout {asked} to it" if (name, target) == ("dropout", "megatron") else ""
            default = getattr(usual, name) or ("none" if isinstance(asked, str) else 0)
            raise UserError(
                f"training.{name}={asked} is not among what is written for {target}; use {name}={default}{more}"
            )


def export(plan: Plan, target: str) -> str:
    """The plan in the words of another engine."""
    from cuboid.planning.export import deepspeed, megatron, nanotron, torchtitan  # here: they build on this file

    writers = {
        "megatron": megatron.export,
        "deepspeed": deepspeed.export,
        "torchtitan": torchtitan.export,
        "nanotron": nanotron.export,
    }
    if target not in TARGETS:
        near = either(f"--to {name}" for name in nearest_names(target, TARGETS, count=4))
        raise UserError(f"unknown target to={target}; use {near}, or --to hf:FOLDER for a trained model")
    model = plan.question.model
    if isinstance(model, PythonModelSpec) and target != "deepspeed":  # whose files describe no model
        raise UserError(f"model={model.name} is one's own, which {target} does not have; train it with cuboid train")
    if not isinstance(model, PythonModelSpec):
        refuse_model(model, target)
    if plan.question.optimizer != "adamw":
        kind = plan.question.optimizer
        raise UserError(f"optimizer.kind={kind} is not among what is written for {target}; use optimizer.kind=adamw")
    if plan.question.average:
        raise UserError(
            f"optimizer.average={plan.question.average} is not among what is written for {target}; use average=0"
        )
    if plan.question.gradient_sums != "float32":
        raise UserError(f"training.gradient_sums=bf16 is not among what is written for {target}; use float32")
    _check_fp8(plan.question, target)
    return writers[target](plan)


FP8_SCALINGS = {"megatron": ("tensor", "block"), "torchtitan": ("tensor", "row")}
"""Those with a recipe of that name."""


def _check_fp8(question: Question, target: str) -> None:
    known = FP8_SCALINGS.get(target)
    if question.precision != "fp8" or known is None:  # the writers of others refuse fp8 itself
        return
    if question.fp8_scaling not in known:
        raise UserError(
            f"training.fp8_scaling={question.fp8_scaling} is no recipe of {target}; use fp8_scaling={known[0]} or "
            f"{known[1]}"
        )
    if question.fp8_experts and target != "megatron":  # whose recipes are for experts too
        raise UserError(f"training.fp8_experts=true is not among what is written for {target}; use fp8_experts=false")


def notes(plan: Plan, target: str) -> list[Note]:
    """Fields that the target has in its own way; its file names them. The files of the others say what the plan says,
    or describe no model."""
    from cuboid.planning.export import megatron, torchtitan

    found = {"megatron": megatron.notes, "torchtitan": torchtitan.notes}
    return found[target](plan) if target in found else []


def refuse_model(model: ModelSpec, target: str) -> None:
    """Raises where the target has no such model, whatever the layout; files of DeepSpeed describe none."""
    from cuboid.planning.export import megatron, nanotron, torchtitan

    checks = {
        "megatron": megatron.check_model,
        "torchtitan": torchtitan.check_model,
        "nanotron": nanotron.check_model,
    }
    lost = Lost(target)
    if target in checks:
        checks[target](model, lost)
        _unwritten(model, lost)
    lost.refuse()


def _unwritten(model: ModelSpec, lost: Lost) -> None:
    """Parts of a model that no writer has words for."""
    for name in UNWRITTEN:
        if name == "prediction_layers" and lost.target == "megatron":
            continue
        value = getattr(model, name)
        lost.unless(value == getattr(ModelSpec, name), f"model.{name}", value, "it is not written")
    lost.unless(model.activation in ("swiglu", "gelu"), "model.activation", model.activation, "it is not written")
    biased = model.mixture is not None and model.mixture.biases
    lost.unless(not biased, "mixture.biases", biased, "they are not written")
