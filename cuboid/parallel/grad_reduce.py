"""The gradients of a unit: summed over micro-batches, then over data-parallel ranks, whole or this rank's shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cuboid.kernels.precision import wide
from cuboid.parallel.collectives import Pending, start_all_reduce, start_reduce_scatter
from cuboid.parallel.groups import Holders
from cuboid.spec.sharding import Part


class GradientReducer:
    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        parts: list[Part],
        zero: int,
        groups: Holders,
        shard: slice,
        size: int,
        dtype: torch.dtype,
        replicates_late: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """`shard`: what of the unit's flat buffer, of `size` elements, this rank keeps under ZeRO. `dtype`: of sums.
        `replicates_late`: replicas of a shard may finish units in different orders, and sum them when all are done.
        `sizes`: of all shards, where they are not equal."""
        self._parameters, self._parts = parameters, parts
        self._zero, self._groups = zero, groups
        self._shard, self._size, self.dtype = shard, size, dtype
        self._replicates_late, self._sizes = replicates_late, sizes
        first = next(iter(parameters.values()))
        self._device = first.device
        self._summed: Tensor | None = None
        # Nobody else adds to the gradient of one micro-batch: autograd's own result is exact without a sum in float32.
        self._is_alone = groups.nobody_adds
        self._is_rounded = first.dtype != wide(first.dtype)
        self._may_add_in_place = zero < 2 and first.dtype == dtype
        self._reducing: Pending | None = None
        self._replicating: Pending | None = None
        # Whether something waits to be done with the result of the reduction: it is added to a shard, which frees the
        # whole, or summed over replicas. ZeRO 0, and 1 without replicas, leave it alone until the step ends.
        self.has_more_to_do = zero >= 2 or (zero == 1 and groups.replicate.size > 1)
        self._collected = self._expected = 0

    @property
    def are_autograds(self) -> bool:
        """Whether the parameters' own gradients are the result."""
        return self._is_alone and self._is_rounded and self._expected == 1

    @property
    def adds_in_place(self) -> bool:
        """Whether autograd adds to the sum itself."""
        return self._may_add_in_place and not self.are_autograds

    @property
    def _sum(self) -> Tensor:
        """Made when first needed: a unit that takes autograd's result as it is never does."""
        if self._summed is None:
            size = self._size if self._zero < 2 else self._shard.stop - self._shard.start
            self._summed = torch.zeros(size, dtype=self.dtype, device=self._device)
        return self._summed

    @property
    def shard(self) -> Tensor:
        """This rank's."""
        return self._sum if self._zero >= 2 else self._sum[self._shard]

    @property
    def held(self) -> Tensor | None:
        """What memory the sum takes, if it takes any."""
        return self._summed

    def begin_step(self, collections: int) -> None:
        """So many times `collect` will be called. Before that, `clear` must be, unless gradients are autograd's own."""
        self._collected, self._expected = 0, collections
        for part in self._parts:
            self._parameters[part.name].grad = self._view(self._sum, part) if self.adds_in_place else None

    def clear(self) -> None:
        """Begin a sum, where the first that is collected does not overwrite what was there."""
        if self.adds_in_place or self._zero >= 2:
            self._sum.zero_()

    @property
    def is_collected(self) -> bool:
        return self._collected == self._expected

    def collect(self, reduces: bool = True) -> None:
        """One use of one micro-batch has computed its weight gradients. `reduces`: as `Unit.collect` has it."""
        self._collected += 1
        if self.are_autograds:
            return
        if self._zero >= 2:
            self.settle()
            # A whole gradient lives for one reduce-scatter: ZeRO 2 and 3 keep the shard only, once a micro-batch.
            flat = torch.zeros(self._size, dtype=self.dtype, device=self._device)
            self._take(flat, first=True)
            self._reducing = start_reduce_scatter(flat, self._groups.shard, self._sizes)
            return
        if not self.adds_in_place:
            self._take(self._sum, first=self._collected == 1)
        # ZeRO 0 and 1 keep whole sums: one collective a step, after the last micro-batch.
        if self.is_collected and reduces:
            self.start()

    def start(self) -> None:
        """The collective of ZeRO 0 and 1."""
        if self.are_autograds:
            return
        if self._zero == 0:
            self._reducing = start_all_reduce(self._sum, self._groups.data)
        else:
            self._reducing = start_reduce_scatter(self._sum, self._groups.shard, self._sizes)

    def _take(self, target: Tensor, first: bool) -> None:
        """Move `.grad` into the buffer: copy the first, add the rest."""
        for part in self._parts:
            parameter, there = self._parameters[part.name], self._view(target, part)
            if first:
                there.zero_() if parameter.grad is None else there.copy_(parameter.grad)
            elif parameter.grad is not None:
                there.add_(parameter.grad)
            parameter.grad = None

    def settle(self) -> None:
        """Wait for what is on its way; under ZeRO 2 and 3 add it to this rank's shard, which frees the whole. The last
        sum of a step continues to the replicas of the shard (hybrid sharding) at once, in place, under whatever the
        caller computes next."""
        if self._reducing is None:
            return
        reduced = self._reducing.wait()
        self._reducing = None
        if self._zero >= 2:
            self._sum.add_(reduced)
        elif self._zero == 1:
            self.shard.copy_(reduced)
        # Hybrid sharding: shards are summed inside a shard group first, and then over its replicas, a shard's bytes
        # each.
        if self._zero and self.is_collected and not self._replicates_late:
            self._replicating = start_all_reduce(self.shard, self._groups.replicate)

    def finish(self) -> None:
        self.settle()
        if self._replicates_late and self._zero:
            self._replicating = start_all_reduce(self.shard, self._groups.replicate)
        if self._replicating is not None:
            self._replicating.wait()
            self._replicating = None

    def of_shard(self, part: Part, here: slice) -> Tensor:
        """`here`: the place of the optimizer shard in this rank's shard."""
        if not self.are_autograds:
            return self.shard[here]
        gradient = self._parameters[part.name].grad
        if gradient is not None:
            return gradient.flatten()
        return torch.zeros(here.stop - here.start, dtype=self.dtype, device=self._device)

    @staticmethod
    def _view(flat: Tensor, part: Part) -> Tensor:
        return flat[part.offset : part.offset + part.size].view(part.shape)
