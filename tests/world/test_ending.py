"""How processes end after a failure: with which status, and what is done before: handlers, rescue files, accepted saves."""

from __future__ import annotations

import signal

import torch
from tests.long import often
from tests.world.plays import cases
from tests.world.programs.herd import Case, Outcome

import phalanx

TIMEOUT = 6.0
SLACK = 5.0  # seconds that a busy machine may add to a promise


def tidying(who: int, others: str) -> Case:
    return Case("tidying", {"who": who, "others": others, "timeout": TIMEOUT, "seconds": 3.5})


@cases(tidying(0, "all_reduce"), tidying(1, "sleep"), *often(tidying(1, "all_reduce"), tidying(0, "loop")))
def test_everything_that_the_user_wants_to_be_done_is_done_before_the_end(case: Case, outcome: Outcome) -> None:
    assert outcome.codes == {0: 1, 1: 1, 2: 1}, outcome.stderr
    for rank in outcome.codes:
        for what in ("tidied", "excepthook", "exit handler from after", "exit handler from before"):
            assert outcome.word(rank, what)
        last = outcome.word(rank, "exit handler from before")["at"]
        assert outcome.ended[rank] - last < 2 + SLACK  # only our own clean-up is left, and bounded


@cases(Case("raising_together", {"timeout": TIMEOUT, "seconds": 6.0}))
def test_a_rank_that_has_its_own_exception_is_not_disturbed(case: Case, outcome: Outcome) -> None:
    assert outcome.codes == {0: 1, 1: 1, 2: 1}, outcome.stderr
    assert outcome.word(1, "tidied")
    assert "ValueError: rank 1 has a reason" in outcome.stderr


@cases(*(Case("raising", {"who": who, "others": "foreign", "timeout": TIMEOUT}) for who in (0, 1)))
def test_a_rank_in_foreign_code_is_ended_all_the_same(case: Case, outcome: Outcome) -> None:
    assert outcome.codes == {0: 1, 1: 1, 2: 1}, outcome.stderr
    assert max(outcome.ended.values()) - outcome.word(case.args["who"], "raises")["at"] < 5 + SLACK
    for rank in {0, 1, 2} - {case.args["who"]}:
        assert f"[rank {rank}] ended because rank {case.args['who']} raised ValueError" in outcome.stderr


@cases(Case("rescuing", {"who": 2, "timeout": TIMEOUT, "seconds": 6.0}, strike=signal.SIGKILL, victim=2))
def test_a_rank_that_handles_the_error_is_not_ended_by_one_that_does_not(case: Case, outcome: Outcome) -> None:
    assert outcome.codes == {0: 1, 1: 0, 2: -signal.SIGKILL}, outcome.stderr
    assert outcome.word(1, "rescued")


@cases(
    *(
        Case("saving", {"directory": "FOLDER/checkpoints", "timeout": TIMEOUT, "seconds": 7.0, "others": others}, ranks=2)
        for others in ("all_reduce", "foreign")
    )
)
def test_a_save_that_was_accepted_is_finished_whatever_ends_the_job(case: Case, outcome: Outcome) -> None:
    assert outcome.codes == {0: 1, 1: 1}, outcome.stderr
    model = torch.nn.Linear(100, 100)
    with phalanx.create_communicator() as comm, phalanx.Checkpointer(outcome.folder / "checkpoints", comm) as checkpoints:
        assert checkpoints.load(model=model) == 1


@cases(
    Case(
        "saving",
        {"directory": "FOLDER/checkpoints", "timeout": TIMEOUT, "seconds": 3.0},
        ranks=2,
        strike=signal.SIGKILL,
        victim=1,
        word="saved",
        after=0.0,
    )
)
def test_a_save_that_lacks_the_part_of_a_dead_rank_says_so(case: Case, outcome: Outcome) -> None:
    assert outcome.codes == {0: 1, 1: -signal.SIGKILL}, outcome.stderr
    assert "phalanx: the last checkpoint is not complete: " in outcome.stderr
    assert "has rank 1 ended" in outcome.stderr
    assert list((outcome.folder / "checkpoints").iterdir()) == []


@cases(
    *(
        Case("interrupted", {"timeout": TIMEOUT, "others": others}, strike=signal.SIGINT, victim=victim)
        for others in ("all_reduce", "sleep")
        for victim in (-1, 1)
    )
)
def test_ctrl_c_ends_all_ranks_at_once_with_one_line(case: Case, outcome: Outcome) -> None:
    interrupted = (0, 1, 2) if case.victim == -1 else (case.victim,)
    assert outcome.codes == {rank: 130 if rank in interrupted else 1 for rank in range(3)}, outcome.stderr
    assert max(outcome.ended.values()) - outcome.struck < (2 if case.victim == -1 else 5) + SLACK
    assert "Traceback" not in outcome.stderr
    assert outcome.stderr.count("KeyboardInterrupt: all ranks end") == 1
    if case.victim == -1:
        assert len(outcome.stderr.splitlines()) == 1, outcome.stderr
