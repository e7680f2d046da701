"""Clusters that are not all alike, from one TOML file: groups of equal accelerators, the sites they stand at, and the
links between them.

[[groups]]
name = "oregon"               # its site too, unless `site` says another one
accelerator = "h100"          # and whatever else a cluster file may say
nodes = 4

[[groups]]
name = "paris"
accelerator = "a100"
nodes = 8
uplink_gbit = 10.0            # of the site, to all others together

[[links]]
between = ["oregon", "paris"]
bandwidth_gbit = 5.0          # Gbit/s in each direction, of all accelerators together
latency_ms = 70.0             # in one direction

A file without groups is a single one: it means what it means to `load_cluster`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from cuboid.errors import UserError, either, nearest_names
from cuboid.readers import Table, read_toml
from cuboid.spec.cluster import ClusterSpec, cluster_from_table, load_cluster, tables_of
from cuboid.spec.coding import check_types, convert, decode, field_types, require_known

MOST_GROUPS = 256
GBIT = 1e9 / 8
"""Bytes."""
FASTEST_GBIT = 1e6
LONGEST_MS = 1e5


@dataclass(frozen=True, kw_only=True)
class SiteLink:
    """Between two sites, or with one name twice between groups of one site."""

    between: tuple[str, ...]
    bandwidth_gbit: float
    """Gbit/s in each direction, of all accelerators together."""
    latency_ms: float
    """In one direction."""

    def __post_init__(self) -> None:
        check_types(self, "links")
        if len(self.between) != 2:
            raise UserError(f"links.between={list(self.between)} does not name two sites; write between = [A, B]")
        _require_within("links", "bandwidth_gbit", self.bandwidth_gbit, FASTEST_GBIT)
        _require_within("links", "latency_ms", self.latency_ms, LONGEST_MS)

    @property
    def rate(self) -> float:
        """Bytes a second, in each direction."""
        return self.bandwidth_gbit * GBIT

    @property
    def latency(self) -> float:
        """Seconds in one direction."""
        return self.latency_ms / 1e3


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal accelerators at one site; with others it makes a cluster that is not all alike."""

    name: str
    cluster: ClusterSpec
    site: str = ""
    """Where it stands; default: a site of its own, of its name."""
    price: float | None = None
    """Of an accelerator for an hour, on demand, in any one currency; 0: it is there anyway."""
    spot_price: float | None = None
    """… and where it may be taken away."""
    life_hours: float | None = None
    """Mean hours until the group as a whole is lost: taken away, or its site is."""
    uplink_gbit: float | None = None
    """Gbit/s of its site in each direction, to all others together."""
    usual_links: bool = False
    """Its file gives no tiers: those of the accelerator's usual nodes are taken."""

    def __post_init__(self) -> None:
        check_types(self, "groups")
        if not self.name.strip() or not self.name.isprintable() or ":" in self.name:
            raise UserError(f"groups.name={self.name!r} is no name; write letters and digits, without a colon")
        object.__setattr__(self, "site", self.site or self.name)
        for key, most in (("price", 1e6), ("spot_price", 1e6), ("life_hours", 1e7), ("uplink_gbit", FASTEST_GBIT)):
            value = getattr(self, key)
            if value is not None:
                _require_within("groups", key, value, most, free=key in ("price", "spot_price"))
        if self.price is not None and self.spot_price is not None and self.spot_price > self.price:
            raise UserError(
                f"groups.spot_price={self.spot_price:g} is above price={self.price:g}; use "
                f"spot_price={self.price:g} or less"
            )


