"""`explain`: from what the ranks answered to the message of the error, a pure function."""

from dataclasses import replace

import pytest

from phalanx.comm.processes import Fate
from phalanx.comm.traffic import Ticket, Way
from phalanx.comm.verdict import CommunicationError, State, Verdict, explain

HERE = State("world", 17, "all_reduce(float32[8], sum)", 4.0)
WORLD = {0: 0, 1: 1, 2: 2, 3: 3}


def told(states, members=WORLD, mine=HERE, cause="", **verdict):
    error = explain(mine, members, Verdict({0: HERE} | states, **verdict), cause)
    assert isinstance(error, CommunicationError)
    assert error.operation == mine.operation
    return str(error), error.missing


def test_a_rank_that_does_not_answer_is_named():
    text, missing = told({1: HERE, 3: HERE})
    assert missing == (2,)
    assert text.startswith("all_reduce(float32[8], sum) (number 17) cannot finish: rank 2 does not answer")


def test_the_kernels_word_on_a_dead_or_stopped_process_is_passed_on():
    text, missing = told({1: HERE, 2: State(fate=Fate.STOPPED, pid=99), 3: HERE})
    assert missing == (2,)
    assert "rank 2 does not answer: its process 99 is stopped" in text


def test_a_rank_that_raised_or_left_is_named_with_the_reason():
    text, missing = told({1: State(raised="KeyError: 'x'"), 2: HERE, 3: State(left=True)})
    assert missing == (1, 3)
    assert "rank 1 raised KeyError: 'x'" in text
    assert "rank 3 has ended" in text


def test_a_rank_that_calls_something_else_is_named_with_its_call():
    text, missing = told({1: HERE, 2: State("world", 17, "barrier()"), 3: HERE})
    assert missing == (2,)
    assert "barrier()" in text


def test_a_late_rank_is_named_with_what_it_does():
    text, missing = told({1: HERE, 2: State(operation="bcast(root 0)", seconds=12.3), 3: State("world", 16, "barrier()", 1.0)})
    assert missing == (2, 3)
    assert "rank 2 has not called it: in user code for 12.3 s, last operation bcast(root 0)" in text
    assert "rank 3 is in barrier() (number 16)" in text


@pytest.mark.parametrize("fallen", [None, State(raised="E"), State(fate=Fate.DEAD, pid=9), State(left=True)])
def test_the_late_are_not_blamed_when_somebody_fell(fallen):
    states = {1: State(operation="x", seconds=9.0), 3: State("child", 2, "barrier()")}
    _, missing = told(states | ({2: fallen} if fallen else {}))
    assert missing == (2,)


def test_nobody_is_blamed_when_all_are_there():
    text, missing = told({1: HERE, 2: HERE, 3: HERE}, cause="connection reset")
    assert missing == ()
    assert "all 4 ranks entered" in text
    assert text.endswith("[connection reset]")


def test_several_ranks_get_a_plural():
    text, missing = told({})
    assert missing == (1, 2, 3)
    assert "ranks 1, 2, 3 do not answer" in text
    assert "ranks 1, 2, 3 have ended or closed their communicators" in told({r: State(left=True) for r in (1, 2, 3)})[0]
    user = State(operation="x", seconds=9.0)
    assert "ranks 1, 2, 3 have not called it: in user code for 9.0 s" in told(dict.fromkeys((1, 2, 3), user))[0]
    other = State("world", 16, "barrier()", 1.0)
    assert "ranks 1, 2, 3 are in barrier() (number 16)" in told(dict.fromkeys((1, 2, 3), other))[0]


def moving(rank: int, awaited: str, posted: str) -> State:
    """A rank in HERE; `awaited` and `posted` are messages as "receive 1 #0": kind, peer and number, or how many."""

    def ticket(text: str) -> Ticket:
        kind, peer, number = text.split()
        return Ticket(Way(kind), int(peer), 7, int(number.lstrip("#")))

    return replace(HERE, awaited=tuple(map(ticket, awaited.split(", "))), posted=tuple(map(ticket, posted.split(", "))))


def test_a_link_that_moves_nothing_is_named():
    """A ring 0 -> 1 -> 2 -> 3 -> 0: what 1 has sent does not reach 2, so 3 gets nothing from 2 later, and so on."""
    states = {
        0: moving(0, "receive 3 #1", "send 1 2, receive 3 2"),
        1: moving(1, "send 2 #0", "send 2 1, receive 0 1"),
        2: moving(2, "receive 1 #0", "send 3 1, receive 1 1"),
        3: moving(3, "receive 2 #1", "send 0 1, receive 2 2"),
    }
    text, missing = told(states, mine=states[0])
    assert missing == ()
    assert "the link between rank 1 and rank 2 moves no data" in text
    assert text.count("the link between") == 1
    _, missing = told(states | {3: State(fate=Fate.DEAD, pid=9)}, mine=states[0])
    assert missing == (3,), "a rank that fell goes before a link"
    text, _ = told(states | {3: State("world", 18, "barrier()", 1.0)}, mine=states[0])
    assert "the link between rank 1 and rank 2" in text, "a rank that is elsewhere does not"


def test_nobody_is_blamed_for_messages_that_were_not_posted():
    states = {rank: moving(rank, f"receive {(rank - 1) % 4} #1", f"send {(rank + 1) % 4} 1") for rank in range(4)}
    text, _ = told(states, mine=states[0])
    assert "all 4 ranks entered" in text


def test_ranks_are_those_of_the_communicator_not_of_the_world():
    _, missing = told({5: HERE}, members={0: 0, 1: 5, 2: 7})
    assert missing == (2,)  # world rank 7 is rank 2 of the split one


def test_ranks_outside_the_operation_do_not_matter():
    _, missing = told({1: HERE, 3: State(raised="E")}, members={0: 0, 1: 1, 2: 2})
    assert missing == (2,)


def test_a_lost_store_is_blamed_on_its_holder():
    text, missing = told({1: HERE, 2: HERE}, members={0: 0, 1: 1, 2: 2, 3: 3}, store_lost=3)
    assert missing == (3,)
    assert "store" in text


def test_messages_have_no_number():
    mine = State("world", 0, "recv(from 1, tag 0)")
    text, missing = told({0: mine, 1: State("world", 0, "send(to 2, tag 0)", 2.0)}, members={0: 0, 1: 1}, mine=mine)
    assert missing == (1,)
    assert "number 0" not in text.split("cannot finish")[0]


def test_a_verdict_survives_the_store():
    verdict = Verdict(
        {
            0: HERE,
            1: moving(1, "send 2 #0", "send 2 1, receive 0 1"),
            3: State(raised='a "quoted"\nreason'),
            5: State(fate=Fate.DEAD, pid=7, left=True),
        },
        store_lost=None,
    )
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert Verdict.from_json(Verdict({}, 4).to_json()) == Verdict({}, 4)
