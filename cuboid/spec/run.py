"""`Run`: everything a training needs, in one TOML file that round-trips.

model = "tiny-llama"
layout = "dp=2,tp=2,pp=2"

[training]
steps = 100
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from cuboid.errors import UserError, either, nearest_names
from cuboid.readers import parse_toml, read_toml
from cuboid.spec.checks import ChecksSpec
from cuboid.spec.coding import (
    check_types,
    decode,
    dumps,
    encode,
    field_types,
    parse_text,
    require_at_most,
    require_in_range,
    require_known,
    unwrap_optional,
)
from cuboid.spec.fitting import batch_divisor, check, check_fp8
from cuboid.spec.generation import SamplesSpec
from cuboid.spec.islands import IslandsSpec
from cuboid.spec.layout import Layout, parse_layout_fields
from cuboid.spec.load import build_model, dump_model
from cuboid.spec.model import ModelSpec
from cuboid.spec.optimizer import OptimizerSpec
from cuboid.spec.plugin import PythonModelSpec
from cuboid.spec.training import (
    OWN_DATA,
    TO_CHOOSE,
    DataSpec,
    EvaluationSpec,
    LearningRateSpec,
    ProfileSpec,
    TrainingSpec,
)

TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "wandb-offline": "wandb", "trackio": "trackio", "jsonl": ""}
"""Name in `output.track` -> the package it needs, if any."""

LONGEST_SECONDS = 10**9
"""To wait for anything; clocks of sockets and locks hold no more."""


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """What a run leaves behind."""

    folder: str = "runs/default"
    """Where everything goes that a run writes."""
    log_every: int = 1
    """Steps between lines on the screen; `metrics.jsonl` has every step."""
    keep_timing: bool = False
    """Keep when each rank did each action of the pipeline schedule."""
    count_communication: bool = False
    """Count what every rank communicates in each step, beside what the planner predicts."""
    layer_norms: bool = False
    """Measure activations, gradients, updates and weights by layer."""
    layer_norms_every: int = 50
    """Steps between two such measurements; the first and the last step have one too. Each takes the time of two to
    four optimizer updates, and the memory of one layer."""
    health: bool = True
    """Warn, once for each kind, when a run goes wrong: its first loss, gradient norm, later losses, activations or
    experts."""
    track: str = ""
    """Trackers to tell besides `metrics.jsonl`, commas between them: tensorboard, wandb, wandb-offline, trackio or
    jsonl (flat rows of numbers in `tracked.jsonl`)."""
    project: str = "cuboid"
    """The project's name at a tracker that has projects."""

    def is_logged(self, step: int, steps: int) -> bool:
        """Whether a step, counted from 1, has a line on the screen whatever happens in it."""
        return step % self.log_every == 0 or step == steps

    def measures_layers(self, step: int, steps: int) -> bool:
        """Whether a step, counted from 1, has norms by layer."""
        return self.layer_norms and (step % self.layer_norms_every == 0 or step in (1, steps))

    @property
    def trackers(self) -> tuple[str, ...]:
        """Those of `track`."""
        return tuple(dict.fromkeys(name.strip() for name in self.track.split(",") if name.strip()))

    def __post_init__(self) -> None:
        check_types(self, "output")
        for name in self.trackers:
            if name not in TRACKERS:
                raise UserError(f"output.track={name} is unknown; use {either(nearest_names(name, TRACKERS))}")
        require_in_range(self, "output", ("log_every", "layer_norms_every"), low=1)
        if not self.folder:
            raise UserError('output.folder="" names no folder; use folder="runs/default"')


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """State kept on disk, from which the same command continues, on any layout."""

    every: int = 0
    """Steps between checkpoints, the last step always included; 0 is never."""
    keep: int = 2
    """How many of the newest stay."""
    keep_every: int = 0
    """Steps of which each multiple stays for ever; 0 is none."""
    folder: str = ""
    """A path, or a URL that fsspec reaches (s3://bucket/…); default: `checkpoints` in the output folder."""
    asynchronous: bool = True
    """Train on while the state, once copied, is written."""
    timeout_seconds: float = 1800.0
    """How long ranks wait for each other, and the training for a save, before that save is given up with a warning."""
    memory_every: int = 0
    """Steps between copies of the state in the memory of its node and of another one, from which a run whose processes
    or nodes are lost continues; 0 is never. They go with the run, or with the last node that has one."""
    memory_folder: str = "/dev/shm"
    """A folder of each node on a memory file system."""

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        require_in_range(self, "checkpoint", ("every", "keep_every", "memory_every"), low=0)
        require_in_range(self, "checkpoint", ("keep", "timeout_seconds"), low=1)
        require_at_most({"timeout_seconds": LONGEST_SECONDS}, self, "checkpoint")

    def is_due(self, done: int, steps: int) -> bool:
        """Whether the state is kept after so many of the steps."""
        return self.every > 0 and (done % self.every == 0 or done == steps)

    @property
    def keeps(self) -> bool:
        """Whether there is ever something to resume from."""
        return self.every > 0 or self.memory_every > 0

    def is_due_in_memory(self, done: int, steps: int) -> bool:
        """After the last step there is nothing to continue."""
        return self.memory_every > 0 and done % self.memory_every == 0 and done < steps


