"""Selftests on ranks that are threads, and communicators with a fault."""

import time

import torch

import phalanx
from phalanx.selftest.all_checks import Selftest

CPU = torch.device("cpu")


def selftest(n, checks=None, *, wrap=lambda comm: comm, seconds=60.0, elapsed=0.0, hosts=1, timeout=60.0):
    """The selftest of each rank, after these checks, or those that a function makes for each rank.

    `wrap` may put a fault into a rank's communicator. `elapsed`: seconds that have passed before.
    """

    def play(comm):
        own = Selftest(wrap(comm), CPU, seconds, time.monotonic() - elapsed)
        own.run(lambda outcome: None, checks() if callable(checks) else checks)
        return own

    return phalanx.run_local(n, play, hosts=hosts, timeout=timeout)


def named(selftest):
    """The results by the names of their checks."""
    return {outcome.name: outcome.result for outcome in selftest.outcomes}


class Faulty(phalanx.Communicator):
    """The communicator `inner`, which is at fault on rank `at`."""

    def __init__(self, inner, at=1):
        vars(self).update(vars(inner))
        self.faulty = inner.rank == at


class WrongSum(Faulty):
    """Adds 1 to the first element of a sum."""

    def all_reduce(self, x, op="sum", *, label=""):
        super().all_reduce(x, op, label=label)
        return self._spoiled(x)

    def all_reduce_async(self, x, op="sum", *, label=""):
        pending = super().all_reduce_async(x, op, label=label)
        if not self.faulty:
            return pending
        pending.wait()
        self._spoiled(x)
        return pending

    def _spoiled(self, x):
        if self.faulty and x.numel():
            first = x[(0,) * x.dim()]
            first.copy_(~first if x.dtype is torch.bool else first + 1)
        return x


class Early:
    """A Pending that does not wait, or that is done too early."""

    def __init__(self, pending, x, *, lies):
        self._pending, self._x, self._lies = pending, x, lies

    def done(self):
        return True

    def wait(self):
        result = self._pending.wait()
        return result if self._lies else self._x


class MissingOrder(Faulty):
    """`wait()` returns before the data are there."""

    lies = False

    def all_reduce_async(self, x, op="sum", *, label=""):
        if not self.faulty:
            return super().all_reduce_async(x, op, label=label)
        before = x.clone() if not self.lies else x
        return Early(super().all_reduce_async(x, op, label=label), before, lies=self.lies)


class DoneTooEarly(MissingOrder):
    """`done()` is true at once, while `wait()` waits."""

    lies = True


class SlowRank(Faulty):
    """Sleeps before it starts an all-reduce."""

    def all_reduce_async(self, x, op="sum", *, label=""):
        time.sleep(0.02 if self.faulty else 0.0)
        return super().all_reduce_async(x, op, label=label)
