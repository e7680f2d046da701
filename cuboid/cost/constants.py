"""Constants of the cost model: what an engine, a chip and a fabric do, calibrated on published runs or measured by
`cuboid probe`."""

from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from cuboid.errors import UserError, nearest_names
from cuboid.readers import parse_toml
from cuboid.spec.cluster import ClusterSpec, accelerator_base, accelerator_table
from cuboid.spec.coding import convert, field_types, require_known

KEPT = ("kept_hidden", "kept_whole", "kept_query", "kept_ffn", "kept_boundary", "kept_routed")
"""Bytes of an engine that are activations in the precision of the matmuls."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A training program: what it keeps in memory, what it hides behind compute, how fast its host code is."""

    name: str
    source: str = ""
    partition: str = "even"
    """How layers go to stages: even; head (embedding and head count as a layer each); balanced (by cost)."""
    fused_attention: bool = True
    attention_scale: float = 1.0
    """Attention time against the accelerator's own best kernel."""
    attention_back: float = 1.0
    """… of its backward pass, once more."""
    attention_latent: float = 1.0
    """How much longer attention takes where keys are wider than values, of which the FLOP alone say nothing."""
    attention_narrow: float = 0.0
    """Fraction by which it is slower with heads of 64 than with heads of 128: as many exponentials for half the
    multiplications."""
    mixture_attention: float = 1.0
    """Its time in layers with experts against that in others: such layers wait for memory more, so that an accelerator
    at its power limit gives attention more."""
    linear_scale: float = 1.0
    """Matrix multiplication time against the accelerator's own best."""
    heat: float = 0.0
    """Fraction by which multiplications slow down per fraction of the time that they take beyond `compute.WARM`: an
    accelerator at its power limit gives them less, the less else it does."""
    apart: bool = False
    """Queries, keys, values, gate and up are multiplications of their own."""
    hidden_traffic: float = 28.0
    """Bytes an element-wise kernel moves forward per token and hidden element of a layer."""
    whole_traffic: float = 0.0
    """Bytes moved backward per token and hidden element of a layer that tensor ranks hold whole for a moment, though
    they split the sequence: gradients of the inputs of multiplications, before their sum."""
    ffn_traffic: float = 6.0
    """… and per feed-forward element."""
    latent_traffic: float = 0.0
    """… and per element of queries, keys and values that come of a latent: they are concatenated from two parts."""
    loss_traffic: float = 16.0
    """… and per logit."""
    cast_traffic: float = 3.0
    """Extra bytes per input element of a matrix multiplication in 8 or 4 bits."""
    host_forward: float = 0.0
    """Seconds the host needs to launch one layer forward; the layer takes no less."""
    host_backward: float = 0.0
    host_collective: float = 0.0
    """Seconds the host adds per layer pass where a tensor-parallel group communicates."""
    host_crossing: float = 0.0
    """Seconds it adds per layer pass and tensor-parallel rank where the pipeline leaves the node; more, by the root of
    their number, where the tensor-parallel group itself spans nodes."""
    host_jitter: float = 0.0
    """Fraction the host's time per pass grows by with every further tensor-parallel rank: all wait for the slowest."""
    host_fallback: float = 0.0
    """Seconds a pass adds where heads × micro-batch of a rank is no multiple of four (Megatron's fused softmax)."""
    host_mixture: float = 0.0
    """Seconds a pass adds where the layer has experts (routing, permutation, synchronisation)."""
    repeated_launches: float = 1.0
    """Fraction of that, and of `host_forward`, that a recomputation takes: it waits for nothing, and ends with the last
    activation that the backward pass needs."""
    host_routing: float = 0.0
    """Seconds of the probe's small layer with experts, forward and backward, on the host that these are of."""
    host_cast: float = 0.0
    """Seconds a pass adds in 8 or 4 bits (scales, conversions)."""
    host_micro_batch: float = 0.0
    host_unsharded: float = 0.0
    """Seconds per micro-batch lost to plain data parallelism (ZeRO 0) in a pipeline (nanotron's rows)."""
    host_step: float = 0.0
    tensor_overlap: float = 0.0
    """Fraction of tensor-parallel communication hidden behind compute."""
    tensor_under_weights: float = 0.0
    """Fraction of the matmuls of weight gradients that the collective of their input gradient can hide behind; none
    where the schedule puts them off."""
    context_overlap: float = 0.8
    """Most that a ring hides of its messages."""
    block_traffic: float = 0.0
    """Bytes moved forward, and as many backward, per element of queries for each further block that a ring attends to:
    outputs of blocks are added up, and so are gradients of queries."""
    host_block: float = 5e-5
    """Seconds of the host for each further block of attention that context parallelism makes."""
    expert_overlap: float = 0.0
    expert_paired: float = 0.0
    """Fraction of the compute of one pass of a DualPipeV pair that the tokens of the other can travel behind."""
    expert_once: bool = True
    """A token goes to another node once, however many of its experts are there (DeepEP and its like)."""
    gradient_overlap: float = 0.0
    """Fraction of the backward pass of the last micro-batch that gradient reduction can hide behind."""
    gather_overlap: float = 0.0
    """Fraction of gathering parameters (ZeRO 1 and 2 after the step) that is hidden, by a forward pass at most."""
    shard_overlap: float = 0.9
    """Fraction of the compute of a layer that ZeRO 3 traffic can hide behind."""
    shard_contention: float = 0.12
    """Fraction of hidden ZeRO 3 traffic that the kernels above it lose."""
    shard_decay: float = 0.0
    """Power of the number of nodes by which ZeRO 3 traffic slows down beyond what the fabric does."""
    reduce_every_micro_batch: bool = False
    fsdp: bool = False
    """ZeRO 2 is PyTorch's FSDP that keeps parameters between forward and backward: without a pipeline it gathers them
    again for every micro-batch; with one, gradients stay whole until the last micro-batch and are summed once."""
    transfer_exposed: float = 1.0
    """Fraction of the transfers between stages that compute waits for in the steady state."""
    transfer_scheduled: bool = False
    """Of that fraction only what the schedule cannot hide (`pipeline.waited_transfers`)."""
    transfer_stops: bool = False
    """A stage computes nothing while a message arrives from a slower network (`planning/heterogeneous.py`)."""
    transfer_split: bool = True
    """Tensor-parallel ranks send a slice each between stages and gather it on arrival."""
    optimizer_passes: float = 34.0
    """Bytes the optimizer step moves per parameter it owns."""
    matrix_steps: int = 0
    """Newton-Schulz iterations of matrices of blocks, where Muon updates them; 0: AdamW updates everything."""
    accumulate_traffic: float = 0.0
    """Bytes moved per parameter and micro-batch to add its gradient to those before, or to bring it where others'
    are added."""
    routing_traffic: float = 16.0
    """Bytes moved per token copy and hidden element to permute tokens to experts and back."""
    routing_floor: float = 0.0
    """Seconds of a pass for which small kernels of routing run, or the device waits for the host that reads how many
    rows go where."""
    grouped_scale: float = 1.4
    """Time of grouped expert multiplication against a plain one."""
    grouped_fp8: float = 1.0
    """… once more in 8 or 4 bits, of which short groups of rows win less."""
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    second_bytes: float = 0.0
    """… more of what is no matrix, where matrices have no second moment."""
    gradient_wire: float = 4.0
    """Bytes per gradient element on the wire."""
    parameter_wire: float = 2.0
    shard_wire: float = 0.0
    """Bytes per parameter of a layer that ZeRO 3 gathers, where it is not `parameter_wire`."""
    activation_wire: float = 2.0
    own_collectives: bool = False
    """Collectives inside layers are those of this engine: tensor ranks route their parts of the tokens to whole
    experts, and recomputation, selective too, repeats what lies before a layer's last matmul. Else every layer has two
    sums each way, and full recomputation repeats those forward."""
    compiled: bool = False
    """Memory is counted as `compiled_memory` does, tensor by tensor; of the fractions below only `kept_boundary`,
    `kept_routed` and `fixed` count then."""
    fp8_slower: float = 1.0
    """Time of matmuls in fp8, with what rounds their inputs, against that with one scale for each tensor."""
    fp8_input: float = 1.0
    """Bytes kept of a matmul's input in fp8, for each number, its scales included."""
    experts_in_fp8: bool = False
    """Grouped matmuls of this engine are in fp8, but for those of weight gradients."""
    fp8_activations: bool = False
    """Matmuls take their inputs in fp8, and keep them so; what `in_precision` says of a compiled engine."""
    kept_hidden: float = 8.0
    """Bytes kept for backward per token and hidden element of a layer (split by sequence parallelism)."""
    kept_whole: float = 0.0
    """… of those, bytes that tensor parallelism never splits."""
    kept_query: float = 2.0
    """… per element of queries, keys, values and of the attention output."""
    kept_ffn: float = 3.0
    """… per feed-forward element (gate and up each count one width)."""
    kept_selective: float = 1.0
    """Fraction of that kept where selective recomputation drops more than attention scores."""
    kept_boundary: float = 2.0
    """Bytes per token and hidden element kept of a layer that is recomputed as a whole."""
    kept_scores: float = 5.0
    """… per attention score where attention is not fused."""
    kept_routed: float = 4.0
    """… per token copy sent to an expert and hidden element."""
    kept_logit: float = 6.0
    """… per logit, on the last stage."""
    working_logit: float = 0.0
    """Bytes per logit alive only while the loss is computed, over what a layer's backward needs."""
    working_layer: float = 1.0
    """Fraction of one layer's kept activations alive a second time while it runs backward or is recomputed."""
    working_whole: float = 0.0
    """Bytes per token and hidden element of gathered tensors alive at once where tensor parallelism gathers."""
    update_bytes: float = 0.0
    """Bytes per owned parameter alive only during the optimizer step."""
    offload_elements: float = 0.0
    """Parameters whose optimizer state is on the accelerator at once where it is offloaded and brought there for the
    update; 0: the host updates it."""
    buffer_bytes: float = 0.0
    """Bytes per parameter of communication buffers that ZeRO does not split."""
    buffer_layer: float = 0.0
    """Bytes per parameter of one layer, and of the head, for gradients on their way into the accumulated ones
    (Transformer Engine keeps one such buffer per shape of weight)."""
    buffer_expert: float = 0.0
    """… per parameter of one layer's routed experts."""
    fixed: float = 1.0e9
    """Bytes of context, libraries and workspaces."""
    communicator_first: float = 0.0
    """Bytes that the library takes with a rank's first communicator, where `fixed` does not hold them already."""
    communicator: float = 0.0
    """Bytes per communicator with collectives that a rank belongs to, where `fixed` does not hold them already."""
    communicator_peer: float = 0.0
    """… and per other rank in it."""
    communicator_link: float = 0.0
    """Bytes per communicator of two pipeline neighbours, one for each direction."""
    reserve: float = 1.0
    """What the measure of this engine's reports counts, against allocated bytes."""
    thrash: float = 0.0
    """Seconds per micro-batch lost to the allocator above `thrash_above` of the memory."""
    thrash_above: float = 0.94
    needs_shards_if_tied: bool = False
    """Tied embeddings in a pipeline with plain data parallelism fail at the start (nanotron's rows)."""
    usable: float = 0.97
    """Fraction of the accelerator's memory up to which a run survives."""

    def with_muon(self, steps: int = 5) -> "Engine":
        """With Muon for matrices of blocks: they have one moment. After `in_precision`."""
        moment = 4.0
        return replace(self, matrix_steps=steps, optimizer_bytes=self.optimizer_bytes - moment, second_bytes=moment)

    def with_bf16_sums(self) -> "Engine":
        """With gradients summed in bf16: a sum is read and written in 2 bytes in place of 4."""
        traffic = 0.6 * self.accumulate_traffic
        return replace(self, gradient_bytes=2.0, gradient_wire=2.0, accumulate_traffic=traffic)

    def with_fp8(self, scaling: str, experts: bool) -> "Engine":
        """With other scales in fp8 than one for each tensor, and with routed experts in it. After `in_precision`."""
        made = replace(self, experts_in_fp8=experts)
        if scaling == "tensor":
            return made
        # Weights are gathered in 16 bits. Scales of blocks are kept with the inputs: 4 bytes for 128 numbers.
        kept = 1.0 + (4 / 128 if scaling == "block" else 0.0)
        return replace(made, shard_wire=self.parameter_wire, fp8_slower=FP8_SLOWER[scaling], fp8_input=kept)

    def in_precision(self, precision: str) -> "Engine":
        """With what travels as wide as the precision makes it; narrower formats than 16 bits travel in 16, but for
        the linears that this engine gathers under ZeRO 3."""
        if precision == "fp8" and self.own_collectives and not self.shard_wire:  # and not yet so
            # Inputs of matmuls are kept in fp8, or made again from what is kept anyway.
            whole, inner = self.kept_whole / 2, self.kept_ffn * 3 / 4
            return replace(self, shard_wire=1.0, fp8_activations=self.compiled, kept_whole=whole, kept_ffn=inner)
        if precision != "float32" or self.activation_wire == 4.0:  # the latter: it is that already
            return self
        wide = replace(self, parameter_wire=4.0, activation_wire=4.0)
        if not self.own_collectives:
            return wide
        # This engine then has no master weights beside the weights, and everything it keeps is twice as wide.
        kept = {name: 2 * getattr(self, name) for name in KEPT}
        return replace(wide, weight_bytes=4.0, optimizer_bytes=8.0, **kept)


