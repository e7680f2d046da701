"""`Layout`: how a training is spread over ranks, written in one way everywhere.

>>> str(Layout.parse("tp=2,dp=2,schedule=interleaved,pp=4"))
'dp=2,tp=2,pp=4,schedule=interleaved'
"""

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from math import gcd, lcm
from typing import Any, Literal, get_origin

from cuboid.errors import UserError, nearest_names, nearest_numbers, use
from cuboid.spec.coding import convert, field_types, parse_text, require_known

STAGES_PER_RANK: dict[str, int | None] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": None,
    "zb1p": 1,
    "zbv": 2,
    "dualpipev": 2,
}
"""Schedule -> the one number of stages per rank it works with; None where that is free (two or more)."""

SCHEDULES = tuple(STAGES_PER_RANK)
V_SHAPED = ("zbv", "dualpipev")
"""Schedules that place stages down the ranks and up again, so that the first rank also holds the last stage."""

ContextMethod = Literal["ring", "ulysses", "allgather", "hybrid"]
CONTEXT_METHODS: tuple[ContextMethod, ...] = ("ring", "ulysses", "allgather", "hybrid")
Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""From nothing to everything."""
PLAIN = {"cp": 1, "cp_method": "ring", "schedule": "1f1b"}
"""Fields on which the defaults of others depend, each with its own."""

DERIVED: Any = None
"""Stands for a value that follows from the others; `Layout` replaces it at construction."""
MOST_RANKS = 10_000_000
MOST_PER_RANK = 1 << 20
"""Sequences of a micro-batch, stages of a rank."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A cuboid of ranks: data × context × tensor × pipeline, and how each of them works."""

    dp: int = 1
    """Data-parallel replicas."""
    tp: int = 1
    """Ranks that split every matrix."""
    pp: int = 1
    """Pipeline ranks."""
    cp: int = 1
    """Ranks that split every sequence."""
    cp_method: ContextMethod = "ring"
    """How a rank's queries meet all keys. ring: keys and values travel from rank to rank. ulysses: an all-to-all trades
    heads for tokens. allgather: every rank gathers all keys and values. hybrid: ulysses inside, ring between."""
    cp_inner: int = DERIVED
    """Ranks that trade heads under hybrid; default: the largest part of cp that leaves a ring."""
    ep: int = 1
    """Ranks that split the experts; they are borrowed from dp × cp × tp."""
    zero: int = 0
    """ZeRO stage: 1 splits the optimizer state over data-parallel ranks, 2 the gradients too, 3 the parameters too."""
    shard: int = 0
    """Over how many data-parallel replicas ZeRO splits; 0 is all of them, less is hybrid sharding. The context-parallel
    ranks of a replica, which hold the same parameters, share the splitting with it."""
    schedule: str = "1f1b"
    """Who does what when in the pipeline: gpipe, 1f1b, interleaved, zb1p, zbv or dualpipev."""
    vpp: int = DERIVED
    """Pipeline stages per rank; default: what the schedule needs."""
    micro_batch: int = 1
    """Sequences per micro-batch on one data-parallel replica."""
    recompute: Recompute = "none"
    """What the backward pass computes again: nothing, all but matmuls and attention, or whole blocks."""
    recompute_layers: int = 0
    """`recompute` applies to the first N layers of each stage; 0: to all. The rest use the next lighter mode: selective
    under full, none under selective."""
    sequence_parallel: bool = DERIVED
    """Split what lies between the tensor-parallel matrices along the sequence; default: on when tp > 1."""
    layers: tuple[int, ...] = ()
    """Layers of each pipeline stage in the order of the model, e.g. 10:12:6:4, or 7x3:11; default: balanced by the
    arithmetic of layers and head. With several stages on a rank one number for each of them, pp × vpp in all."""
    batch_weights: tuple[int, ...] = ()
    """In which proportion data-parallel replicas divide a global batch, e.g. 3:1; default: equally. Replicas that meet
    only at the end of a step run so many more micro-batches. Those that wait for one another in each micro-batch
    (zero=2 and 3, experts over replicas) run equally many, of so many more sequences than `micro_batch` says."""
    shard_weights: tuple[int, ...] = ()
    """In which proportion the replicas that ZeRO splits over keep what it splits, e.g. 3:1; default: equally. With
    `shard`, the replicas of each group alike."""
    offload: bool = False
    """Keep the optimizer's state in CPU memory and bring it to the accelerator for the update. Changes no
    result; on CPUs, whose memory is the host's, nothing at all."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch"):
            require_positive(name, getattr(self, name))
        if self.micro_batch > MOST_PER_RANK:
            raise UserError(f"micro_batch={self.micro_batch} is too large; use micro_batch={MOST_PER_RANK} or less")
        if self.world_size > MOST_RANKS:
            raise UserError(f"world_size={self.world_size} is too large; use dp × cp × tp × pp = {MOST_RANKS} or less")
        self._resolve_schedule()
        for name, low, high in (("zero", 0, 3), ("shard", 0, self.dp)):
            value = convert(getattr(self, name), int, name)
            if not low <= value <= high:
                raise UserError(f"{name}={value} is out of range; {use(name, [min(max(value, low), high)])}")
        self._check_shard()
        self._check_recompute()
        self._resolve_context()
        asked = self.sequence_parallel is None or convert(self.sequence_parallel, bool, "sequence_parallel")
        # Splitting over one rank changes nothing, so one spelling is kept for it.
        object.__setattr__(self, "sequence_parallel", asked and self.tp > 1)
        convert(self.offload, bool, "offload")
        self._resolve_weights()
        self._check_layers()
        borrowed = self.dp * self.cp * self.tp
        if borrowed % self.ep:
            near = nearest_numbers(self.ep, lambda number: borrowed % number == 0, 1, borrowed)
            raise UserError(f"ep={self.ep} does not divide dp × cp × tp = {borrowed}; {use('ep', near)}")
        split = self.shard_size * self.cp * self.tp
        if self.zero and split % self.ep and self.ep % split:
            near = nearest_numbers(self.ep, lambda number: borrowed % number == 0 and split % number == 0, 1, split)
            raise UserError(f"ep={self.ep} does not divide shard × cp × tp = {split}; {use('ep', near)}")

    def _resolve_schedule(self) -> None:
        if self.schedule not in STAGES_PER_RANK:
            near = nearest_names(str(self.schedule), SCHEDULES)
            raise UserError(f"unknown schedule={self.schedule}; {use('schedule', near)}")
        fixed = STAGES_PER_RANK[self.schedule]
        if self.vpp is None:
            object.__setattr__(self, "vpp", fixed or 2)
        require_positive("vpp", self.vpp)
        if fixed is None and self.vpp < 2:
            raise UserError(
                f"vpp={self.vpp} leaves schedule={self.schedule} nothing to interleave; use vpp=2 or schedule=1f1b"
            )
        if fixed == 1 and self.vpp != 1:
            raise UserError(
                f"vpp={self.vpp} needs an interleaved schedule and schedule={self.schedule} is not one; "
                f"use schedule=interleaved or vpp=1"
            )
        if fixed == 2 and self.vpp != 2:
            raise UserError(
                f"vpp={self.vpp} does not fit schedule={self.schedule}, which has two stages per rank; use vpp=2"
            )

    def _resolve_context(self) -> None:
        convert(self.cp_method, field_types(Layout)["cp_method"], "cp_method")
        if self.cp == 1:  # Nothing is split, so one spelling is kept for it.
            object.__setattr__(self, "cp_method", "ring")
        inner = {"ulysses": self.cp, "hybrid": None}.get(self.cp_method, 1)
        if inner is not None:
            if self.cp_inner not in (None, inner) and self.cp > 1:
                raise UserError(f"cp_inner={self.cp_inner} needs cp_method=hybrid, not {self.cp_method}; omit it")
            object.__setattr__(self, "cp_inner", inner)
            return
        parts = [number for number in range(2, self.cp) if self.cp % number == 0]
        if not parts:
            raise UserError(f"cp_method=hybrid has nothing to divide in cp={self.cp}; use cp=4 or cp_method=ring")
        if self.cp_inner is None:
            object.__setattr__(self, "cp_inner", parts[-1])
        if convert(self.cp_inner, int, "cp_inner") not in parts:
            whole = nearest_numbers(self.cp_inner, lambda number: number in parts, 2, self.cp)
            raise UserError(f"cp_inner={self.cp_inner} is no part of cp={self.cp}; {use('cp_inner', whole)}")

    def _check_shard(self) -> None:
        if self.shard and not self.zero:
            raise UserError(f"shard={self.shard} has nothing to split with zero=0; use zero=1, zero=2 or zero=3")
        if self.shard and self.dp % self.shard:
            near = nearest_numbers(self.shard, lambda number: self.dp % number == 0, 1, self.dp)
            raise UserError(f"shard={self.shard} does not divide dp={self.dp}; {use('shard', near)}")

    def _check_recompute(self) -> None:
        convert(self.recompute, field_types(Layout)["recompute"], "recompute")
        if convert(self.recompute_layers, int, "recompute_layers") < 0:
            raise UserError(
                f"recompute_layers={self.recompute_layers} is negative; use recompute_layers=1 or more, or 0 for all"
            )
        if self.recompute_layers and self.recompute == "none":
            raise UserError(
                f"recompute_layers={self.recompute_layers} has nothing to do with recompute=none; "
                "use recompute=selective or recompute=full"
            )

    def _resolve_weights(self) -> None:
        """Equal weights have one spelling, none, and others the smallest numbers."""
        wanted = {"batch_weights": ("dp", self.dp), "shard_weights": ("shard", self.shard_size)}
        for name, (field, count) in wanted.items():
            if getattr(self, name) == ():
                continue
            weights = convert(getattr(self, name), field_types(Layout)[name], name)
            told = f"{name}={format_weights(weights)}"
            if name == "shard_weights" and not self.zero:
                raise UserError(f"{told} has nothing to split with zero=0; use zero=1, zero=2 or zero=3")
            if not weights or min(weights) < 1 or max(weights) > MOST_PER_RANK:
                raise UserError(f"{told} has a weight that is not between 1 and {MOST_PER_RANK}; use 3:1 or the like")
            if len(weights) != count:
                raise UserError(f"{told} has {len(weights)} weights for {field}={count}; use one for each replica")
            common = gcd(*weights)
            weights = tuple(weight // common for weight in weights)
            object.__setattr__(self, name, weights if max(weights) > 1 else ())

    def _check_layers(self) -> None:
        if self.layers == ():
            return
        layers = convert(self.layers, field_types(Layout)["layers"], "layers")
        object.__setattr__(self, "layers", layers)
        told = f"layers={format_weights(layers)}"
        if self.stages == 1:
            raise UserError(f"{told} has nothing to divide with pp=1; use pp={max(len(layers), 2)} or omit it")
        if len(layers) != self.stages:
            stages = f"pp={self.pp}" + (f" × vpp={self.vpp}" if self.vpp > 1 else "")
            raise UserError(
                f"{told} has {len(layers)} numbers for {self.stages} stages ({stages}); use one for each stage"
            )
        if min(layers) < 1:
            raise UserError(f"{told} leaves stage {layers.index(min(layers))} empty; use 1 or more for each")

    # How replicas divide a global batch.

    @property
    def batch_parts(self) -> int:
        """Into how many equal parts a global batch is divided; each replica takes one, or as many as its weight."""
        return sum(self.batch_weights) or self.dp

    @property
    def batch_unit(self) -> int:
        """What a global batch must divide by, in sequences."""
        return self.batch_parts * self.micro_batch

    def shard_weight_of(self, replica: int) -> int:
        return self.shard_weights[replica % self.shard_size] if self.shard_weights else 1

    @property
    def fuller_shard(self) -> float:
        """What the replica with most keeps of what ZeRO splits, over the mean."""
        return max(self.shard_weights) * self.shard_size / sum(self.shard_weights) if self.shard_weights else 1.0

    def weight_of(self, replica: int) -> int:
        return self.batch_weights[replica] if self.batch_weights else 1

    @property
    def busiest_replica(self) -> int:
        """The first of those that take most of a batch."""
        return self.batch_weights.index(max(self.batch_weights)) if self.batch_weights else 0

    @cached_property
    def has_unequal_sizes(self) -> bool:
        """Whether replicas differ in how large their micro-batches are, rather than in how many they have: because some
        of unequal weight wait for one another in each micro-batch."""
        if not self.batch_weights:
            return False
        replica = self.cp * self.tp
        together = lcm(self.shard_size * replica if self.zero >= 2 else 1, self.ep)
        return any(
            len(set(self.batch_weights[first // replica : -(-(first + together) // replica)])) > 1
            for first in range(0, self.dp * replica, together)
        )

    @property
    def has_unequal_counts(self) -> bool:
        """Whether replicas have different numbers of micro-batches."""
        return bool(self.batch_weights) and not self.has_unequal_sizes

    def micro_batch_of(self, replica: int) -> int:
        """Sequences of its micro-batches."""
        return self.micro_batch * (self.weight_of(replica) if self.has_unequal_sizes else 1)

    def micro_batches_of(self, replica: int, global_batch: int) -> int:
        """How many it has in a step."""
        return global_batch // self.batch_unit * (1 if self.has_unequal_sizes else self.weight_of(replica))

    def as_replica(self, replica: int, global_batch: int) -> tuple["Layout", int]:
        """The layout, and its global batch, in which all replicas do what this one does: what it computes, sends and
        holds is what this replica does here."""
        size, count = self.micro_batch_of(replica), self.micro_batches_of(replica, global_batch)
        return self.changed(batch_weights=(), micro_batch=size), self.dp * size * count

    def sequences_of(self, replica: int, global_batch: int) -> range:
        """Which sequences of a global batch it takes, in their order."""
        each = global_batch // self.batch_parts
        before = sum(self.batch_weights[:replica]) if self.batch_weights else replica
        return range(before * each, (before + self.weight_of(replica)) * each)

    def recompute_at(self, place: int) -> Recompute:
        """What the layer at some place of its stage computes again. The first ones most: they keep what they keep
        for longest."""
        spared = self.recompute_layers and place >= self.recompute_layers
        return RECOMPUTE[RECOMPUTE.index(self.recompute) - 1] if spared else self.recompute

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def stages(self) -> int:
        """Pipeline stages in all."""
        return self.pp * self.vpp

    @property
    def shard_size(self) -> int:
        """How many replicas hold different parts of what ZeRO splits."""
        return (self.shard or self.dp) if self.zero else 1

    @property
    def expert_shard_size(self) -> int:
        """As `shard_size`, of the state of routed experts: their holders are borrowed from dp × cp × tp."""
        return max(1, self.shard_size * self.cp * self.tp // self.ep) if self.zero else 1

    @property
    def last_stage_rank(self) -> int:
        """The pipeline rank that holds the last stage."""
        return 0 if self.schedule in V_SHAPED else self.pp - 1

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """The stages a pipeline rank holds, first to last."""
        if self.schedule in V_SHAPED:
            return (pipeline_rank, 2 * self.pp - 1 - pipeline_rank)
        return tuple(range(pipeline_rank, self.stages, self.pp))

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """From the layout string, e.g. `dp=2,tp=2,pp=2,zero=1,schedule=1f1b`."""
        return cls(**parse_layout_fields(text))

    def changed(self, **changes: Any) -> "Layout":
        """With some fields changed and what was left to its default resolved anew (`dataclasses.replace` keeps it)."""
        return Layout(**{**parse_layout_fields(str(self)), **changes})

    def __str__(self) -> str:
        plain = Layout(tp=self.tp, cp=self.cp, cp_method=self.cp_method, schedule=self.schedule)
        shown = ["dp", "tp", "pp"]
        for field in fields(self):
            default = PLAIN[field.name] if field.name in PLAIN else getattr(plain, field.name)
            if field.name not in shown and getattr(self, field.name) != default:
                shown.append(field.name)
        return ",".join(f"{name}={_written(getattr(self, name))}" for name in shown)


def _written(value: object) -> str:
    return format_weights(value) if isinstance(value, tuple) else str(value).lower()


def format_weights(weights: tuple[int, ...]) -> str:
    """Three or more equal ones in a row as `weight x times`.

    >>> format_weights((3, 3, 3, 3, 2, 1))
    '3x4:2:1'
    """
    runs = [(weight, len(list(same))) for weight, same in groupby(weights)]
    return ":".join(f"{weight}x{times}" if times > 2 else ":".join([str(weight)] * times) for weight, times in runs)


def parse_weights(text: str, where: str) -> tuple[int, ...]:
    """
    >>> parse_weights("3x4:2:1", "batch_weights")
    (3, 3, 3, 3, 2, 1)
    """
    weights: list[int] = []
    for part in text.split(":"):
        weight, _, times = part.strip().partition("x")
        if not (weight.isdecimal() and (times or "1").isdecimal()) or len(weight + times) > 15:
            what = "numbers" if where == "layers" else "weights"
            raise UserError(f"{where}={text} is no list of {what}; write it like {where}=3:1 or {where}=3x4:1x2")
        if len(weights) + int(times or 1) > MOST_RANKS:
            each = "stage" if where == "layers" else "replica"
            raise UserError(f"{where}={text} has more numbers than there are ranks; use one for each {each}")
        weights += [int(weight)] * int(times or 1)
    return tuple(weights)


def require_positive(name: str, value: object) -> None:
    """Refuses what is not a whole number of at least one."""
    if convert(value, int, name) < 1:
        raise UserError(f"{name}={value} is not positive; use {name}=1 or more")


def parse_layout_fields(text: str) -> dict[str, Any]:
    """The fields a layout string sets, typed, without the defaults of the others."""
    types = field_types(Layout)
    values: dict[str, Any] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise UserError(f"layout part {part!r} is not key=value; write it like dp=2,tp=2,pp=2")
        require_known(key, types, "")
        if key in values:
            raise UserError(f"layout names {key} twice; keep one of {key}={values[key]} and {key}={value}")
        is_list = get_origin(types[key]) is tuple
        values[key] = parse_weights(value, key) if is_list else parse_text(value, types[key], key)
    return values
