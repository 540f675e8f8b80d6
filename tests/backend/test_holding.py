"""All-reduces of a backward run at its end where no core is idle, earlier where somebody wants them, always in their order."""

import contextlib
import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.backend.groups import both, group_of
from torch.nn.parallel import DistributedDataParallel

from phalanx.backend import holding, lane

LONG = 60.0  # seconds of patience: whatever needs them fails by its deadline


@contextlib.contextmanager
def busy_cores(*, patience=LONG, idle=False):
    """As on a machine whose cores all compute."""
    real, before = holding.has_idle_core, lane.PATIENCE
    holding.has_idle_core, lane.PATIENCE = lambda ranks: idle, patience
    try:
        yield
    finally:
        holding.has_idle_core, lane.PATIENCE = real, before


class During(torch.autograd.Function):
    """Calls `during` in the middle of backward."""

    @staticmethod
    def forward(ctx, x, during):
        ctx.during = during
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.during()
        return grad, None


def backward_with(during):
    x = torch.ones(3, requires_grad=True)
    During.apply(x, during).sum().backward()


def at_the_end(comm):
    with busy_cores(), group_of("phalanx") as group:
        xs, works, threads = [torch.full((n,), comm.rank + 1.0) for n in (5, 300_000, 2_000_000)], [], []

        def during():
            for x in xs:
                works.append(dist.all_reduce(x, group=group, async_op=True))
                works[-1].get_future().then(lambda _: threads.append(threading.current_thread()))
            assert not any(work.is_completed() for work in works)
            assert all(x.min() == x.max() == comm.rank + 1 for x in xs)

        backward_with(during)
        assert all(work.is_completed() for work in works)
        assert threads == [threading.current_thread()] * 3
        assert all(x.min() == x.max() == 3 for x in xs)


def with_an_idle_core(comm):
    with busy_cores(idle=True), group_of("phalanx") as group:
        x = torch.full((2_000_000,), comm.rank + 1.0)

        def during():
            future = dist.all_reduce(x, group=group, async_op=True).get_future()
            future.wait()
            assert x.min() == x.max() == 3, "another thread did it during backward"

        backward_with(during)


def wanted_earlier(comm):
    """A work that is waited for, a synchronous call behind held ones, a barrier, a second thread that waits."""
    with busy_cores(), group_of("phalanx") as group:
        order = []

        def start(value):
            x = torch.full((1000,), float(value))
            work = dist.all_reduce(x, group=group, async_op=True)
            work.get_future().then(lambda _: order.append(value))
            return x, work

        def during():
            x, work = start(1)
            y, last = start(2)
            last.wait()
            assert order == [1, 2], "what comes before it runs first"
            assert x.max() == 2
            assert y.max() == 4
            start(3)
            z = torch.ones(1)
            dist.all_reduce(z, group=group)
            assert order == [1, 2, 3]
            assert z.item() == 2
            start(4)
            dist.barrier(group=group)
            _, work = start(5)
            other = threading.Thread(target=work.wait)
            other.start()
            other.join()
            assert order == [1, 2, 3, 4, 5]

        backward_with(during)


def waits_with_a_timeout(comm):
    """Then the group's thread does it."""
    with busy_cores(), group_of("phalanx") as group:
        x = torch.full((1000,), comm.rank + 1.0)

        def during():
            dist.all_reduce(x, group=group, async_op=True).wait(datetime.timedelta(seconds=30))
            assert x.max() == 3

        backward_with(during)


def between_hosts(comm):
    """Steps with and without holding, in turns, are all right, whichever wins."""
    with busy_cores(), group_of("phalanx", per_host=1) as group:
        for step in range(3 * holding.TRIALS):
            xs = [torch.full((n,), comm.rank + 1.0) for n in (5, 300_000)]
            works = []

            def during(xs=xs, works=works):
                works.extend(dist.all_reduce(x, group=group, async_op=True) for x in xs)

            backward_with(during)
            for work in works:
                work.wait()
            assert all(x.min() == x.max() == 3 for x in xs), step


def futures_in_backward(comm):
    """Nothing can see that a program waits for a future: the lane loses its patience once, and holds nothing from then on."""
    with busy_cores(patience=0.3), group_of("phalanx") as group:
        times = []

        def during():
            for _ in range(3):
                begun = time.monotonic()
                x = torch.ones(2_000_000)
                dist.all_reduce(x, group=group, async_op=True).get_future().wait()
                assert x.max() == 2
                times.append(time.monotonic() - begun)

        backward_with(during)
        assert times[0] >= 0.3 > times[2], times


def failed_backward(comm):
    """A backward that fails after its all-reduces began owes them to the other ranks."""
    with busy_cores(patience=0.2), group_of("phalanx") as group:
        x = torch.full((1000,), comm.rank + 1.0)

        def during():
            dist.all_reduce(x, group=group, async_op=True)
            if comm.rank == 1:
                raise ValueError("no luck")

        if comm.rank == 1:
            with pytest.raises(ValueError, match="no luck"):
                backward_with(during)
        else:
            backward_with(during)
            assert x.max() == 3
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == 2
        assert x.max() == 3


def in_two_rounds(group, bucket):
    """A hook that sums again in the callback of a sum, and waits there, as PowerSGD does."""

    def again(first):
        [x] = first.value()
        return dist.all_reduce(x, group=group, async_op=True).get_future().wait()[0] / 4

    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(again)


in_two_rounds.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def hooks_that_wait(comm, idle):
    """One bucket: with several, the order of such sums is a race between threads, on gloo as well."""
    with busy_cores(idle=idle), both() as (ours, theirs):
        found = []
        for group in (ours, theirs):
            torch.manual_seed(3)
            net = DistributedDataParallel(torch.nn.Linear(2000, 1000, bias=False), process_group=group)  # 8 MB
            net.register_comm_hook(group, in_two_rounds)
            torch.manual_seed(comm.rank)
            for _ in range(2):
                net(torch.randn(2, 2000)).square().mean().backward()
            found.append(net.module.weight.grad)
        torch.testing.assert_close(*found)
        assert found[0].abs().max() > 0


@pytest.mark.parametrize(("plain", "held", "wanted"), [(1.0, 0.5, True), (0.5, 1.0, False), (1.0, 1.0, False)])
def test_a_trial_keeps_the_faster_way(plain, held, wanted):
    now = [1.0]
    trial = holding.Trial(lambda: now[0])
    ways = []
    while not trial.over:
        ways.append(trial.held)
        first = len(ways) > 1 and ways[-1] != ways[-2]
        now[0] += 100.0 if first else held if trial.held else plain  # the first step of a way does not count
        trial.backward_ended()
        assert len(ways) < 100
    assert ways == [False] * (1 + holding.TRIALS) + [True] * holding.TRIALS
    assert trial.held is wanted
    trial.backward_ended()
    assert trial.held is wanted


@pytest.mark.parametrize(
    "case",
    [at_the_end, with_an_idle_core, between_hosts, wanted_earlier, waits_with_a_timeout, futures_in_backward, failed_backward],
)
def test_all_reduces_of_a_backward(pair, case):
    pair.run(case)


@pytest.mark.parametrize("idle", [False, True])
def test_hooks_that_wait_in_a_callback(pair, idle):
    pair.run(hooks_that_wait, idle)
