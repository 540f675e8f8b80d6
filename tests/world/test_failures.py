"""Every fault that API.md speaks of, injected into real processes: who learns what, how fast, and how each rank ends.

A `Case` is a value; all cases that pytest selected run several at a time, because they mostly wait, and each test judges the
`Outcome` of its own. `programs/faults.py` is what the ranks run, `programs/herd.py` starts and strikes them.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future
from pathlib import Path

from tests.long import often
from tests.world.plays import cases
from tests.world.programs.herd import Case, Outcome

TIMEOUT = 6.0
SLACK = 5.0  # seconds that a busy machine may add to a promise; less than the next timeout would
ALL_REDUCE = "all_reduce(float32[65536], sum)"


def tracebacks(stderr: str) -> list[str]:
    """The text from each `Traceback` on, in the order in which they were printed."""
    return stderr.split("Traceback (most recent call last)")[1:]


def assert_aware(case: Case, outcome: Outcome, missing: list[int], *words: str) -> None:
    """Every rank but the victim raised a CommunicationError with these facts, within the timeout, and lived on to exit with 0."""
    for rank in outcome.codes:
        if rank == case.victim or rank == case.args.get("who"):
            continue
        error = outcome.word(rank, "error")
        assert error["missing"] == missing, error
        assert all(word in error["text"] for word in words), error
        assert error["took"] < TIMEOUT + SLACK, error
        assert outcome.codes[rank] == 0, outcome.stderr


# ---- an exception on one rank ----------------------------------------------------------------------------------------------


def raising(who: int, others: str, *, shared: bool = False, **more: object) -> Case:
    args = {"who": who, "others": others, "timeout": TIMEOUT, **more}
    return Case("raising", args, shared=shared, wholly=others == "all_reduce")


@cases(
    raising(0, "all_reduce"),
    raising(1, "loop"),
    raising(2, "sleep"),
    *often(*(raising(who, "all_reduce") for who in (1, 2))),
    *often(*(raising(who, "loop") for who in (0, 2))),
    *often(*(raising(who, "sleep") for who in (0, 1))),
    *often(raising(1, "sleep", context=True)),
    raising(0, "all_reduce", shared=True),
    *often(raising(0, "all_reduce", context=True), raising(1, "all_reduce", shared=True)),
)
def test_exception_ends_all_ranks_and_its_traceback_comes_first(case: Case, outcome: Outcome) -> None:
    who = case.args["who"]
    raised = outcome.word(who, "raises")["at"]
    assert outcome.codes == {0: 1, 1: 1, 2: 1}, outcome.stderr
    assert max(outcome.ended.values()) - raised < 5 + SLACK, outcome.stderr
    first, *others = tracebacks(outcome.stderr)
    assert f"ValueError: rank {who} has a reason" in first
    assert not others, outcome.stderr  # the echoes of the others are one line each
    for rank in {0, 1, 2} - {who}:
        assert f"[rank {rank}] " in outcome.stderr
        if case.args["others"] in ("loop", "sleep"):
            assert outcome.word(rank, "finally")["at"] - raised < 5 + SLACK


@cases(*(raising(who, "all_reduce", way="exit") for who in (0, 1, *often(2))))
def test_sys_exit_on_one_rank_is_told_to_those_who_wait_for_it(case: Case, outcome: Outcome) -> None:
    who = case.args["who"]
    assert outcome.codes == {0: 1, 1: 1, 2: 1} | {who: 3}, outcome.stderr
    assert f"{ALL_REDUCE} (number 2) cannot finish: rank {who} has ended" in outcome.stderr
    assert max(outcome.ended.values()) - outcome.word(who, "raises")["at"] < TIMEOUT + SLACK


# ---- a rank that dies, stops or hangs ----------------------------------------------------------------------------------------


def struck(strike: signal.Signals, victim: int, ranks: int = 3, *, shared: bool = False, **more: object) -> Case:
    args = {"who": victim, "timeout": TIMEOUT, **more}
    return Case("handling", args, ranks=ranks, strike=strike, victim=victim, shared=shared, wholly=False)


@cases(
    *(struck(signal.SIGKILL, victim, ranks, timeout=30.0) for victim, ranks in ((0, 3), (2, 4), *often((1, 3), (0, 4)))),
    *(struck(signal.SIGKILL, victim, shared=True, timeout=30.0) for victim in (1, *often(0))),
)
def test_killed_rank_is_named_at_once_by_those_who_wait_for_it(case: Case, outcome: Outcome) -> None:
    assert outcome.codes[case.victim] == -signal.SIGKILL
    assert_aware(case, outcome, [case.victim], f"{ALL_REDUCE} (number 2)", f"rank {case.victim} does not answer", "is dead")
    for rank in set(outcome.codes) - {case.victim}:
        assert outcome.word(rank, "error")["at"] - outcome.struck < 3 + SLACK  # far from the timeout


@cases(*(struck(signal.SIGKILL, victim, later=1.5) for victim in (0, *often(1))))
def test_killed_rank_is_named_by_those_who_call_later(case: Case, outcome: Outcome) -> None:
    assert_aware(case, outcome, [case.victim], f"rank {case.victim} does not answer", "is dead")


@cases(
    *(struck(signal.SIGSTOP, victim, ranks) for victim, ranks in ((3, 4), *often((0, 3), (1, 3), (0, 4)))),
    *(struck(signal.SIGSTOP, victim, shared=True) for victim in (1, *often(0))),
)
def test_stopped_rank_is_named_within_the_timeout(case: Case, outcome: Outcome) -> None:
    assert_aware(case, outcome, [case.victim], f"{ALL_REDUCE} (number 2)", f"rank {case.victim} does not answer", "is stopped")


@cases(*(Case("handling", {"who": who, "timeout": TIMEOUT}, sleepers=(who,), wholly=False) for who in (2, *often(0))))
def test_rank_that_never_calls_is_named_as_in_user_code(case: Case, outcome: Outcome) -> None:
    who = case.args["who"]
    assert_aware(case, outcome, [who], f"rank {who} has not called it: in user code for", f"last operation {ALL_REDUCE}")


@cases(struck(signal.SIGKILL, 0), struck(signal.SIGSTOP, 2), *often(struck(signal.SIGKILL, 1)))
def test_failed_communicator_refuses_at_once(case: Case, outcome: Outcome) -> None:
    for rank in set(outcome.codes) - {case.victim}:
        again = [line for line in outcome.said[rank] if line["what"] == "error" and not line["first"]]
        assert len(again) == 1
        assert again[0]["took"] < TIMEOUT / 3
        assert again[0]["missing"] == [case.victim]
        assert again[0]["text"].startswith("barrier() cannot start: an earlier communication failed")


@cases(Case("splitting", {"who": [2, 3], "timeout": TIMEOUT}, ranks=5, strike=signal.SIGKILL, victim=2, after=1.0, sleepers=(3,)))
def test_split_communicator_names_its_own_ranks(case: Case, outcome: Outcome) -> None:
    for world_rank in (0, 4):  # world ranks 4, 2, 0 are ranks 0, 1, 2 of the even part
        error = outcome.word(world_rank, "error")
        assert error["missing"] == [1]
        assert "rank 1 does not answer" in error["text"]
    error = outcome.word(1, "error")  # its own part, 3 and 1, is only late
    assert error["missing"] == []
    assert "the job is broken outside of its 2 ranks: in the world, rank 2 does not answer" in error["text"]
    assert [outcome.codes[rank] for rank in (0, 1, 4)] == [0, 0, 0], outcome.stderr


# ---- ranks that disagree -----------------------------------------------------------------------------------------------------

DEBUG = {"PHALANX_DEBUG": "1"}


@cases(
    *(
        Case("disagreeing", {"timeout": TIMEOUT, "calls": calls}, env=DEBUG, wholly=False)
        for calls in (
            ["40000", "40000", "40001"],
            ["barrier", "65536", "65536"],
            *often(["7", "8", "8"], ["65536", "float64", "65536"]),
        )
    )
)
def test_disagreement_under_debug_is_an_error_on_all_ranks(case: Case, outcome: Outcome) -> None:
    odd = [rank for rank, call in enumerate(case.args["calls"]) if case.args["calls"].count(call) == 1]
    for rank in range(3):
        error = outcome.word(rank, "error")
        assert error["missing"] == odd, error
        assert "ranks disagree on operation number 2" in error["text"]
        assert error["took"] < TIMEOUT - 1  # it is not the timeout that tells
        assert outcome.word(rank, "done")  # nothing was sent: the communicator goes on
    assert set(outcome.codes.values()) == {0}, outcome.stderr


@cases(
    *(
        Case("disagreeing", {"timeout": TIMEOUT, "calls": calls})
        for calls in (
            ["40000", "40000", "40001"],
            ["bcast", "bcast", "allgather"],
            *often(["65536", "barrier", "65536"], ["float64", "65536", "65536"]),
        )
    )
)
def test_disagreement_is_reported_within_the_timeout(case: Case, outcome: Outcome) -> None:
    calls = case.args["calls"]
    name = {"barrier": "barrier()", "allgather": "allgather()", "bcast": "bcast(root 0)"} | {
        "float64": "all_reduce(float64[65536], sum)"
    }
    for rank in range(3):
        if rank == 0 and calls[0] == "bcast":
            continue  # the root sends to both, and is done
        error = outcome.word(rank, "error")
        assert error["took"] < TIMEOUT + SLACK
        others = [other for other in range(3) if calls[other] != calls[rank]]
        assert set(error["missing"]) <= set(others)
        assert error["missing"], error
        for other in error["missing"]:
            assert name.get(calls[other], f"all_reduce(float32[{calls[other]}], sum)") in error["text"]
    assert set(outcome.codes.values()) == {0}, outcome.stderr  # above all: no SIGABRT


# ---- ranks that never come ---------------------------------------------------------------------------------------------------


@cases(*(Case("meeting", {"timeout": 3.0}, absent=absent, wholly=False) for absent in ((0,), (1, 2), *often((1,)))))
def test_rank_that_never_starts_is_named(case: Case, outcome: Outcome) -> None:
    for rank in outcome.codes:
        error = outcome.word(rank, "error")
        assert error["missing"] == list(case.absent), error
        assert error["operation"] == "create_communicator"
        assert error["took"] < 3.0 + SLACK
        assert outcome.codes[rank] == 0


# ---- ends that are no failures -----------------------------------------------------------------------------------------------


@cases(
    *(
        Case("ending", {"timeout": TIMEOUT, "order": order, "close": close})
        for order, close in (
            ([0, 1, 2], "none"),
            ([2, 0, 0], "close"),
            *often(*((order, close) for order in ([0, 0, 0], [0, 2, 2]) for close in ("none", "close"))),
            *often(([0, 1, 2], "close"), ([2, 0, 0], "none")),
        )
    ),
    Case("ending", {"timeout": TIMEOUT, "order": [0, 2, 1], "close": "none"}, shared=True),
)
def test_normal_end_is_quick_and_silent(case: Case, outcome: Outcome) -> None:
    assert set(outcome.codes.values()) == {0}
    assert outcome.stderr == ""
    last = max(outcome.word(rank, "ends")["at"] for rank in range(3))
    for rank in range(3):
        # the rank that holds the store stays for the others; all leave their exit handlers at once
        assert (
            outcome.word(rank, "left")["at"] - (last if rank == 0 else outcome.word(rank, "ends")["at"]) < TIMEOUT - 1
        )  # nobody waits for a timeout


@cases(Case("crawling", {"timeout": 3.0, "delay": 0.9}))
def test_slow_but_moving_is_no_failure(case: Case, outcome: Outcome) -> None:
    assert max(outcome.word(rank, "done")["took"] for rank in range(3)) > 3.0  # longer than the timeout in total
    assert all(outcome.word(rank, "sum")["right"] for rank in range(3))
    assert set(outcome.codes.values()) == {0}


def test_no_trace_is_left(plays: dict[int, Future[Outcome]]) -> None:
    """After all of the above: no process, nothing in /dev/shm, no note in the folder for temporary files."""
    for future in plays.values():
        future.exception()
    ranks = [pid for future in plays.values() if not future.exception() for pid in future.result().pids.values()]
    assert ranks
    assert not [pid for pid in ranks if _parent(Path(f"/proc/{pid}")) == os.getpid()]  # a number may have a new owner by now
    # "phalanx-PROCESS-..."; others belong to tests beside this one
    assert not [path for path in Path("/dev/shm").glob("phalanx-*") if path.name.split("-")[1] in map(str, ranks)]


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1
