"""Who is slow, why, and which shares suit the ranks: functions of times."""

from __future__ import annotations

import random

import pytest

from phalanx.data.route import World
from phalanx.grad.pace import EVERY, WINDOWS, Pace, Suspicion, find_slow, suitable_speeds

FAST = Pace(input=0.002, compute=0.048, wait=0.001, samples=10)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("cause", ["input", "compute"])
def test_the_slow_rank_and_its_cause(size, cause):
    for slow in range(size):
        paces = [FAST] * size
        paces[slow] = Pace(0.102, 0.048, 0.001, 10) if cause == "input" else Pace(0.002, 0.148, 0.001, 10)
        assert find_slow(paces) == (slow, cause, pytest.approx(3.0))


def test_wall_times_say_nothing_and_a_small_share_does_not_hide_a_slow_rank():
    assert find_slow([FAST, FAST, Pace(0.002, 0.060, 0.09, 10)]) is None  # within the noise
    rank = find_slow([Pace(0, 0.06, 0, 12), Pace(0, 0.06, 0, 12), Pace(0, 0.06, 0, 12), Pace(0, 0.06, 0, 4)])
    assert rank is not None
    assert rank[0] == 3


def test_a_slow_network_is_nobodys_fault():
    assert find_slow([Pace(0.001, 0.009, 0.09)] * 4) == (None, "network", pytest.approx(0.9))
    assert (
        find_slow([Pace(0.001, 0.009, 0.09)] * 3 + [Pace(0.001, 0.009, 0.001)]) is None
    )  # one rank does not wait: all wait for it


def test_a_rank_is_named_once_and_within_20_steps():
    slow = [FAST, FAST, Pace(0.002, 0.148, 0.0, 10)]
    suspicion = Suspicion()
    named = [suspicion.window(slow) for _ in range(10)]
    assert [found is not None for found in named] == [False] * (WINDOWS - 1) + [True] + [False] * (10 - WINDOWS)
    assert (EVERY - 1) + WINDOWS * EVERY < 20  # it became slow just after a window began
    assert suspicion.window([FAST] * 3) is None
    assert [suspicion.window(slow) is not None for _ in range(3)] == [False, False, True]  # again, after it was fast


def test_one_slow_window_is_noise():
    suspicion = Suspicion()
    slow, clean = [FAST, FAST, Pace(0.002, 0.148, 0.0, 10)], [FAST] * 3
    assert all(suspicion.window(paces) is None for _ in range(20) for paces in (slow, slow, clean))


def test_speeds_are_suitable_where_they_gain_something():
    paces = [FAST, FAST, FAST, Pace(0.002, 0.148, 0.0, 10)]
    speeds = suitable_speeds(paces)
    assert speeds == pytest.approx((200, 200, 200, 200 / 3))
    assert [len(World(speeds=speeds).part(range(40), 4, rank)) for rank in range(4)] == [12, 12, 12, 4]
    assert (
        suitable_speeds([Pace(0, len(part) / speed, 0, len(part)) for part, speed in zip((range(12),) * 3 + (range(4),), speeds)])
        is None
    )
    assert suitable_speeds([FAST, Pace(0.0, 0.0, 0.0, 10)]) is None
    assert suitable_speeds([FAST, Pace(0.1, 0.1, 0.0, 0)]) is None


@pytest.mark.parametrize("seed", range(40))
def test_shares_by_speed_are_a_partition(seed):
    chosen = random.Random(seed)
    ranks, begin, length = chosen.randrange(1, 9), chosen.randrange(50), chosen.randrange(0, 70)
    step = range(begin, begin + length)
    world = World(speeds=tuple(chosen.uniform(0.01, 5) for _ in range(ranks)))
    parts = [world.part(step, ranks, rank) for rank in range(ranks)]
    assert [place for part in parts for place in part] == list(step)
    total = sum(world.speeds)
    assert all(abs(len(part) - length * speed / total) <= 1 for part, speed in zip(parts, world.speeds))
    even = [world.part(step, ranks + 1, rank) for rank in range(ranks + 1)]  # speeds of another world are not used
    assert max(map(len, even)) - min(map(len, even)) <= 1
