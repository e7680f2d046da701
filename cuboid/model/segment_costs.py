"""What a module of one's own costs, found by running it on tensors without contents: its parameters on a tensor rank,
every operation's arithmetic and bytes, and the bytes alive at each moment of its forward and backward pass."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cuboid.errors import UserError, either
from cuboid.model.linear import ColumnLinear, Linear, RowLinear, VocabularyEmbedding, declared_split
from cuboid.spec.sharding import ShardingRank

if TYPE_CHECKING:
    from cuboid.model.custom import Model

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}

Work = list[tuple[float, float]]
"""FLOPs, and bytes read and written, of every operation in its order."""
MEASURED = (2, 4)
"""Micro-batches from whose costs those of larger ones are estimated: nearly every number grows evenly."""


@dataclass(frozen=True)
class SegmentCosts:
    """Of one micro-batch on one tensor rank."""

    parameters: int
    kept: int
    """Bytes alive between forward and backward, the input among them if it is needed."""
    forward_peak: int
    """Most bytes alive in the forward pass, input and output among them."""
    backward_peak: int
    """… in the backward pass, with what was kept and, where they are not added in place, gradients of parameters."""
    backward_peak_in_place: int
    """… where gradients are added to those of earlier micro-batches."""
    flow: int
    """Bytes of its output."""
    forward: Work
    backward: Work
    summed_forward: int
    """Bytes that tensor ranks sum forward."""
    summed_backward: int

    def grown(self, other: SegmentCosts, steps: float) -> SegmentCosts:
        """As much more than `other` costs as that costs more than this, so many times."""

        def line(one: Any, two: Any) -> Any:
            if isinstance(one, list):
                return [tuple(map(line, *pair)) for pair in zip(one, two, strict=True)]
            return two + (two - one) * steps

        return SegmentCosts(**{name: line(one, getattr(other, name)) for name, one in vars(self).items()})


@dataclass
class _Uncommunicating:
    """In place of a `Region`: counts what would be summed."""

    forward: int = 0
    backward: int = 0

    def enter(self, x: Tensor) -> Tensor:
        self.backward += x.numel() * x.element_size()
        return x

    def leave(self, x: Tensor) -> Tensor:
        self.forward += x.numel() * x.element_size()
        return x

    def columns(self, x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
        x = self.enter(x)
        return [linear.matmul(x, linear.weight, linear.bias) for linear in linears]

    def sliced_columns(self, inputs: Sequence[Tensor], linears: Sequence[Linear | None]) -> Sequence[Tensor]:
        pairs = zip(map(self.enter, inputs), linears, strict=True)
        return [x if linear is None else linear.matmul(x, linear.weight, linear.bias) for x, linear in pairs]


@dataclass
class _Moment:
    """What was seen while it was watched."""

    peak: int = 0
    work: Work = field(default_factory=list)


class _Watch(TorchDispatchMode):
    """Follows every tensor that is made until it is gone."""

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry

        self._flops: Mapping[Any, Callable[..., int]] = flop_registry
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
            moved = sum(each.numel() * each.element_size() for each in (*given, *made))
            self.moment.work.append((flops, float(moved)))
        self.moment.peak = max(self.moment.peak, self.bytes)
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


def segment_costs(
    model: Model, prefix: str, ranks: int, micro_batch: int, sequence: int, precision: str
) -> SegmentCosts:
    """`ranks`: tensor ranks."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = DTYPES[precision]
    with torch.device("meta"):
        module = model.make(prefix)
    with FakeTensorMode():
        local = _localize(module, prefix, ranks, dtype)
        region = _Uncommunicating()
        for child in module.modules():
            if isinstance(child, ColumnLinear | RowLinear | VocabularyEmbedding) and ranks > 1:
                child.region = region
        batch = _batch(model, micro_batch, sequence, dtype)
        shapes = model.flow_shapes(micro_batch, sequence)
        try:
            kept, forward, backward = _run(module, prefix, shapes, batch, dtype, in_place=False)
            added = region.forward, region.backward
            *_, in_place = _run(module, prefix, shapes, batch, dtype, in_place=True)
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
    return SegmentCosts(
        parameters=local,
        kept=kept,
        forward_peak=forward.peak,
        backward_peak=backward.peak,
        backward_peak_in_place=in_place.peak,
        flow=sum(math.prod(shape) for shape in shapes) * dtype.itemsize,
        forward=forward.work,
        backward=backward.work,
        summed_forward=added[0],
        summed_backward=added[1],
    )


def _localize(module: nn.Module, prefix: str, ranks: int, dtype: torch.dtype) -> int:
    """Give every parameter the shape it has on a tensor rank; how many numbers that is."""
    splits = {name: declared_split(module, name) for name, _ in module.named_parameters()}
    total = 0
    for name, parameter in list(module.named_parameters()):
        shape, declared = list(parameter.shape), splits[name]
        if declared is not None and ranks > 1:
            cut = declared.slice_of(f"{prefix}.{name}", tuple(shape), ShardingRank(ranks))
            shape[cut.dimension] = cut.length
        total += math.prod(shape)
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
    dtype: torch.dtype,
    in_place: bool,
) -> tuple[int, _Moment, _Moment]:
    """Forward and backward once. `in_place`: gradients of parameters are added to what is there."""
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if in_place else None
    watch = _Watch()
    with watch:
        with watch.watching() as forward:
            if prefix == "embedding":
                y = module(batch)
            else:
                given = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
                y = module(given[0] if len(given) == 1 else tuple(given), batch)
                del given
        outputs = list(y) if isinstance(y, tuple) else [y]
        edges = [torch.autograd.graph.get_gradient_edge(each) for each in outputs if each.requires_grad]
        like = [(tuple(each.shape), each.dtype) for each in outputs if each.requires_grad]
        del y, outputs
        kept = watch.bytes
        with watch.watching() as backward:
            gradients = [torch.zeros(shape, dtype=kind) for shape, kind in like]
            torch.autograd.backward(edges, gradients)
            del gradients
    return kept, forward, backward
