"""Cluster files of several groups: sites, links, prices, and what is refused or said of them."""

from pathlib import Path

import pytest

from cuboid.errors import UserError
from cuboid.spec.cluster import load_cluster
from cuboid.spec.groups import GBIT, load_groups

TWO = """
[[groups]]
name = "oregon"
accelerator = "h100"
nodes = 4
price = 2.5
spot_price = 1.25
life_hours = 100
[[groups]]
name = "paris"
site = "france"
accelerator = "a100"
nodes = 8
memory_gib = 60
uplink_gbit = 10
[[links]]
between = ["oregon", "france"]
bandwidth_gbit = 5
latency_ms = 70
"""


def written(folder: Path, text: str) -> str:
    path = folder / "sites.toml"
    path.write_text(text)
    return str(path)


def test_groups_and_links(tmp_path: Path) -> None:
    found = load_groups(written(tmp_path, TWO))
    oregon, paris = found.groups
    assert (oregon.site, paris.site, found.accelerators) == ("oregon", "france", 4 * 8 + 8 * 8)
    assert (paris.cluster.memory_gib, paris.cluster.name) == (60.0, "paris")
    link = found.link(paris, oregon)
    assert (link.rate, link.latency) == (5e9 / 8, 0.07)
    assert (found.uplink(paris), found.uplink(oregon)) == (10 * GBIT, None)
    assert found.omitted() == [
        "tiers of oregon are not given: taken are nvlink4 × 8 at 450 GB/s each way and infiniband-ndr × 32 at 50 GB/s "
        "each way, usual with h100-80g",
        "tiers of paris are not given: taken are nvlink3 × 8 at 300 GB/s each way and infiniband-hdr × 64 at 25 GB/s "
        "each way, usual with a100-80g",
        "uplink_gbit of oregon is not given: only the links limit what a site sends",
        "price of paris is not given: what it costs is not said",
        "life_hours of paris is not given: it is taken to be lost as often as its accelerators fail",
    ]


def test_one_group_is_a_cluster_as_ever(tmp_path: Path) -> None:
    path = written(tmp_path, 'accelerator = "h100"\nnodes = 2\n')
    found = load_groups(path)
    assert [group.cluster for group in found.groups] == [load_cluster(path)]
    (said,) = found.omitted()
    assert said.startswith("tiers of sites are not given: taken are nvlink4 × 8")
    assert load_groups("h100x16").omitted() == [], "a name is no file"
    assert load_groups(written(tmp_path, 'accelerator = "h100"\naccelerators_per_node = 1\n')).omitted() == []
    assert load_groups("h100x8").groups[0].cluster == load_cluster("h100x8")


def test_a_file_with_one_group_is_that_cluster(tmp_path: Path) -> None:
    path = written(tmp_path, '[[groups]]\nname = "mine"\naccelerator = "a100"\nnodes = 3\nprice = 0\n')
    assert load_cluster(path).accelerators == 24
    assert load_groups(path).groups[0].price == 0


