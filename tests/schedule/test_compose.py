"""Schedules made of schedules."""

from dataclasses import replace

import pytest
from tests.schedule import oracle

from phalanx.schedule import (
    ScheduleError,
    binomial,
    chain,
    gossip,
    halving_doubling,
    lower,
    relabel,
    ring,
    scatter_gather,
    torus,
    verify,
)


def test_a_chain_cuts_chunks_as_finely_as_all_its_links_need():
    s = chain([binomial(4), scatter_gather(4), binomial(4)], goal="copy", name="thrice")
    assert (s.name, s.world, s.chunks, s.root) == ("thrice", 4, 4, 0)
    verify(s)
    assert oracle.copies_root(s)
    uneven = chain([binomial(6, 2), relabel(torus(2, 3), range(6)), halving_doubling(6)], goal="sum")
    assert uneven.chunks == 12
    inputs = oracle.integers(uneven)
    assert all(row == [36 * x for x in inputs[2]] for row in oracle.run(uneven, inputs))
    with pytest.raises(ScheduleError, match=r"ends as 36\*x2"):
        verify(uneven)


def test_a_chain_of_two_sums_is_not_a_sum():
    with pytest.raises(ScheduleError, match=r"ring\(3\) \+ ring\(3\): chunk 0 of rank 0 ends as 3\*x0 \+ 3\*x1 \+ 3\*x2"):
        verify(chain([ring(3), ring(3)], goal="sum"))


def test_a_chain_has_one_world():
    with pytest.raises(ValueError, match=r"chain: ring\(3\) has 3 ranks and ring\(4\) has 4; give schedules of one world size"):
        chain([ring(3), ring(4)], goal="sum")
    with pytest.raises(ValueError, match=r"nothing to chain"):
        chain([], goal="sum")


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (3, 0, 5, 1, 4, 2)])
def test_relabelled_schedules_do_the_same_elsewhere(ranks):
    for s in (torus(2, 3), lower(torus(3, 2)), ring(6), binomial(6, 2), scatter_gather(6, 1), gossip(6, 2, "hypercube")):
        other = relabel(s, ranks)
        verify(other)
        inputs = oracle.integers(s)
        played = oracle.run(other, [inputs[ranks.index(rank)] for rank in range(6)])
        if s.goal != "mixing" and s.lowered:
            assert [played[ranks[i]] for i in range(6)] == oracle.run(s, inputs)
    assert relabel(binomial(6, 2), ranks).root == ranks[2]


def test_relabelled_gossip_scales_whom_it_should():
    s = gossip(6, 2, "hypercube")  # ranks 2 and 3 sit out
    scaled = relabel(s, (2, 0, 4, 1, 3, 5))  # and now 4 and 1
    assert {rank for op in scaled.steps[0].ops for rank in op.ranks} == {0, 2, 3, 5}


def test_relabel_needs_a_permutation():
    for ranks in [(0, 1), (0, 1, 1), (1, 2, 3), (0, 1, 2, 3)]:
        with pytest.raises(ValueError, match=r"is not a permutation of the ranks 0 to 2 of ring\(3\)"):
            relabel(ring(3), ranks)


def test_a_wrong_link_makes_a_wrong_chain():
    broken = replace(ring(4), steps=())
    with pytest.raises(ScheduleError):
        verify(chain([broken, broken], goal="sum"))
