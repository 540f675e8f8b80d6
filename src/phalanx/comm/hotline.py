"""A side channel between ranks: short questions and answers over TCP, separate from the job's store and data connections.

A thread of each rank answers, independently of the training thread. So an answer means that the process is alive and reachable,
and no answer means that it is not. Nothing is sent until a rank asks. Each rank listens on the address that gloo uses, so
ranks that can exchange tensors can also ask each other.

A question and its answer are one line each: a signature and JSON. The key of the signatures is random, and is exchanged over the
job's data connections. Lines without a valid signature are not parsed. An answer is signed together with its question, so a
stranger can neither answer for a lost rank nor replay an old answer.
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

LONGEST = 1 << 20  # maximum bytes of a question or an answer
PATIENCE = 5.0  # seconds that a caller has to send its question
CALLERS = 1024  # at a time
HELD = 16 << 20  # maximum bytes of incomplete questions, over all callers
PAUSE = 0.05  # seconds to wait before accepting again, when this process has no file descriptors left

Answer = Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers by rank, and the ranks that refused the connection because no process listens there any more."""

    words: dict[int, dict[str, Any]] = field(default_factory=dict)
    refused: frozenset[int] = frozenset()


class Hotline:
    """This rank's end of the channel, at `address`. All ranks create it together. `answer` runs in the channel's own thread."""

    def __init__(self, address: str, answer: Answer, allgather: Callable[[Any], list[Any]]) -> None:
        # the selector too: if this process has no descriptors left, its caller hears of it, and not a thread that dies
        waiting = selectors.DefaultSelector()
        self._wake, self._end = socket.socketpair()
        self._listener = socket.create_server((address, 0), backlog=min(CALLERS, socket.SOMAXCONN))
        port = self._listener.getsockname()[1]
        mine = [address, port, secrets.token_hex(32)]
        places = [list(each) for each in allgather(mine)]
        self._places = [(host, port) for host, port, _ in places]
        self._lines = _SignedLines(bytes.fromhex(places[0][2]))
        self._thread = threading.Thread(
            target=_serve,
            args=(waiting, self._listener, self._wake, self._lines, places.index(mine), answer),
            name="phalanx-hotline",
            daemon=True,
        )
        self._thread.start()

    def ask(self, questions: Mapping[int, Mapping[str, Any]], seconds: float) -> Answers:
        """Ask several ranks at once, each its own question, and wait at most `seconds` for their answers."""
        until = time.monotonic() + seconds
        words: dict[int, dict[str, Any]] = {}
        refused: set[int] = set()
        with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as open_ones:
            for rank, question in questions.items():
                nonce = secrets.token_hex(16)
                message = self._lines.write(f"question to {rank}", {"nonce": nonce, **question})
                caller = open_ones.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                caller.setblocking(False)
                with contextlib.suppress(OSError):
                    caller.connect_ex(self._places[rank])
                    waiting.register(caller, selectors.EVENT_WRITE, _Call(rank, message, nonce))
            while waiting.get_map() and (left := until - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    call: _Call = key.data
                    try:
                        word = call.get_on(key.fileobj)  # type: ignore[arg-type]
                        if word is None:
                            waiting.modify(key.fileobj, selectors.EVENT_WRITE if call.left else selectors.EVENT_READ, call)
                            continue
                        words[call.rank] = self._lines.read(f"answer to {call.nonce}", word)
                    except ConnectionRefusedError:
                        refused.add(call.rank)
                    except (OSError, ValueError):
                        pass  # no route, a reset, or invalid JSON: not an answer
                    waiting.unregister(key.fileobj)
        return Answers(words, frozenset(refused))

    def close(self) -> None:
        """Stop answering. Idempotent."""
        with contextlib.suppress(OSError):
            self._end.close()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)


