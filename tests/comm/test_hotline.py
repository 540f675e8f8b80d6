"""The side line between ranks: who lives answers, whatever its training thread does; strangers get nothing."""

import json
import socket
import threading
import time

import pytest

import phalanx
from phalanx.comm.hotline import LONGEST, Hotline


def lines(n, answer):
    """`n` ends that know each other; their allgather is a table."""
    told, ready = [None] * n, threading.Barrier(n)

    def end(rank):
        def allgather(mine):
            told[rank] = mine
            ready.wait(10)
            return list(told)

        made[rank] = Hotline("127.0.0.1", lambda question: answer(rank, question), allgather)

    made = [None] * n
    threads = [threading.Thread(target=end, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return made, told


@pytest.fixture
def three():
    made, told = lines(3, lambda rank, question: {"rank": rank, **question})
    yield made, [(host, port) for host, port, _ in told]
    for line in made:
        line.close()


def test_all_are_asked_at_once_and_each_answers_its_question(three):
    made, _ = three
    answers = made[0].ask({1: {"n": 10}, 2: {"n": 20, "long": list(range(20_000))}}, 10)
    assert {rank: (said["rank"], said["n"]) for rank, said in answers.words.items()} == {1: (1, 10), 2: (2, 20)}
    assert answers.words[2]["long"] == list(range(20_000))
    assert answers.refused == frozenset()


def test_who_has_ended_refuses(three):
    made, _ = three
    made[1].close()
    until = time.monotonic() + 10
    while not (answers := made[0].ask({1: {}, 2: {}}, 5)).refused and time.monotonic() < until:
        time.sleep(0.01)
    assert answers.refused == {1}
    assert answers.words.keys() == {2}


def test_who_is_stuck_is_silent_and_costs_the_time_that_was_given():
    stuck = threading.Event()
    made, _ = lines(2, lambda rank, question: {"waited": stuck.wait(20)})
    begun = time.monotonic()
    answers = made[0].ask({1: {}}, 0.2)
    assert not answers.words
    assert not answers.refused
    assert time.monotonic() - begun < 10
    stuck.set()
    for line in made:
        line.close()


def shout(place, message):
    with socket.create_connection(place, 5) as caller:
        caller.sendall(message)
        caller.shutdown(socket.SHUT_WR)
        caller.settimeout(10)
        try:
            return caller.recv(1000)
        except ConnectionError:
            return b""


@pytest.mark.parametrize(
    "message",
    [
        b"\n",
        b"[]\n",
        b"{}\n",
        b'{"token": "wrong", "n": 1}\n',
        b'{"token": 5}\n',
        b"\xff\xfe\n",
        b'{"token"',
        json.dumps({"token": "x" * 1000}).encode() + b"\n",
    ],
)
def test_strangers_get_no_answer_and_stop_nobody(three, message):
    made, places = three
    assert shout(places[1], message) == b""
    assert made[0].ask({1: {"n": 1}}, 10).words[1]["n"] == 1


def pour(caller):
    for _ in range(64):
        caller.sendall(b"x" * (LONGEST // 8))
        time.sleep(0.001)


def test_too_long_and_idle_callers_stop_nobody(three):
    made, places = three
    idle = [socket.create_connection(places[1], 5) for _ in range(50)]
    flood = socket.create_connection(places[1], 5)
    flood.settimeout(10)
    with pytest.raises(OSError):
        pour(flood)
    assert made[0].ask({1: {"n": 3}}, 10).words[1]["n"] == 3
    for caller in [*idle, flood]:
        caller.close()


def test_a_communicator_has_one():
    def run(comm):
        line = comm.hotline(lambda question: {"from": comm.rank})
        said = line.ask({rank: {} for rank in range(comm.size) if rank != comm.rank}, 10)
        comm.barrier()
        line.close()
        return {rank: word["from"] for rank, word in said.words.items()}

    assert phalanx.run_local(3, run, timeout=30) == [{1: 1, 2: 2}, {0: 0, 2: 2}, {0: 0, 1: 1}]
