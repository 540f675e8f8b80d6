"""A cluster as a value: hosts, the ranks on each, and the links between them, in a file that a person can read and change.

A host has `per_host` ranks (one per accelerator, or per core) and `ports` network cards; rank i of a host uses port
i * ports // per_host, as drivers place them. Every port is full duplex. Hosts may be in groups below an uplink that carries
less than their ports together: a thin tree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, Literal, cast

from phalanx.schedule.limits import MAX_RANKS
from phalanx.schedule.plain_json import brief, loads

Sharing = Literal["pair", "rank", "host"]
GBIT = 1e9 / 8  # bytes/s
GB = 1e9  # bytes/s, as vendors count
MAX_PORTS = 1024  # network cards of a host
MAX_TEXT = 1000  # characters of a name or a source
LARGEST = 1e15  # of any number in a file: no link is this fast, no world this large


class ClusterError(ValueError):
    """A cluster that cannot exist, or a file that does not describe one. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a wire: seconds for the first byte, bytes per second for the rest. Both directions work at once."""

    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Uplink:
    """What `hosts` neighbouring hosts share on the way to all others; `bandwidth` in bytes/s, each way."""

    hosts: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """`hosts` equal hosts of `per_host` ranks. `sources` says where each number comes from.

    `shared` says what has its own link inside a host: every `pair` of ranks (a mesh of NVLinks), every `rank` (a switch with
    a port each), or only the `host` (one bus for all messages).
    """

    name: str
    hosts: int
    per_host: int
    inside: Link
    network: Link  # per port
    ports: int = 1
    shared: Sharing = "rank"
    uplink: Uplink | None = None
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for field in ("hosts", "per_host", "ports"):
            if getattr(self, field) < 1:
                raise ClusterError(f"cluster {self.name}: {field}={getattr(self, field)}; give at least 1")
        if self.ranks > MAX_RANKS or self.ports > MAX_PORTS:
            raise ClusterError(
                f"cluster {self.name}: {self.hosts} hosts of {self.per_host} ranks and {self.ports} ports;"
                f" at most {MAX_RANKS} ranks in all, and {MAX_PORTS} ports per host"
            )
        for field, link in (("inside", self.inside), ("network", self.network)):
            if not (0 <= link.latency < inf and 0 < link.bandwidth < inf):
                raise ClusterError(f"cluster {self.name}: {field} has {link}; give latency >= 0 and bandwidth > 0")
        if self.shared not in ("pair", "rank", "host"):
            raise ClusterError(f"cluster {self.name}: shared={self.shared!r}; give 'pair', 'rank' or 'host'")
        if self.uplink and not (self.uplink.hosts >= 1 and 0 < self.uplink.bandwidth < inf):
            raise ClusterError(f"cluster {self.name}: {self.uplink}; give at least 1 host and bandwidth > 0")

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    def with_ranks(self, ranks: int) -> Cluster:
        """As many hosts of the same kind as `ranks` need. Fewer ranks than one host has make one smaller host."""
        if ranks < 1:
            raise ClusterError(f"cluster {self.name}: {ranks} ranks; give at least 1")
        per_host = min(self.per_host, ranks)
        if ranks % per_host:
            raise ClusterError(
                f"cluster {self.name}: {ranks} ranks do not fill hosts of {per_host}; give a multiple of {per_host}"
            )
        ports = max(1, ceil(self.ports * per_host / self.per_host))
        return replace(self, hosts=ranks // per_host, per_host=per_host, ports=ports)


def uniform(ranks: int, *, latency: float, bandwidth: float) -> Cluster:
    """`ranks` hosts of one rank each and equal links: where textbook formulas hold."""
    link = Link(latency, bandwidth)
    return Cluster(f"uniform({ranks})", ranks, 1, inside=link, network=link)


def to_json(cluster: Cluster) -> str:
    """`cluster` as a file for people: microseconds, GB/s inside a host, Gbit/s between hosts."""
    content: dict[str, Any] = {
        "name": cluster.name,
        "hosts": cluster.hosts,
        "per_host": cluster.per_host,
        "inside": {
            "latency_us": cluster.inside.latency * 1e6,
            "gigabytes_per_s": cluster.inside.bandwidth / GB,
            "shared": cluster.shared,
        },
        "network": {
            "latency_us": cluster.network.latency * 1e6,
            "gigabits_per_s": cluster.network.bandwidth / GBIT,
            "ports": cluster.ports,
        },
    }
    if cluster.uplink:
        content["uplink"] = {"hosts": cluster.uplink.hosts, "gigabits_per_s": cluster.uplink.bandwidth / GBIT}
    if cluster.sources:
        content["sources"] = dict(cluster.sources)
    return json.dumps(content, indent=2) + "\n"


def from_json(text: str) -> Cluster:
    """The cluster in a file that `to_json` or a person wrote."""
    try:
        content = loads(text)
    except ValueError as error:
        raise ClusterError(f"a cluster file is JSON: {error}") from None
    if not isinstance(content, dict):
        raise ClusterError("a cluster file is one JSON object; `phalanx plan --show-cluster NAME` prints an example")
    top = _Reader(content, "the cluster file")
    inside, network = top.part("inside"), top.part("network")
    uplink = top.part("uplink") if "uplink" in content else None
    sources = top.part("sources") if "sources" in content else None
    cluster = Cluster(
        name=top.text("name", "unnamed"),
        hosts=top.whole("hosts"),
        per_host=top.whole("per_host"),
        inside=Link(inside.number("latency_us") / 1e6, inside.number("gigabytes_per_s") * GB),
        network=Link(network.number("latency_us") / 1e6, network.number("gigabits_per_s") * GBIT),
        ports=network.whole("ports", 1),
        shared=cast("Sharing", inside.text("shared", "rank")),
        uplink=Uplink(uplink.whole("hosts"), uplink.number("gigabits_per_s") * GBIT) if uplink else None,
        sources=tuple((key, sources.text(key)) for key in sources.content) if sources else (),
    )
    top.no_others("name", "hosts", "per_host", "inside", "network", "uplink", "sources")
    inside.no_others("latency_us", "gigabytes_per_s", "shared")
    network.no_others("latency_us", "gigabits_per_s", "ports")
    if uplink:
        uplink.no_others("hosts", "gigabits_per_s")
    return cluster


@dataclass(frozen=True, slots=True)
class _Reader:
    """A JSON object that is read by name, so that every error can name the value."""

    content: dict[str, Any]
    where: str

    def part(self, name: str) -> _Reader:
        value = self.content.get(name)
        if not isinstance(value, dict):
            raise ClusterError(f"{self.where} has no object {name!r}; `phalanx plan --show-cluster NAME` prints an example")
        return _Reader(value, f"{name!r} of {self.where}")

    def number(self, name: str) -> float:
        value = self.content.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ClusterError(f"{self.where}: {name} is {brief(value)}; give a number")
        if abs(value) > LARGEST:
            raise ClusterError(f"{self.where}: {name} is {brief(value)}; give a number of at most {LARGEST:g}")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.content.get(name, default)
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise ClusterError(f"{self.where}: {brief(name)} is {brief(value)}; give a text of at most {MAX_TEXT} characters")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.content.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ClusterError(f"{self.where}: {name} is {brief(value)}; give a whole number")
        if abs(value) > LARGEST:
            raise ClusterError(f"{self.where}: {name} is {brief(value)}; give a number of at most {LARGEST:g}")
        return value

    def no_others(self, *names: str) -> None:
        others = sorted(self.content.keys() - set(names))
        if others:
            raise ClusterError(f"{self.where}: {brief(others[0])} is unknown; there are {', '.join(names)}")
