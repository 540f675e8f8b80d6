"""8-bit sums on hosts of several ranks with shared memory: what has not arrived is in the errors, whatever the length.

Ranks of one machine pretend to be on several hosts.
"""

import os
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from tests.long import often

import phalanx
from phalanx.comm.run import LANE_BYTES, LANES
from phalanx.grad.wires.carrier import carrier_of
from phalanx.schedule import Scale, Step, quantised

STEPS = 3


def on_pretended_hosts(comm, per_host, work, *what):
    """What `work` returns with a communicator that sees a host for every `per_host` ranks."""
    from phalanx.comm import create

    real = create.host_key
    create.host_key = lambda: f"host {comm.rank // per_host}"
    try:
        with phalanx.create_communicator(timeout=20) as spread:
            return work(spread, *what)
    finally:
        create.host_key = real


def in_form(comm, form, work, *what):
    """What `work` returns on hosts of two ranks without shared memory."""
    os.environ["PHALANX_FORM"] = form
    try:
        return on_pretended_hosts(comm, 2, work, *what)
    finally:
        del os.environ["PHALANX_FORM"]


def sent_and_arrived(comm, length, options):
    """Of several exchanges: what this rank sent, what arrived, and what it still owes, as a checkpoint would hold it."""
    x = comm.buffer(length) if options.pop("in_buffer") else torch.empty(length)
    carrier = carrier_of(phalanx.Int8(block=32, **options), comm, x, shapes={range(length): 1})
    sent, arrived = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    for step in range(STEPS):
        own = torch.Generator().manual_seed(100 * comm.rank + step)
        x.copy_(torch.randn(length, generator=own) * (1 + torch.arange(length) % 7))
        sent += x
        carrier.leave(x, "sum", label=f"{step}").wait()
        assert bool(carrier.arrive(x))
        arrived += x
    return sent, arrived, carrier.state(range(length))["error"].double()


def lengths(world):
    """Around a whole number of chunks, around that of lanes, and with one lane and all of them."""
    unit = world * LANES
    short, long = 16 * unit, LANES * LANE_BYTES // 4
    return sorted({1, world + 1, short - 1, short, short + 1, short + world, long - 1, long - long % unit, long + unit})


@pytest.mark.parametrize("options", [{}, *often({"rounding": "stochastic"}, {"level": "rank"})], ids=str)
@pytest.mark.parametrize("shape", [(4, 2), *often((6, 3), (6, 2), (3, 2))], ids=str)
@pytest.mark.parametrize("in_buffer", [True, False])
def test_nothing_is_lost(pools, shape, options, in_buffer):
    ranks, per_host = shape
    for length in lengths(ranks):
        own = {**options, "in_buffer": in_buffer}
        found = pools.of(ranks).run(on_pretended_hosts, per_host, sent_and_arrived, length, own, deadline=60)
        wanted = sum(sent for sent, _, _ in found)
        owed = sum(error for _, _, error in found)
        for _, arrived, _ in found:
            assert torch.equal(arrived, found[0][1]), length
            assert torch.allclose(arrived + owed, wanted, atol=1e-3), length
        if length > 64:
            assert float(owed.abs().max()) > 0.01  # negative control: the sums alone are not what was sent


@pytest.mark.parametrize("form", ["collectives", "moves"])
def test_nothing_is_lost_without_shared_memory(pools, form):
    for length in lengths(4):
        found = pools.of(4).run(in_form, form, sent_and_arrived, length, {"in_buffer": False}, deadline=60)
        wanted = sum(sent for sent, _, _ in found)
        owed = sum(error for _, _, error in found)
        for _, arrived, _ in found:
            assert torch.equal(arrived, found[0][1]), length
            assert torch.allclose(arrived + owed, wanted, atol=1e-3), length


def scaled(comm, place, length):
    """The mean of all ranks by a schedule that scales all chunks as step `place`."""
    steps = list(quantised(2, 2).steps)
    steps.insert(place, Step((Scale(range(4), range(4), Fraction(1, 4)),), "scale"))
    mean = replace(quantised(2, 2), name=f"mean {place}", goal="mean", steps=tuple(steps))
    return comm.run(mean, torch.randn(length, generator=torch.Generator().manual_seed(comm.rank)))


@pytest.mark.parametrize("place", [0, len(quantised(2, 2).steps)])
def test_what_scales_several_chunks_scales_each_number_once(pools, place):
    for length in (4096, LANES * LANE_BYTES // 4):
        found = pools.of(4).run(on_pretended_hosts, 2, scaled, place, length, deadline=60)
        wanted = sum(torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(4)) / 4
        assert all(torch.equal(own, found[0]) for own in found)
        assert float((found[0] - wanted).abs().max()) < 0.05


def diloco(comm, elements):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(elements))
    sync = phalanx.DiLoCo(every=2, outer={"lr": 1.0}, wire=phalanx.Int8(block=32), level="rank")
    opt = phalanx.create_multi_node_optimizer(torch.optim.SGD([p], lr=0.1), comm, sync=sync)
    for step in range(4):
        own = torch.Generator().manual_seed(10 * comm.rank + step)
        opt.zero_grad()
        (p * torch.randn(elements, generator=own)).sum().backward()
        opt.step()
    return p.detach().clone()


@pytest.mark.parametrize("elements", [1001, 1024])
def test_local_steps_send_lengths_as_they_come(pools, elements):
    """An outer rate of 1 makes the parameters the mean of all replicas."""
    found = pools.of(4).run(on_pretended_hosts, 2, diloco, elements, deadline=60)
    start = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    for rank in range(4):
        for step in range(4):
            start -= 0.1 / 4 * torch.randn(elements, generator=torch.Generator().manual_seed(10 * rank + step))
    assert all(torch.equal(own, found[0]) for own in found)
    assert torch.allclose(found[0], start, atol=0.01)
