"""What a module of one's own costs, found by running it on tensors without contents: its parameters on a rank, every
operation's arithmetic and bytes, its collectives, and the bytes alive at each moment of its passes.

It is run as the engine runs it: with the same recomputation, and the same postponed weight gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cuboid.errors import UserError, either
from cuboid.kernels.recompute import with_recompute
from cuboid.model.linear import ColumnLinear, Linear, RowLinear, VocabularyEmbedding, declared_split
from cuboid.model.routed_costs import Made, grouped_flops, route_evenly
from cuboid.model.split_backward import Deferral, defer_matmuls
from cuboid.model.transformer import Head, summed_loss
from cuboid.spec.plugin import SegmentRun
from cuboid.spec.sharding import EXPERT, ShardingRank

if TYPE_CHECKING:
    from cuboid.model.custom import Model

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}

Work = list[tuple[float, float]]
"""FLOPs, and bytes read and written, of every operation in its order."""
MEASURED = (2, 4)
"""Micro-batches from whose costs those of larger ones are estimated: nearly every number grows evenly."""


@dataclass(frozen=True)
class SegmentCosts:
    """Of one micro-batch on one rank."""

    parameters: int
    routed: int
    """Of them those of experts, which other ranks hold alike than the rest."""
    kept: int
    """Bytes alive between forward and backward, the input among them if it is needed."""
    postponed: int
    """Bytes alive between the backward pass and that of weight gradients, where the schedule splits them."""
    forward_peak: int
    """Most bytes alive in the forward pass, input and output among them."""
    backward_peak: int
    """… in the backward pass, with what was kept and, where they are not added in place, gradients of parameters."""
    input_peak: int
    """… in a backward pass that postpones weight gradients."""
    weight_peak: int
    """… in the pass of postponed ones."""
    flow: int
    """Bytes of its output."""
    forward: Work
    backward: Work
    """With what is computed again, and all gradients."""
    weight: Work
    """Of it what can be postponed."""
    repeated: float
    """FLOPs of what is computed again."""
    forward_collectives: list[Made]
    backward_collectives: list[Made]

    @property
    def flops(self) -> float:
        """What the model itself takes, without recomputation."""
        return sum(flops for work in (self.forward, self.backward) for flops, _ in work) - self.repeated

    @property
    def shape(self) -> list[int]:
        """Of two that have the same, what a third costs follows (`grown`)."""
        return [len(each) for each in vars(self).values() if isinstance(each, list)]

    def grown(self, other: SegmentCosts, steps: float) -> SegmentCosts:
        """As much more than `other` costs as that costs more than this, so many times."""

        def line(one: Any, two: Any) -> Any:
            if isinstance(one, list | tuple):
                return type(one)(map(line, one, two))
            return one if isinstance(one, str) else two + (two - one) * steps

        return SegmentCosts(**{name: line(one, getattr(other, name)) for name, one in vars(self).items()})


class _Sum(torch.autograd.Function):
    """Counts what tensor ranks would sum, forward or of gradients, and copies as their sum does."""

    @staticmethod
    def forward(context: Any, x: Tensor, region: _Uncommunicating, leaves: bool) -> Tensor:
        context.region, context.leaves = region, leaves
        return region.add(x.contiguous().clone()) if leaves else x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if not context.leaves:
            # Where nothing is postponed the sum overlaps with weight gradients, in the memory of the gradient.
            region = context.region
            gradient = region.add(gradient.contiguous().clone() if region.copies else gradient)
        return gradient, None, None


class _Uncommunicating:
    """In place of a `Region`."""

    def __init__(self, copies: bool) -> None:
        self.copies = copies
        self.made: list[Made] = []

    def add(self, x: Tensor) -> Tensor:
        self.made.append(("tp", "all-reduce", x.nbytes))
        return x

    def taken(self) -> list[Made]:
        taken = [*self.made]
        self.made.clear()
        return taken

    def enter(self, x: Tensor) -> Tensor:
        entered: Tensor = _Sum.apply(x, self, False)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        left: Tensor = _Sum.apply(x, self, True)
        return left

    def mean(self, x: Tensor) -> Tensor:
        return self.enter(self.leave(x))

    def columns(self, x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
        x = self.enter(x)
        return [linear.matmul(x, linear.weight, linear.bias) for linear in linears]

    def sliced_columns(self, inputs: Sequence[Tensor], linears: Sequence[Linear | None]) -> Sequence[Tensor]:
        x = self.enter(torch.cat([*inputs], -1)).split([each.shape[-1] for each in inputs], -1)
        pairs = zip(x, linears, strict=True)
        return [x if linear is None else linear.matmul(x, linear.weight, linear.bias) for x, linear in pairs]

    def summed_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The largest logit of all ranks, then two sums at once, in float32 at least."""
        exact = max(logits.element_size(), 4) * logits.shape[0]
        self.made += [("tp", "all-reduce", exact), ("tp", "all-reduce", 2 * exact)]
        return summed_loss(logits, labels)


