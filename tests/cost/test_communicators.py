"""The planner counts the communicators that the engine really makes."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from cuboid.cost.constants import Engine
from cuboid.cost.inputs import Jobs, Shape
from cuboid.cost.memory import communicator_bytes, communicators
from cuboid.parallel.groups import Group, make_groups
from cuboid.spec.layout import Layout
from cuboid.spec.model import load_model
from cuboid.spec.sharding import kv_part_count

LAYOUTS = [
    ("tiny-llama", "dp=2"),
    ("tiny-llama", "dp=4,tp=2,pp=4,zero=1"),
    ("tiny-llama", "dp=8,shard=2,zero=3,tp=4,pp=3"),
    ("tiny-llama", "dp=2,cp=4,cp_method=hybrid,cp_inner=2,tp=2,pp=2,zero=1"),
    ("tiny-llama", "tp=4,pp=2,schedule=zbv"),
    ("tiny-mixtral", "dp=8,ep=4,tp=2,zero=1"),
    ("tiny-mixtral", "dp=4,ep=4,cp=2,pp=2,zero=0"),
    ("tiny-mixtral", "dp=8,shard=2,ep=8,tp=2,pp=2,zero=3"),
]


def made(model_name: str, text: str, rank: int) -> tuple[int, int, int]:
    model, layout = load_model(model_name), Layout.parse(text)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        tied = model.tie_embeddings and layout.last_stage_rank > 0
        groups = make_groups(layout, rank, kv_part_count(model, layout.tp), tied, model.mixture is not None, False)
        named = [getattr(groups, field.name) for field in fields(groups)] + list(vars(groups.routed).values())
        found = {id(group.handle): group.size for group in named if isinstance(group, Group) and group.handle}
        return len(found), sum(found.values()) - len(found), len(groups.links)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("model", "text"), LAYOUTS, ids=[text for _, text in LAYOUTS])
def test_the_planner_counts_what_the_engine_makes(model: str, text: str) -> None:
    layout = Layout.parse(text)
    counted = communicators(Shape.of(load_model(model)), Jobs.of([layout], global_batch=64, sequence=64))
    expected = tuple(int(np.squeeze(value)) for value in (counted.collective, counted.peers, counted.links))
    found = [made(model, text, rank) for rank in range(0, layout.world_size, layout.world_size // layout.pp)]
    assert tuple(map(max, zip(*found, strict=True))) == expected


def test_communicators_are_planned_for() -> None:
    shape, jobs = Shape.of(load_model("tiny-llama")), Jobs.of([Layout.parse("dp=2,pp=2")], global_batch=8, sequence=64)
    engine = Engine(name="none", communicator=100.0, communicator_peer=10.0, communicator_link=1.0)
    assert communicator_bytes(shape, jobs, engine).item() == 2 * 100 + (3 + 1) * 10 + 2
