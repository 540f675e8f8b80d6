"""Every group of checks passes where nothing is wrong, and the right line fails where something is."""

import functools

import pytest
import torch
from tests.selftest.worlds import DoneTooEarly, MissingOrder, SlowRank, WrongSum, named, selftest

import phalanx
from phalanx.selftest import correctness, ordering, speed, training
from phalanx.selftest.result import Status
from phalanx.selftest.slow_ranks import find_slow
from phalanx.selftest.speed import recommend

QUICK = 2.0  # seconds: every check does the least that it can


def only(group, *names):
    """The checks of these names, made for each rank."""
    return lambda: [check for check in group.checks() if check.name in names]


def failing(n, checks, wrap, seconds=QUICK):
    """The names of the checks that fail, the same on all ranks, and the result of each."""
    found = [named(own) for own in selftest(n, checks, wrap=wrap, seconds=seconds)]
    assert all(own == found[0] for own in found)
    return {name: result for name, result in found[0].items() if result.status is Status.FAIL}


@pytest.mark.parametrize(
    ("group", "world"),
    [(correctness, 1), (correctness, 2), (correctness, 5), (ordering, 1), (ordering, 3), (training, 1), (training, 3)],
)
def test_all_is_well(group, world):
    seconds = 30.0 if group is training else QUICK
    for own in selftest(world, group.checks, seconds=seconds):
        assert {name: result for name, result in named(own).items() if result.status is Status.FAIL} == {}
        assert own.broken is None
        assert not own.failed


def test_hosts():
    """Over two hosts there is a torus to measure."""
    (own, *_) = selftest(4, only(speed, "all-reduce of 1 MB"), seconds=2.0, hosts=2)
    (rows,) = (result.figures for result in named(own).values())
    assert rows.keys() == {"automatic", "one call", "torus"}
    for row in rows.values():
        assert row["busbw"] == pytest.approx(row["algbw"] * 2 * 3 / 4)
        assert row["algbw"] == pytest.approx(1e6 / row["time_us"] / 1e3)
    assert not own.failed


def test_every_verb_has_a_check():
    """A new verb of the communicator wants a line here."""
    names = {word for check in correctness.checks() for word in check.name.split() if word != "and"}
    names |= {f"{verb}_obj" for verb in ("bcast", "gather", "allgather", "scatter", "allreduce", "send", "recv")}
    ends = {"close", "part", "survivors"}
    for_rooms = {
        "buffer",
        "shared_buffer",
        "on_host",
        "exchange_async",
        "hotline",
        "after_step",
        "compound_async",
        "as_one",
        "has_left",
    }
    verbs = {name for name in dir(phalanx.Communicator) if not name.startswith("_")}
    methods = {name for name in verbs if callable(getattr(phalanx.Communicator, name))}
    assert methods - ends - for_rooms == names - {"objects"}


# ---- faults --------------------------------------------------------------------------------------------------------------------


def test_a_wrong_sum():
    some = [
        check for check in correctness.checks() if check.name in ("all_reduce", "all_reduce_async", "reduce_scatter", "bcast")
    ]
    found = failing(3, some, WrongSum)
    assert {"all_reduce"} <= found.keys() <= {"all_reduce", "all_reduce_async"}
    assert found["all_reduce"].ranks == (1,)
    assert "rank 1: all_reduce sum of float32[1] contiguous on cpu: element 0 is " in found["all_reduce"].reason
    assert found["all_reduce"].remedy


def test_a_wrong_sum_while_training():
    found = failing(3, only(training, "float32"), WrongSum)
    assert "rank 1" in found["float32"].reason  # whose replica is another


@pytest.mark.parametrize(("fault", "line"), [(MissingOrder, "inputs written late"), (DoneTooEarly, "done() means done")])
def test_missing_order(fault, line):
    found = failing(2, only(ordering, line), fault)
    assert found[line].ranks == (1,)
    assert "differ from the synchronous run" in found[line].reason


def test_a_slow_rank():
    slow = only(speed, "slow ranks")
    found = failing(3, slow, functools.partial(SlowRank, at=2))
    assert found["slow ranks"].reason.startswith("slow rank 2: the start of an all-reduce takes 2")
    assert failing(3, slow, functools.partial(SlowRank, at=-1)) == {}


def test_which_rank_is_slow():
    rank = lambda **times: {"a": 0.001, "b": 0.1} | times  # noqa: E731
    assert find_slow([rank(), rank()])[0] is None
    assert find_slow([rank(), rank(b=0.19)])[0] is None
    assert find_slow([rank(), rank(b=0.21)])[0] == (1, "b")
    assert find_slow([rank(a=0.0001), rank(a=0.0009)])[0] is None  # too short to tell
    slow, figures = find_slow([rank(), rank(), rank(a=0.004), rank()])
    assert slow == (2, "a")
    assert figures["a"] == {"median_s": 0.001, "slowest_s": 0.004, "slowest_rank": 2}


def test_one_element_of_any_stride():
    """Found by the check of `bcast`."""

    def play(comm):
        return comm.bcast(torch.full((2,), 7.0)[::2] if comm.rank == 0 else None).item()

    assert phalanx.run_local(2, play, timeout=10.0) == [7.0, 7.0]


# ---- what it recommends --------------------------------------------------------------------------------------------------------


def test_recommendations():
    rows = {"automatic": {"busbw": 1.0}, "one call": {"busbw": 0.9}, "torus": {"busbw": 1.1}, "torch": {"busbw": 1.0}}
    assert recommend({}) is None
    assert recommend({"100 MB": rows}) == "keep the defaults"
    faster = rows | {"torus": {"busbw": 1.5}}
    assert "torus is 1.5 times as fast" in recommend({"1 MB": rows, "100 MB": faster})
    assert recommend({"100 MB": faster, "automatic": "torus"}) == "keep the defaults"  # it is the same
    assert recommend({"1 MB": faster, "100 MB": rows}) == "keep the defaults"  # gradients travel in large groups
    assert "report it" in recommend({"100 MB": rows | {"torch": {"busbw": 2.0}}})
    assert recommend({"step": {"alone": 9.0, "phalanx": 10.0}}) == "keep the defaults"
    assert "50% of a small step" in recommend({"step": {"alone": 5.0, "phalanx": 10.0}})