@dataclass(frozen=True, kw_only=True)
class ResilienceSpec:
    """What a run does when a rank fails."""

    restarts: int = 3
    """How many times in a row ranks are started again from the newest checkpoint without a newer one being written; 0
    is never. A run that keeps no checkpoints is never started again."""
    grace_seconds: float = 30.0
    """How long a scheduler lets the job live after SIGTERM or SIGUSR1: in this time it saves and ends with exit code
    75. When it is over the job ends by itself, with what was saved before."""
    contact_seconds: float = 30.0
    """Of a job on many nodes: after so long without a word a node is lost to the others, which continue without it. It
    ends its own ranks earlier, so that they never write beside those of the others."""
    gather_seconds: float = 60.0
    """How long a job that has its least number of nodes waits for more of them as it starts."""
    rejoin_seconds: float = 3600.0
    """How long nodes wait for the one that leads, and that one for its least number of nodes, before they give up."""
    hang_factor: float = 10.0
    """A job in which no rank gets on for so many times the median step (evaluation, save), and for twice the longest,
    hangs: its ranks are ended and started again. 0: it may stand still for ever."""
    hang_floor_seconds: float = 30.0
    """No job that stands still for less than this hangs."""
    setup_seconds: float = 1800.0
    """How long it may stand still where nothing is learned yet: while it sets up, in its first steps, its first
    evaluation and its first save. 0: for ever."""
    stuck_seconds: float = 40.0
    """How long it may stand still there if every rank waits for another: none computes, compiles, loads or reads. That
    is a deadlock or a lost rank, and is named and ended. 0: it is not looked for."""
    bad_steps: Literal["skip", "retry", "rollback", "stop"] = "skip"
    """What is done about a step whose loss or gradient norm is not finite, or a spike: skip its update, go back to
    the newest checkpoint and try again (a batch that is bad twice is skipped), go back and drop its batch from the
    data for good, or stop the run."""
    most_bad_steps: int = 10
    """How many bad steps, with no good one further on, a run continues after."""
    spike_score: float = 0.0
    """A loss or gradient norm this many deviations (median absolute, as standard ones) above the median of the latest
    good steps is a spike; 0 looks for none, 8 is a good number. The host then waits for each step."""
    spike_window: int = 128
    """How many of the latest good steps say what is usual."""
    rebalance: bool = True
    """Of a job on many nodes: give replicas on slow nodes less of each batch, as measured, right after a checkpoint, if
    that saves more than starting again takes. Nothing changes but speed."""
    check_replicas_every: int = 0
    """Steps between comparisons of what several ranks should hold alike, also before each checkpoint then; 0 is
    never."""

    def __post_init__(self) -> None:
        check_types(self, "resilience")
        seconds = (
            "grace_seconds",
            "gather_seconds",
            "rejoin_seconds",
            "hang_floor_seconds",
            "setup_seconds",
            "stuck_seconds",
        )
        counts = ("restarts", "hang_factor", "most_bad_steps", "spike_score", "check_replicas_every")
        require_in_range(self, "resilience", (*counts, *seconds), low=0)
        require_in_range(self, "resilience", ("contact_seconds",), low=3)
        require_in_range(self, "resilience", ("spike_window",), low=4, high=1_000_000)
        require_at_most(dict.fromkeys((*seconds, "contact_seconds"), LONGEST_SECONDS), self, "resilience")

    @property
    def goes_back(self) -> bool:
        """Whether a bad step sends the run back to its newest checkpoint."""
        return self.bad_steps in ("retry", "rollback")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model, a layout and a training that fit together: construction checks each against the others."""

    model: ModelSpec
    layout: Layout = field(default_factory=Layout)
    training: TrainingSpec = field(default_factory=TrainingSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    learning_rate: LearningRateSpec = field(default_factory=LearningRateSpec)
    data: DataSpec = field(default_factory=DataSpec)
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    samples: SamplesSpec = field(default_factory=SamplesSpec)
    islands: IslandsSpec = field(default_factory=IslandsSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    resilience: ResilienceSpec = field(default_factory=ResilienceSpec)
    checks: ChecksSpec = field(default_factory=ChecksSpec)
    output: OutputSpec = field(default_factory=OutputSpec)
    profile: ProfileSpec = field(default_factory=ProfileSpec)
    plan: dict[str, object] = field(default_factory=dict, hash=False)
    """What a planner predicted for this run; training keeps it and does not read it."""

    def __post_init__(self) -> None:
        check_types(self)
        batch, sequence = self.training.global_batch, self.training.sequence
        check(self.layout, self.model, global_batch=batch, sequence=sequence, section="training.")
        unit = self.layout.batch_unit
        for sequences, _ in self.training.batch_sizes.stages:
            if sequences % unit:
                raise UserError(
                    f"training.batch_ramp={self.training.batch_ramp} has a batch of {sequences}, which does not divide "
                    f"by {batch_divisor(self.layout)}; use multiples of {unit}"
                )
        if isinstance(self.model, PythonModelSpec):
            self._check_own_model()
        self.optimizer.check_layout(self.layout)
        own = isinstance(self.model, PythonModelSpec)
        self.optimizer.check_model(own, self.model.qk_norm, self.model.tie_embeddings)
        if self.training.precision == "fp8":
            check_fp8(self.layout, self.model, sequence, "training.", self.training.fp8_experts)
        if self.training.overlap_tensor == "on" and self.layout.tp > 1:
            if not self.layout.sequence_parallel:
                raise UserError("training.overlap_tensor=on needs sequence_parallel=true; use it or overlap_tensor=off")
            if self.training.precision == "fp8" and self.training.fp8_scaling == "block":
                raise UserError(
                    "training.overlap_tensor=on splits matmuls that the compiler sees, and training.fp8_scaling=block "
                    "has others; use overlap_tensor=off or fp8_scaling=row"
                )
            if self.output.count_communication:
                raise UserError(
                    "training.overlap_tensor=on hides collectives, which output.count_communication=true counts; "
                    "use one of them"
                )
        if self.training.cuda_graphs == "on" and self.obstacle_to_graphs:
            raise UserError(f"training.cuda_graphs=on needs {self.obstacle_to_graphs}; use cuda_graphs=auto")
        if self.evaluation.every and not self.data.holds_out:
            raise UserError(
                f"evaluation.every={self.evaluation.every} has no held-out data; "
                "use data.validation_fraction=0.01 or name a source in data.validation"
            )
        if self.evaluation.average and not self.optimizer.average:
            raise UserError("evaluation.average=true has no average of weights; use optimizer.average=0.999 or false")
        self._check_islands()
        self.profile.check(self.layout.world_size, self.training.steps)
        if self.resilience.goes_back and not self.checkpoint.every:
            policy = self.resilience.bad_steps
            raise UserError(f"resilience.bad_steps={policy} has no checkpoints to go back to; use checkpoint.every=100")

    def _check_islands(self) -> None:
        """What islands cannot have yet."""
        if self.islands.count == 1:
            return
        self.islands.check_model(self.model)
        refused = {
            f"training.batch_ramp={self.training.batch_ramp}": (bool(self.training.batch_ramp), "none"),
            f"training.sequence_ramp={self.training.sequence_ramp}": (bool(self.training.sequence_ramp), "none"),
            f"resilience.bad_steps={self.resilience.bad_steps}": (self.resilience.goes_back, "skip or stop"),
        }
        for setting, (asked, instead) in refused.items():
            if asked:
                raise UserError(f"{setting} is not for islands.count={self.islands.count}; use {instead}")

    def _check_own_model(self) -> None:
        """What is not for a model of one's own."""
        refused = {
            "training.precision=fp8": (self.training.precision == "fp8", "precision=bf16"),
            f"samples.every={self.samples.every}": (self.samples.every > 0, "every=0"),
            f"training.sequence_ramp={self.training.sequence_ramp}": (bool(self.training.sequence_ramp), "none"),
            f"training.dropout={self.training.dropout}": (
                self.training.dropout > 0,
                "dropout=0 and cuboid.Dropout in its modules",
            ),
            f"training.z_loss={self.training.z_loss}": (self.training.z_loss > 0, "z_loss=0 and add it in the head"),
        }
        for setting, (asked, instead) in refused.items():
            if asked:
                raise UserError(f"{setting} is not for a model of one's own; use {instead}")

    @property
    def obstacle_to_graphs(self) -> str:
        """What the passes of a step would need to be a CUDA graph: collectives that begin and end within them, shapes
        that stay, nothing in them decided or looked at by the host. Empty: nothing that a run could say."""
        layout = self.layout
        beyond = layout.pp * layout.cp * layout.ep > 1 or layout.zero == 3
        obstacles = {
            f"one rank, or only dp and tp with zero=0, 1 or 2, not layout={layout}": layout.world_size > 1 and beyond,
            "training.overlap_tensor=off": layout.tp > 1 and self.training.overlap_tensor != "off",
            "offload=false": layout.offload,
            "experts in bf16 with widths that 8 divides, or none": self._experts_by_the_host,
            "data.attention_within_documents=false": self.data.attention_within_documents,
            "output.count_communication=false": self.output.count_communication,
            "output.keep_timing=false": self.output.keep_timing,
            "a run that is not profiled": self.profile.steps > 0,
            "batches of one size, not training.batch_ramp": bool(self.training.batch_ramp),
            "sequences of one length, not training.sequence_ramp": bool(self.training.sequence_ramp),
            "a model of the catalog, not one of one's own": isinstance(self.model, PythonModelSpec),
            "a GPU, not training.device=cpu": self.training.device == "cpu",
            "compiled blocks": self.training.compiles_nothing,
        }
        return next((need for need, missing in obstacles.items() if missing), "")

    @property
    def _experts_by_the_host(self) -> bool:
        """Whether the host asks how many rows each expert has: where torch's grouped matmul does not serve."""
        mixture = self.model.mixture
        if mixture is None:
            return False
        return self.training.weights != "bf16" or mixture.expert_ffn % 8 > 0 or self.model.hidden % 8 > 0

    def planned_optimizer(self, engine: str = "cuboid") -> str:
        """What a planner counts: Muon of models of the catalog and this engine, else AdamW."""
        counted = engine == "cuboid" and not isinstance(self.model, PythonModelSpec)
        return "muon" if self.optimizer.is_muon and counted else "adamw"

    def of_batch(self, batch: int) -> Self:
        """The run whose batches all have the size of this one, counted from 0."""
        if not self.training.batch_ramp:
            return self
        training = replace(self.training, global_batch=self.training.batch_sizes.at(batch), batch_ramp="")
        return replace(self, training=training)

    def micro_batches_of(self, replica: int) -> int:
        """Micro-batches it accumulates per optimizer step, once batches have grown to `global_batch`."""
        return self.layout.micro_batches_of(replica, self.training.global_batch)

    @property
    def micro_batches(self) -> int:
        """Of each replica; where they differ, of the one that has most."""
        return self.micro_batches_of(self.layout.busiest_replica)

    @property
    def counts(self) -> str:
        """What a batch is counted in."""
        own = self.model if isinstance(self.model, PythonModelSpec) else None
        return "samples" if own is not None and not own.built.has_sequence else "tokens"


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """A run from its TOML file, with overrides such as `training.steps=20`; models are found beside the file."""
    path = Path(path)
    return build_run(read_toml(path), overrides, folder=path.parent)


