"""Which side of a cut may train: a value."""

from __future__ import annotations

import itertools

import pytest

from phalanx.comm.elastic.quorum import ONE_CUT, Quorum


@pytest.mark.parametrize(("here", "silent"), list(itertools.product(range(1, 9), range(9))))
def test_at_least_half_of_those_that_may_live_train(here, silent):
    quorum = Quorum().silent(range(here, here + silent), 0.0)
    assert (here >= quorum.needs) == (2 * here >= here + silent)


def test_hosts_that_fall_silent_one_after_the_other_are_behind_one_cut():
    quorum, size = Quorum(), 4
    for member, at in ((3, 0.0), (2, 0.5), (1, 3.0)):
        size -= 1
        quorum = quorum.silent([member], at).trains(size, at)
    assert quorum.needs == 3 > size


def test_after_a_while_the_ranks_that_train_are_the_whole_job():
    quorum = Quorum().silent([3], 0.0)
    assert quorum.trains(3, ONE_CUT).needs == 1
    settled = quorum.trains(3, ONE_CUT + 0.1)
    assert settled.needs == 0
    assert settled.silent([2], 60.0).needs == 1, "2 of 3, in another cut"


def test_a_minority_never_becomes_the_whole_job_by_waiting():
    quorum = Quorum().silent([1, 2, 3], 0.0)
    assert quorum.trains(1, 1e6).needs == 3
    assert quorum.trains(3, 1e6).needs == 0, "others have come"


def test_those_that_are_known_to_have_ended_do_not_count():
    assert Quorum().silent([1, 2, 3], 0.0).ended({2: 0, 3: 75, 9: 1}).needs == 1


def test_without_a_rule_nothing_is_needed():
    assert Quorum("none").silent([1, 2, 3], 0.0).needs == 0