def test_one_group_of_a_file_is_a_cluster(tmp_path: Path) -> None:
    path = written(tmp_path, TWO)
    assert load_cluster(f"{path}:paris") == load_groups(path).groups[1].cluster
    with pytest.raises(UserError, match="has no group pariss; use paris"):
        load_cluster(f"{path}:pariss")
    with pytest.raises(UserError, match=r"this takes one kind; name one of them, as in .*:oregon or .*:paris"):
        load_cluster(path)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('name = "oregon"\n', "", "groups[0].name is missing; write name"),
        ('accelerator = "h100"\n', "", "group oregon: groups.accelerator is missing; write accelerator"),
        ("nodes = 4", "nods = 4", "group oregon: unknown key groups.nods; did you mean groups.nodes"),
        ("nodes = 8", "nodes = 0", "group paris: cluster.nodes=0 is not positive"),
        ("nodes = 8", "accelerators_per_node = 0", "group paris: cluster.accelerators_per_node=0 is not positive"),
        ('accelerator = "a100"', 'accelerator = "a101"', "group paris: unknown accelerator=a101; use a10g, a100"),
        ('accelerator = "a100"', 'accelerator = "a100x8"', "group paris: accelerator=a100x8 is an accelerator and a"),
        ("memory_gib = 60", "memory_gib = 81920", "group paris: cluster.memory_gib=81920 is not between 0.001 and 1"),
        ("price = 2.5", "price = -1", "group oregon: groups.price=-1 is not from 0 to 1e+06; use price=1"),
        ("price = 2.5", "price = 1", "group oregon: groups.spot_price=1.25 is above price=1; use spot_price=1 or less"),
        ("life_hours = 100", "life_hours = inf", "group oregon: groups.life_hours=inf is not finite; it must be"),
        ("uplink_gbit = 10", 'uplink_gbit = "10"', 'group paris: groups.uplink_gbit="10" is a string; it must be a'),
        ('name = "paris"', 'name = "oregon"', "groups.name=oregon is there twice"),
        ('name = "paris"', 'name = " "', "groups.name=' ' is no name"),
        ('["oregon", "france"]', '["oregon", "paris"]', "links.between names paris, which is no group's site; use"),
        ('["oregon", "france"]', '["oregon", "oregon"]', "sites has no link between oregon and paris; add [[links]]"),
        ('["oregon", "france"]', '["oregon"]', "links.between=['oregon'] does not name two sites"),
        ('between = ["oregon", "france"]', "", "links.between is missing; it must be a list"),
        (
            "bandwidth_gbit = 5",
            "bandwidth = 5",
            "link between oregon and france: unknown key links.bandwidth; did you mean links.bandwidth_gbit",
        ),
        (
            "bandwidth_gbit = 5",
            "bandwidth_gbit = 0",
            "link between oregon and france: links.bandwidth_gbit=0 is not above 0",
        ),
        (
            "latency_ms = 70",
            "latency_ms = 1e9",
            "link between oregon and france: links.latency_ms=1e+09 is not above 0 and at",
        ),
        ("latency_ms = 70", "", "link between oregon and france: links.latency_ms is missing; it must be a number"),
        ("[[links]]", "[[lines]]", "unknown key cluster.lines; did you mean cluster.links"),
        ("[[links]]", "links = 3\n[[lines]]", "unknown key"),
        ("[[links]]", "[links]", "links is no list of tables; write [[links]] before each"),
        (TWO, "groups = []", "sites has 0 groups; use 1 to 256"),
        (TWO, 'groups = ["a"]', "groups is no list of tables; write [[groups]] before each of them"),
        (TWO, '[groups.oregon]\naccelerator = "h100"', "groups is no list of tables; write [[groups]]"),
        (TWO, '[[group]]\nname = "a"', "unknown key cluster.group; did you mean cluster.groups"),
        (TWO, "links = []", "{path} has links and no groups to link; add [[groups]]"),
    ],
)
def test_what_is_refused(before: str, after: str, sentence: str, tmp_path: Path) -> None:
    assert before in TWO
    path = written(tmp_path, TWO.replace(before, after))
    with pytest.raises(UserError) as caught:
        load_groups(path)
    assert str(caught.value).startswith(sentence.format(path=path))


def test_two_links_between_the_same_sites_are_refused(tmp_path: Path) -> None:
    again = '[[links]]\nbetween = ["france", "oregon"]\nbandwidth_gbit = 1\nlatency_ms = 1\n'
    with pytest.raises(UserError, match="links has two between france and oregon; use one with the sum of both"):
        load_groups(written(tmp_path, TWO + again))


def test_groups_of_one_site_need_a_link_within_it(tmp_path: Path) -> None:
    text = TWO.replace('name = "oregon"', 'name = "oregon"\nsite = "france"').replace("oregon", "oregon")
    text = text.replace('["oregon", "france"]', '["france", "france"]')
    found = load_groups(written(tmp_path, text))
    assert found.link(*found.groups).latency_ms == 70
    assert found.uplink(found.groups[0]) == 10 * GBIT  # a site has one