def build_run(table: Mapping[str, object], overrides: Sequence[str] = (), *, folder: Path = Path()) -> Run:
    """A run from a table as TOML gives it: `model` a name or a table, `layout` a string or a table."""
    types = field_types(Run)
    for key in table:
        require_known(key, types, "")
    merged = {key: _expand(key, value) for key, value in table.items()}
    apply_overrides(merged, overrides, types)
    if "model" not in merged:
        raise UserError('model is missing; write model = "tiny-llama" or a [model] table')
    values: dict[str, Any] = {"plan": merged.pop("plan", {})}
    for key, value in merged.items():
        values[key] = build_model(value, folder) if key == "model" else decode(types[key], value, key)
    if isinstance(values["model"], PythonModelSpec):
        _default_to_own(values, merged, folder)
    run = Run(**values)
    mixture = run.model.mixture
    if run.training.start_from and mixture is not None and "router_noise" not in merged["model"].get("mixture", {}):
        # Noise is for routers that know nothing yet; those of a trained model begin as they are.
        run = replace(run, model=replace(run.model, mixture=replace(mixture, router_noise=0.0)))
    return run


def _default_to_own(values: dict[str, Any], given: Mapping[str, Any], folder: Path) -> None:
    """What is not given follows a model of one's own: its data, the length of its samples, and no sequence parallelism,
    which it has not."""
    layout: Layout = values.get("layout", Layout())
    if "sequence_parallel" not in given.get("layout", {}):
        values["layout"] = replace(layout, sequence_parallel=False)
    data: DataSpec = values.get("data", DataSpec())
    if "source" not in given.get("data", {}) and values["model"].built.data is not None:
        data = replace(data, source=OWN_DATA)
    values["data"] = data
    if "sequence" not in given.get("training", {}) and not values["model"].built.has_sequence:
        values["training"] = replace(values.get("training", TrainingSpec()), sequence=1)