OWN = ("name", "site", "price", "spot_price", "life_hours", "uplink_gbit")
"""What a group says beside what its cluster says."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """All there is in a cluster file."""

    name: str
    groups: tuple[Group, ...]
    links: tuple[SiteLink, ...] = ()

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not names or len(names) > MOST_GROUPS:
            raise UserError(f"{self.name} has {len(names)} groups; use 1 to {MOST_GROUPS}")
        if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise UserError(f"groups.name={twice} is there twice; use another name for one of them")
        sites = list(dict.fromkeys(group.site for group in self.groups))
        known: set[frozenset[str]] = set()
        for link in self.links:
            for site in link.between:
                if site not in sites:
                    near = either(nearest_names(site, sites, len(sites)))
                    raise UserError(f"links.between names {site}, which is no group's site; use {near}")
            if frozenset(link.between) in known:
                raise UserError(f"links has two between {' and '.join(link.between)}; use one with the sum of both")
            known.add(frozenset(link.between))
        for first, second in combinations(self.groups, 2):
            if frozenset((first.site, second.site)) not in known:
                where = f'["{first.site}", "{second.site}"]'
                raise UserError(
                    f"{self.name} has no link between {first.name} and {second.name}; add [[links]] with "
                    f"between = {where}, bandwidth_gbit and latency_ms"
                )
        uplinks: dict[str, float] = {}
        for group in self.groups:
            own = group.uplink_gbit
            if own is not None and uplinks.setdefault(group.site, own) != own:
                raise UserError(
                    f"groups.uplink_gbit={own:g} of {group.name} differs from that of another group at {group.site}; "
                    f"use {uplinks[group.site]:g} for both"
                )

    @property
    def accelerators(self) -> int:
        return sum(group.cluster.accelerators for group in self.groups)

    def link(self, first: Group, second: Group) -> SiteLink:
        sites = {first.site, second.site}
        return next(link for link in self.links if set(link.between) == sites)

    def uplink(self, group: Group) -> float | None:
        """Bytes a second that a group's site sends to all others together; None: only links limit it."""
        gbit = next((each.uplink_gbit for each in self.groups if each.site == group.site and each.uplink_gbit), None)
        return None if gbit is None else gbit * GBIT

    def omitted(self) -> list[str]:
        """What the file does not say, and what that means."""
        found = self._usual_links()
        if len(self.groups) == 1:
            return found
        lacking = {
            "uplink_gbit": "only the links limit what a site sends",
            "price": "what it costs is not said",
            "life_hours": "it is taken to be lost as often as its accelerators fail",
        }
        for key, meaning in lacking.items():
            names = [group.name for group in self.groups if getattr(group, key) is None]
            if key == "price":
                names = [group.name for group in self.groups if group.price is None and group.spot_price is None]
            if names:
                found.append(f"{key} of {_listed(names)} is not given: {meaning}")
        if names := [group.name for group in self.groups if not group.cluster.watts]:
            found.append(f"watts of {_listed(names)} is not given, nor in the catalog: its energy is not known")
        return found

    def _usual_links(self) -> list[str]:
        """Links that are taken for groups whose file gives none."""
        alike: dict[str, list[str]] = {}
        for group in self.groups:
            if group.usual_links:
                tiers = [
                    f"{tier.name} × {tier.size:,} at {tier.bandwidth:g} GB/s each way" for tier in group.cluster.tiers
                ]
                alike.setdefault(f"{_listed(tiers)}, usual with {group.cluster.accelerator}", []).append(group.name)
        return [f"tiers of {_listed(names)} are not given: taken are {links}" for links, names in alike.items()]


def load_groups(text: str) -> Groups:
    """A cluster file with groups, or a single cluster by name or file; `FILE.toml:NAME` is one group of a file."""
    path, _, chosen = text.partition(".toml:")
    if chosen:
        found = _from_file(Path(f"{path}.toml"))
        group = next((group for group in found.groups if group.name == chosen), None)
        if group is None:
            names = [each.name for each in found.groups]
            raise UserError(f"{path}.toml has no group {chosen}; use {either(nearest_names(chosen, names))}")
        return Groups(name=chosen, groups=(group,))
    if text.endswith(".toml"):
        return _from_file(Path(text))
    return _single(load_cluster(text))


def _single(cluster: ClusterSpec) -> Groups:
    return Groups(name=cluster.name, groups=(Group(name=cluster.name, cluster=cluster),))


def _from_file(path: Path) -> Groups:
    table = read_toml(path)
    if "groups" not in table:
        if "links" in table:
            raise UserError(f"{path} has links and no groups to link; add [[groups]]")
        group = _single(cluster_from_table(table, path)).groups[0]
        return Groups(name=group.name, groups=(replace(group, usual_links=_takes_usual_links(group.cluster, table)),))
    for key in table:
        require_known(key, dict.fromkeys(("name", "groups", "links")), "cluster")
    name = convert(table.get("name", path.stem), str, "cluster.name")
    groups = tuple(_group(entry, number) for number, entry in enumerate(tables_of(table, "groups")))
    links = tuple(_link(entry) for entry in tables_of(table, "links"))
    return Groups(name=name, groups=groups, links=links)


def _group(table: Table, number: int) -> Group:
    if "name" not in table:
        raise UserError(f'groups[{number}].name is missing; write name = "oregon" in each [[groups]]')
    name = convert(table["name"], str, f"groups[{number}].name")
    try:
        for key in table:
            require_known(key, {**dict.fromkeys(OWN), **field_types(ClusterSpec)}, "groups")
        if "accelerator" not in table:
            raise UserError('groups.accelerator is missing; write accelerator = "h100"')
        own: dict[str, object] = {key: table.pop(key) for key in OWN if key in table}
        cluster = cluster_from_table({"nodes": 1, **table, "name": name or "-"}, Path(name))
        return decode(Group, {**own, "cluster": cluster, "usual_links": _takes_usual_links(cluster, table)}, "groups")
    except UserError as error:  # of many groups, says which
        raise UserError(f"group {name}: {error}" if name.strip() and name.isprintable() else str(error)) from None


def _link(table: Table) -> SiteLink:
    try:
        return decode(SiteLink, table, "links")
    except UserError as error:
        between = table.get("between")
        sites = [str(site) for site in between] if isinstance(between, list) and len(between) == 2 else []
        raise UserError(f"link between {' and '.join(sites)}: {error}" if sites else str(error)) from None


def _takes_usual_links(cluster: ClusterSpec, table: Mapping[str, object]) -> bool:
    return "tiers" not in table and cluster.accelerators > 1


def _require_within(where: str, key: str, value: float, most: float, free: bool = False) -> None:
    """`free`: it may be 0."""
    if not 0 < value <= most and not (free and value == 0):
        range_of = f"from 0 to {most:g}" if free else f"above 0 and at most {most:g}"
        raise UserError(f"{where}.{key}={value:g} is not {range_of}; use {key}={1 if free else 10}")


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