PRECISIONS = ("bf16", "fp8", "fp4", "float32")
FP8_SLOWER = {"row": 1.18, "block": 1.15}
"""`Engine.fp8_slower`. Of rows from one H200, Llama 3 8B with 16 layers: 24,236 tokens/s beside 26,404. Of blocks a
prediction, of the rates that others print of cuBLAS; measured since: 25,041 tokens/s, and 26,994 with one scale for
each tensor in another session."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """An accelerator and how well its kernels run."""

    name: str
    peak: dict[str, float]
    """FLOP/s of dense matrix multiplication by precision, as the vendor prints it."""
    memory: float
    """Bytes a process can see."""
    memory_bandwidth: float
    """Bytes per second, as printed."""
    linear_efficiency: dict[str, float]
    """Fraction of the peak that a large matrix multiplication of a training step reaches."""
    kernel_floor: float = 6e-6
    """Seconds no kernel goes below."""
    narrow: float = 0.0
    """Output columns at which a multiplication loses half of its efficiency (0: none)."""
    attention_forward: float = 0.5
    """Fraction of the bf16 peak fused causal attention reaches, counting the causal half."""
    attention_backward: float = 0.4
    together: float = 1.0
    """Fraction of its speed a rank has while all compute, where ranks share cores; these figures are for that case, and
    a rank that others wait for runs faster."""
    memory_efficiency: float = 0.8
    """Fraction of the memory bandwidth element-wise kernels reach."""
    host_link: float = 2.0e10
    """Bytes per second to CPU memory, and from it at once, while all accelerators of a node copy (PCIe 4)."""
    best_utilization: dict[str, float] = field(default_factory=dict)
    """Precision -> the best fraction of the 16-bit peak a published run reached (model FLOPs, attention in full)."""
    source: str = ""


@dataclass(frozen=True)
class Level:
    """Links between groups of nodes: a tier of a cluster beyond the one that joins nodes."""

    inside: int
    """Accelerators of one domain of the level below."""
    bandwidth: float
    """Bytes per second and accelerator out of such a domain that collectives reach."""
    latency: float
    """Seconds per hop."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Links between accelerators: fast ones inside a node, slower ones between nodes."""

    name: str
    node: int = 8
    """Accelerators that share the fast links."""
    inner_bandwidth: float
    """Bytes per second and accelerator, one direction, that collectives reach inside a node."""
    mesh: bool = False
    """Links inside a node join accelerators in pairs, without a switch: a group that stays there has only those between
    its members."""
    inner_latency: float = 4e-6
    """Seconds per hop inside a node."""
    outer_bandwidth: float
    """Bytes per second and accelerator that collectives reach between two nodes."""
    outer_latency: float = 1.2e-5
    further: tuple[Level, ...] = ()
    """Levels beyond the links between nodes, where a cluster has them."""
    links: str = ""
    """The accelerator whose links in the catalog these figures are for: other links scale them."""
    spill: float = 0.0
    """Seconds a tensor-parallel collective loses when its group leaves the node, for two nodes."""
    partial: float = 1.0
    """Fraction of that bandwidth left to a group that has several ranks on a node but not the whole node."""
    decay: float = 0.0
    """Power of the number of nodes by which the bandwidth between them falls."""
    curve: dict[str, list[float]] = field(default_factory=dict)
    """Measured bus bandwidth (GB/s) of a collective over 1, 2, 4, … whole nodes, where someone measured it."""
    delay: dict[str, list[float]] = field(default_factory=dict)
    """Measured seconds of a collective over 1, 2, 4, … whole nodes before its bytes count, likewise."""
    alone: float = 0.0
    """Bytes per second between two nodes for a rank whose neighbours are silent; 0: nobody measured it, ports are each
    rank's own, and a pipeline with several ranks on a node stays inside it."""
    straggler: float = 0.0
    """Fraction a step grows by with every doubling of nodes: the slowest rank decides."""
    source: str = ""


