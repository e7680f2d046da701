"""Process groups: each rank makes its own alone, under names on which all of them agree."""

from __future__ import annotations

import pytest

from cuboid.launch.pool import Pool
from cuboid.spec.layout import Layout

CASES = [
    ("pp=3", 1, False, False),
    ("pp=4", 1, True, False),
    ("pp=5,vpp=2,schedule=interleaved", 1, True, False),
    ("dp=2,tp=2,pp=2,zero=1", 2, True, False),
    ("dp=4,shard=2,tp=2,zero=3", 1, False, False),
    ("dp=2,cp=4,cp_method=hybrid,cp_inner=2", 1, False, False),
    ("dp=4,tp=2,ep=4,zero=1", 1, False, True),
]


@pytest.mark.parametrize(("text", "kv_parts", "tied", "experts"), CASES, ids=[case[0] for case in CASES])
def test_ranks_that_make_different_groups_agree_on_their_names(
    pool: Pool, text: str, kv_parts: int, tied: bool, experts: bool
) -> None:
    """Torch counts the groups of a process in their names: a rank that makes one less waits for ever."""
    ranks = Layout.parse(text).world_size
    found = pool.run(
        "tests.parallel.group_jobs:use_all_groups", (text, kv_parts, tied, experts), ranks=ranks, timeout=300
    )
    assert all(right for _, right in found)
    assert len({made for made, _ in found}) == 1
    assert found[0][0] <= 16  # its own kinds and its neighbours in the pipeline, not those of others
