"""The tables of a run file that say what is computed, whatever the layout: [training], [learning_rate], [data],
[evaluation] and [profile]."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cuboid.errors import UserError, up_to
from cuboid.spec.coding import check_types, require_at_most, require_in_range
from cuboid.spec.plugin import is_plugin
from cuboid.spec.ramp import Ramp, parse_ramp

MOST = {"steps": 10**9, "global_batch": 1 << 24, "sequence": 1 << 28, "threads_per_rank": 1024}
"""Above them no machine has the memory or the time."""
Batch = int | tuple[int, ...]
"""A batch of the global order by its number; or as many equal parts of one as there are, by theirs."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """What is computed, whatever the layout."""

    steps: int = 100
    """Optimizer steps in all."""
    global_batch: int = 16
    """Sequences per optimizer step, over all replicas."""
    batch_ramp: str = ""
    """Smaller batches at first: 8x100,16x50 is 100 steps of 8 sequences, then 50 of 16, then of `global_batch`. A batch
    that `resilience.bad_steps` omits counts as one of these steps."""
    sequence: int = 256
    """Tokens per sequence."""
    sequence_ramp: str = ""
    """Shorter sequences at first: 64x100,128x50 cuts each sequence every 64 tokens for 100 steps, then every 128 for
    50, then not at all. Attention and positions begin anew at a cut, and a step has as many tokens as always."""
    seed: int = 0
    """Decides the first parameters and the order of samples, whatever the layout."""
    precision: Literal["float32", "bf16", "fp16", "fp8", "float64"] = "float32"
    """bf16 and fp16 keep float32 master weights, and fp16 multiplies the loss so that small gradients survive; fp8 is
    bf16 with the matmuls of the blocks' linears in fp8 (not those of routers, attention and head, nor, unless
    `fp8_experts` asks for it, of routed experts);
    float64 is for verification."""
    loss_scale: float = 65536.0
    """Of fp16: what the loss is multiplied by at first. It halves when a gradient overflows, in a step that is then
    skipped."""
    loss_scale_steps: int = 2000
    """Of fp16: after so many good steps in a row the factor doubles."""
    fp8_scaling: Literal["tensor", "row", "block"] = "tensor"
    """Of fp8: one scale for each tensor, one for each of its rows (more exact, and slower), or block: one for every 128
    numbers of an input and every 128 × 128 of a weight, as DeepSeek-V3 was trained, on Hopper (and CPUs)."""
    fp8_experts: bool = False
    """Of fp8: also the matmuls of routed experts, forward and for the gradient of their input, with a scale for each
    row whatever `fp8_scaling` says; their weight gradients stay in bf16. On Hopper (and CPUs)."""
    deterministic: bool = False
    """Only kernels that give the same bits each time; slower on GPUs."""
    gradient_sums: Literal["float32", "bf16"] = "float32"
    """Of bf16 and fp8: in what gradients are summed, over micro-batches and over ranks. bf16 halves the memory of
    gradients and the bytes of their collectives; each addition then rounds to 8 bits."""
    gradient_clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    z_loss: float = 0.0
    """Coefficient of the z-loss, which keeps logits from drifting: what is minimised is the loss plus this times the
    mean square of log Σ exp(logits) over tokens with labels (PaLM has 1e-4). Metrics tell that square apart from the
    loss; 0 turns it off."""
    dropout: float = 0.0
    """In training, the fraction of numbers dropped of what attention, feed-forward and embedding add to the residual
    stream. The same on any layout. Attention probabilities are not dropped."""
    prediction_loss: float = 0.3
    """Coefficient of the loss of prediction layers (`model.prediction_layers`), a mean over them: DeepSeek-V3's first
    one; later it had 0.1. Metrics tell their losses apart from the loss."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What carries collectives; auto: NCCL where ranks have GPUs, also where they share one, and gloo on CPUs. Ranks
    that share a GPU may use either; NCCL then runs over sockets."""
    bind: Literal["auto", "off"] = "auto"
    """Keep each rank on the cores near its GPU (those of its NUMA node), and so its memory; auto: where the system says
    which they are, and nobody (Slurm, taskset, numactl) has bound the rank already."""
    threads_per_rank: int = 1
    """Threads of a rank on a CPU."""
    start_from: str = ""
    """Weights to begin with: hf:FOLDER of Hugging Face, or a run of Cuboid, its checkpoints or one of them. Default:
    random ones."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Let torch.compile fuse blocks, loss and optimizer; auto: on GPUs, except in float64 and where bits
    must be the same each time: the compiler times kernels as a run starts, and which it takes changes the last bits."""
    overlap_tensor: Literal["auto", "on", "off"] = "off"
    """Async tensor parallelism: compiled blocks split the matmuls beside collectives of tensor ranks to overlap both;
    auto: with sequence_parallel, on GPUs of one machine that reach one another's memory. Where the schedule splits the
    backward pass, only forward. What it gains was never measured between GPUs, so it has to be asked for."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Start forward and backward passes, and the update, by a single call of the host each. auto: where
    GPUs are seen to wait for the host, and on one GPU also where as much memory is free as the run has taken. Of
    several ranks: over NCCL, with dp, tp and zero up to 2. Changes no result."""
    callbacks: str = ""
    """Classes of one's own that are called at the moments of a training, commas between them:
    python:my_callbacks.py:Watch."""

    @property
    def weights(self) -> Literal["float32", "bf16", "fp16", "float64"]:
        """The precision of weights and activations."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def batch_sizes(self) -> Ramp:
        """Sequences of each batch."""
        return parse_ramp("batch_ramp", self.batch_ramp, self.global_batch)

    def places(self, batch: Batch) -> Sequence[int]:
        """The positions of its sequences in the global order."""
        if isinstance(batch, int):
            return range(self.batch_sizes.sum_before(batch), self.batch_sizes.sum_before(batch + 1))
        size = self.global_batch // len(batch)
        return tuple(place for part in batch for place in range(part * size, (part + 1) * size))

    @property
    def lengths(self) -> Ramp:
        """Tokens after which sequences of each batch are cut."""
        return parse_ramp("sequence_ramp", self.sequence_ramp, self.sequence)

    @property
    def compiles_nothing(self) -> bool:
        """Whatever the device."""
        exact = self.deterministic or self.precision == "float64"
        return self.compile == "off" or (exact and self.compile == "auto")

    def __post_init__(self) -> None:
        check_types(self, "training")
        require_in_range(
            self,
            "training",
            ("steps", "global_batch", "sequence", "threads_per_rank", "loss_scale", "loss_scale_steps"),
            low=1,
        )
        require_in_range(self, "training", ("seed", "gradient_clip", "z_loss", "prediction_loss"), low=0)
        if not 0 <= self.dropout < 1:
            raise UserError(f"training.dropout={self.dropout} is no fraction below 1; use 0.1, or 0 for none")
        require_at_most(MOST, self, "training")
        parse_ramp("batch_ramp", self.batch_ramp, self.global_batch)
        parse_ramp("sequence_ramp", self.sequence_ramp, self.sequence)
        if self.deterministic and self.compile == "on":
            raise UserError(
                "training.compile=on takes whichever kernel is fastest as a run starts, and its last bits, but "
                "training.deterministic=true asks for the same each time; use training.compile=auto or off"
            )
        if self.gradient_sums == "bf16" and self.weights != "bf16":
            raise UserError(
                f"training.gradient_sums=bf16 is for precision=bf16 or fp8, not training.precision={self.precision}; "
                "use gradient_sums=float32"
            )
        if self.fp8_experts and self.precision != "fp8":
            raise UserError(
                f"training.fp8_experts=true is for precision=fp8, not training.precision={self.precision}; use "
                "precision=fp8 or fp8_experts=false"
            )
        if self.backend == "nccl" and self.device == "cpu":
            raise UserError("training.backend=nccl needs GPUs, not training.device=cpu; use backend=auto or gloo")
        if self.overlap_tensor == "on" and self.device == "cpu":
            raise UserError("training.overlap_tensor=on needs GPUs, not training.device=cpu; use overlap_tensor=auto")
        if self.overlap_tensor == "on" and self.compiles_nothing:
            raise UserError(
                "training.overlap_tensor=on needs compiled blocks; use training.compile=on or overlap_tensor=auto"
            )


