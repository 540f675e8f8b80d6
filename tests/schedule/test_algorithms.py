"""Every algorithm on every small world, at both levels, by the checker and by the oracle."""

import random

import pytest
from tests.long import times
from tests.schedule import oracle

from phalanx.schedule import (
    binomial,
    halving_doubling,
    hierarchical,
    lower,
    recursive_doubling,
    ring,
    scatter_gather,
    torus,
    tree,
    verify,
)

WORLDS = range(1, 34)
MOST, MOST_IN_THREE = times(64, seldom=36), times(48, seldom=30)  # ranks
PAIRS = [(a, b) for a in range(1, 65) for b in range(1, 65) if a * b <= MOST]
TRIPLES = [(a, b, c) for a in range(1, 49) for b in range(1, 49) for c in range(1, 49) if a * b * c <= MOST_IN_THREE]


@pytest.mark.parametrize("make", [ring, halving_doubling, recursive_doubling, tree, torus])
def test_one_level_algorithms_sum_on_every_world(make):
    for n in WORLDS:
        s = make(n)
        assert s.world == n
        for level in (s, lower(s)):
            verify(level)
            assert oracle.sums_everything(level)


@pytest.mark.parametrize("make", [torus, hierarchical])
def test_two_level_algorithms_sum_on_every_grid(make):
    for rows, cols in PAIRS:
        s = make(rows, cols)
        assert s.world == rows * cols
        for level in (s, lower(s)):
            verify(level)
            assert oracle.sums_everything(level)


def test_leaders_may_use_any_all_reduce_among_themselves():
    for among in (recursive_doubling, halving_doubling, tree):
        for hosts, per_host in [(1, 3), (2, 2), (3, 2), (5, 3), (8, 4)]:
            s = hierarchical(hosts, per_host, among=among)
            for level in (s, lower(s)):
                verify(level)
                assert oracle.sums_everything(level)


def test_three_dimensional_tori_sum_on_every_grid():
    for dims in TRIPLES:
        s = torus(*dims)
        for level in (s, lower(s)):
            verify(level)
        if min(dims) > 1:  # the others are the grids above
            assert oracle.sums_everything(s)
            assert oracle.sums_everything(lower(s))


def test_tori_of_four_and_five_dimensions_sum():
    for dims in [(2, 2, 2, 2), (3, 1, 2, 4), (2, 3, 2, 2, 2)]:
        for level in (torus(*dims), lower(torus(*dims))):
            verify(level)
            assert oracle.sums_everything(level)


@pytest.mark.parametrize("make", [binomial, scatter_gather])
def test_broadcasts_copy_from_every_root(make):
    for n in WORLDS:
        for root in {0, 1 % n, n // 2, n - 1}:
            s = make(n, root)
            for level in (s, lower(s)):
                verify(level)
                assert oracle.copies_root(level)


def test_ranks_agree_bitwise_on_floats():
    rng = random.Random(0)
    schedules = [make(n) for make in (ring, halving_doubling, recursive_doubling, tree) for n in (2, 3, 5, 8, 13)]
    schedules += [torus(3, 4), torus(2, 3, 2), hierarchical(3, 4)]
    for s in map(lower, schedules):
        inputs = [[rng.gauss(0, 1) * 10.0 ** rng.randrange(-8, 8) for _ in range(s.chunks)] for _ in range(s.world)]
        first, *others = oracle.run(s, inputs)
        assert all(row == first for row in others), s.name


def test_two_dimensional_torus_is_the_papers():
    s = torus(2, 3)
    assert [step.label for step in s.steps] == ["reduce-scatter along rows", "all-reduce along columns", "all-gather along rows"]
    assert [op.group for op in s.steps[0].ops] == [(0, 1, 2), (3, 4, 5)]
    assert [(op.group, op.chunks) for op in s.steps[1].ops] == [
        ((0, 3), range(2)),
        ((1, 4), range(2, 4)),
        ((2, 5), range(4, 6)),
    ]
    assert [op.group for op in s.steps[2].ops] == [(0, 1, 2), (3, 4, 5)]


def test_axes_of_size_one_cost_nothing():
    assert torus(1, 1).steps == ()
    assert len(torus(5, 1).steps) == 1
    assert [step.ops for step in torus(1, 4, 1).steps] == [step.ops for step in torus(1, 4).steps]


def test_tree_leaves_of_one_half_work_in_the_other():
    for n in range(2, 34):
        s = tree(n, pipeline=1)
        receivers = [{op.dst for op in s.ops() if op.reduce and op.chunks == range(c, c + 1)} for c in (0, 1)]
        leaves = [set(range(n)) - receiving for receiving in receivers]
        assert not leaves[0] & leaves[1], n


def test_tree_pipeline_sets_chunks_and_steps():
    for n in (2, 3, 8, 9, 33):
        height = (n - 1).bit_length()
        for length in (1, 2, 7):
            s = tree(n, pipeline=length)
            verify(s)
            assert (s.chunks, len(s.steps)) == (2 * length, 2 * height + length - 1)
        assert tree(n).chunks == 4 * height


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ring(0), r"ring\(0\): a world has at least 1 rank; give n >= 1"),
        (lambda: halving_doubling(0), r"halving_doubling\(0\): .*give n >= 1"),
        (lambda: recursive_doubling(-1), r"recursive_doubling\(-1\): .*give n >= 1"),
        (lambda: tree(0), r"tree\(0\): .*give n >= 1"),
        (lambda: tree(4, pipeline=0), r"tree\(4, pipeline=0\): a pipeline has at least 1 chunk"),
        (lambda: torus(), r"torus\(\): a grid has at least 1 axis"),
        (lambda: torus(3, 0), r"torus\(3x0\): axis 1 has size 0; give sizes >= 1"),
        (lambda: hierarchical(0, 4), r"hierarchical\(0x4\): there is at least 1 host"),
        (lambda: hierarchical(2, 0), r"hierarchical\(2x0\): there is at least 1 host and 1 rank per host"),
        (lambda: binomial(0), r"binomial\(0\): .*give n >= 1"),
        (lambda: binomial(3, 3), r"binomial\(3, root=3\): root 3 is not a rank; give 0 <= root < 3"),
        (lambda: scatter_gather(3, -1), r"scatter_gather\(3, root=-1\): root -1 is not a rank"),
    ],
)
def test_bad_sizes_are_named_with_the_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()
