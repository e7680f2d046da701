"""Clusters: names, files, tiers, and a source for every constant of the catalog."""

import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from cuboid.errors import UserError
from cuboid.spec.cluster import ClusterSpec, LinkTier, accelerator_names, accelerator_table, load_cluster
from cuboid.spec.layout import Layout
from cuboid.spec.ranks import groups

CATALOG = tomllib.loads((files("cuboid.spec.catalog") / "accelerators.toml").read_text(encoding="utf-8"))


def refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        load_cluster(text)
    return str(caught.value)


def written(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_name_gives_nodes_and_tiers() -> None:
    cluster = load_cluster("h100x1024")
    assert (cluster.name, cluster.accelerator, cluster.nodes, cluster.accelerators_per_node) == (
        "h100x1024",
        "h100-80g",
        128,
        8,
    )
    assert [(tier.name, tier.size) for tier in cluster.tiers] == [("nvlink4", 8), ("infiniband-ndr", 1024)]
    assert cluster.peak_tflops["bf16"] == 989.4
    assert cluster.accelerators == 1024


def test_small_clusters_are_one_part_of_a_node() -> None:
    assert [
        (c.nodes, c.accelerators_per_node, len(c.tiers)) for c in map(load_cluster, ("h100x8", "h100x3", "cpux8"))
    ] == [
        (1, 8, 1),
        (1, 3, 1),
        (1, 8, 1),
    ]


@pytest.mark.parametrize(
    ("name", "accelerator", "tiers"),
    [
        ("a100-80gx4096", "a100-80g", [8, 4096]),
        ("gb200x144", "gb200", [72, 144]),
        ("gb200x64", "gb200", [64]),
        ("mi300xx16", "mi300x", [8, 16]),
        ("mi300x16", "mi300x", [8, 16]),
        ("H100x16", "h100-80g", [8, 16]),
        ("tpu-v5ex512", "tpu-v5e", [256, 512]),
    ],
)
def test_names_and_aliases_resolve(name: str, accelerator: str, tiers: list[int]) -> None:
    cluster = load_cluster(name)
    assert (cluster.accelerator, [tier.size for tier in cluster.tiers]) == (accelerator, tiers)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("h100x12", "cluster=h100x12 does not fill nodes of 8; use h100x8 or h100x16"),
        ("h100x0", "cluster=h100x0 has no accelerators; use h100x1 or more"),
        ("h1000x8", "unknown accelerator=h1000; did you mean h100"),
        ("h100", "cluster=h100 does not say how many accelerators; write it like h100x8"),
        ("nowhere.toml", "nowhere.toml does not exist"),
    ],
)
def test_bad_names_are_refused_in_one_sentence(text: str, sentence: str) -> None:
    assert refusal(text).startswith(sentence)


def test_the_slowest_tier_a_group_crosses() -> None:
    cluster = load_cluster("gb200x144")
    assert cluster.tier_of([0]).name == "nvlink5"
    assert cluster.tier_of([0, 71]).name == "nvlink5"
    assert cluster.tier_of([71, 72]).name == "infiniband-ndr"
    assert (cluster.node_of(3), cluster.node_of(4)) == (0, 1)
    with pytest.raises(UserError, match=r"rank=144 is outside gb200x144; use rank=0 to rank=143"):
        cluster.tier_of([0, 144])


def test_tensor_parallel_stays_inside_a_node() -> None:
    cluster, found = load_cluster("h100x64"), groups(Layout(dp=4, tp=8, pp=2))
    assert {cluster.tier_of(group).name for group in found["tp"]} == {"nvlink4"}
    assert {cluster.tier_of(group).name for group in found["dp"]} == {"infiniband-ndr"}


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    cluster = load_cluster(
        written(tmp_path, 'accelerator = "h100"\nnodes = 4\nmemory_gib = 60\n[peak_tflops]\nbf16 = 800\n')
    )
    assert (cluster.name, cluster.accelerator, cluster.accelerators, cluster.memory_gib) == (
        "mine",
        "h100-80g",
        32,
        60.0,
    )
    assert cluster.peak_tflops == {"bf16": 800.0}
    assert [tier.size for tier in cluster.tiers] == [8, 32]


