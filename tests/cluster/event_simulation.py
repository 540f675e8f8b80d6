"""An independent simulation of a schedule's messages: event by event, in plain Python, every flow with its max-min fair rate.

It shares no code with `phalanx.cluster.simulate` but the schedule and the cluster as values. A message begins when both of its
ranks have finished their messages of the step before; messages of one step do not wait for each other. It uses all links on its
way at once, at one rate. Its sender is done when it has passed, its receiver a latency later.
"""

from collections import defaultdict
from dataclasses import dataclass
from math import inf

from phalanx.schedule import Move, lower


@dataclass
class Flow:
    """A message: what it needs to pass, over which links."""

    src: int
    dst: int
    step: int
    left: float
    links: tuple
    latency: float


def links_of(cluster, src, dst):
    """The names of the links on the way from `src` to `dst`, each with its bytes/s."""
    here, there = src // cluster.per_host, dst // cluster.per_host
    if here == there:
        rate = cluster.inside.bandwidth
        names = {"host": [("bus", here)], "rank": [("out", src), ("in", dst)], "pair": [("pair", src, dst)]}[cluster.shared]
        return dict.fromkeys(names, rate)

    def port(rank):
        return rank // cluster.per_host, rank % cluster.per_host * cluster.ports // cluster.per_host

    links = {("port out", *port(src)): cluster.network.bandwidth, ("port in", *port(dst)): cluster.network.bandwidth}
    if cluster.uplink and here // cluster.uplink.hosts != there // cluster.uplink.hosts:
        links["uplink out", here // cluster.uplink.hosts] = cluster.uplink.bandwidth
        links["uplink in", there // cluster.uplink.hosts] = cluster.uplink.bandwidth
    return links


def fair_rates(flows, capacity):
    """Max-min fairness: the link that leaves least to each of its flows decides their rates, then the next, with what is left."""
    rates, room = {}, dict(capacity)
    while len(rates) < len(flows):
        users = defaultdict(list)
        for number, flow in enumerate(flows):
            if number not in rates:
                for link in flow.links:
                    users[link].append(number)
        tightest = min(users, key=lambda link: room[link] / len(users[link]))
        share = room[tightest] / len(users[tightest])
        for number in users[tightest]:
            rates[number] = share
            for link in flows[number].links:
                room[link] = max(0.0, room[link] - share)
    return [rates[number] for number in range(len(flows))]


def simulate_events(schedule, cluster, nbytes, start=None):
    """When every rank has finished its last message."""
    capacity, waiting = {}, []
    per_rank = defaultdict(lambda: defaultdict(int))  # rank -> step -> messages that are not finished
    for number, step in enumerate(lower(schedule).steps):
        for op in step.ops:
            if isinstance(op, Move):
                links = links_of(cluster, op.src, op.dst)
                capacity |= links
                link = cluster.inside if op.src // cluster.per_host == op.dst // cluster.per_host else cluster.network
                size = nbytes * len(op.chunks) / schedule.chunks
                waiting.append(Flow(op.src, op.dst, number, size, tuple(links), link.latency))
                per_rank[op.src][number] += 1
                per_rank[op.dst][number] += 1
    # a rank's clock is the end of its last whole step, `latest` that of its messages so far. If one message of a step moved the
    # clock, the others of this step would wait for it, a latency each.
    clock = [0.0] * cluster.ranks if start is None else list(start)
    latest = list(clock)
    active, now = [], 0.0
    while waiting or active:
        begin_at = [
            max(clock[flow.src], clock[flow.dst])
            if flow.step == min(per_rank[flow.src]) and flow.step == min(per_rank[flow.dst])
            else inf
            for flow in waiting
        ]
        rates = fair_rates(active, capacity) if active else []
        finish = min((now + flow.left / rate for flow, rate in zip(active, rates)), default=inf)
        after = min(finish, min(begin_at, default=inf))
        for flow, rate in zip(active, rates):
            flow.left -= (after - now) * rate
        now = max(now, after)
        still = []
        for flow, rate in zip(active, rates):
            if flow.left > 1e-9 * rate * max(now, 1e-6):
                still.append(flow)
                continue
            for rank, end in ((flow.src, now), (flow.dst, now + flow.latency)):
                latest[rank] = max(latest[rank], end)
                per_rank[rank][flow.step] -= 1
                if not per_rank[rank][flow.step]:
                    del per_rank[rank][flow.step]
                    clock[rank] = latest[rank]
        active = still + [flow for flow, begin in zip(waiting, begin_at) if begin <= now + 1e-15]
        waiting = [flow for flow, begin in zip(waiting, begin_at) if begin > now + 1e-15]
    return clock