def dump_run(run: Run) -> str:
    """TOML text from which `build_run` makes an equal run."""
    table: dict[str, Any] = {"layout": str(run.layout), "model": dump_model(run.model)}
    table |= {name: encode(getattr(run, name)) for name in field_types(Run) if name not in (*table, "plan")}
    return dumps({**table, "plan": run.plan} if run.plan else table)


def _expand(key: str, value: object) -> dict[str, Any]:
    """The short forms as tables, so that an override can reach inside them."""
    if key == "model" and isinstance(value, str):
        return {"base": value}
    if key == "layout" and isinstance(value, str):
        return parse_layout_fields(value)
    if not isinstance(value, dict):
        raise UserError(f"{key}={value} is not a table; write it as [{key}]")
    return dict(value)


def apply_overrides(table: dict[str, Any], overrides: Sequence[str], types: Mapping[str, Any]) -> None:
    """Changes `table` in place; later overrides win. `types` are the types of the outermost fields."""
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals:
            raise UserError(f"override {override!r} has no value; write it like training.steps=20")
        path, text = path.strip(), text.strip()
        if path in ("model", "layout"):
            table[path] = {"base": text} if path == "model" else parse_layout_fields(text)
        else:
            _set(table, path.split("."), text, types, path)


def _set(table: dict[str, Any], keys: list[str], text: str, types: Mapping[str, Any], path: str) -> None:
    key, *rest = keys
    done = path[: len(path) - len(".".join(keys))].rstrip(".")
    if (done, key) == ("model", "base"):
        types = {"base": str}
    # Of a user's own model or optimizer, which alone knows their types, or by the names of parameters.
    if (done, key) in (("model", "options"), ("optimizer", "options"), ("optimizer", "fused")) and rest:
        table[key] = {**table.get(key, {}), ".".join(rest): _literal(text)}
        return
    require_known(key, types, done)
    hint, optional = unwrap_optional(types[key])
    nested = is_dataclass(hint) and isinstance(hint, type)
    if not rest:
        if nested and not (optional and text.lower() == "none"):
            raise UserError(
                f"{path}={text} would replace a whole table; set one field, like {path}.{next(iter(field_types(hint)))}"
            )
        table[key] = None if nested else parse_text(text, types[key], path)
        return
    if not nested:
        raise UserError(f"unknown key {path}; {done + '.' if done else ''}{key} is a single value, not a table")
    inner = table.get(key)
    table[key] = dict(inner) if isinstance(inner, Mapping) else {}
    _set(table[key], rest, text, field_types(hint), path)


def _literal(text: str) -> object:
    """A value as TOML reads it; a word that is none is a string."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def check_chosen(run: Run) -> None:
    """A plan knows nothing of the data: what it left to choose is not guessed."""
    if TO_CHOOSE in run.data.sources:
        raise UserError(
            f"data.source={TO_CHOOSE} is no data: a plan chooses the layout alone; use --set data.source=STORE (cuboid "
            f"data build makes one, and python-stdlib is on every machine), and choose training.steps (now "
            f"{run.training.steps:,}) and checkpoint.every (now {run.checkpoint.every})"
        )


def check_supported(run: Run) -> None:
    """Returns when the engine can train the run."""
    if run.model.mixture is not None and run.model.mlp_bias:
        raise UserError("model.mlp_bias=true has no place in routed experts; use mlp_bias=false")
    if run.model.latent is not None:
        for name in ("qkv_bias", "output_bias", "qk_norm"):
            if getattr(run.model, name):
                raise UserError(f"model.{name}=true has no place in latent attention; use {name}=false")
