"""The side line between ranks: who lives answers, whatever its training thread does; strangers get nothing."""

import contextlib
import json
import os
import resource
import socket
import threading
import time

import pytest

import phalanx
from phalanx.comm.hotline import HELD, LONGEST, PATIENCE, Hotline


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


def overheard(place, question):
    """What a rank answers, word for word, and the question as it went over the wire."""
    with socket.create_connection(place, 5) as caller:
        caller.sendall(question)
        caller.settimeout(10)
        return caller.recv(1 << 16)


def impostor(listener, answers, heard):
    """Whoever listens where a rank has listened: it keeps what it is asked, and answers as it likes."""
    with contextlib.suppress(OSError):
        while True:
            caller, _ = listener.accept()
            with caller:
                heard.append(caller.recv(1 << 16))
                caller.sendall(answers(heard[-1]))


@pytest.mark.parametrize(
    "answers",
    [
        lambda question: b'{"rank": 1}\n',
        lambda question: question,  # its own words
        lambda question: b"0" * 64 + b' {"rank": 1}\n',
        lambda question: b"[" * 50_000 + b"\n",
        lambda question: b"\xff\n",
    ],
)
def test_nobody_answers_for_a_rank_that_is_gone(three, answers):
    made, places = three
    made[1].close()
    with socket.create_server(places[1]) as listener:
        heard = []
        thread = threading.Thread(target=impostor, args=(listener, answers, heard), daemon=True)
        thread.start()
        said = made[0].ask({1: {"n": 1}, 2: {"n": 2}}, 10)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    assert heard
    assert said.words.keys() == {2}


def test_an_answer_to_one_question_is_none_to_another(three):
    """Recorded and played again, to the same rank and to another."""
    made, places = three
    question = made[0]._lines.write("question to 1", {"nonce": "1", "n": 1})
    answer = overheard(places[1], question)
    assert json.loads(answer.partition(b" ")[2]) == {"rank": 1, "n": 1}
    assert overheard(places[2], question) == b"", "another rank was asked"
    made[1].close()
    with socket.create_server(places[1]) as listener:
        thread = threading.Thread(target=impostor, args=(listener, lambda question: answer, []), daemon=True)
        thread.start()
        assert not made[0].ask({1: {"n": 1}}, 10).words
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def test_callers_who_together_say_too_much_are_hung_up_on(three):
    made, places = three
    callers = [socket.create_connection(places[1], 5) for _ in range(2 * HELD // LONGEST)]
    for caller in callers:
        caller.settimeout(10)
        with contextlib.suppress(OSError):  # it has hung up on the eldest
            caller.sendall(b"x" * (LONGEST - 1))
    assert made[0].ask({1: {"n": 4}}, 20).words[1]["n"] == 4
    until = time.monotonic() + PATIENCE - 1  # before it hangs up on who takes too long
    while not any(hung_up(caller) for caller in callers):
        assert time.monotonic() < until
        time.sleep(0.01)
    for caller in callers:
        caller.close()


def hung_up(caller):
    caller.settimeout(0.0)
    try:
        return caller.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_process_without_descriptors_answers_again_when_it_has_some(three):
    made, places = three
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    caller = socket.create_connection(places[1], 5)  # it holds a descriptor of the other end
    with contextlib.ExitStack() as taken:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        waiting = [socket.socket() for _ in range(4)]
        with contextlib.suppress(OSError):
            while True:
                taken.enter_context(open(os.devnull))
        for each in waiting:
            each.connect(places[2])  # nobody can accept it
        spent = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - spent < 0.4, "it waits, and does not turn in circles"
    assert made[0].ask({2: {"n": 5}}, 20).words[2]["n"] == 5
    for each in (caller, *waiting):
        each.close()


def test_a_communicator_has_one():
    def run(comm):
        line = comm.hotline(lambda question: {"from": comm.rank})
        said = line.ask({rank: {} for rank in range(comm.size) if rank != comm.rank}, 10)
        comm.barrier()
        line.close()
        return {rank: word["from"] for rank, word in said.words.items()}

    assert phalanx.run_local(3, run, timeout=30) == [{1: 1, 2: 2}, {0: 0, 2: 2}, {0: 0, 1: 1}]