@dataclass(frozen=True, kw_only=True)
class LearningRateSpec:
    """How the learning rate moves over the steps."""

    peak: float = 3e-4
    """The highest learning rate."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """wsd: warm up, stay, decay at the end."""
    warmup_steps: int = 0
    """Steps in which it rises from nothing to the peak."""
    decay_steps: int = 0
    """Length of the decay of wsd; 0 is a fifth of the steps."""
    minimum_ratio: float = 0.1
    """Last learning rate over the peak."""
    python: str = ""
    """A schedule of one's own in place of `schedule`: python:my_schedule.py:name, a function of (step from 0, steps)
    that returns what multiplies the peak. Warm-up comes before it."""

    def __post_init__(self) -> None:
        check_types(self, "learning_rate")
        require_in_range(self, "learning_rate", ("peak", "warmup_steps", "decay_steps"), low=0)
        require_in_range(self, "learning_rate", ("minimum_ratio",), low=0, high=1)
        if self.python and not is_plugin(self.python):
            raise UserError(f"learning_rate.python={self.python} names no function; write python:my_schedule.py:name")


OWN_DATA = "model"
"""The source of a model of one's own that brings its data set."""
TO_CHOOSE = "to-choose"
"""The source of a plan, which chooses a layout and no data: a person decides, and until then it does not train."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where tokens come from, how they become samples, and what is held out. Paths are relative to the folder the
    command runs in, as output.folder is."""

    source: str = "python-stdlib"
    """python-stdlib, synthetic, a store that `cuboid data build` wrote, the prefix of a Megatron .bin/.idx pair, a data
    set of one's own (python:my_data.py:dataset), or the one that a model of one's own brings (model)."""
    mixture: dict[str, float] | None = field(default=None, hash=False)
    """Source -> weight, in place of `source`. A weight is a fraction of the samples; weights need not sum to one."""
    packing: Literal["packed", "padded"] = "packed"
    """packed: documents one after another, cut every `sequence` tokens. padded: a document per sample, cut at its end
    or filled up."""
    mask_across_documents: bool = False
    """Do not count in the loss the first token of each document, which no earlier token of its own document predicts.
    What attention sees is decided below."""
    attention_within_documents: bool = False
    """Tokens of a packed sample see only those of their own document."""
    positions_within_documents: bool = False
    """Positions count from the start of each document, as Hugging Face's packed collators and Megatron's
    reset-position-ids do. Rotary positions are relative: to them it matters only where attention crosses documents."""
    assignment: Literal["order", "work"] = "order"
    """Which replica and micro-batch takes which sequences of a step. order: one run of them after another. work: so
    that all have as much to compute, by the lengths of documents: whole sequences, as many for each. Needs
    attention_within_documents, without which all sequences are the same work. It changes the order of sums and nothing
    else; every rank looks up the lengths of all sequences of a step."""
    validation: str = ""
    """A source of its own for evaluation."""
    validation_fraction: float = 0.0
    """Which part of the documents is held out for evaluation, spread evenly over the source; training never sees
    them."""

    def __post_init__(self) -> None:
        check_types(self, "data")
        if not self.source:
            raise UserError('data.source="" names no data; use python-stdlib or the path of a store')
        if self.mixture is not None:
            self._check_mixture(self.mixture)
        if self.assignment == "work" and not self.attention_within_documents:
            raise UserError(
                "data.assignment=work needs data.attention_within_documents=true, without which all sequences are the "
                "same work; use assignment=order"
            )
        if not 0 <= self.validation_fraction < 1:
            raise UserError(
                f"data.validation_fraction={self.validation_fraction} is no part of the documents; "
                "use 0.01, or 0 for none"
            )
        if self.validation and self.validation_fraction:
            raise UserError(
                f"data.validation={self.validation} and data.validation_fraction={self.validation_fraction} both "
                "choose the held-out data; use one of them"
            )
        if self.validation_fraction and "synthetic" in self.sources:
            raise UserError("data.source=synthetic has no documents to hold out; use validation_fraction=0")

    def _check_mixture(self, mixture: dict[str, float]) -> None:
        if not mixture:
            raise UserError(
                'data.mixture={} names no source; write mixture = { "stores/web" = 0.7, "stores/code" = 0.3 }'
            )
        if self.source not in ("python-stdlib", TO_CHOOSE):
            raise UserError(f"data.source={self.source} and data.mixture both name sources; use one of them")
        for name, weight in mixture.items():
            if weight <= 0:
                raise UserError(f"data.mixture.{name}={weight} is no weight; use a number above 0, or omit it")

    @property
    def weights(self) -> dict[str, float]:
        """Every source with its weight."""
        return self.mixture if self.mixture is not None else {self.source: 1.0}

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.weights)

    @property
    def uses_documents(self) -> bool:
        """Whether the model must know where documents begin."""
        return self.attention_within_documents or self.positions_within_documents

    @property
    def holds_out(self) -> bool:
        """Whether there is data to evaluate on."""
        return bool(self.validation or self.validation_fraction)


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """The loss on held-out data, now and then during training."""

    every: int = 0
    """Steps between evaluations; 0 is never."""
    batches: int = 8
    """How many global batches one evaluation takes at most: the same samples each time, each once."""
    average: bool = False
    """Evaluate the moving average of the weights, which `optimizer.average` keeps, in place of the weights."""

    def __post_init__(self) -> None:
        check_types(self, "evaluation")
        if self.every < 0:
            raise UserError(f"evaluation.every={self.every} is too small; use every=0 for never, or every=100")
        if self.batches < 1:
            raise UserError(f"evaluation.batches={self.batches} is too small; use batches=1 or more")
        require_at_most({"batches": 1_000_000}, self, "evaluation")