class _Call:
    """One question being sent, or its answer being received."""

    def __init__(self, rank: int, message: bytes, nonce: str) -> None:
        self.rank, self.left, self.nonce, self._received = rank, message, nonce, b""

    def get_on(self, caller: socket.socket) -> bytes | None:
        """Send or receive what is possible now. Return the answer once it is complete."""
        if self.left:
            error = caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise ConnectionRefusedError if error == errno.ECONNREFUSED else OSError(error, "cannot connect")
            self.left = self.left[caller.send(self.left) :]
            return None
        piece = caller.recv(1 << 16)
        self._received += piece
        if not piece or len(self._received) > LONGEST:
            raise ValueError("the answer ended early, or does not end")
        return self._received if self._received.endswith(b"\n") else None


class _SignedLines:
    """Lines with signatures. `about` is signed too, but not sent, because both ends know it."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def write(self, about: str, words: Mapping[str, Any]) -> bytes:
        text = json.dumps(words).encode()
        return self._signature(about, text) + b" " + text + b"\n"

    def read(self, about: str, line: bytes) -> dict[str, Any]:
        """Return what a rank of the job wrote. Raise ValueError for any other line."""
        signature, _, text = line.removesuffix(b"\n").partition(b" ")
        if not hmac.compare_digest(signature, self._signature(about, text)):
            raise ValueError("not signed by a rank of this job")
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("not an object")
        return found

    def _signature(self, about: str, text: bytes) -> bytes:
        return hmac.digest(self._key, about.encode() + b"\n" + text, "sha256").hex().encode()


def _serve(
    waiting: selectors.BaseSelector,
    listener: socket.socket,
    wake: socket.socket,
    lines: _SignedLines,
    rank: int,
    answer: Answer,
) -> None:
    """Accept calls, read one line of each, answer it and hang up, until the other end of `wake` is closed."""
    with waiting, listener, wake:
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
                        if (found := _accept(listener)) is not None:
                            callers[found] = (time.monotonic(), b"")
                            waiting.register(found, selectors.EVENT_READ)
                        continue
                    caller: socket.socket = key.fileobj  # type: ignore[assignment]
                    since, line = callers[caller]
                    more = _read(caller, line)
                    callers[caller] = (since, more or b"")
                    if more is None or more.endswith(b"\n"):
                        if more is not None:
                            _reply(caller, more, lines, rank, answer)
                        _hang_up(caller, waiting, callers)
                for caller in _unwelcome(callers):
                    _hang_up(caller, waiting, callers)
        finally:
            for caller in callers:
                caller.close()


def _accept(listener: socket.socket) -> socket.socket | None:
    try:
        caller, _ = listener.accept()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # the listener stays ready, so without a pause this is a busy loop
            time.sleep(PAUSE)
        return None
    caller.setblocking(False)
    return caller


def _unwelcome(callers: Mapping[socket.socket, tuple[float, bytes]]) -> list[socket.socket]:
    """Return callers that take too long, and the oldest ones while callers are too many or hold too many bytes."""
    now = time.monotonic()
    held, found = sum(len(line) for _, line in callers.values()), []
    for number, (caller, (since, line)) in enumerate(callers.items()):
        if now - since > PATIENCE or len(callers) - number > CALLERS or held > HELD:
            found.append(caller)
            held -= len(line)
    return found


def _read(caller: socket.socket, line: bytes) -> bytes | None:
    """Return what was received so far, or None if the caller is gone or sends too much."""
    try:
        piece = caller.recv(1 << 16)
    except BlockingIOError:
        return line
    except OSError:
        return None
    return line + piece if piece and len(line) + len(piece) <= LONGEST else None


def _reply(caller: socket.socket, line: bytes, lines: _SignedLines, rank: int, answer: Answer) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a line from a stranger must not stop this thread
        question = lines.read(f"question to {rank}", line)
        nonce = question.pop("nonce")
        reply = lines.write(f"answer to {nonce}", answer(question))
        caller.settimeout(PATIENCE)
        caller.sendall(reply)


def _hang_up(caller: socket.socket, waiting: selectors.BaseSelector, callers: dict[socket.socket, tuple[float, bytes]]) -> None:
    waiting.unregister(caller)
    caller.close()
    del callers[caller]