class _FusedRmsNorm(torch.autograd.Function):
    """What a GPU's kernel reads, writes and keeps: its input, and a number for each row."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor | None, dimensions: int) -> Tensor:
        rows = x.new_empty(x.shape[:-dimensions], dtype=torch.float32)
        context.save_for_backward(x, rows, *([] if weight is None else [weight]))
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, _, *weights = context.saved_tensors
        return gradient + x, torch.empty_like(weights[0]) if weights else None, None


class _FusedNorms(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function in (functional.rms_norm, torch.rms_norm):
            return self._norm(*arguments, **(options or {}))
        return function(*arguments, **(options or {}))

    @staticmethod
    def _norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if weight is not None and weight.dtype != input.dtype:  # no kernel for that
            return torch.rms_norm(input, normalized_shape, weight, eps)
        made: Tensor = _FusedRmsNorm.apply(input, weight, len(normalized_shape))
        return made


@dataclass
class _Moment:
    """What was seen while it was watched."""

    peak: int = 0
    work: Work = field(default_factory=list)
    repeated: float = 0.0


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """FLOPs of SDPA, in full where it is causal too: (batch, heads, length, width) each."""
    return 2 * math.prod(query.shape[:3]) * key.shape[2] * (key.shape[3] + value.shape[3])


def _attention_backward(_: Tensor, *arguments: Any, **options: Any) -> int:
    return 2 * _attention(*arguments, **options)


UNCOUNTED: dict[Any, Callable[..., int]] = {
    torch.ops.aten._grouped_mm: grouped_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Operations whose FLOPs torch does not count."""


INSIDE: dict[Any, Callable[..., int]] = {
    torch.ops.aten._softmax_backward_data: lambda gradient, *_: gradient.nbytes,  # gradient · output, before the sums
}
"""Operations that take memory for themselves while they run on a GPU, and how many bytes."""


class _Watch(TorchDispatchMode):
    """Follows every tensor that is made until it is gone."""

    def __init__(self, on_gpu: bool) -> None:
        super().__init__()
        self._inside = INSIDE if on_gpu else {}
        from torch.utils.flop_counter import flop_registry

        self._flops: Mapping[Any, Callable[..., int]] = {**flop_registry, **UNCOUNTED}
        self._alive: dict[int, int] = {}
        self.bytes = 0
        self.moment = _Moment()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        given, made = _tensors((arguments, options)), _tensors(result)
        known = {each.untyped_storage()._cdata for each in given}
        fresh = [each for each in made if each.untyped_storage()._cdata not in known]
        for each in fresh:
            self._follow(each.untyped_storage())
        in_place = function._schema.name.rstrip("_") != function._schema.name
        if fresh or in_place:  # a view costs nothing
            count = self._flops.get(function._overloadpacket)
            flops = float(count(*arguments, **options, out_val=result)) if count is not None else 0.0
            # What is expanded is read once.
            moved = sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in (*given, *made))
            self.moment.work.append((flops, float(moved)))
            # A backward pass records no gradients, but what it computes again does.
            self.moment.repeated += flops * torch.is_grad_enabled()
        inside = self._inside.get(function._overloadpacket)
        self.moment.peak = max(self.moment.peak, self.bytes + (inside(*arguments) if inside is not None else 0))
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.bytes -= self._alive.pop(key, 0)

    @contextmanager
    def watching(self) -> Iterator[_Moment]:
        self.moment = _Moment(self.bytes)
        yield self.moment


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def segment_costs(model: Model, prefix: str, run: SegmentRun) -> SegmentCosts:
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = DTYPES[run.precision]
    with torch.device("meta"):
        module = model.make(prefix)
    with FakeTensorMode():
        local = _localize(module, prefix, run, dtype)
        region, deferral = _Uncommunicating(run.splits_backward), Deferral()
        if run.tensor > 1:
            _connect(module, region)
        if run.splits_backward:
            defer_matmuls(module, deferral)
        route_evenly(module, run, region.made, deferral)
        batch = _batch(model, run.micro_batch, run.sequence, dtype)
        shapes = model.flow_shapes(run.micro_batch, run.sequence)
        try:
            seen = _run(module, prefix, shapes, batch, run, region, deferral)
            split = {"postponed": 0, "backward_peak": 0, "weight_peak": 0, "weight": []}
            if run.splits_backward:
                deferral.active = True
                split = _run(module, prefix, shapes, batch, run, region, deferral)
        except KeyError as missing:
            told = either(map(repr, batch))
            raise UserError(
                f"{prefix} asks for {missing} of a batch that has {told}: planning knows tokens and labels, or what "
                "Model(data=…) gives; bring the data set with the model"
            ) from missing
        except (RuntimeError, NotImplementedError) as problem:
            first = str(problem).strip().splitlines()[0]
            raise UserError(
                f"{prefix} cannot be planned: on tensors without contents it fails ({first}); it must not look at "
                "values"
            ) from problem
    flow = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    later = {name: split[name] for name in ("postponed", "weight_peak", "weight")}
    return SegmentCosts(**{**seen, **later, **local, "input_peak": split["backward_peak"]}, flow=flow)


