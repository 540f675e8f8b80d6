"""Random numbers that are functions of (seed, epoch, index, stream, k): what they do not depend on, and that they look random."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

from phalanx.data.draws import Draws

whole = st.integers(0, 2**70)


def reference(seed: int, epoch: int, index: int, stream: int, k: int) -> float:
    """The same in plain integers, one number at a time."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x &= mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = 0
    for number in (seed, epoch):
        words = [number >> 64 * i & mask for i in range(max(1, -(-number.bit_length() // 64)))]
        for word in (len(words), *words):
            key = mix(mix(key + golden) ^ word)
    return (mix(mix(index * golden + key) + ((stream << 32) + k + 1) * golden) >> 11) / 2**53


@given(whole, whole, st.integers(0, 2**62), st.integers(0, 1000), st.integers(0, 2**32))
@settings(max_examples=times(100, seldom=40), deadline=None)
def test_a_number_depends_on_nothing_but_its_five_arguments(seed, epoch, index, stream, others):
    count = others % 100 + 1
    alone = Draws(seed, epoch, np.array([index])).uniform(stream, count)[0]
    crowd = Draws(seed, epoch, np.array([others, index, others + 1]))
    assert np.array_equal(crowd.uniform(stream, count)[1], alone)
    for row, numbers in zip(
        [1, 2, 0, 1], crowd.uniform(stream, count)[[1, 2, 0, 1]]
    ):  # what one has asked for is kept for others
        own = crowd[row].uniform(stream, count)
        assert np.array_equal(own, [numbers])
        own[:] = 2.0  # whatever becomes of it
    assert np.array_equal(crowd[1].uniform(stream, count)[0], alone)
    assert np.array_equal(crowd[1:].uniform(stream, count + 7)[0, :count], alone)
    assert crowd.uniform(stream)[1] == alone[0]
    assert ((alone >= 0) & (alone < 1)).all()


@given(whole, whole, st.integers(0, 2**62), st.integers(0, 2**32 - 1), st.integers(0, 150))
@settings(max_examples=times(100, seldom=40), deadline=None)
def test_the_hash_is_splitmix64(seed, epoch, index, stream, k):
    assert Draws(seed, epoch, np.array([index])).uniform(stream, k + 1)[0, k] == reference(seed, epoch, index, stream, k)


def test_the_numbers_of_recorded_runs_stay_what_they_were():
    assert Draws(0, 0, np.arange(3)).uniform(0).tolist() == [0.21975305870388773, 0.9676181919049565, 0.01891877539057729]


def test_any_argument_changes_the_number():
    base = Draws(0, 0, np.arange(100)).uniform(0, 70)
    others = [
        Draws(1, 0, np.arange(100)).uniform(0, 70),
        Draws(0, 1, np.arange(100)).uniform(0, 70),
        Draws(2**64, 0, np.arange(100)).uniform(0, 70),  # beyond one word
        Draws(0, 0, np.arange(100, 200)).uniform(0, 70),
        Draws(0, 0, np.arange(100)).uniform(1, 70),
        base[:, ::-1],
    ]
    for other in others:
        assert (base != other).all()
    assert len(np.unique(base)) == base.size
    assert abs(Draws(1, 2, np.arange(10)).uniform(0) - Draws(2, 1, np.arange(10)).uniform(0)).min() > 0


def test_uniform_is_uniform_and_neighbours_are_independent():
    numbers = Draws(7, 0, np.arange(20_000)).uniform(3, 5)
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert abs(counts - numbers.size / 50).max() < 5 * np.sqrt(numbers.size / 50)
    columns = np.concatenate([numbers, Draws(7, 1, np.arange(20_000)).uniform(3, 5), np.roll(numbers, 1, axis=0)], axis=1)
    correlations = np.corrcoef(columns, rowvar=False) - np.eye(15)
    assert abs(correlations).max() < 5 / np.sqrt(20_000)


@given(st.integers(1, 2**32), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_integers_stay_below_their_limit(high, seed):
    drawn = Draws(seed, 0, np.arange(50)).integers(1, high)
    assert drawn.dtype == np.int64
    assert ((drawn >= 0) & (drawn < high)).all()


def test_integers_reach_every_value_equally_and_limits_may_differ_by_row():
    counts = np.bincount(Draws(0, 0, np.arange(90_000)).integers(2, 9), minlength=9)
    assert abs(counts - 10_000).max() < 5 * np.sqrt(10_000)
    highs = np.arange(1, 101)
    drawn = Draws(0, 0, np.arange(100)).integers(2, highs)
    assert (drawn < highs).all()
    assert drawn[0] == 0
    assert drawn[50] == Draws(0, 0, np.array([50])).integers(2, 51)[0]


def test_rows_are_selected_like_an_array():
    draws = Draws(0, 4, np.array([10, 20, 30]))
    assert len(draws) == 3
    assert draws[1].indices.tolist() == [20]
    assert draws[-2:].indices.tolist() == [20, 30]
    assert draws[np.array([2, 0])].indices.tolist() == [30, 10]
    assert Draws(0, 0, np.array([], dtype=np.int64)).uniform(0, 3).shape == (0, 3)
    assert np.array_equal(Draws(0, 0, np.arange(8)[::2]).uniform(0), Draws(0, 0, np.array([0, 2, 4, 6])).uniform(0))


@pytest.mark.parametrize(
    "call",
    [
        lambda: Draws(-1, 0, np.arange(3)),
        lambda: Draws(0, -1, np.arange(3)),
        lambda: Draws(0, 0, np.arange(3)).integers(0, 0),
        lambda: Draws(0, 0, np.arange(3)).integers(0, 2**32 + 1),
        lambda: Draws(0, 0, np.arange(3)).uniform(-1),
        lambda: Draws(0, 0, np.arange(3)).uniform(2**32),
    ],
)
def test_arguments_without_meaning_are_refused(call):
    with pytest.raises(ValueError):
        call()
