"""Optimizers other than AdamW and Muon: any of `torch.optim` by name, or one that a user's own factory builds.

    [optimizer]
    kind = "sgd"
    options = { momentum = 0.9 }

    [optimizer]
    python = "python:my_optimizer.py:build"     # build(groups, **options) -> torch.optim.Optimizer, or several

Such an optimizer sees what a rank keeps of each parameter as a parameter of its own: flat, because ZeRO and tensor
parallelism cut between any two elements. One that updates each element by itself computes the same on any layout; one
that looks at whole matrices must say so (`whole_parameters`), and then gets them whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cuboid.errors import UserError, either, nearest_names
from cuboid.parallel.zero import OptimizerShard, Unit
from cuboid.spec.optimizer import OptimizerSpec
from cuboid.spec.plugin import load_plugin, resolve_here
from cuboid.spec.run import Run
from cuboid.training.adamw import Elements

Group = dict[str, Any]
"""`params`, and of each its `names` and full `shapes`; `lr` at its peak, `weight_decay`."""
STORED = (torch.float32, torch.float64, torch.bfloat16)


class UserOptimizer(Protocol):
    """What a factory returns: a `torch.optim.Optimizer`, or what looks like one."""

    param_groups: list[Group]
    state: Any

    def step(self) -> object: ...


@dataclass(frozen=True)
class Named:
    """A parameter, or what a rank keeps of one."""

    name: str
    shape: tuple[int, ...]
    """Of all of it."""
    rate_factor: float
    values: nn.Parameter


@cache
def _named_kinds() -> dict[str, Any]:
    unfit = ("optimizer", "lbfgs", "sparseadam", "adamw", "muon")
    known = {name.lower(): found for name, found in vars(torch.optim).items() if isinstance(found, type)}
    return {name: found for name, found in known.items() if name not in unfit}


def _options(spec: OptimizerSpec, known: Iterable[str]) -> dict[str, object]:
    """Those of the run, with AdamW's own numbers where the kind has the like; else such a number is refused."""
    given = {"betas": (spec.beta1, spec.beta2), "eps": spec.epsilon} if "betas" in known else {}
    plain = OptimizerSpec()
    for name in ("beta1", "beta2", "epsilon"):
        if not given and getattr(spec, name) != getattr(plain, name):
            raise UserError(
                f"optimizer.{name}={getattr(spec, name)} means nothing to {spec.called}; use optimizer.options"
            )
    return {**given, **spec.options}


def _builder(spec: OptimizerSpec) -> Callable[[list[Group]], list[UserOptimizer]]:
    if spec.python:
        make = load_plugin(resolve_here(spec.python, "optimizer.python"), "optimizer.python")
        options = _options(spec, ())
    else:
        make = _named_kinds().get(spec.kind)
        if make is None:
            near = either(nearest_names(spec.kind, ["adamw", "muon", *_named_kinds()]))
            raise UserError(f"optimizer.kind={spec.kind} is unknown; use {near}, or optimizer.python")
        options = _options(spec, inspect.signature(make).parameters)

    def build(groups: list[Group]) -> list[UserOptimizer]:
        try:
            made = make(groups, **options)
        except (TypeError, ValueError) as problem:
            raise UserError(f"{spec.called} cannot be built: {problem}; change optimizer.options") from problem
        found = list(made) if isinstance(made, list | tuple) else [made]
        for each in found:
            if not hasattr(each, "step") or not hasattr(each, "param_groups") or not hasattr(each, "state"):
                raise UserError(f"{spec.called} returns {type(each).__name__}; it must return a torch.optim.Optimizer")
        return found

    return build


