"""An FSDP unit: parameters that are gathered, released and reduced together (a block, an embedding, a head), under
ZeRO 0 to 3.

All parameters of a unit lie in one flat buffer. What each ZeRO stage holds between uses:

    zero   parameters   gradients   master weights and optimizer state
    0      whole        whole       whole
    1      whole        whole       this rank's shard
    2      whole        shard       this rank's shard
    3      shard        shard       this rank's shard

Of a master weight beside a bf16 parameter only the difference is kept (`kernels.precision`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from cuboid.kernels.precision import join_halves, split_halves, wide
from cuboid.parallel.collectives import Pending, start_all_gather
from cuboid.parallel.fp8_all_gather import Fp8Shard
from cuboid.parallel.grad_reduce import GradientReducer
from cuboid.parallel.groups import Holders
from cuboid.spec.sharding import Part, shard_sizes


class Unit:
    def __init__(
        self,
        name: str,
        parts: list[Part],
        zero: int,
        groups: Holders,
        compute: torch.dtype,
        device: torch.device,
        fp8: Collection[str] = (),
        sums: torch.dtype | None = None,
        replicates_late: bool = False,
        weights: Sequence[int] = (),
    ) -> None:
        """`fp8`: parameters whose matmuls are in fp8 with one scale for each; ZeRO 3 gathers them so. `sums`: in what
        gradients are summed; default: in float32 or wider. `replicates_late`: as `GradientReducer` has it.
        `weights`: of the ranks that ZeRO splits over; default: equal ones."""
        self.name = name
        self.parts = parts
        self.zero = zero
        self.groups = groups
        self.uses = 0
        """How many times one micro-batch uses the unit on this rank (twice when a tied embedding is first and last)."""
        self.accumulate = wide(compute)
        # The last one is padded: equal shards take one size from every rank, as all-gather and reduce-scatter want it.
        sizes = shard_sizes(parts, (weights or [1] * groups.shard.size) if zero else [1])
        index = groups.shard.index if zero else 0
        self.shard_size = sizes[index]
        self.begin = sum(sizes[:index])
        self.end = self.begin + self.shard_size
        self._sizes = sizes if len(set(sizes)) > 1 else None
        self._flat = torch.zeros(sum(sizes), dtype=compute, device=device)
        # This rank's shard of the parameters; of ZeRO 3 all that it has of them between uses.
        self._own = torch.zeros(self.shard_size, dtype=compute, device=device) if zero == 3 else self._shard(self._flat)
        self._master_is_apart = compute != self.accumulate
        # float32 master = bf16 weight + int16 rest: 4 bytes a parameter in place of 6, and the weight is where matmuls
        # read it.
        self._is_halved = compute == torch.bfloat16
        kept = torch.int16 if self._is_halved else self.accumulate
        apart = self._master_is_apart
        self._kept = torch.zeros(self.shard_size, dtype=kept, device=device) if apart else self._own
        self._settle_kept: Callable[[], None] = _is_settled
        # With one scale a tensor the gathered bytes are what the matmul would have made; with row scales they are not.
        gathers_fp8 = zero == 3 and groups.shard.size > 1 and fp8
        self._fp8 = Fp8Shard(parts, fp8, self.begin, self.end, groups.shard, self._sizes) if gathers_fp8 else None
        self._opened: Tensor | None = None
        # `.data` has its own version counter: gathering anew between forward and backward is not a change to autograd.
        self.parameters = {part.name: nn.Parameter(self._view(self._flat.data, part)) for part in parts}
        shard = slice(self.begin, self.end)
        self._gradients = GradientReducer(
            self.parameters,
            parts,
            zero,
            groups,
            shard,
            self._flat.numel(),
            sums or self.accumulate,
            replicates_late,
            self._sizes,
        )
        self._gathering: Pending | None = None
        self._update: tuple[torch.cuda.Event, list[Tensor]] | None = None
        self._clear_first = False
        self._users = 0
        self._free_if_unused()

    def _shard(self, flat: Tensor) -> Tensor:
        return flat[self.begin : self.end]

    def _view(self, flat: Tensor, part: Part) -> Tensor:
        return flat[part.offset : part.offset + part.size].view(part.shape)

    def side_by_side(self, parameters: list[nn.Parameter]) -> Tensor | None:
        """These matrices as one, row after row, if they lie so; without a copy, and nothing asks for its gradient."""
        offsets = {id(self.parameters[part.name]): part.offset for part in self.parts}
        first = end = offsets[id(parameters[0])]
        for parameter in parameters:
            if offsets[id(parameter)] != end:
                return None
            end += parameter.numel()
        self._make_room()  # nothing can be seen of memory that is not there
        fused = self._flat.data[first:end].view(-1, parameters[0].shape[1])
        self._free_if_unused()
        return fused

    def fill(self, held: Callable[[Part], Tensor]) -> None:
        """Set the parameters from what this rank holds of each full tensor; padding stays zero. What was written since
        `open` no longer counts."""
        self._settle_kept()
        self._opened = None
        if self._fp8 is not None:
            self._fp8.forget()
        whole = torch.zeros(self._flat.numel(), dtype=self.accumulate, device=self._flat.device)
        for part in self.parts:
            cut = part.slice
            self._view(whole, part).narrow(cut.dimension, 0, cut.stop - cut.start).copy_(held(part))
        near, rest = split_halves(whole) if self._is_halved else (whole, whole)
        target = self._own if self.zero == 3 else self._flat
        target = target.view(torch.int16) if self._is_halved else target
        target.copy_(self._shard(near) if self.zero == 3 else near)
        if self._master_is_apart:
            self._kept.copy_(self._shard(rest))

    @property
    def master(self) -> Tensor:
        """The master weights of this rank's shard as they are kept, where they are kept whole."""
        assert not self._is_halved
        return self._kept

    @property
    def only_for_update(self) -> torch.dtype | None:
        """What is kept beside the weights that matmuls use, so that only the update reads it; None where these are
        the master weights themselves."""
        return self._kept.dtype if self._master_is_apart else None

    def keep_in(self, memory: Tensor, settle: Callable[[], None]) -> None:
        """Keep what only the update reads in some other memory from now on. `settle`: the host waits until what was
        last written to it is there."""
        assert self.only_for_update is not None
        memory.copy_(self._kept)
        self._kept, self._settle_kept = memory, settle

    @property
    def gathers_exactly(self) -> bool:
        """Whether matmuls use the bits that shards keep."""
        return self._fp8 is None

    def open(self) -> None:
        """Until `publish`, the optimizer shards' master weights lie in one tensor, where they are kept, and what is
        written there counts."""
        if self._is_halved and self._opened is None:
            self._settle_kept()
            self._opened = join_halves(self._own.view(torch.int16).to(self._kept.device), self._kept)

    # Parameters: whole while in use.

    def start_gather(self) -> None:
        """Begin to make the parameters whole, so that they are there when asked for."""
        if self.zero < 3 or self._gathering is not None or self._flat.untyped_storage().size():
            return
        self.wait_for_update()
        if self._fp8 is not None:
            self._gathering = self._fp8.start_gather(self._own)
            return
        # The all-gather of ZeRO 3. Parameters are views of one storage, which only changes its size: they need no new
        # views, and autograd sees the same tensors in forward and backward.
        self._make_room()
        self._gathering = start_all_gather(self._own, self.groups.shard, self._flat, self._sizes)

    def _make_room(self) -> None:
        self._flat.untyped_storage().resize_(self._flat.numel() * self._flat.element_size())

    def gather(self) -> None:
        self._users += 1
        self.wait_for_update()
        self.start_gather()
        if self._gathering is not None:
            gathered = self._gathering.wait()
            self._gathering = None
            if self._fp8 is not None:
                self._make_room()
                self._fp8.widen(gathered, self._flat)

    def settle_gather(self) -> None:
        """Let the current stream wait for parameters that are on their way, whoever uses them next."""
        if self._gathering is not None:
            self.gather()
            self.release()

    def release(self) -> None:
        self._users -= 1
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self.zero == 3 and self._users == 0:
            # The tensor stays and its memory goes: no view is invalid, and nobody may read one until the next gather.
            self._flat.untyped_storage().resize_(0)

    def publish(self, written: bool = False) -> None:
        """After the optimizer changed the master weights: let every rank's parameters follow. `written`: those of this
        rank's optimizer shards do already."""
        if self._fp8 is not None:
            self._fp8.forget()
        if self._opened is not None:
            # Rounded to bf16 once, from the exact sum: master weights never lose what the update added.
            near, rest = split_halves(self._opened)
            self._own.view(torch.int16).copy_(near)
            self._kept.copy_(rest)
            self._opened = None
        elif self._master_is_apart and not self._is_halved and not written:
            self._own.copy_(self._kept)
        # The clone is sent: `_own` is a part of `_flat`, which the all-gather writes while it reads.
        if self.zero in (1, 2):
            self._gathering = start_all_gather(self._own.clone(), self.groups.shard, self._flat, self._sizes)

    def is_being_updated(self, until: torch.cuda.Event, reads: list[Tensor]) -> None:
        """Another stream changes this unit until an event, and reads these gradients."""
        self._update = (until, reads)

    def wait_for_update(self) -> None:
        """Let the current stream wait; the host does not."""
        if self._update is not None:
            # A wait of the current stream for the optimizer's stream; the host continues to queue kernels.
            self._update[0].wait()
            self._update = None
        if self._clear_first:
            self._gradients.clear()
            self._clear_first = False

    # Gradients.

    def begin_step(self, micro_batches: int) -> None:
        self._gradients.begin_step(self.uses * micro_batches)
        if not self._gradients.are_autograds:
            self._clear_first = True
            if self._update is None:
                self.wait_for_update()

    def collect(self, reduces: bool = True) -> None:
        """One use of one micro-batch has computed its weight gradients. `reduces`: the last one starts the reduction,
        for which else somebody calls `start_reduction`."""
        self._gradients.collect(reduces)

    @property
    def is_collected(self) -> bool:
        """Whether all micro-batches of the step have been."""
        return self._gradients.is_collected

    def start_reduction(self) -> None:
        self._gradients.start()

    def settle(self) -> None:
        """Continue with what was sent when the segment before computed, where there is more to do than wait for it."""
        if self._gradients.has_more_to_do:
            self._gradients.settle()

    def finish_reduction(self) -> None:
        self._gradients.finish()

    @property
    def adds_in_place(self) -> bool:
        """Whether a parameter's gradient is the sum over the micro-batches so far, and not that of one."""
        return self._gradients.adds_in_place

    @property
    def sums_in(self) -> torch.dtype:
        """The precision of sums of gradients."""
        return self._gradients.dtype

    @property
    def shard_gradient(self) -> Tensor:
        return self._gradients.shard

    def optimizer_shards(self) -> list[OptimizerShard]:
        """The parameters, or parts of them, whose optimizer state this rank keeps."""
        self.wait_for_update()
        result = []
        held = self._own if self._master_is_apart else None
        for part in self.parts:
            start, stop = max(part.offset, self.begin), min(part.offset + part.size, self.end)
            if start < stop:
                here = slice(start - self.begin, stop - self.begin)
                local = (start - part.offset, stop - part.offset)
                kept = self._kept if self._opened is None else self._opened
                weight = None if held is None else held[here]
                take = partial(self._gradients.of_shard, part, here)
                result.append(OptimizerShard(part, *local, kept[here], weight, take, self._settle_kept))
        return result

    def held_tensors(self) -> list[Tensor]:
        """What `held_bytes` counts."""
        gradient = self._gradients.held
        return [self._flat, self._own, self._kept, *([] if gradient is None else [gradient])]

    def held_bytes(self) -> dict[str, int]:
        """Bytes really allocated now on the device."""
        apart = self._master_is_apart
        here = (apart or self.zero == 3) and self._kept.device == self._flat.device
        master = self._kept.nbytes if here else 0
        own = self._own.nbytes if apart and self.zero == 3 else 0
        return {
            "parameters": self._flat.untyped_storage().nbytes() + own,
            "master": master,
            "gradients": 0 if self._gradients.held is None else self._gradients.held.untyped_storage().nbytes(),
        }


