"""What a bug of the catalogue is, and how it is put back into the engine: by replacing functions of it inside rank
processes, for one verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cuboid.parallel import grad_norm
from cuboid.spec.run import Run
from cuboid.training import step
from cuboid.verification.make import verification_run


class Patches:
    """Replaced attributes, as they were before on `undo`."""

    def __init__(self, rank: int, run: Run, leg: int = 0) -> None:
        """`leg`: of a chain of layouts."""
        self.rank, self.run, self.leg = rank, run, leg
        self._plain: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, wrong: Any) -> None:
        self._plain.append((owner, name, owner.__dict__[name] if name in vars(owner) else getattr(owner, name)))
        setattr(owner, name, wrong)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Meanwhile everything is as it was before."""
        wrong = [(owner, name, vars(owner)[name]) for owner, name, _ in self._plain]
        for owner, name, plain in reversed(self._plain):
            setattr(owner, name, plain)
        try:
            yield
        finally:
            for owner, name, each in wrong:
                setattr(owner, name, each)

    def undo(self) -> None:
        while self._plain:
            owner, name, plain = self._plain.pop()
            setattr(owner, name, plain)


Install = Callable[[Patches], None]


@dataclass(frozen=True)
class Bug:
    """A public bug, and what `verify` should say of it."""

    name: str
    source: str
    """Where it is described in public."""
    install: Install
    layout: str
    module: str
    """A regular expression for the module that is to be named."""
    where: str
    """… for the pass."""
    cause: str
    """… for the cause in words."""
    model: str = "tiny-llama"
    set: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("float64", "bf16")
    onto: str = ""
    """The layout that a checkpoint is loaded into, of a bug about checkpoints."""

    def run(self, precision: str) -> Run:
        return verification_run(self.layout, self.model, self._changed, steps=3, dtype=precision)

    def chain(self, precision: str) -> list[Run]:
        """Two steps on each layout."""
        both = (self.layout, self.onto)
        return [verification_run(each, self.model, self._changed, 4, precision, 0, both) for each in both]

    @property
    def _changed(self) -> tuple[str, ...]:
        few = ("model.layers=2",) if not any(each.startswith("model.layers") for each in self.set) else ()
        return (*few, *self.set)


CATALOGUE: dict[str, Bug] = {}


def bug(
    name: str, source: str, layout: str, module: str, where: str, cause: str, **more: Any
) -> Callable[[Install], Install]:
    """Enter a function that installs a bug."""

    def enter(install: Install) -> Install:
        assert name not in CATALOGUE, name
        CATALOGUE[name] = Bug(name, source, install, layout, module, where, cause, **more)
        return install

    return enter


def leave_out(patches: Patches, words: str) -> None:
    """Some parameters from the sum over tensor ranks."""
    plain, plain_sum = step.finish_gradients, grad_norm._sum_together
    apart: set[int] = set()

    def finish(engine: Any) -> None:
        apart.clear()
        for unit in engine.units:
            unit.finish_reduction()
            apart.update(shard.gradient.data_ptr() for shard in unit.optimizer_shards() if words in shard.part.name)
        plain(engine)

    def sums(tensors: list[Tensor], group: Any) -> None:
        plain_sum([tensor for tensor in tensors if tensor.data_ptr() not in apart], group)

    patches.put(step, "finish_gradients", finish)
    patches.put(grad_norm, "_sum_together", sums)