class Updates:
    """The user's optimizer over some parameters, with the run's learning rate and weight decay."""

    def __init__(self, spec: OptimizerSpec, peak: float, parameters: Sequence[Named]) -> None:
        self._spec, self._peak = spec, peak or 1.0
        self.by_name = {each.name: each.values for each in parameters}
        kinds: dict[tuple[bool, float], list[Named]] = {}
        for each in parameters:
            kinds.setdefault((len(each.shape) > 1, each.rate_factor), []).append(each)
        groups: list[Group] = [
            {
                "params": [each.values for each in alike],
                "names": [each.name for each in alike],
                "shapes": [each.shape for each in alike],
                "lr": self._peak * factor,
                # Multiplied by the learning rate, as torch does; how strongly a weight decays has no such factor.
                "weight_decay": spec.weight_decay / factor if decays else 0.0,
            }
            for (decays, factor), alike in kinds.items()
        ]
        self.optimizers = _builder(spec)(groups) if groups else []
        self._rates = [(group, group["lr"]) for each in self.optimizers for group in each.param_groups]
        held = {id(values) for group, _ in self._rates for values in group["params"]}
        for each in parameters:
            if id(each.values) not in held:
                raise UserError(f"{spec.called} does not update {each.name}; give every parameter to an optimizer")

    def step(self, learning_rate: float) -> None:
        """From the gradients that lie in `.grad`. What a group's `lr` was built with is its peak."""
        for group, peak in self._rates:
            group["lr"] = peak * (learning_rate / self._peak)
        for optimizer in self.optimizers:
            optimizer.step()
        for values in self.by_name.values():
            values.grad = None

    def state(self, name: str) -> dict[str, Any]:
        """What an optimizer keeps of a parameter: the table itself."""
        values = self.by_name[name]
        for optimizer in self.optimizers:
            if values in optimizer.state:
                found: dict[str, Any] = optimizer.state[values]
                return found
        return {}

    def set_state(self, name: str, state: dict[str, Any]) -> None:
        values = self.by_name[name]
        for optimizer in self.optimizers:
            if any(values is each for group in optimizer.param_groups for each in group["params"]):
                optimizer.state[values] = state

    def forget(self) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()


def numbers_of(state: dict[str, Any]) -> dict[str, float]:
    """What is one number: a count of steps, say."""
    return {key: float(value) for key, value in state.items() if _is_number(value)}


def elements_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """What has a number for every element."""
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.ndim}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


# What an optimizer is like, found out by trying it on a few numbers.


def _tried(spec: OptimizerSpec, peak: float, shapes: dict[str, tuple[int, ...]], parts: int, steps: int = 3) -> Updates:
    """After some steps on small parameters, each cut into so many flat parts; 0: as they are."""
    random = torch.Generator().manual_seed(0)
    named = []
    for name, shape in shapes.items():
        whole = torch.randn(shape, generator=random, dtype=torch.float64)
        cut = [whole] if parts == 0 else list(whole.flatten().tensor_split(parts))
        named += [Named(f"{name}:{place}", shape, 1.0, nn.Parameter(part.clone())) for place, part in enumerate(cut)]
    updates = Updates(spec, peak, named)
    for _ in range(steps):
        for name, shape in shapes.items():
            whole = torch.randn(shape, generator=random, dtype=torch.float64)
            for place, part in enumerate([whole] if parts == 0 else whole.flatten().tensor_split(parts)):
                updates.by_name[f"{name}:{place}"].grad = part.clone()
        updates.step(peak)
    return updates


def _is_elementwise(spec: OptimizerSpec, peak: float) -> bool:
    """Whether cutting parameters anywhere changes nothing."""
    shapes = {"matrix": (6, 4), "vector": (9,)}
    whole = _tried(spec, peak, shapes, 0)
    try:
        cut = _tried(spec, peak, shapes, 3)
    except (UserError, RuntimeError, ValueError, IndexError):
        return False  # of flat parameters it makes nothing
    for name in shapes:
        parts = torch.cat([cut.by_name[f"{name}:{place}"].detach() for place in range(3)])
        if not torch.allclose(parts, whole.by_name[f"{name}:0"].detach().flatten(), rtol=1e-12, atol=1e-14):
            return False
    return True


