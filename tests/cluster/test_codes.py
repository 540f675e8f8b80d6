"""The price of a schedule that encodes: what travels between hosts costs as much as the code is long."""

import numpy as np
import pytest

from phalanx.cluster import GBIT, PLAIN, Cluster, Link, compile_schedule, simulate
from phalanx.schedule import quantised, torus


def slow(hosts, per_host):
    return Cluster("slow", hosts, per_host, inside=Link(0.0, 1e15), network=Link(0.0, 1 * GBIT))


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (4, 2), (3, 3)], ids=str)
def test_bytes_between_hosts_shrink_by_the_code(shape):
    cluster, nbytes, code = slow(*shape), 1e9, 65 / 256
    plain = simulate(quantised(*shape), cluster, nbytes).seconds
    coded = simulate(quantised(*shape), cluster, nbytes, code=code).seconds
    assert coded == pytest.approx(code * plain, rel=1e-3)
    hosts = shape[0]
    assert plain == pytest.approx(2 * (hosts - 1) / hosts * nbytes / (1 * GBIT), rel=0.02)
    assert plain == pytest.approx(simulate(torus(*shape), cluster, nbytes).seconds, rel=0.02)


def test_a_schedule_without_codes_costs_the_same():
    cluster = slow(4, 2)
    one, other = (simulate(torus(4, 2), cluster, 1e8, code=code).clocks for code in (1.0, 0.25))
    assert np.array_equal(one, other)
    coded, plain = (compile_schedule(torus(4, 2), cluster, PLAIN, code=code) for code in (0.25, 1.0))
    assert coded.messages == plain.messages
