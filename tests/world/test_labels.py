"""What ranks call must be the same thing: shared memory notices at once, and nothing is broken by it."""

import pytest
import torch
from tests.world.test_one_host import native
from tests.world.test_reductions import LARGE, equal

import phalanx

pytestmark = pytest.mark.skipif(not native(), reason="no native core: only the timeout finds a disagreement")


def disagree(comm, what, odd):
    n = comm.size
    usual, other = {
        "dims": (lambda: comm.all_reduce(torch.ones(2, 3)), lambda: comm.all_reduce(torch.ones(3, 2))),
        "large dims": (lambda: comm.all_reduce(torch.ones(2, LARGE)), lambda: comm.all_reduce(torch.ones(LARGE, 2))),
        "truths": (lambda: comm.all_reduce(torch.ones(5).bool()), lambda: comm.all_reduce(torch.ones(5).byte(), "max")),
        "label": (
            lambda: comm.all_reduce(torch.ones(5), label="gradients of step 3"),
            lambda: comm.all_reduce(torch.ones(5), label="gradients of step 4"),
        ),
        "async label": (
            lambda: comm.all_reduce_async(torch.ones(LARGE), label="gradients of step 3").wait(),
            lambda: comm.all_reduce_async(torch.ones(LARGE), label="gradients of step 4").wait(),
        ),
        "scattered dims": (lambda: comm.reduce_scatter(torch.ones(n, 2)), lambda: comm.reduce_scatter(torch.ones(2 * n))),
        "root": (lambda: comm.bcast(torch.ones(5), 0), lambda: comm.bcast(torch.ones(5), 1)),
        "gathering root": (lambda: comm.gather(torch.ones(5), 0), lambda: comm.gather(torch.ones(5), 1)),
        "gather": (lambda: comm.allgather(torch.ones(5)), lambda: comm.gather(torch.ones(5), 1)),
        "scatter": (lambda: comm.alltoall([torch.ones(5)] * n), lambda: comm.scatter([torch.ones(5)] * n, comm.rank)),
        "object": (lambda: comm.bcast_obj(1, 0), lambda: comm.bcast_obj(1, 1)),
        "schedule": (lambda: comm.run(phalanx.ring(n), torch.ones(5)), lambda: comm.run(phalanx.tree(n), torch.ones(5))),
        "complex": (
            lambda: comm.all_reduce(torch.ones(2, 3, dtype=torch.complex64)),
            lambda: comm.all_reduce(torch.ones(6, dtype=torch.complex64)),
        ),
        "verb": (lambda: comm.all_reduce(torch.ones(2 * n)), lambda: comm.reduce_scatter(torch.ones(2 * n))),
    }[what]
    with pytest.raises(phalanx.CommunicationError, match="disagree") as caught:
        (other if comm.rank == odd else usual)()
    equal(comm.all_reduce(torch.ones(4)), torch.full((4,), float(n)))
    assert comm.allgather_obj(comm.rank) == list(range(n))
    return str(caught.value).partition(": ")[2], caught.value.missing


WHAT = [
    "dims", "large dims", "truths", "label", "async label", "scattered dims", "root", "gathering root", "gather", "scatter",
    "object", "schedule", "complex", "verb",
]  # fmt: skip


@pytest.mark.parametrize("what", WHAT)
def test_ranks_that_mean_different_things_are_told_so(pools, what):
    for odd in (0, 2):
        answers = pools.of(3).run(disagree, what, odd)
        assert [missing for _, missing in answers] == [(odd,)] * 3
        assert len({text for text, _ in answers}) == 1
        assert f"rank {odd}: " in answers[0][0]
        if "label" in what:
            assert "gradients of step 3" in answers[0][0]
            assert "gradients of step 4" in answers[0][0]


def agree(comm):
    n = comm.size
    for label in ("", "gradients of step 3, backward 2", "x" * 1000):
        equal(comm.all_reduce(torch.ones(5), label=label), torch.full((5,), float(n)))
        equal(comm.all_reduce_async(torch.ones(LARGE), label=label).wait(), torch.full((LARGE,), float(n)))


def test_a_label_changes_nothing_where_all_have_the_same(world):
    world.run(agree)


def test_labels_keep_messages_apart():
    def differ(comm):
        with pytest.raises(phalanx.CommunicationError, match="step 4" if comm.rank != 1 else "step 3") as caught:
            comm.all_reduce(torch.ones(5), label=f"step {3 + (comm.rank == 1)}")
        return caught.value.missing

    assert phalanx.run_local(3, differ, timeout=2.0) == [(1,), (0, 2), (1,)]