def _table(file: str) -> dict[str, Any]:
    text = resources.files("cuboid.cost").joinpath("data", file).read_text(encoding="utf-8")
    return parse_toml(text)


@cache
def tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Everything calibrated, as plain tables: kind -> name -> field -> value."""
    return {kind: _table(f"{kind}.toml") for kind in ("chips", "fabrics", "engines")}


def _merged(kind: str, name: str) -> dict[str, Any]:
    """The entry of a name, its bases merged in."""
    table = tables()[kind]
    if name not in table:
        near = nearest_names(name, tuple(table)) or tuple(table)
        raise UserError(f"{kind[:-1]}={name} is unknown; use {' or '.join(near)}")
    base = table[name].get("base")
    return {**(_merged(kind, base) if base else {}), **table[name], "name": name}


def _known(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(cls)}
    return {key: value for key, value in values.items() if key in names}


@cache
def chip_named(name: str) -> Chip:
    """An accelerator of the catalog with its calibration."""
    return chip_from(name, accelerator_table(name))


def chip_from(name: str, facts: dict[str, Any]) -> Chip:
    """An accelerator with some peaks, memory and bandwidth; one without a calibration or base runs like an H100."""
    calibrated: str | None = name
    while calibrated and calibrated not in tables()["chips"]:
        calibrated = accelerator_base(calibrated)
    peaks = {precision: 1e12 * peak for precision, peak in facts["peak_tflops"].items()}
    peaks.setdefault("bf16", peaks.get("fp16", peaks.get("float32", 1e12)))
    peaks.setdefault("float32", peaks["bf16"] / 8)
    values = _known(Chip, _merged("chips", calibrated or "h100-80g")) | {"name": name}
    memory, bandwidth = facts["memory_gib"] * 2**30, facts["memory_bandwidth"] * 1e9
    return Chip(**values, peak=peaks, memory=memory, memory_bandwidth=bandwidth)


@cache
def fabric_named(name: str) -> Fabric:
    """A fabric of the calibration."""
    return Fabric(**_known(Fabric, _merged("fabrics", name)))


@cache
def engine_named(name: str) -> Engine:
    """An engine profile."""
    return Engine(**_known(Engine, _merged("engines", name)))


def engine_for(name: Engine | str, chip: Chip) -> Engine:
    """An engine profile on an accelerator: `name@family` where its rows on that family say something else."""
    if isinstance(name, Engine):
        return name
    special = f"{name}@{chip.name.split('-')[0]}"
    return engine_named(special if special in tables()["engines"] else name)


WITHOUT_PEERS = ("rtx-2080-ti", "rtx-3090", "rtx-4090", "rtx-5090", "titan-rtx", "titan-v")
"""Cards whose drivers copy between them through the host."""
FABRIC_OF = {"gb200": "nvl72", "gb300": "nvl72", "a800": "a100", "h200": "h100", "h800": "h100", "b300": "b200"}
"""Accelerator family -> the fabric it is usually wired with, where that has another name."""


def default_fabric(accelerator: str) -> str:
    """The fabric clusters of an accelerator usually have."""
    if accelerator in WITHOUT_PEERS:
        return "geforce"
    family = accelerator.split("-")[0]
    name = FABRIC_OF.get(family, family)
    return name if name in tables()["fabrics"] else ("mi300x" if family.startswith("mi") else "h100")


Constants = TypeVar("Constants", Chip, Fabric, Engine)
KINDS = {"chip": Chip, "fabric": Fabric, "engine": Engine}
OLD_NAMES = {"own_exchanges": "own_collectives", "grouped_narrow": "grouped_fp8"}
"""What profiles of before call a constant -> its name."""


def profiled(constants: Constants, cluster: ClusterSpec, kind: str) -> Constants:
    """The constants of one of the `KINDS`, those replaced that the cluster's profile has."""
    for key in cluster.measured:
        require_known(key, KINDS, "cluster.measured")
    types, where = field_types(KINDS[kind]), f"cluster.measured.{kind}"
    values = {}
    for key, value in cluster.measured.get(kind, {}).items():
        key = OLD_NAMES.get(key, key)
        require_known(key, types, where)
        found = convert(value, types[key], f"{where}.{key}")
        if isinstance(found, float) and (found < 0 or (found == 0 and key.endswith("bandwidth"))):
            raise UserError(f"{where}.{key}={found:g} is no measurement; omit it, or measure with cuboid probe")
        values[key] = found
    return replace(constants, **values)