def _connect(module: nn.Module, region: _Uncommunicating) -> None:
    from cuboid.model.custom import VocabularyLoss

    for child in module.modules():
        if isinstance(child, ColumnLinear | RowLinear | VocabularyEmbedding):
            child.region = region
        if isinstance(child, VocabularyLoss | Head):
            child.summed_loss = region.summed_loss


def _localize(module: nn.Module, prefix: str, run: SegmentRun, dtype: torch.dtype) -> dict[str, int]:
    """Give every parameter the shape it has on a rank; how many numbers that is, and of experts alone."""
    splits = {name: declared_split(module, name) for name, _ in module.named_parameters()}
    place = ShardingRank(run.tensor, expert=run.expert)
    total = {"parameters": 0, "routed": 0}
    for name, parameter in list(module.named_parameters()):
        shape, declared = list(parameter.shape), splits[name]
        if declared is not None and (run.tensor > 1 or run.expert > 1):
            cut = declared.slice_of(f"{prefix}.{name}", tuple(shape), place)
            shape[cut.dimension] = cut.length
        total["parameters"] += math.prod(shape)
        total["routed"] += math.prod(shape) * (declared == EXPERT)
        _set(module, name, nn.Parameter(torch.empty(shape, dtype=dtype)))
    for name, buffer in list(module.named_buffers()):
        owner, _, inner = name.rpartition(".")
        kind = dtype if buffer.is_floating_point() else buffer.dtype
        module.get_submodule(owner)._buffers[inner] = torch.empty(buffer.shape, dtype=kind)
    return total


def _set(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, parameter)


def _batch(model: Model, micro_batch: int, sequence: int, dtype: torch.dtype) -> dict[str, Tensor]:
    if model.data is None:
        return {name: torch.zeros(micro_batch, sequence, dtype=torch.int64) for name in ("tokens", "labels")}
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        dataset = model.data()
        sample = dataset[0] if hasattr(dataset, "__len__") else next(iter(dataset))
        collate = getattr(dataset, "collate", None)
        if collate is not None:
            sample = {name: value[0] for name, value in collate([sample]).items()}
    fields = sample if isinstance(sample, Mapping) else dict(zip(("tokens", "labels"), sample, strict=True))
    return {
        name: torch.zeros(micro_batch, *value.shape, dtype=dtype if value.is_floating_point() else value.dtype)
        for name, value in fields.items()
    }


def _run(
    module: nn.Module,
    prefix: str,
    shapes: list[tuple[int, ...]],
    batch: Mapping[str, Tensor],
    run: SegmentRun,
    region: _Uncommunicating,
    deferral: Deferral,
) -> dict[str, Any]:
    """Forward and backward once: what is seen of them, by the names of `SegmentCosts`."""
    parameters = [*module.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if run.adds_in_place else None
    call = with_recompute(module, run.recompute if prefix.startswith("layers.") else "none")
    watch = _Watch(run.on_gpu)
    inputs: list[weakref.ref[Tensor]] = []
    with _FusedNorms() if run.on_gpu else nullcontext(), watch:
        with watch.watching() as forward:
            if prefix == "embedding":
                y = call(batch)
            else:
                dtype = DTYPES[run.precision]
                given = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
                y = call(given[0] if len(given) == 1 else tuple(given), batch)
                inputs = [weakref.ref(each) for each in given]
                del given
        forward_collectives = region.taken()
        outputs = list(y) if isinstance(y, tuple) else [y]
        edges = [torch.autograd.graph.get_gradient_edge(each) for each in outputs if each.requires_grad]
        like = [(tuple(each.shape), each.dtype) for each in outputs if each.requires_grad]
        del y, outputs
        kept = watch.bytes
        with watch.watching() as backward:
            gradients = [torch.zeros(shape, dtype=kind) for shape, kind in like]
            torch.autograd.backward(edges, gradients)
            del gradients, edges
        for each in inputs:  # what is postponed holds them, but not their gradients, which have left
            if (held := each()) is not None:
                held.grad = None
                del held
        gradients_held = 0
        if not run.adds_in_place:
            gradients_held = sum(each.grad.nbytes for each in parameters if each.grad is not None)
        postponed = watch.bytes - gradients_held
        with watch.watching() as weight, torch.no_grad():
            for work in (work for works in deferral.take().values() for work in works):
                work()
    return {
        "kept": kept,
        "postponed": postponed,
        "forward_peak": forward.peak,
        "backward_peak": backward.peak,
        "weight_peak": weight.peak,
        "forward": forward.work,
        "backward": backward.work,
        "weight": weight.work,
        "repeated": backward.repeated,
        "forward_collectives": forward_collectives,
        "backward_collectives": region.taken(),
    }
