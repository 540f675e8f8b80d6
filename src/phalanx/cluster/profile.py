"""How a library uses a link: time per call and per message, the share of the bandwidth that it reaches, its own algorithms.

The cost of a `Collective` belongs to the backend, not to the schedule. A backend that runs schedules message by message (gloo)
pays `message` for each; one that takes a group's collective as a single call (NCCL; shared memory inside a host) is priced by the
library's own rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.schedule import Kind

Calls = Literal["never", "on one host", "always"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Hops:
    """Seconds of latency: once per call, per hop inside a host, per hop between hosts."""

    base: float
    inside: float
    network: float

    def slower(self, factor: float) -> Hops:
        return Hops(self.base * factor, self.inside * factor, self.network * factor)


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way in which a library moves data: latencies as a ring and as a tree, share of the bandwidth, and its ceiling.

    `ceilings` are bytes/s of one rank on 1 host, on 2 or 3, on 4 and more.
    """

    name: str
    ring: Hops
    tree: Hops
    share: float
    ceilings: tuple[float, float, float] = (inf, inf, inf)

    def slower(self, factor: float) -> Protocol:
        """The same with `factor` times the latencies."""
        return replace(self, ring=self.ring.slower(factor), tree=self.tree.slower(factor))


@dataclass(frozen=True, slots=True)
class BackendProfile:
    """How a backend spends time. `residual` is the relative error (one sigma) left where the profile was fitted or tried.

    `call` seconds start a library call, `start` seconds an operation made of messages. Both ends of a message are busy with it
    for half of `message` or `message_inside`. `network` and `inside` are the shares of the links' bandwidth that payload reaches.
    `calls` says which collectives are one library call. Buffers go through a schedule in up to `lanes` pieces of at least
    `lane_bytes`; one travels while another waits. Data to send are packed, and data received are mixed in, at `memory` bytes/s.
    With a `rendezvous`, the receiver sends a request when it is ready, and data leave when it arrives, a latency later. In each
    port that it passes, the request waits behind at most `queue` seconds of data.

    Communication slows down computing. While a collective runs during backward, it takes the share `steals` of the device.
    Every group of gradients costs `group` seconds of computing. A step on several hosts costs `agree` seconds more, for any
    amount of data: to agree on what is ready, to gather it and to spread it again.
    """

    name: str
    calls: Calls = "never"
    call: float = 0.0
    start: float = 0.0
    message: float = 0.0
    message_inside: float = 0.0
    network: float = 1.0
    inside: float = 1.0
    lanes: int = 1
    lane_bytes: float = 512 << 10
    memory: float = inf
    rendezvous: bool = False
    queue: float = 0.0
    protocols: tuple[Protocol, ...] = ()
    trees: bool = True
    steals: float = 0.0
    group: float = 0.0
    agree: float = 0.0
    residual: float = 0.1
    source: str = ""

    def pieces(self, nbytes: float) -> int:
        """Into how many pieces a buffer is cut."""
        return max(1, min(self.lanes, int(nbytes // self.lane_bytes)))


_US = 1e-6


def _nccl_hops(base: float, inside: float, network: float) -> Hops:
    """NCCL's constants, in microseconds, minus the latencies of the wires, which the cluster has."""
    return Hops(base * _US, (inside - 0.3) * _US, (network - 2.6) * _US)  # NVLink and InfiniBand: TACCL's topology files


_SIMPLE = Protocol("Simple", _nccl_hops(8.4, 3.4, 14), _nccl_hops(8.4, 4.0, 14), share=1.0)
_LL128 = Protocol("LL128", _nccl_hops(14, 1.9, 4.0), _nccl_hops(14, 1.25, 8.5), share=0.92)
_LL = Protocol(
    "LL",
    _nccl_hops(6.6, 0.6, 2.7),
    _nccl_hops(6.8, 0.6, 5.0),
    share=0.5,
    ceilings=(87.7e9, 22.5e9, 19.0e9),  # llMaxBws of Ampere
)

PLAIN = BackendProfile("plain", residual=0.0, source="the links as they are: for textbook formulas")
NCCL = BackendProfile(
    "nccl",
    calls="always",
    call=10 * _US,
    message=21 * _US,
    message_inside=13 * _US,
    network=0.85,
    inside=0.8,
    protocols=(_LL, _LL128, _SIMPLE),
    # The choices of published runs show what overlap costs: 16 groups in MLPerf v0.6, one without overlap ever since. Both are
    # within 2 % of the best if a collective takes 0.5 to 0.6 of the device and a group 20 us: benchmarks/plan_overlap.py.
    steals=0.5,
    group=20 * _US,
    agree=500 * _US,  # fitted to 30 published rows of several hosts; 400 to 600 us if any one system is left out (same program)
    residual=0.056,  # root mean square over these rows
    source="latencies, shares and ceilings: NCCL's src/graph/tuning.cc; 10 us to launch a kernel, also for"
    " single messages; 0.85 and 0.8 of the links' bandwidth: usual results of nccl-tests (A100 NVSwitch: some 235 of 300 GB/s)",
)
NCCL_WITHOUT_TREES = replace(NCCL, name="nccl-2.3", trees=False, source=f"{NCCL.source}; before 2.4 there were only rings")
GLOO = BackendProfile(
    "gloo",
    start=100 * _US,
    message=90 * _US,
    message_inside=90 * _US,
    network=0.97,
    inside=0.05,
    lanes=4,
    memory=2.7e9,
    rendezvous=True,
    queue=1e-3,
    residual=0.25,
    source="2 cores, Intel Xeon, torch 2.13: a message and its wake-ups; inside a host 2 of the memory's 44 GB/s; pieces as"
    " phalanx.comm.run cuts them; packing 64 MiB of gradients took 25 ms; gloo's senders wait for a request"
    " from their receivers (NOTIFY_RECV_READY), behind what TCP's small queues hold, 1 ms."
    " Replace these numbers with `phalanx plan --calibrate ROWS`",
)
SHARED_MEMORY = replace(
    GLOO,
    name="shm+gloo",
    calls="on one host",
    call=20 * _US,
    inside=1.0,
    source="shared memory inside a host, 2 W S bytes through memory for W ranks (docs/native.md); gloo between hosts",
)

PROFILES = {profile.name: profile for profile in (PLAIN, NCCL, NCCL_WITHOUT_TREES, GLOO, SHARED_MEMORY)}


@dataclass(frozen=True, slots=True)
class CallGroup:
    """What the price of a call depends on, for each group of a step, all of one size: its hosts and its bandwidth."""

    size: int
    hosts: NDArray[np.int64]
    inside: Floats  # bytes/s that one rank of the group has inside its host
    between: Floats  # bytes/s that the group has from host to host; infinite if it stays on one
    wire: Hops  # seconds of the wires alone


def call_seconds(profile: BackendProfile, kind: Kind, group: CallGroup, nbytes: Floats) -> Floats:
    """By group, the seconds of one call on buffers of `nbytes`."""
    if not profile.protocols:
        return profile.call + _through_memory(kind, group, nbytes) / (group.inside * profile.inside)
    times = []
    for protocol in profile.protocols:
        times.append(_ring_seconds(profile, protocol, kind, group, nbytes))
        if kind == "all_reduce" and profile.trees:
            times.append(_tree_seconds(profile, protocol, group, nbytes))
    return np.asarray(profile.call + np.minimum.reduce(times))


def _through_memory(kind: Kind, group: CallGroup, nbytes: Floats) -> Floats:
    """Bytes through the memory of a host: every buffer read once and, for an all-reduce, written once."""
    return nbytes * (2 * group.size if kind == "all_reduce" else group.size + 1)


def _ring_seconds(profile: BackendProfile, protocol: Protocol, kind: Kind, group: CallGroup, nbytes: Floats) -> Floats:
    """A ring through all ranks, host after host; reduce and broadcast are pipelines along it."""
    n = group.size
    laps = 2 if kind == "all_reduce" else 1
    crossings = laps * (group.hosts - 1)
    hops = laps * (n - 1)
    inside, network = protocol.ring.inside + group.wire.inside, protocol.ring.network + group.wire.network
    latency = protocol.ring.base + (hops - crossings) * inside + crossings * network
    moved = nbytes if kind in ("reduce", "broadcast") else laps * (n - 1) / n * nbytes
    return np.asarray(latency + moved / _rate(profile, protocol, group))


def _tree_seconds(profile: BackendProfile, protocol: Protocol, group: CallGroup, nbytes: Floats) -> Floats:
    """Two trees of hosts, a chain inside each: everything goes up once and down once, with 0.92 of the bandwidth."""
    per_host = np.ceil(group.size / group.hosts)
    inside, network = protocol.tree.inside + group.wire.inside, protocol.tree.network + group.wire.network
    up = (per_host - 1) * inside + np.ceil(np.log2(group.hosts)) * network
    return np.asarray(protocol.tree.base + 2 * up + 2 * nbytes / (0.92 * _rate(profile, protocol, group)))


def _rate(profile: BackendProfile, protocol: Protocol, group: CallGroup) -> Floats:
    """Bytes/s of the slowest link on the way round, by group."""
    ceiling = np.select([group.hosts < 2, group.hosts < 4], protocol.ceilings[:2], protocol.ceilings[2])
    links = np.minimum(group.inside * profile.inside, group.between * profile.network)
    return np.asarray(np.minimum(links * protocol.share, ceiling))
