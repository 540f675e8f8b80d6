"""How ranks agree on a result, what a rank that raises does to the others, and what happens when time is up."""

import time

import pytest
from tests.selftest.worlds import named, selftest

import phalanx
from phalanx.selftest.render import last_line, line, to_record
from phalanx.selftest.result import Check, Outcome, Result, Status, failed, from_data, passed, skipped, to_data, together


def check(run, **options):
    return Check("ordering", "it", run, **options)


AFTER = Check("training", "what follows", lambda trial: passed(f"{trial.comm.allreduce_obj(1)} ranks"))


# ---- together ------------------------------------------------------------------------------------------------------------------


def test_one_rank_that_fails_is_enough():
    bad = failed("broken", "mend it", count=3)
    found = together([passed("fine"), bad, passed("fine")])
    assert found == Result(Status.FAIL, "rank 1: broken", "mend it", {"count": 3}, (1,))
    assert together([bad, bad]).reason == "broken"  # all say the same, so no rank is named
    assert together([bad, bad]).ranks == (0, 1)
    both = together([failed("a", "x"), failed("b", "y"), passed("fine")])
    assert both.reason == "ranks 0, 1: a"
    assert both.figures == {"reasons": {"1": "b"}}
    many = together([passed("fine")] + [bad] * 100)
    assert many.reason == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 92 more: broken"
    assert len(many.ranks) == 100


def test_a_skip_weighs_more_than_a_pass():
    assert together([passed("fine"), skipped("none")]) == skipped("none")
    assert together([passed("fine", a=1), passed("well", a=2)]) == passed("fine", a=1)


def test_results_travel_as_plain_data():
    for result in (passed("x", a=[1]), failed("y", "z"), skipped("w")):
        assert from_data(to_data(result)) == result


# ---- running -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_exception_is_a_result(world):
    def run(trial):
        if trial.comm.rank == world - 1:
            raise ValueError("no\nluck")
        return passed("fine")

    for own in selftest(world, [check(run), AFTER]):
        found = named(own)
        assert found["it"].status is Status.FAIL
        assert found["it"].reason.endswith("ValueError: no luck")
        assert found["it"].ranks == (world - 1,)
        assert found["what follows"] == passed(f"{world} ranks")
        assert own.failed
        assert own.speaker == 0


def test_a_broken_communicator_ends_it():
    """The check fails with what the communicator says; nothing after it runs."""

    def run(trial):
        if trial.comm.rank != 1:
            trial.comm.barrier()
        raise ValueError("left early")

    owns = selftest(3, [check(run), AFTER], timeout=2.0)
    for own in owns:
        found = named(own)
        assert found["it"].status is Status.FAIL
        assert found["what follows"].status is Status.SKIP
        assert "broke" in found["what follows"].reason
        assert isinstance(own.broken, phalanx.CommunicationError)
        assert own.failed
    assert "left early; then" in named(owns[1])["it"].reason  # its own reason comes first
    assert owns[1].own.reason == "ValueError: left early"


def test_time_is_up_on_all_ranks_alike():
    """The slowest rank decides."""

    def slow(trial):
        time.sleep(0.6 * trial.comm.rank)
        return passed("fine")

    last = [
        Check("failure", "needs much", lambda trial: passed("fine"), needs=2.0),
        Check("failure", "needs none", AFTER.run, None),
    ]
    for own in selftest(2, [check(slow), check(slow), AFTER, *last], seconds=0.5):
        statuses = [outcome.result.status for outcome in own.outcomes]
        assert statuses == [Status.PASS, Status.SKIP, Status.SKIP, Status.SKIP, Status.PASS]
        assert "no time left" in own.outcomes[1].result.reason
        assert own.outcomes[0].seconds > 0.5
        assert not own.failed


def test_time_is_kept_for_the_groups_after_it():
    """A group that is late leaves the next ones what they need, if that is not more than half of all."""

    def statuses(elapsed, needs):
        last = Check("failure", "the last", AFTER.run, needs=needs)
        (own,) = selftest(1, [check(AFTER.run), last], seconds=1000.0, elapsed=elapsed)
        return "".join(outcome.result.status.value[0] for outcome in own.outcomes)

    assert statuses(0.0, 200.0) == "PP"
    assert statuses(400.0, 200.0) == "PP"
    assert statuses(400.0, 700.0) == "PS"  # it can never run, so nothing is kept for it
    assert statuses(9000.0, 200.0) == "PP"  # half of the time is for checks, however long the start took


def test_checks_of_gpus_are_skipped_on_cpus():
    (own,) = selftest(1, [check(AFTER.run, gpu=True), AFTER])
    assert named(own)["it"] == skipped("the ranks compute on CPUs")


# ---- what is shown -------------------------------------------------------------------------------------------------------------

OUTCOMES = [
    Outcome("placement", "versions", passed("torch 2.13"), 0.1),
    Outcome("correctness", "all_reduce", failed("rank 1: element 0 is 4", "report it"), 1.25),
    Outcome("speed", "all-reduce of 1 MB", skipped("a\x1b[31m\nb", "use more --minutes"), 0.0),
]


def test_lines_are_aligned_and_printable():
    lines = [line(outcome) for outcome in OUTCOMES]
    assert lines == [
        "PASS  placement    versions                    torch 2.13",
        "FAIL  correctness  all_reduce                  rank 1: element 0 is 4. Remedy: report it",
        r"SKIP  speed        all-reduce of 1 MB          a\x1b[31m\nb. Remedy: use more --minutes",
    ]
    assert last_line(OUTCOMES, 3.0) == "1 passed, 1 failed, 1 skipped in 3.0 s: correctness all_reduce failed"
    assert last_line(OUTCOMES[:1], 3.0) == "1 passed, 0 failed, 0 skipped in 3.0 s"


def test_the_record():
    record = to_record({"ranks": 2}, OUTCOMES, 3.0)
    assert record["ranks"] == 2
    assert record["failed"] == 1
    assert [own["status"] for own in record["checks"]] == ["PASS", "FAIL", "SKIP"]
    assert record["checks"][1]["remedy"] == "report it"
    assert record["checks"][1]["seconds"] == 1.25