def test_a_file_may_describe_everything_itself(tmp_path: Path) -> None:
    text = """
        accelerator = "abacus"
        nodes = 2
        accelerators_per_node = 3
        memory_gib = 1
        memory_bandwidth = 2
        peak_tflops = { float32 = 1 }
        [[tiers]]
        name = "rod"
        size = 3
        bandwidth = 1
        latency = 9
        [[tiers]]
        name = "post"
        size = 6
        bandwidth = 0.1
        latency = 99
    """
    cluster = load_cluster(written(tmp_path, text))
    assert cluster.tiers[1] == LinkTier(name="post", size=6, bandwidth=0.1, latency=99)
    assert cluster.tier_of([2, 3]).name == "post"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nodes = 4", "cluster.accelerator is missing"),
        ("accelerator = 4", "cluster.accelerator=4 is not a string"),
        ('accelerator = "h101"', "unknown accelerator=h101; did you mean h100"),
        ('accelerator = "h100"\nnods = 4', "unknown key cluster.nods; did you mean cluster.nodes"),
        ('accelerator = "h100"\nnodes = "4"', 'cluster.nodes="4" is a string; it must be an integer'),
        ('accelerator = "h100"\nnodes = 0', "cluster.nodes=0 is not positive"),
        ('accelerator = "h100"\nhost_memory_gib = -1', "cluster.host_memory_gib=-1.0 is negative; use 0"),
        ('accelerator = "h100"\nmemory_gib = 0', "cluster.memory_gib=0.0 is not positive"),
        ('accelerator = "h100"\npeak_tflops = 3', "cluster.peak_tflops=3 is an integer; it must be a table"),
        ('accelerator = "h100"\npeak_tflops = { bf16 = -1 }', "cluster.peak_tflops.bf16=-1.0 is not positive"),
        ('accelerator = "h100"\ntiers = 3', "tiers is no list of tables; write [[tiers]] before each of them"),
        ('accelerator = "h100"\n[tiers]\nname = "a"', "tiers is no list of tables; write [[tiers]]"),
        ('accelerator = "h100"\npeak_tflops = { BF16 = 9 }', "unknown key cluster.peak_tflops.BF16; did you mean"),
        ('accelerator = "h100"\npeak_tflops = { fp8 = 9 }', "cluster.peak_tflops has none of bf16, fp16, float32"),
        ('accelerator = "h100"\npeak_tflops = { bf16 = 9e14 }', "cluster.peak_tflops.bf16=9e+14 is more than 1e+06"),
        ('accelerator = "h100"\nmemory_gib = 81559', "cluster.memory_gib=81559 is not between 0.001 and 10000; write"),
        ('accelerator = "h100"\nmemory_bandwidth = 3.35e12', "cluster.memory_bandwidth=3.35e+12 is not between"),
        ('accelerator = "h100"\naccelerators_per_node = 0', "cluster.accelerators_per_node=0 is not positive"),
        ('accelerator = "h100x16"', 'accelerator=h100x16 is an accelerator and a number; write accelerator = "h100"'),
        ('accelerator = "NVIDIA GeForce RTX 4090"', "unknown accelerator=NVIDIA GeForce RTX 4090; did you mean rtx-4"),
        ('accelerator = "NVIDIA GH200 480GB"', "unknown accelerator=NVIDIA GH200 480GB; did you mean gh200"),
        (
            'accelerator = "abacus"\nmemory_gib = 1',
            "unknown accelerator=abacus; use v100, v100-32g or v100-16g, or add also tiers and peak_tflops and mem",
        ),
        ('[[group]]\nname = "a"', "unknown key cluster.group; did you mean cluster.groups"),
        (
            'accelerator = "h100"\ntiers = [{ name = "a", size = 8, bandwidth = 1e10, latency = 1 }]',
            "tier.bandwidth=1e+10 of a is not between 1e-06 and 1e+06; write it in GB/s",
        ),
        (
            'accelerator = "h100"\ntiers = [{ name = "a", size = 8, bandwidth = 1, latency = 1e-6 }]',
            "tier.latency=1e-06 of a is not between 0.001 and 1e+07; write it in microseconds",
        ),
        ('accelerator = "h100"\ntiers = []', "cluster.tiers sizes none do not grow to the cluster; end with size=8"),
        (
            'accelerator = "h100"\ntiers = [{ name = "a", size = 4, bandwidth = 1, latency = 1 }]',
            "cluster.tiers sizes a=4 do",
        ),
        (
            'accelerator = "h100"\ntiers = [{ name = "a", size = 8, bandwidth = 0, latency = 1 }]',
            "tier.bandwidth=0.0 of a",
        ),
        ('accelerator = "h100"\ntiers = [{ name = "a", size = 8 }]', "cluster.tiers[0].bandwidth is missing"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    assert refusal(written(tmp_path, text)).startswith(sentence)


def test_links_inside_a_node_end_with_the_node(tmp_path: Path) -> None:
    found = load_cluster(written(tmp_path, 'accelerator = "l40s"\nnodes = 5\naccelerators_per_node = 7\n'))
    assert [tier.size for tier in found.tiers] == [7, 35]
    rack = load_cluster(written(tmp_path, 'accelerator = "gb200"\nnodes = 40\naccelerators_per_node = 2\n'))
    assert [tier.size for tier in rack.tiers] == [72, 80]


def test_every_accelerator_makes_a_cluster() -> None:
    for name in accelerator_names():
        cluster = load_cluster(f"{name}x1152")
        assert isinstance(cluster, ClusterSpec) and cluster.accelerators == 1152
        assert "bf16" in cluster.peak_tflops or "fp16" in cluster.peak_tflops
        bandwidths = [tier.bandwidth for tier in cluster.tiers]
        assert bandwidths == sorted(bandwidths, reverse=True)
        hash(cluster)


def test_every_constant_names_its_source() -> None:
    for name, link in CATALOG["links"].items():
        assert set(link["source"]) == set(link) - {"source"}, name
    for name, entry in CATALOG["accelerators"].items():
        own = set(entry) - {"source", "base", "aliases", "accelerators_per_node"}
        assert set(entry["source"]) == own, name
        table = accelerator_table(name)
        always = {"memory_gib", "memory_bandwidth", "peak_tflops", "tiers"}
        assert set(table["source"]) == always | ({"watts"} if "watts" in table else set())
        assert ("watts" in table) == (name not in ("cpu", "tpu-v5e", "tpu-v5p", "tpu-v6e")), name


def test_board_power_is_the_catalogs_unless_a_file_says_another(tmp_path: Path) -> None:
    assert load_cluster("h100x8").watts == 700
    assert load_cluster("tpu-v5ex8").watts == 0
    limited = tmp_path / "limited.toml"
    limited.write_text('accelerator = "h100"\nwatts = 500\n')
    assert load_cluster(str(limited)).watts == 500
    limited.write_text('accelerator = "h100"\nwatts = -1.0\n')
    with pytest.raises(UserError, match=r"cluster\.watts=-1 is not from 0"):
        load_cluster(str(limited))


def test_every_link_is_used() -> None:
    used = {tier["link"] for entry in CATALOG["accelerators"].values() for tier in entry.get("tiers", [])}
    assert used == set(CATALOG["links"])


def test_the_page_lists_every_accelerator() -> None:
    page = (Path(__file__).parents[2] / "docs/clusters.md").read_text(encoding="utf-8")
    row = r"^\| `([\w-]+)` \| [^|]*\| [^|]*\| ([\d.]+) \| [\d.,]+ \| ([\d.,]+|–) \|"
    rows = re.findall(row, page, re.MULTILINE)
    listed = {name: memory for name, memory, _ in rows}
    power = {name: float(watts.replace(",", "")) for name, _, watts in rows if watts != "–"}
    assert power == {name: table["watts"] for name in listed if "watts" in (table := accelerator_table(name))}
    names = set(accelerator_names().values())
    assert {name: float(memory) for name, memory in listed.items()} == {
        name: accelerator_table(name)["memory_gib"] for name in names
    }