def check_optimizer(run: Run) -> None:
    """Refuse an optimizer that would compute something else on some layouts, before any process starts."""
    spec = run.optimizer
    if spec.matrix_function:
        check_matrix_function(spec.matrix_function)
        return
    if not spec.whole_parameters and not _is_elementwise(spec, run.learning_rate.peak or 1.0):
        raise UserError(
            f"{spec.called} does not update every element by itself, so ranks that hold parts of a matrix would "
            "compute something else; use optimizer.whole_parameters=true with zero=0 and tp=1, or another optimizer"
        )


MatrixFunction = Callable[[Tensor], Tensor]
"""Of a batch of whole matrices (matrices, m, n)."""


def load_matrix_function(name: str) -> MatrixFunction:
    """Of one's own, in place of Newton-Schulz."""
    found: MatrixFunction = load_plugin(resolve_here(name, "optimizer.matrix_function"), "optimizer.matrix_function")
    return found


def check_matrix_function(name: str) -> None:
    """Refuse one that does not return matrices, each by itself, as it got them."""
    function = load_matrix_function(name)
    said = f"optimizer.matrix_function={name}"
    random = torch.Generator().manual_seed(0)
    for shape in ((2, 6, 4), (2, 4, 6)):
        matrices = torch.randn(shape, generator=random, dtype=torch.float64)
        try:
            found = function(matrices.clone())
        except (TypeError, ValueError, RuntimeError) as problem:
            raise UserError(f"{said} fails on matrices {shape}: {problem}") from problem
        if not isinstance(found, Tensor) or found.shape != matrices.shape:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise UserError(f"{said} returns {got} for matrices {shape}; it must return as many of the same shape")
        if not torch.allclose(found[1:], function(matrices[1:].clone()), rtol=1e-9, atol=1e-12):
            raise UserError(
                f"{said} mixes the matrices of a batch, which differs by layout; it must treat each by itself"
            )


