"""`cuboid clusters [sites.toml]`: accelerators and links that Cuboid knows by name, or what a cluster file says."""

from dataclasses import asdict
from itertools import combinations
from typing import Annotated

import typer

from cuboid.spec.cluster import ClusterSpec, accelerator_names, accelerator_table, link_table
from cuboid.spec.groups import Group, Groups, load_groups
from cuboid.strict_json import json_text


def command(
    cluster: Annotated[
        str | None, typer.Argument(help="A cluster file, or a name such as h100x32: show what it says.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the accelerators and links Cuboid knows by name, or show what a cluster file says and what it omits.

    Example: cuboid clusters
    Example: cuboid clusters sites.toml
    """
    if cluster is not None:
        found = load_groups(cluster)
        if as_json:
            print(json_text(as_row(found)))
        else:
            _show_file(found)
        return
    names = dict.fromkeys(accelerator_names().values())
    if as_json:
        accelerators = [_row(name) for name in names]
        print(json_text({"accelerators": accelerators, "links": [{"name": name} | row for name, row in _links()]}))
        return
    _show_catalog(list(names))


def as_row(found: Groups) -> dict[str, object]:
    """A cluster file as JSON."""
    links = [
        {"between": [first.name, second.name]}
        | {key: getattr(found.link(first, second), key) for key in ("bandwidth_gbit", "latency_ms")}
        for first, second in combinations(found.groups, 2)
    ]
    return {
        "name": found.name,
        "accelerators": found.accelerators,
        "groups": [_group_row(group) for group in found.groups],
        "links": links,
        "omitted": found.omitted(),
    }


def _group_row(group: Group) -> dict[str, object]:
    row = {key: value for key, value in asdict(group).items() if key != "cluster"}
    cluster = group.cluster
    return row | {
        "accelerator": cluster.accelerator,
        "nodes": cluster.nodes,
        "accelerators_per_node": cluster.accelerators_per_node,
        "memory_gib": cluster.memory_gib,
        "watts": cluster.watts or None,
        "tiers": [asdict(tier) for tier in cluster.tiers],
    }


def _row(name: str) -> dict[str, object]:
    table = accelerator_table(name)
    aliases = [alias for alias, canonical in accelerator_names().items() if canonical == name and alias != name]
    return {"name": name, **table, "aliases": aliases}


def _links() -> list[tuple[str, dict[str, object]]]:
    return list(link_table().items())


def _show_catalog(names: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("accelerator", style="bold", no_wrap=True)
    for head in ("TFLOPS", "GiB", "GB/s", "W", "a node"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("links")
    for name in names:
        entry = accelerator_table(name)
        peaks = entry["peak_tflops"]
        domains = [f"{tier['link']} × {tier['size']}" if tier["size"] else tier["link"] for tier in entry["tiers"]]
        table.add_row(
            name,
            f"{peaks.get('bf16', peaks.get('fp16')):g}",
            f"{entry['memory_gib']:g}",
            f"{entry['memory_bandwidth']:,g}",
            f"{entry['watts']:,g}" if "watts" in entry else "–",
            str(entry["accelerators_per_node"] or "any"),
            ", ".join(domains),
        )
    console.print(table)
    links = Table(box=None, pad_edge=False)
    links.add_column("link", style="bold", no_wrap=True)
    for head in ("GB/s each way", "latency µs"):
        links.add_column(head, justify="right", no_wrap=True)
    links.add_column("source of its bandwidth")
    for name, row in _links():
        source = row["source"]
        assert isinstance(source, dict)
        links.add_row(name, f"{row['bandwidth']:g}", f"{row['latency']:g}", source["bandwidth"])
    console.print(links)
    console.print("TFLOPS: dense, bf16 (fp16 where there is none). W: board power.")
    console.print("--json has all precisions, aliases and sources.")


def _show_file(found: Groups) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{found.name}: {found.accelerators:,} accelerators")
    table = Table(box=None, pad_edge=False)
    for head in (
        "group",
        "site",
        "accelerators",
        "GiB",
        "W",
        "links inside",
        "uplink Gbit/s",
        "price",
        "spot",
        "life h",
    ):
        table.add_column(head, style="bold" if head == "group" else None, no_wrap=head == "accelerators")
    for group in found.groups:
        given = (group.uplink_gbit, group.price, group.spot_price, group.life_hours)
        table.add_row(
            group.name,
            group.site,
            _counted(group.cluster),
            f"{group.cluster.memory_gib:g}",
            f"{group.cluster.watts:g}" if group.cluster.watts else "–",
            ", ".join(f"{tier.name} × {tier.size}" for tier in group.cluster.tiers),
            *("–" if value is None else f"{value:g}" for value in given),
        )
    console.print(table)
    for first, second in combinations(found.groups, 2):
        link = found.link(first, second)
        console.print(
            f"{first.name} ↔ {second.name}: {link.bandwidth_gbit:g} Gbit/s each way, {link.latency_ms:g} ms",
            markup=False,
        )
    for sentence in found.omitted():
        console.print(f"! {sentence}", style="yellow", markup=False)


def _counted(cluster: ClusterSpec) -> str:
    return f"{cluster.nodes} × {cluster.accelerators_per_node} {cluster.accelerator}"
