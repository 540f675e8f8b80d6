"""Which wires a message uses: the stages that it passes one after another, and the share that each group gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .machine import Cluster
from .profile import BackendProfile, CallGroup, Hops

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
OUT, IN = "port out", "port in"  # keys of hosts' ports to the network


@dataclass(frozen=True, slots=True)
class RouteStage:
    """Messages `of` a step share their `port` of this kind, which has `rate` bytes/s. One alone uses at most `most`."""

    of: Ints
    port: Ints  # numbered from 0 within the stage
    ports: int
    rate: float
    most: float
    key: str  # stages with equal keys, in different steps, are the same ports


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a step's messages: first-byte latency and software time of each, and the stages in order.

    `notice` is the delay between a ready receiver and the start of a message: with a rendezvous, the sender waits for a request.
    The request leaves its host through port `back` and enters the sender's through port `ahead`; -1 means none.
    """

    latency: Floats
    notice: Floats
    back: Ints
    ahead: Ints
    software: Floats
    stages: tuple[RouteStage, ...]


def route(cluster: Cluster, profile: BackendProfile, src: Ints, dst: Ints) -> Routes:
    """The route of every message from `src` to `dst`."""
    from_host, to_host = src // cluster.per_host, dst // cluster.per_host
    local = from_host == to_host
    latency = np.where(local, cluster.inside.latency, cluster.network.latency)
    software = np.where(local, profile.message_inside, profile.message)
    inner, outer = np.flatnonzero(local), np.flatnonzero(~local)
    stages: list[RouteStage] = []
    if inner.size:
        rate = cluster.inside.bandwidth * profile.inside
        if cluster.shared == "host":
            stages.append(RouteStage(inner, from_host[inner], cluster.hosts, rate, rate, "bus"))
        elif cluster.shared == "rank":
            stages.append(RouteStage(inner, src[inner], cluster.ranks, rate, rate, "rank out"))
            stages.append(RouteStage(inner, dst[inner], cluster.ranks, rate, rate, "rank in"))
        else:
            pair = src[inner] * cluster.per_host + dst[inner] % cluster.per_host
            stages.append(RouteStage(inner, pair, cluster.ranks * cluster.per_host, rate, rate, "pair"))
    if outer.size:
        rate = cluster.network.bandwidth * profile.network
        stages.append(RouteStage(outer, port_of(cluster, src[outer]), cluster.hosts * cluster.ports, rate, rate, OUT))
        if cluster.uplink:
            below = cluster.uplink.hosts
            leaving = outer[from_host[outer] // below != to_host[outer] // below]
            groups = -(-cluster.hosts // below)
            rising = cluster.uplink.bandwidth * profile.network
            if leaving.size:
                stages.append(RouteStage(leaving, from_host[leaving] // below, groups, rising, rate, "uplink out"))
                stages.append(RouteStage(leaving, to_host[leaving] // below, groups, rising, rate, "uplink in"))
        stages.append(RouteStage(outer, port_of(cluster, dst[outer]), cluster.hosts * cluster.ports, rate, rate, IN))
    notice = latency if profile.rendezvous else np.zeros(src.size)
    back, ahead = (np.where(local, -1, port_of(cluster, ends)) for ends in (dst, src))
    return Routes(
        latency=latency.astype(np.float64),
        notice=notice.astype(np.float64),
        back=back,
        ahead=ahead,
        software=software.astype(np.float64),
        stages=tuple(stages),
    )


def contended(moves: Iterable[tuple[Ints, Ints, Routes]]) -> set[str]:
    """The kinds of ports at which messages of different steps may meet: no one rank takes part in all messages of a port.

    If one does, it has finished a step before it begins the next, and so has its port. `moves` has src, dst and routes of each
    step.
    """
    owners: dict[str, tuple[Ints, NDArray[np.bool_]]] = {}  # by port: the ends of its first message, and which of them are in all
    for src, dst, routes in moves:
        for stage in routes.stages:
            rank, every = owners.setdefault(stage.key, (np.full((2, stage.ports), -1), np.ones((2, stage.ports), dtype=np.bool_)))
            ends = np.stack((src[stage.of], dst[stage.of]))
            new = rank[0, stage.port] < 0
            rank[:, stage.port[new]] = ends[:, new]
            for owner, stays in zip(rank, every):
                stays[stage.port[(ends != owner[stage.port]).all(axis=0)]] = False
    return {key for key, (_, every) in owners.items() if not every.any(axis=0).all()}


def distinct(numbers: Ints) -> Ints:
    """Each of these numbers once, in order: np.unique, which takes ten times as long for numbers that nearly all differ."""
    ordered = np.sort(numbers)
    return np.asarray(ordered[np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))])


def share(cluster: Cluster, groups: Ints) -> CallGroup:
    """The bandwidth that each of `groups` (a row of ranks each) gets if all communicate at once.

    A group uses every port of the ranks it has on a host; a port that several groups use is divided evenly.
    """
    count, size = groups.shape
    number = np.repeat(np.arange(count), size)
    host, port = groups.ravel() // cluster.per_host, port_of(cluster, groups.ravel())
    ports = cluster.hosts * cluster.ports
    used = distinct(number * ports + port)  # (group, port)
    users = np.bincount(used % ports, minlength=ports)
    at_host = distinct(number * cluster.hosts + host)  # (group, host)
    hosts = np.bincount(at_host // cluster.hosts, minlength=count)
    mine = np.zeros(at_host.size)
    places = np.searchsorted(at_host, used // ports * cluster.hosts + used % ports // cluster.ports)
    np.add.at(mine, places, cluster.network.bandwidth / users[used % ports])
    between = np.full(count, np.inf)
    np.minimum.at(between, at_host // cluster.hosts, mine)
    if cluster.uplink:
        between = np.minimum(between, _below_uplinks(cluster, groups, number, host))
    between[hosts == 1] = np.inf
    wire = Hops(0.0, cluster.inside.latency, cluster.network.latency)
    return CallGroup(size, hosts.astype(np.int64), _inside(cluster, at_host, size, hosts), between, wire)


def _below_uplinks(cluster: Cluster, groups: Ints, number: Ints, host: Ints) -> Floats:
    """Bytes/s of each group through uplinks: a ring passes each uplink once, so its users divide it."""
    assert cluster.uplink is not None
    racks = -(-cluster.hosts // cluster.uplink.hosts)
    used = distinct(number * racks + host // cluster.uplink.hosts)  # (group, rack)
    spans = np.bincount(used // racks, minlength=len(groups))
    crossing = used[spans[used // racks] > 1]
    users = np.bincount(crossing % racks, minlength=racks)
    rate = np.full(len(groups), np.inf)
    np.minimum.at(rate, crossing // racks, cluster.uplink.bandwidth / users[crossing % racks])
    return rate


def _inside(cluster: Cluster, at_host: Ints, size: int, hosts: Ints) -> Floats:
    """Bytes/s of a rank inside its host: its own links, or its group's part of the bus."""
    bandwidth = cluster.inside.bandwidth
    if cluster.shared == "host":
        neighbours = np.bincount(at_host % cluster.hosts, minlength=cluster.hosts)
        most = np.zeros(hosts.size)
        np.maximum.at(most, at_host // cluster.hosts, neighbours[at_host % cluster.hosts])
        return np.asarray(bandwidth / most)
    if cluster.shared == "pair":  # rings in several directions use the links to all neighbours
        return np.asarray(bandwidth * np.maximum(1, np.ceil(size / hosts) - 1))
    return np.full(hosts.size, bandwidth)


def port_of(cluster: Cluster, rank: Ints) -> Ints:
    """The port to the network that each of these ranks uses."""
    host, place = np.divmod(rank, cluster.per_host)
    return np.asarray(host * cluster.ports + place * cluster.ports // cluster.per_host)
