"""The order of an epoch: a permutation for every n, the same everywhere, another for every seed and epoch, nowhere regular."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch

from phalanx.data import epoch_order
from phalanx.data.order import BLOCK, SMALL, permute

IMAGENET = 1_281_167
KEYS = (0x0123456789ABCDEF, 0xFEDCBA9876543210, 0x0F1E2D3C4B5A6978, 0x1122334455667788)


def is_permutation(values, n):
    values = np.asarray(values)
    return values.shape == (n,) and bool((np.bincount(values, minlength=n) == 1).all()) if n else values.size == 0


# ---- a bijection


@pytest.mark.parametrize("ns", [range(400), range(SMALL - 2, SMALL + 3), (63 * 63, 64 * 64 + 1, 65535, 65536, 65537, 1_000_003)])
def test_every_element_once(ns):
    for n in ns:
        assert is_permutation(epoch_order(3, 5, n)[:], n), n


def test_the_network_is_a_bijection_for_small_n_too():
    for n in range(1, 300):
        for rounds in (1, 2, 3, 4):
            assert is_permutation(permute(np.arange(n), n, KEYS[:rounds]), n), (n, rounds)


def test_every_image_of_imagenet_once():
    assert is_permutation(epoch_order(0, 0, IMAGENET)[:], IMAGENET)


def test_very_large_orders():
    n = 1 << 62
    found = epoch_order(1, 2, n)[n - 1000 : n]
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < n
    with pytest.raises(ValueError, match=r"2\*\*62"):
        epoch_order(0, 0, n + 1)


# ---- read like a sequence


@pytest.mark.parametrize("n", [0, 1, 2, 17, SMALL, SMALL + 1, 3 * BLOCK + 5])
def test_reads_like_its_list(n):
    order = epoch_order(7, 1, n)
    values = order.tolist()
    assert len(order) == len(values) == n
    assert list(order) == values
    assert np.asarray(order).tolist() == values
    assert np.asarray(order, dtype=np.int32).dtype == np.int32
    for a, b, step in [(None, None, None), (1, 5, None), (None, None, -1), (-3, None, None), (2, 10**9, 3), (5, 2, None)]:
        part = order[a:b:step]
        assert part.dtype == np.int64
        assert part.tolist() == values[a:b:step]
    if n:
        places = np.array([[0, n - 1], [-1, n // 2]])
        assert order[places].tolist() == [[values[p] for p in row] for row in places]
        assert order[range(n)].tolist() == order[list(range(n))].tolist() == values
        assert (order[0], order[-1], order[np.int64(n - 1)]) == (values[0], values[-1], values[n - 1])
        assert type(order[0]) is int
    assert order[[]].shape == (0,)
    for outside in (n, -n - 1):
        with pytest.raises(IndexError, match=f"{outside}"):
            order[outside]


@pytest.mark.parametrize("bad", [{"seed": -1}, {"epoch": -1}, {"n": -1}, {"n": 2.0}, {"seed": "0"}])
def test_arguments_are_named(bad):
    (name,) = bad
    with pytest.raises((ValueError, TypeError), match=f"{name}="):
        epoch_order(**{"seed": 0, "epoch": 0, "n": 5, **bad})
    with pytest.raises(TypeError, match="float64"):
        epoch_order(0, 0, 5)[np.array([0.0])]


# ---- a fixed function: a run that was recorded can be repeated


def test_the_same_for_ever():
    assert epoch_order(0, 0, 10).tolist() == [2, 4, 1, 6, 9, 5, 7, 0, 3, 8]
    assert epoch_order(0, 0, IMAGENET)[:4].tolist() == [22857, 302948, 113195, 606404]
    assert epoch_order(2**64, 0, 10) != epoch_order(0, 0, 10)
    assert epoch_order(1, 2, 10) == epoch_order(1, 2, 10)


def test_seeds_and_epochs_differ():
    n = SMALL + 100
    settings = [(s, e) for s in (0, 1, 2, 2**63, 2**64, 2**64 + 1, 2**130) for e in (0, 1, 2, 10**6, 2**64)]
    for size in (200, n):
        orders = [epoch_order(s, e, size)[:] for s, e in settings]
        for a, b in itertools.combinations(orders, 2):
            assert (a == b).mean() < 0.05


# ---- chance; seeds are fixed, so these either always pass or never


def unusual(counts, expected):
    """How many standard deviations the chi-square of `counts` lies above what chance gives."""
    counts = np.asarray(counts, dtype=float)
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def test_all_orders_of_four_are_equally_frequent():
    draws = 4800
    seen = dict.fromkeys(itertools.permutations(range(4)), 0)
    for i in range(draws):
        seen[tuple(epoch_order(i % 40, i // 40, 4).tolist())] += 1
    assert abs(unusual(list(seen.values()), draws / 24)) < 4


@pytest.mark.parametrize("n", [64, SMALL + 1, IMAGENET])
def test_every_place_gets_every_sample(n):
    """Over many epochs the sample at a place is uniform, at the ends and in the middle."""
    places, bins, epochs = np.array([0, 1, n // 2, n - 1]), 16, 1600
    counts = np.zeros((len(places), bins))
    for epoch in range(epochs):
        counts[np.arange(len(places)), epoch_order(11, epoch, n)[places] * bins // n] += 1
    for row in counts:
        assert abs(unusual(row, epochs / bins)) < 4


def regularity(values):
    """The largest of several correlations that chance leaves near 0, in its standard deviations."""
    n = len(values)
    x = (values - (n - 1) / 2) / math.sqrt((n * n - 1) / 12)
    lags = [1, 2, 3, 7, 64, math.isqrt(n), math.isqrt(n) + 1, n // 2]
    own = [abs((x[lag:] * x[:-lag]).sum()) / math.sqrt(n - lag) for lag in lags]
    place = np.linspace(-math.sqrt(3), math.sqrt(3), n)
    steps = np.diff(values) % n
    return max(
        *own, abs((x * place).sum()) / math.sqrt(n), abs(unusual(np.bincount(steps * 64 // n, minlength=64), (n - 1) / 64))
    )


@pytest.mark.parametrize("n", [1000, SMALL + 1, 50_000, 65_536, 300_007])
def test_no_order_is_regular(n):
    for seed, epoch in [(0, 0), (0, 1), (5, 90)]:
        assert regularity(epoch_order(seed, epoch, n)[:]) < 5


def test_the_detector_of_regularity_detects():
    n = 50_000
    stride = np.arange(n) * 30_011 % n
    two_rounds = permute(np.arange(n), n, KEYS[:2])
    assert regularity(np.arange(n)) > 5
    assert regularity(stride) > 5
    assert regularity(two_rounds) > 5


@pytest.mark.parametrize("n", [2000, 50_000])
def test_epochs_are_independent(n):
    """Neither equal places, nor shifted, mirrored or near ones; between any two of 8 epochs and 2 seeds."""
    orders = [epoch_order(seed, epoch, n)[:] for seed in (0, 1) for epoch in range(8)]
    for a, b in itertools.combinations(orders, 2):
        assert (a == b).sum() < 12  # 1 expected
        difference = np.bincount((a - b) % n * 64 // n, minlength=64)
        assert abs(unusual(difference, n / 64)) < 5.5
        assert abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(n) < 5


# ---- memory


def test_memory_does_not_grow_with_n():
    def peak(n):
        order = epoch_order(0, 1, n)
        tracemalloc.start()
        for start in range(0, 40 * BLOCK, 1000):
            order[start : start + 1000]
        for _ in itertools.islice(order, 3 * BLOCK):
            pass
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(IMAGENET) < 1 << 20
    assert peak(10**12) < 1 << 20


def test_torch_takes_it():
    assert torch.arange(100)[torch.from_numpy(epoch_order(0, 0, 100)[:10])].shape == (10,)