def _is_settled() -> None:
    """What no other stream writes is always there."""


# A parameter, or the part of it, whose master weights and optimizer state a rank keeps.


@dataclass(frozen=True)
class OptimizerShard:
    """What of a parameter lies in this rank's shard: elements `start:stop` of the local tensor, flattened."""

    part: Part
    start: int
    stop: int
    stored: Tensor
    """`kept`, which may be on its way to where it is stored."""
    weight: Tensor | None
    """The same elements in the precision of the matmuls, where these are kept beside the master weights."""
    take_gradient: Callable[[], Tensor]
    settle: Callable[[], None]
    """The host waits until what is stored is there."""

    @property
    def kept(self) -> Tensor:
        """The master weights, or of each 16 bits more than `weight` has."""
        self.settle()
        return self.stored

    @property
    def is_halved(self) -> bool:
        return self.stored.dtype == torch.int16

    @property
    def master(self) -> Tensor:
        """Of a halved shard a copy: `set_master` makes it count."""
        if not self.is_halved:
            return self.kept
        assert self.weight is not None
        return join_halves(self.weight.view(torch.int16), self.kept.to(self.weight.device))

    def set_master(self, values: Tensor) -> None:
        """Write master weights and what follows from them on this rank."""
        if not self.is_halved:
            self.kept.copy_(values)
            return
        assert self.weight is not None
        near, rest = split_halves(values)
        self.weight.view(torch.int16).copy_(near)
        self.kept.copy_(rest)

    @property
    def gradient(self) -> Tensor:
        """The unit knows only after a backward pass which tensor holds it."""
        return self.take_gradient()
