"""A plan of islands in a run file that `cuboid train --island N` takes as it is.

[islands]                             # how they synchronise
[plan]                                # links, predicted rounds, what else could be done
[plan.islands.oregon]                 # island 0: its layout, and its plan as in any plan file"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from cuboid.cost.island_loss import expected_loss
from cuboid.cost.rounds import IslandTimes
from cuboid.errors import UserError, up_to
from cuboid.planning.island_alternatives import Alternative
from cuboid.planning.islands import IslandsPlan
from cuboid.planning.plan import Plan, load_plan, plan_of, plan_table, to_choose
from cuboid.readers import Table, read_toml
from cuboid.spec.coding import convert, decode, encode
from cuboid.spec.groups import OWN, Group, Groups, SiteLink
from cuboid.spec.run import Run, build_run, dump_run

ISLANDS = "islands"


def dump_islands_plan(plan: IslandsPlan, train_tokens: float = 0.0) -> str:
    """The run file of all islands, headed by what the planner did not choose."""
    first = plan.run(0)
    if train_tokens:
        a_step = sum(own.question.global_batch * own.question.sequence for own in plan.plans)
        first = replace(first, training=replace(first.training, steps=ceil(train_tokens / a_step)))
    run = replace(first, plan=_table(plan))
    lines = [*to_choose(run), *(f"Island {number}, {line}" for number, line in enumerate(start_lines(plan, "THIS")))]
    return "".join(f"# {line}\n" for line in lines) + dump_run(run)


def start_lines(plan: IslandsPlan, file: str) -> list[str]:
    """How each island is started."""
    place = f"--islands-rendezvous HOST-IN-{plan.coordinator.upper()}:29700"
    return [f"{name}: cuboid train {file} --island {number} {place}" for number, name in enumerate(plan.names)]


def _table(plan: IslandsPlan) -> dict[str, object]:
    groups, members = plan.groups, plan.members
    sites = {group.site for group in members}
    table: dict[str, object] = {
        "groups": groups.name,
        "step_seconds": plan.step_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "computing": plan.computing,
        "hidden": plan.hidden,
        "sent_bytes": list(plan.sent),
        "transfer_seconds": list(plan.transfers),
        "decide_seconds": plan.decide,
        "one_job_refused": plan.one_job_refused,
        "notes": list(plan.notes),
        "links": [encode(link) for link in groups.links if set(link.between) <= sites],
    }
    others = {"alone": plan.alone, "one_job": plan.one_job, "unequal": plan.unequal}
    table |= {name: encode(other) for name, other in others.items() if other is not None}
    table[ISLANDS] = {
        group.name: {"layout": str(own.layout), "global_batch": own.question.global_batch, "times": encode(times)}
        | {"group": {key: value for key, value in encode(group).items() if key in OWN}}
        | plan_table(own)
        for group, own, times in zip(members, plan.plans, plan.times, strict=True)
    }
    return table


def plans_islands(table: Mapping[str, object]) -> bool:
    """Whether a run file has a plan of islands."""
    plan = table.get("plan")
    return isinstance(plan, Mapping) and ISLANDS in plan


def with_island(table: Table, number: int) -> Table:
    """The run file of one island: with its layout, batch and own plan."""
    rows = list(_rows(table["plan"]).values())
    if not 0 <= number < len(rows):
        raise UserError(f"island={number} is not in the plan; use {up_to(len(rows) - 1, 'island=')}")
    row = convert(rows[number], dict[str, object], f"plan.{ISLANDS}")
    own = {key: value for key, value in row.items() if key not in ("layout", "global_batch", "times", "group")}
    training = {**_field(table, "training", dict[str, object]), "global_batch": _field(row, "global_batch", int)}
    return {**table, "layout": _field(row, "layout", str), "training": training, "plan": own}


def _rows(plan: object) -> Mapping[str, object]:
    rows: Mapping[str, object] = _field(plan, ISLANDS, dict[str, object])
    if not rows:
        raise UserError(f"plan.{ISLANDS} is empty; write it anew with cuboid plan … -o")
    return rows


def _field(table: object, key: str, hint: Any) -> Any:
    if not isinstance(table, Mapping) or key not in table:
        raise UserError(f"plan.{key} is missing; write it anew with cuboid plan … -o")
    return convert(table[key], hint, f"plan.{key}")


def load_any_plan(path: str | Path, island: int | None) -> Plan | IslandsPlan:
    """What a run file plans: islands together, or one of them; or a plan as any other."""
    table = dict(read_toml(path))
    if not plans_islands(table):
        if island is not None:
            raise UserError(f"island={island} is for a plan of islands, and {path} is none; omit it")
        return load_plan(path)
    if island is None:
        return load_islands_plan(path)[0]
    return plan_of(build_run(with_island(table, island), folder=Path(path).parent), str(path))


def load_islands_plan(path: str | Path) -> tuple[IslandsPlan, Run]:
    """The plan in a run file, and the run of the first island."""
    path = Path(path)
    table = dict(read_toml(path))
    head = table["plan"]
    rows = _rows(head)
    runs = [build_run(with_island(table, number), folder=path.parent) for number in range(len(rows))]
    plans = tuple(plan_of(run, str(path)) for run in runs)
    members = []
    for (name, row), plan in zip(rows.items(), plans, strict=True):
        cluster = replace(plan.question.cluster, name=name)
        members.append(decode(Group, {**_field(row, "group", dict[str, object]), "cluster": cluster}, "plan.group"))
    links = [decode(SiteLink, row, "plan.links") for row in _field(head, "links", list[dict[str, object]])]
    groups = Groups(name=_field(head, "groups", str), groups=tuple(members), links=tuple(links))
    spec, model = runs[0].islands, runs[0].model
    if spec.count != len(rows):
        raise UserError(f"islands.count={spec.count} is not what the plan has; use count={len(rows)}")
    others = {
        name: decode(Alternative, _field(head, name, dict[str, object]), f"plan.{name}")
        for name in ("alone", "one_job", "unequal")
        if isinstance(head, Mapping) and name in head
    }
    transfers = _field(head, "transfer_seconds", list[float])
    if len(transfers) != spec.fragments:
        raise UserError(f"plan.transfer_seconds has {len(transfers)} of {spec.fragments} fragments; plan it anew")
    found = IslandsPlan(
        groups=groups,
        names=tuple(rows),
        plans=plans,
        spec=spec,
        times=tuple(
            decode(IslandTimes, _field(row, "times", dict[str, object]), "plan.times") for row in rows.values()
        ),
        transfers=tuple(transfers),
        decide=_field(head, "decide_seconds", float),
        sent=tuple(_field(head, "sent_bytes", list[int])),
        computing=_field(head, "computing", float),
        hidden=_field(head, "hidden", float),
        step_seconds=_field(head, "step_seconds", float),
        loss=expected_loss(model.active_parameters, spec.count, spec.every),
        alone=others.get("alone"),
        one_job=others.get("one_job"),
        unequal=others.get("unequal"),
        one_job_refused=_field(head, "one_job_refused", str),
        notes=tuple(_field(head, "notes", list[str])),
    )
    return found, runs[0]
