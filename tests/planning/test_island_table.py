"""The mildest table is the one that simulating every table finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuboid.planning.island_links import Paths
from cuboid.planning.island_table import COMPUTING, Tables, mildest, specs
from tests.planning.test_islands import groups_of, planned


@pytest.mark.parametrize("wanted", [{"every": 32}, {"every": 128, "bits": 4}, {"every": 32, "ramp_steps": 256}])
def test_no_table_is_skipped_that_would_be_taken(tmp_path: Path, wanted: dict[str, Any]) -> None:
    plan = planned(groups_of(tmp_path))
    slowest = max(own.seconds for own in plan.plans)
    enough = []
    for gbit in (0.0001, 0.5, 5):
        groups = groups_of(tmp_path, gbit=gbit)
        tables = Tables(Paths(groups, plan.members), plan.plans)
        seconds = {spec: tables.seconds(spec) for spec in specs(plan.plans, wanted)}
        assert all(tables.least_seconds(spec) <= found for spec, found in seconds.items())
        likely = [spec for spec, found in seconds.items() if slowest >= COMPUTING * found]
        best = likely[0] if likely else min(seconds, key=lambda spec: seconds[spec])
        assert mildest(Paths(groups, plan.members), plan.plans, wanted) == (best, seconds[best])
        enough.append(bool(likely))
    assert set(enough) == {False, True}


def test_what_one_island_waits_at_least_is_less_than_the_simulation_says(tmp_path: Path) -> None:
    """Islands of other speeds than those of the plan, slower and faster links than any."""
    groups = groups_of(tmp_path)
    plan = planned(groups)
    near = 0
    for factor in (0.3, 1.0, 4.0):
        first, second = plan.plans
        chosen = [first, replace(second, parts={name: part * factor for name, part in second.parts.items()})]
        for gbit in (0.05, 0.5, 40):
            tables = Tables(Paths(groups_of(tmp_path, gbit=gbit), plan.members), chosen)
            for spec in specs(chosen, {"every": 64}):
                least, seconds = tables.least_seconds(spec), tables.seconds(spec)
                assert least <= seconds, spec
                near += least > 0.98 * seconds
    assert near > 100
