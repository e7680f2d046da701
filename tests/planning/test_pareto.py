"""What trainings cost: against arithmetic by hand, against trying everything, and more of anything is never worse."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuboid.cost.goodput import PUBLISHED, Costs, recommend
from cuboid.errors import UserError
from cuboid.planning.choose import each_size, resized_search
from cuboid.planning.island_table import COMPUTING
from cuboid.planning.pareto import TrainingOption, best, cluster_of, front, training_options, with_smaller_parts
from cuboid.planning.pareto_picture import svg
from cuboid.planning.question import Question, every_size, resized, sizes
from cuboid.spec.cluster import ClusterSpec, load_cluster
from cuboid.spec.groups import Group, Groups, SiteLink
from tests.planning.conftest import DENSE

TOKENS = 1e11


def ask(cluster: ClusterSpec, global_batch: int) -> Question:
    return Question(model=DENSE, cluster=cluster, global_batch=global_batch, sequence=512)


def group(name: str, cluster: str, price: float | None = 2.0, **more: float) -> Group:
    return Group(name=name, cluster=replace(load_cluster(cluster), name=name), price=price, **more)  # type: ignore[arg-type]


def groups(*members: Group, gbit: float = 10) -> Groups:
    names = [member.name for member in members]
    links = [
        SiteLink(between=(first, second), bandwidth_gbit=gbit, latency_ms=10)
        for place, first in enumerate(names)
        for second in names[place + 1 :]
    ]
    return Groups(name="mine", groups=members, links=tuple(links))


@pytest.fixture(scope="module")
def found() -> list[TrainingOption]:
    spot = group("here", "h100x16", 2.5, spot_price=1.0, life_hours=10)
    return training_options(groups(spot, group("there", "a100x8", 1.4)), ask, 64, TOKENS)


def test_days_and_cost_by_hand(found: list[TrainingOption]) -> None:
    one = next(
        option for option in found if option.groups == ("here",) and option.accelerators == 16 and not option.spot
    )
    assert one.goodput == recommend(PUBLISHED["rsc"].seconds(16), Costs()).fraction
    assert one.days == pytest.approx(TOKENS / one.tokens_per_second / one.goodput / 86400)
    assert one.cost == pytest.approx(one.days * 24 * 16 * 2.5)
    spot = next(option for option in found if option.groups == ("here",) and option.accelerators == 16 and option.spot)
    assert spot.goodput < one.goodput
    assert spot.cost is not None and one.cost is not None and spot.cost < one.cost
    islands = [option for option in found if option.islands is not None]
    assert {option.groups for option in islands} == {("here", "there")}


def test_the_front_is_what_nothing_beats(found: list[TrainingOption]) -> None:
    kept = front(found)
    for option in found:
        beaten = [
            other
            for other in found
            if other.days <= option.days
            and (other.cost or 0) <= (option.cost or 0)
            and (other.days, other.cost) != (option.days, option.cost)
        ]
        equal = [each for each in kept if (each.days, each.cost) == (option.days, option.cost)]
        assert bool(equal) != bool(beaten)
    for faster, slower in pairwise(kept):
        assert faster.days < slower.days and (faster.cost or 0) > (slower.cost or 0)


def test_each_objective_within_its_limits(found: list[TrainingOption]) -> None:
    fastest, cheapest = best(found, "time", None, None), best(found, "cost", None, None)
    assert fastest.days == min(option.days for option in found)
    assert cheapest.cost == min(option.cost or 0 for option in found)
    middle = (fastest.days * cheapest.days) ** 0.5
    in_time = best(found, "cost", None, middle)
    assert in_time.days <= middle
    assert in_time.cost == min(option.cost or 0 for option in found if option.days <= middle)
    fewest = best(found, "gpus", None, middle)
    assert fewest.accelerators == min(option.accelerators for option in found if option.days <= middle)
    paid = best(found, "time", 1.1 * (cheapest.cost or 0), None)
    assert paid.days == min(option.days for option in found if (option.cost or 0) <= 1.1 * (cheapest.cost or 0))


def test_energy_by_hand_and_the_least_of_it(found: list[TrainingOption]) -> None:
    whole = next(option for option in found if option.groups == ("here",) and option.accelerators == 16)
    assert whole.energy == pytest.approx(whole.days * 24 * 16 * 0.7)
    islands = next(option for option in found if option.islands is not None)
    assert islands.energy == pytest.approx(islands.days * 24 * (16 * 0.7 + 8 * 0.4))
    least = best(found, "energy", None, None)
    assert least.energy == min(option.energy or 0 for option in found)
    middle = (found[0].days * least.days) ** 0.5
    in_time = best(found, "energy", None, middle)
    assert in_time.energy == min(option.energy or 0 for option in found if option.days <= middle)
    assert front(found, "energy")[-1].energy == least.energy
    picture = ElementTree.fromstring(svg(found, least, "energy", "energy"))
    tips = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(tips) > len(found) and all(" kWh, " in tip for tip in tips)


@settings(max_examples=12, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["h100x8", "a100x8", "l40sx8", "v100x8", "tpu-v5ex8"]), min_size=1, max_size=2),
    watts=st.lists(st.sampled_from([100.0, 350.0, 1500.0, None]), min_size=2, max_size=2),
    batch=st.sampled_from([8, 64, 96]),
)
def test_no_other_objective_takes_less_energy(kinds: list[str], watts: list[float | None], batch: int) -> None:
    members = []
    for place, (kind, own) in enumerate(zip(kinds, watts, strict=False)):
        given = group(f"g{place}", kind, float(place))
        power = given.cluster.watts if own is None else own
        members.append(replace(given, cluster=replace(given.cluster, watts=power)))
    options = training_options(groups(*members), ask, batch, TOKENS)
    if all(member.cluster.watts == 0 for member in members):
        with pytest.raises(UserError, match="objective=energy needs the board power"):
            best(options, "energy", None, None)
        return
    least = best(options, "energy", None, None).energy
    assert least is not None
    for objective in ("time", "cost", "gpus"):
        other = best(options, objective, None, None).energy
        assert other is None or least <= other


def test_what_cannot_be_met_is_refused_with_what_would_be_enough(found: list[TrainingOption]) -> None:
    fastest, cheapest = best(found, "time", None, None), best(found, "cost", None, None)
    with pytest.raises(UserError, match="is too short") as refused:
        best(found, "cost", None, fastest.days / 2)
    enough = float(str(refused.value).split("use deadline=")[1].split()[0])
    assert best(found, "cost", None, enough).days <= enough
    with pytest.raises(UserError, match="is too small") as refused:
        best(found, "time", (cheapest.cost or 0) / 2, None)
    enough = float(str(refused.value).split("use budget=")[1].split()[0])
    assert (best(found, "time", enough, None).cost or 0) <= enough
    free = training_options(groups(group("free", "a100x8", None)), ask, 64, TOKENS)
    with pytest.raises(UserError, match="needs a price"):
        best(free, "cost", None, None)
    assert best(free, "gpus", None, 1e9).accelerators == 1


@pytest.mark.parametrize(
    ("kind", "batch", "memory"), [("h100x64", 64, 40.0), ("a100x48", 96, 2.4), ("h100x16", 8, 1.9)]
)
def test_parts_searched_together_have_the_best_of_each(kind: str, batch: int, memory: float) -> None:
    question = ask(replace(load_cluster(kind), memory_gib=memory), batch)
    together = {size: seconds for size, seconds, _ in each_size(question, sizes(question.cluster))}
    alone = {size: resized_search(resized(question, size)) for size in sizes(question.cluster)}
    assert together == {size: pytest.approx(best[0], rel=1e-9) for size, best in alone.items() if best}
    assert together


def test_no_smaller_part_of_a_large_group_is_in_time() -> None:
    mine = groups(group("large", "h100x112"))
    found = training_options(mine, ask, 96, TOKENS)
    deadline = 1.02 * max(option.days for option in found if option.accelerators >= 48)
    chosen = best(with_smaller_parts(mine, ask, 96, TOKENS, found, None, deadline), "gpus", None, deadline)
    question = ask(mine.groups[0].cluster, 96)
    steps = TOKENS / (96 * 512)
    enough = [
        size
        for size, seconds, _ in each_size(question, every_size(question.cluster))
        if steps * seconds / recommend(PUBLISHED["rsc"].seconds(size), Costs()).fraction <= deadline * 86400
    ]
    assert chosen.accelerators == min(enough)


def test_the_part_that_is_taken(found: list[TrainingOption]) -> None:
    mine = groups(group("here", "h100x16"))
    some = next(option for option in found if option.groups == ("here",) and option.accelerators == 8)
    assert cluster_of(mine, some).accelerators == 8


def test_the_picture_has_every_option(found: list[TrainingOption]) -> None:
    root = ElementTree.fromstring(svg(found, best(found, "cost", None, None), "llama & <co>"))
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == len(found) + 1


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(["a100", "h100", "l40s", "v100"]),
    nodes=st.integers(1, 4),
    memory=st.floats(0.8, 16),
    batch=st.sampled_from([8, 12, 64]),
    more=st.sampled_from(["nodes", "memory", "bandwidth", "group", "link"]),
)
def test_more_is_never_worse(kind: str, nodes: int, memory: float, batch: int, more: str) -> None:
    base = replace(load_cluster(f"{kind}x{8 * nodes}"), memory_gib=memory)
    larger = replace(load_cluster(f"{kind}x{8 * (nodes + 1)}"), memory_gib=memory)

    def of(cluster: ClusterSpec, gbit: float, *others: Group) -> tuple[float, float]:
        own = Group(name="mine", cluster=replace(cluster, name="mine"), price=1.0)
        try:
            found = training_options(groups(own, *others, gbit=gbit), ask_all, batch, TOKENS)
        except UserError:
            return float("inf"), float("inf")
        return min(option.days for option in found), min(option.cost or 0.0 for option in found)

    def ask_all(cluster: ClusterSpec, global_batch: int) -> Question:
        precision = "bf16" if "bf16" in cluster.peak_tflops else "fp16"
        return Question(model=DENSE, cluster=cluster, global_batch=global_batch, sequence=512, precision=precision)

    other = group("other", "a100x8", 1.0)
    before, after = {
        "nodes": lambda: (of(base, 1), of(larger, 1)),
        "memory": lambda: (of(base, 1), of(replace(base, memory_gib=2 * memory), 1)),
        "bandwidth": lambda: (
            of(base, 1),
            of(replace(base, tiers=tuple(replace(tier, bandwidth=2 * tier.bandwidth) for tier in base.tiers)), 1),
        ),
        "group": lambda: (of(base, 1), of(base, 1, other)),
        "link": lambda: (of(base, 1, other), of(base, 10, other)),
    }[more]()
    # Faster links may be spent on a milder table [islands], with which islands still compute that much of the time.
    most = 1 / COMPUTING if more == "link" else 1 + 1e-9
    assert after[0] <= before[0] * most
    assert after[1] <= before[1] * most
