"""A side line between ranks: short questions and answers over TCP, beside the job's store and its data connections.

A thread of each rank answers whatever the training thread does, so an answer means "the process is alive and can be reached", and
no answer means that it is not. Nothing travels until somebody asks. Each rank listens on the address that gloo uses as well, so
whoever can exchange tensors can ask. A question and its answer are one line of JSON each; a random token of the job keeps
strangers out.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

LONGEST = 1 << 20  # bytes of a question or an answer
PATIENCE = 5.0  # seconds in which a caller must have asked
CALLERS = 1024  # at a time

Answer = Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Answers:
    """What came back: the words of those who answered, and who refused the connection because no process listens any more."""

    words: dict[int, dict[str, Any]] = field(default_factory=dict)
    refused: frozenset[int] = frozenset()


class Hotline:
    """This rank's end of the line, at `address`. All ranks make it together; `answer` runs in the line's own thread."""

    def __init__(self, address: str, answer: Answer, allgather: Callable[[Any], list[Any]]) -> None:
        self._listener = socket.create_server((address, 0), backlog=min(CALLERS, socket.SOMAXCONN))
        port = self._listener.getsockname()[1]
        told = allgather([address, port, secrets.token_hex(16)])
        self._places = [(host, port) for host, port, _ in told]
        self._token: str = told[0][2]
        self._wake, self._end = socket.socketpair()
        self._thread = threading.Thread(
            target=_serve, args=(self._listener, self._wake, self._token, answer), name="phalanx-hotline", daemon=True
        )
        self._thread.start()

    def ask(self, questions: Mapping[int, Mapping[str, Any]], seconds: float) -> Answers:
        """Ask several ranks at once, each its question, and wait `seconds` for their answers at most."""
        until = time.monotonic() + seconds
        words: dict[int, dict[str, Any]] = {}
        refused: set[int] = set()
        with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as open_ones:
            for rank, question in questions.items():
                message = json.dumps({"token": self._token, **question}).encode() + b"\n"
                caller = open_ones.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                caller.setblocking(False)
                with contextlib.suppress(OSError):
                    caller.connect_ex(self._places[rank])
                    waiting.register(caller, selectors.EVENT_WRITE, _Call(rank, message))
            while waiting.get_map() and (left := until - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    call: _Call = key.data
                    try:
                        word = call.get_on(key.fileobj)  # type: ignore[arg-type]
                        if word is None:
                            waiting.modify(key.fileobj, selectors.EVENT_WRITE if call.left else selectors.EVENT_READ, call)
                            continue
                        words[call.rank] = word
                    except ConnectionRefusedError:
                        refused.add(call.rank)
                    except (OSError, ValueError):
                        pass  # no route, a reset, or no JSON: not an answer
                    waiting.unregister(key.fileobj)
        return Answers(words, frozenset(refused))

    def close(self) -> None:
        """Answer no more. Idempotent."""
        with contextlib.suppress(OSError):
            self._end.close()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)


class _Call:
    """One question on its way out, or its answer on the way back."""

    def __init__(self, rank: int, message: bytes) -> None:
        self.rank, self.left, self._come = rank, message, b""

    def get_on(self, caller: socket.socket) -> dict[str, Any] | None:
        """Send or receive what is possible now; the answer once it is complete."""
        if self.left:
            error = caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise ConnectionRefusedError if error == errno.ECONNREFUSED else OSError(error, "cannot connect")
            self.left = self.left[caller.send(self.left) :]
            return None
        piece = caller.recv(1 << 16)
        self._come += piece
        if not piece or len(self._come) > LONGEST:
            raise ValueError("the answer ended early, or does not end")
        return _parsed(self._come) if self._come.endswith(b"\n") else None


def _parsed(line: bytes) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _serve(listener: socket.socket, wake: socket.socket, token: str, answer: Answer) -> None:
    """Until the other end of `wake` is closed: take calls, read one line of each, answer it, hang up."""
    with selectors.DefaultSelector() as waiting, listener, wake:
        listener.setblocking(False)
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(wake, selectors.EVENT_READ)
        callers: dict[socket.socket, tuple[float, bytes]] = {}
        try:
            while True:
                for key, _ in waiting.select(PATIENCE if callers else None):
                    if key.fileobj is wake:
                        return
                    if key.fileobj is listener:
                        with contextlib.suppress(OSError):
                            caller, _ = listener.accept()
                            caller.setblocking(False)
                            callers[caller] = (time.monotonic(), b"")
                            waiting.register(caller, selectors.EVENT_READ)
                        continue
                    caller = key.fileobj  # type: ignore[assignment]
                    since, line = callers[caller]
                    more = _read(caller, line)
                    callers[caller] = (since, more or b"")
                    if more is None or more.endswith(b"\n"):
                        if more is not None:
                            _reply(caller, more, token, answer)
                        _hang_up(caller, waiting, callers)
                late = [caller for caller, (since, _) in callers.items() if time.monotonic() - since > PATIENCE]
                for caller in [*late, *list(callers)[: max(0, len(callers) - CALLERS)]]:
                    if caller in callers:
                        _hang_up(caller, waiting, callers)
        finally:
            for caller in callers:
                caller.close()


def _read(caller: socket.socket, line: bytes) -> bytes | None:
    """What came so far; None where the caller is gone or says too much."""
    try:
        piece = caller.recv(1 << 16)
    except BlockingIOError:
        return line
    except OSError:
        return None
    return line + piece if piece and len(line) + len(piece) <= LONGEST else None


def _reply(caller: socket.socket, line: bytes, token: str, answer: Answer) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a stranger's line is no reason to stop answering
        question = _parsed(line)
        if hmac.compare_digest(str(question.pop("token", "")), token):
            reply = json.dumps(answer(question)).encode() + b"\n"
            caller.settimeout(PATIENCE)
            caller.sendall(reply)


def _hang_up(caller: socket.socket, waiting: selectors.BaseSelector, callers: dict[socket.socket, tuple[float, bytes]]) -> None:
    waiting.unregister(caller)
    caller.close()
    del callers[caller]