WARM_UP = 3
"""Steps before those traced by default: two in which kernels are compiled and memory is taken, one in which the
profiler itself warms up."""
USUAL = 3
"""Steps that `cuboid train --profile` traces."""


@dataclass(frozen=True, kw_only=True)
class ProfileSpec:
    """Traces of some steps for Perfetto, and what memory holds."""

    steps: int = 0
    """How many steps are traced; 0 is none. `--profile` traces three."""
    first: int = 0
    """The first of them, counted from one as in metrics.jsonl; 0: the fourth after the start, or earlier where the run
    would end before."""
    ranks: str = ""
    """Ranks that are traced, e.g. 0,4,5; default: all."""
    memory: bool = True
    """On a GPU: also record what is allocated and where, from the start to the last traced step, as a snapshot for
    pytorch.org/memory_viz."""

    def __post_init__(self) -> None:
        check_types(self, "profile")
        require_in_range(self, "profile", ("steps", "first"), low=0)
        if not all(re.fullmatch(r" *[0-9]{1,8} *", part) for part in self.ranks.split(",")) and self.ranks:
            raise UserError(f"profile.ranks={self.ranks} is no list of ranks; write it like 0,4,5")

    def check(self, world_size: int, steps: int) -> None:
        """Against the run it belongs to."""
        for rank in self.chosen_ranks:
            if rank >= world_size:
                raise UserError(f"profile.ranks={rank} is outside the layout; use {up_to(world_size - 1)}")
        if self.steps and self.first > steps:
            raise UserError(f"profile.first={self.first} is after training.steps={steps}; use profile.first={steps}")

    @property
    def chosen_ranks(self) -> tuple[int, ...]:
        """Those of `ranks`; none of them means all."""
        return tuple(int(part) for part in self.ranks.split(",")) if self.ranks else ()

    def traces(self, rank: int) -> bool:
        """Whether this rank is traced."""
        return self.steps > 0 and (not self.ranks or rank in self.chosen_ranks)

    def window(self, done: int, steps: int, most: int) -> range:
        """The traced ones of steps `done + 1` to `steps`, at most so many; empty where they lie behind."""
        count = min(self.steps, most, steps - done)
        first = self.first or max(done + 1, min(done + 1 + WARM_UP, steps - count + 1))
        return range(max(first, done + 1), min(first + count, steps + 1))
