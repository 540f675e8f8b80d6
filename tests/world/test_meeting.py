"""A meeting point that is taken: by a running job, by a program that is no store. Whoever comes late leaves, and harms nobody."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.long import only_long, times
from tests.world.programs.herd import Case, Herd, Outcome, free_port, play

TIMEOUT = 6.0
SLACK = 5.0  # seconds that a busy machine may add to a promise


@pytest.fixture(scope="module")
def herd() -> Iterator[Herd]:
    made = Herd()
    yield made
    made.close()


def beside(herd: Herd, folder: Path, others: list[Case]) -> tuple[Outcome, list[Outcome]]:
    """A job, and while it runs others at its port, all at once."""
    port = free_port()
    folders = [folder / str(number) for number in range(len(others) + 1)]
    for own in folders:
        own.mkdir()
    with ThreadPoolExecutor(len(folders)) as pool:
        first = pool.submit(play, herd, Case("marching", {"timeout": TIMEOUT, "seconds": 5.0}, port=port), folders[0])
        deadline = time.monotonic() + 30
        while not all('"ready"' in read(folders[0] / f"stdout.{rank}") for rank in range(3)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        later = [pool.submit(play, herd, replace(case, port=port), own) for case, own in zip(others, folders[1:])]
        return first.result(), [other.result() for other in later]


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@only_long
def test_jobs_at_the_port_of_a_running_one_leave_it_alone(herd, tmp_path):
    """The same job again, the same without its rank 0, a smaller and a larger one."""
    shapes = [(3, ()), (3, (0,)), (2, (0,)), (5, (0,))]
    first, others = beside(
        herd,
        tmp_path,
        [Case("meeting", {"timeout": TIMEOUT}, ranks=n, absent=absent, deadline=40, wholly=False) for n, absent in shapes],
    )
    assert set(first.codes.values()) == {0}, first.stderr
    assert first.stderr == ""
    assert len({first.word(rank, "marched")["number"] for rank in range(3)}) == 1
    for other in others:
        for rank in other.codes:
            error = other.word(rank, "error")
            assert "choose another MASTER_PORT" in error["text"], error
            assert str(first.port) in error["text"]
            assert error["took"] < TIMEOUT - 1, error  # it is not the timeout that tells


@contextlib.contextmanager
def stranger(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A program that listens at a port, and does what it likes with those who come."""
    kept = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    visitor = listener.accept()[0]
                    kept.append(visitor)
                    with contextlib.suppress(OSError):
                        answer(visitor)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for visitor in kept:
                visitor.close()


def say_nothing(visitor: socket.socket) -> None:
    pass


def close_at_once(visitor: socket.socket) -> None:
    visitor.close()


def be_a_web_server(visitor: socket.socket) -> None:
    visitor.recv(100)
    visitor.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    visitor.close()


@pytest.mark.parametrize("answer", [say_nothing, close_at_once, be_a_web_server])
def test_a_program_that_is_no_store_is_recognised_within_the_timeout(herd, tmp_path, answer):
    with stranger(answer) as port:
        outcome = play(herd, Case("meeting", {"timeout": 3.0}, port=port, deadline=30, wholly=answer is say_nothing), tmp_path)
    assert set(outcome.codes.values()) == {0}, outcome.stderr
    for rank in range(3):
        error = outcome.word(rank, "error")
        assert f"{port}" in error["text"]
        assert "choose another MASTER_PORT" in error["text"], error
        assert error["took"] < (1 if rank == 0 else 3) + SLACK, error
    assert "Exception raised from" not in outcome.stderr  # torch's C++ stacks


def test_a_job_that_begins_where_another_has_just_ended_is_no_second_one(herd, tmp_path):
    port = free_port()
    for number in range(times(3, seldom=2)):
        (tmp_path / str(number)).mkdir()
        outcome = play(herd, Case("meeting", {"timeout": TIMEOUT}, port=port), tmp_path / str(number))
        assert set(outcome.codes.values()) == {0}, outcome.stderr
        assert all(outcome.word(rank, "done") for rank in range(3))