class OwnState:
    """A user's optimizer over the optimizer shards of a rank."""

    host_bytes = 0

    def __init__(self, units: Sequence[Unit], run: Run) -> None:
        self._units, self._spec = units, run.optimizer
        shards = list(self._shards())
        named = []
        for shard in shards:
            # Halved master weights are whole only while they are updated.
            values = shard.master if shard.is_halved else shard.kept
            values = values.view(self._shape(shard)) if not shard.is_halved else torch.empty(0, device=values.device)
            named.append(Named(shard.part.name, shard.part.full_shape, shard.part.rate_factor, nn.Parameter(values)))
        self._updates = Updates(self._spec, run.learning_rate.peak, named)
        self._numbers: dict[str, dict[str, Tensor]] = {}
        """Of each parameter, as checkpoints have them."""
        self._awaited: dict[str, dict[str, Tensor]] = {}
        """What a checkpoint will fill of parameters that no step has touched."""
        self._template = self._find_template(run, shards)

    def _shards(self) -> Iterator[OptimizerShard]:
        for unit in self._units:
            yield from unit.optimizer_shards()

    def _shape(self, shard: OptimizerShard) -> tuple[int, ...]:
        return shard.part.shape if self._spec.whole_parameters else (shard.stop - shard.start,)

    def _find_template(self, run: Run, shards: list[OptimizerShard]) -> dict[str, dict[str, Any]]:
        """By parameter, the like of what is kept of it: a number, or one for each of a few elements. Many optimizers
        make it in their first step, but a checkpoint must know before."""
        whole = self._spec.whole_parameters
        small = {
            shard.part.name: nn.Parameter(
                torch.ones(
                    [min(size, 4) for size in shard.part.shape] if whole else (4,),
                    dtype=torch.float32 if shard.is_halved else shard.kept.dtype,
                    device=shard.kept.device,
                )
            )
            for shard in shards
        }
        parts = {shard.part.name: shard.part for shard in shards}
        tried = Updates(
            self._spec,
            run.learning_rate.peak,
            [Named(name, parts[name].full_shape, parts[name].rate_factor, values) for name, values in small.items()],
        )
        for _ in range(2):
            for values in small.values():
                values.grad = torch.ones_like(values)
            tried.step(run.learning_rate.peak)
        found: dict[str, dict[str, Any]] = {}
        for name, values in small.items():
            found[name] = {}
            for key, kept in tried.state(name).items():
                if kept is None:
                    continue
                fits = isinstance(kept, Tensor) and kept.shape == values.shape and kept.dtype in STORED
                if "/" in str(key) or not (fits or _is_number(kept)):
                    raise UserError(
                        f"{self._spec.called} keeps {key} of {name}, which is neither a number nor as many float32 "
                        "or bf16 as the parameter has; checkpoints hold nothing else: use another optimizer"
                    )
                found[name][key] = kept
        return found

    @property
    def device_bytes(self) -> int:
        return sum(
            value.nbytes for name in self._updates.by_name for value in elements_of(self._updates.state(name)).values()
        )

    def tensors(self, shard: OptimizerShard) -> dict[str, Tensor]:
        name = shard.part.name
        state, kept = self._updates.state(name), {}
        for key, like in self._template[name].items():
            if _is_number(like):
                number = self._numbers.setdefault(name, {}).setdefault(key, torch.zeros((), dtype=torch.float64))
                number.fill_(numbers_of(state).get(key, 0.0))
                kept[key] = number
            elif key in state:
                kept[key] = state[key].view(-1)
            else:
                size = shard.stop - shard.start
                awaited = self._awaited.setdefault(name, {})
                if key not in awaited:
                    awaited[key] = torch.zeros(size, dtype=like.dtype, device=like.device)
                kept[key] = awaited[key]
        if later := [key for key in {**elements_of(state), **numbers_of(state)} if key not in kept]:
            raise UserError(
                f"{self._spec.called} keeps {later[0]} of {name} only after some steps, which no checkpoint is "
                "prepared for; let it keep that from its first step on"
            )
        return kept

    def loaded(self, steps: int) -> None:
        """What `tensors` gave has been filled with what was kept after so many updates."""
        if not steps:
            self._updates.forget()
        for shard in self._shards() if steps else ():
            name = shard.part.name
            state = dict(self._updates.state(name))
            state |= {key: value.view(self._shape(shard)) for key, value in self._awaited.get(name, {}).items()}
            for key, number in self._numbers.get(name, {}).items():
                like, value = self._template[name][key], number.item()
                state[key] = torch.full_like(like, value) if isinstance(like, Tensor) else type(like)(value)
            self._updates.set_state(name, state)
        self._awaited.clear()

    def update(
        self,
        learning_rate: float,
        scale: float,
        around: Callable[[Unit, list[Elements]], AbstractContextManager[None]] | None,
    ) -> None:
        self._awaited.clear()
        with ExitStack() as watched:
            lots = [
                (unit, [Elements.of(each, each.kept, each.kept, each.kept) for each in unit.optimizer_shards()])
                for unit in self._units
            ]
            for unit, lot in lots:
                if around is not None:
                    watched.enter_context(around(unit, lot))
            every = [elements for _, lot in lots for elements in lot]
            for elements in every:
                values = self._updates.by_name[elements.part.name]
                master = elements.master
                shape = elements.part.shape if self._spec.whole_parameters else master.shape
                if elements.is_halved:
                    values.data = master.view(shape)
                gradient = elements.gradient.to(master.dtype)
                values.grad = (gradient * scale if scale != 1 else gradient).view(shape)
            self._updates.step(learning_rate)
            for elements in every:
                values = self._updates.by_name[elements.part.name]
                elements.set_master(values.detach().view(-1))
                if elements.is_halved:
                    values.data = torch.empty(0, device=values.device)