SECONDS: dict[str, tuple[str, ...]] = {
    "chip": ("kernel_floor",),
    "fabric": ("inner_latency", "outer_latency", "spill"),
    "engine": tuple(
        item.name for item in fields(Engine) if item.name.startswith("host_") and item.name != "host_jitter"
    ),
}
"""Kind of constants -> those that are seconds."""
RATES: dict[str, tuple[str, ...]] = {"chip": ("host_link",), "fabric": ("inner_bandwidth", "outer_bandwidth", "alone")}
"""… that are so much a second; those of an accelerator's data sheet stand in the cluster itself."""


def at_host_speed(engine: Engine, routing: float) -> dict[str, object]:
    """The host's seconds where the small layer takes `routing` of them."""
    if not engine.host_routing:
        return {}
    return {name: getattr(engine, name) * routing / engine.host_routing for name in SECONDS["engine"]}


def slowed(cluster: ClusterSpec, factor: float, chip: Chip, fabric: Fabric, engine: Engine) -> ClusterSpec:
    """The cluster as if every second of it, by these constants, were so many: whatever a step does takes so much
    longer."""
    measured: dict[str, dict[str, object]] = {kind: dict(values) for kind, values in cluster.measured.items()}
    for kind, constants in (("chip", chip), ("fabric", fabric), ("engine", engine)):
        values = measured.setdefault(kind, {})
        values |= {name: factor * getattr(constants, name) for name in SECONDS[kind]}
        values |= {name: getattr(constants, name) / factor for name in RATES.get(kind, ())}
    measured["fabric"]["curve"] = {name: [value / factor for value in each] for name, each in fabric.curve.items()}
    measured["fabric"]["delay"] = {name: [value * factor for value in each] for name, each in fabric.delay.items()}
    peaks = {name: value / factor for name, value in cluster.peak_tflops.items()}
    bandwidth = cluster.memory_bandwidth / factor
    return replace(cluster, peak_tflops=peaks, memory_bandwidth=bandwidth, measured=measured)
