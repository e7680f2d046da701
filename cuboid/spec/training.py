"""The tables of a run file that say what is computed, whatever the layout: [training], [optimizer], [learning_rate],
[data], [evaluation] and [profile]."""

import math
import re
from dataclasses import MISSING, dataclass, field, fields
from typing import Literal

from cuboid.errors import UserError, up_to
from cuboid.spec.coding import check_types, require_at_most, require_in_range
from cuboid.spec.layout import Layout
from cuboid.spec.plugin import is_plugin
from cuboid.spec.ramp import Ramp, parse_ramp

MOST = {"steps": 10**9, "global_batch": 1 << 24, "sequence": 1 << 28, "threads_per_rank": 1024}
"""Above them no machine has the memory or the time."""


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
        require_in_range(self, "training", ("seed", "gradient_clip", "z_loss"), low=0)
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
class OptimizerSpec:
    """AdamW, Muon, or another by name or by a user's own factory."""

    kind: str = "adamw"
    """adamw; muon: the matrices of blocks by Muon, all else by AdamW; or another optimizer of torch.optim by its name
    in small letters: sgd, adam, nadam, rmsprop, …"""
    python: str = ""
    """A factory of one's own in place of `kind`: python:my_optimizer.py:build, called with groups of parameters and
    `options`; returns a torch.optim.Optimizer or a list of them."""
    options: dict[str, object] = field(default_factory=dict, hash=False)
    """Arguments of an optimizer that is not AdamW: { momentum = 0.9 }."""
    whole_parameters: bool = False
    """Of an optimizer that is not AdamW: it looks at whole matrices, not at each element by itself. Needs zero=0 and
    tp=1."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of their squares."""
    epsilon: float = 1e-8
    """Added to the root of the second mean."""
    weight_decay: float = 0.1
    """Of matrices; norms and biases are not decayed."""
    embedding_rate: float = 1.0
    """What multiplies the learning rate of the embedding's parameters. Their weight decay follows learning_rate.peak
    alone."""
    head_rate: float = 1.0
    """What multiplies the learning rate of the head's matrix, likewise; not for models that tie it to the embedding."""
    average: float = 0.0
    """Decay of a moving average of the weights, such as 0.999: after each update it is itself × this + weights × the
    rest. In float32, sharded as master weights, saved in checkpoints; 0: none."""
    momentum: float = 0.95
    """Of muon: decay of the mean of gradients of matrices."""
    nesterov: bool = True
    """Of muon: what is orthogonalised is the momentum as the next step would have it."""
    update_scale: Literal["rms", "spectral", "original"] = "rms"
    """Of muon: what multiplies the orthogonal update of a matrix m × n. rms: 0.2 √max(m, n), so that its elements are
    as large as AdamW's and one learning rate serves both (Moonlight); spectral: √(m / n); original: √max(1, m / n)."""
    matrix_rate: float = 1.0
    """Of muon: what multiplies the learning rate of matrices, as with update_scale=original, where AdamW's is smaller.
    Their weight decay follows learning_rate.peak alone."""
    newton_schulz_steps: int = 5
    """Of muon: iterations that orthogonalise a matrix."""
    newton_schulz_precision: Literal["auto", "bf16", "float32", "float64"] = "auto"
    """Of muon: the precision of these iterations, and of matrices on their way to the rank that makes them; auto: bf16
    where training.precision has 16 bits or fewer, else training.precision."""
    matrix_function: str = ""
    """Of muon: a function of one's own in place of Newton-Schulz, python:my_optimizer.py:name. It gets whole matrices
    on any layout, (matrices, m, n), and returns as many of the same shape."""
    per_head: bool = False
    """Of muon: every head of queries, keys and values is a matrix of its own."""
    normuon: bool = False
    """Of muon: each row of an orthogonal update is divided by the root of the mean of its squares, which decays by
    beta2, so that every neuron learns alike (NorMuon); the whole is as large as before."""
    qk_clip: float = 0.0
    """Of muon: the largest attention logit that the norms of a head's queries and keys allow, over the batch of a step.
    Weights of a head above it are scaled down after the update (QK-clip); 0 turns it off."""
    fused: dict[str, list[int]] = field(default_factory=dict, hash=False)
    """Of muon and a model of one's own: parameters that are several matrices, row after row, by the end of their names
    and the rows of each: { "qkv.weight" = [64, 32, 32] }."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        if self.python and not is_plugin(self.python):
            raise UserError(f"optimizer.python={self.python} names no factory; write python:my_optimizer.py:build")
        if self.python and self.kind != "adamw":
            raise UserError(f"optimizer.kind={self.kind} and optimizer.python both name an optimizer; use one of them")
        if not self.is_own and (self.options or self.whole_parameters):
            raise UserError(
                "optimizer.options and optimizer.whole_parameters mean nothing to AdamW and Muon; use optimizer.beta1, "
                "optimizer.momentum and the like, or another optimizer.kind"
            )
        decays = ("beta1", "beta2", "momentum", "average")
        require_in_range(self, "optimizer", (*decays, "epsilon", "weight_decay", "qk_clip"), low=0)
        for name in decays:
            if getattr(self, name) >= 1:
                raise UserError(f"optimizer.{name}={getattr(self, name)} never forgets; use a number below 1")
        for name in ("embedding_rate", "head_rate", "matrix_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"optimizer.{name}={getattr(self, name)} would not learn; use a number above 0, like 1")
        self._check_muon()

    def _check_muon(self) -> None:
        for each in fields(self) if not self.is_muon else ():
            usual = {} if each.default is MISSING else each.default
            if each.name in OF_MUON and getattr(self, each.name) != usual:
                instead = " or optimizer.options" if self.is_own else ""
                raise UserError(
                    f"optimizer.{each.name}={getattr(self, each.name)} means nothing to {self.called}; "
                    f"use optimizer.kind=muon{instead}"
                )
        require_in_range(self, "optimizer", ("newton_schulz_steps",), low=1, high=100)
        if self.matrix_function and not is_plugin(self.matrix_function):
            raise UserError(
                f"optimizer.matrix_function={self.matrix_function} names no function; write python:my_optimizer.py:name"
            )
        for name, rows in self.fused.items():
            if not rows or min(rows) < 1:
                raise UserError(f"optimizer.fused.{name}={rows} is no list of rows; write it like [64, 32, 32]")

    @property
    def is_muon(self) -> bool:
        """Whether matrices of blocks are updated by Muon."""
        return self.kind == "muon" and not self.python

    @property
    def is_own(self) -> bool:
        """Whether it is neither AdamW nor Muon as the engine has them."""
        return bool(self.python) or self.kind not in ("adamw", "muon")

    @property
    def has_own_code(self) -> bool:
        """Whether it must be tried before a training starts."""
        return self.is_own or bool(self.matrix_function)

    @property
    def called(self) -> str:
        """In a sentence."""
        return f"optimizer.python={self.python}" if self.python else f"optimizer.kind={self.kind}"

    def rate_of(self, name: str) -> float:
        """What multiplies the learning rate of a parameter, as the whole model calls it."""
        if name.startswith("embedding."):
            return self.embedding_rate
        return self.head_rate if name.startswith("head.") and not name.startswith("head.norm.") else 1.0

    def check_model(self, own: bool, qk_norm: bool, tied: bool) -> None:
        """Refuse a model that this optimizer cannot serve. `own`: it is the user's. `tied`: head and embedding are
        one matrix."""
        if tied and self.head_rate != 1:
            raise UserError(
                f"optimizer.head_rate={self.head_rate} has no matrix of its own in a model that ties embeddings; use "
                f"optimizer.embedding_rate={self.head_rate} for both or model.tie_embeddings=false"
            )
        if self.qk_clip and own:
            raise UserError(f"optimizer.qk_clip={self.qk_clip} is not for a model of one's own; use qk_clip=0")
        if self.qk_clip and qk_norm:
            raise UserError(
                f"optimizer.qk_clip={self.qk_clip} has nothing to clip with model.qk_norm=true, which bounds queries "
                "and keys already; use qk_clip=0"
            )
        if self.fused and not own:
            raise UserError(
                f"optimizer.fused={self.fused} is for a model of one's own: in those of the catalog every matrix is a "
                "parameter; omit it"
            )

    def check_layout(self, layout: Layout) -> None:
        """Refuse a layout that keeps parameters or state where this optimizer cannot use them."""
        if layout.offload and (self.is_own or self.is_muon):
            raise UserError(f"offload=true is for AdamW, not for {self.called}; use offload=false")
        if layout.offload and self.average:
            raise UserError(
                f"optimizer.average={self.average} is kept on the device, where offload=true keeps no such state; use "
                "offload=false or average=0"
            )
        if not self.is_own:
            return
        cuts = {"zero": layout.zero if layout.dp * layout.cp > 1 else 0, "tp": layout.tp - 1, "ep": layout.ep - 1}
        name = next((name for name, cut in cuts.items() if cut), "")
        if name and self.whole_parameters:
            raise UserError(
                f"optimizer.whole_parameters=true needs parameters that ranks hold whole, but {name}="
                f"{getattr(layout, name)} cuts them; use zero=0, tp=1 and ep=1"
            )


OF_MUON = (
    "momentum",
    "nesterov",
    "update_scale",
    "matrix_rate",
    "newton_schulz_steps",
    "newton_schulz_precision",
    "matrix_function",
    "per_head",
    "normuon",
    "qk_clip",
    "fused",
)
"""What another optimizer does not read."""


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
BUILT_IN = ("python-stdlib", "synthetic")
"""Sources that need no file: bytes of the standard library's own source; random tokens with masked labels."""


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
