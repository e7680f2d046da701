"""What the ranks do in tests of process groups."""

from __future__ import annotations

from dataclasses import fields
from unittest.mock import patch

import torch
import torch.distributed as dist

from cuboid.parallel.groups import Group, Groups, context_group, make_groups
from cuboid.spec.layout import Layout


def all_groups(groups: Groups) -> list[Group]:
    named = [getattr(groups, field.name) for field in fields(groups)]
    found = [group for group in named if isinstance(group, Group)] + list(vars(groups.routed).values())
    return [*found, *groups.links.values()]


def use_all_groups(rank: int, text: str, kv_parts: int, tied: bool, experts: bool) -> tuple[int, bool]:
    """How many groups this rank made, and whether each of them adds up its own ranks."""
    made = 0
    real = dist.new_group

    def counted(*arguments: object, **options: object) -> object:
        nonlocal made
        made += 1
        return real(*arguments, **options)

    layout = Layout.parse(text)
    with patch.object(dist, "new_group", counted):
        groups = make_groups(layout, rank, kv_parts, tied, experts, on_cpu=True)
        context = context_group(groups, layout, rank)
    right = True
    for group in [*all_groups(groups), context]:
        if group.handle is not None:
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=group.handle)
            right = right and total.item() == sum(group.ranks) and group.ranks[group.index] == rank
    return made, right
