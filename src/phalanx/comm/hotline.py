"""A side line between ranks: short questions and answers over TCP, beside the job's store and its data connections.

A thread of each rank answers whatever the training thread does, so an answer means "the process is alive and can be reached", and
no answer means that it is not. Nothing travels until somebody asks. Each rank listens on the address that gloo uses as well, so
whoever can exchange tensors can ask. A question and its answer are one line each: a signature and JSON. The key of the signatures
is random, and comes over the job's data connections. Nobody parses what is not signed; an answer is signed together with its
question, so that nobody can answer for a rank that is gone, nor repeat what it once said.
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
HELD = 16 << 20  # bytes of questions that have begun, of all callers together
PAUSE = 0.05  # seconds without a new caller, when this process has no descriptor left for one

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
        mine = [address, port, secrets.token_hex(32)]
        told = [list(each) for each in allgather(mine)]
        self._places = [(host, port) for host, port, _ in told]
        self._script = _Script(bytes.fromhex(told[0][2]))
        self._wake, self._end = socket.socketpair()
        self._thread = threading.Thread(
            target=_serve,
            args=(self._listener, self._wake, self._script, told.index(mine), answer),
            name="phalanx-hotline",
            daemon=True,
        )
        self._thread.start()

    def ask(self, questions: Mapping[int, Mapping[str, Any]], seconds: float) -> Answers:
        """Ask several ranks at once, each its question, and wait `seconds` for their answers at most."""
        until = time.monotonic() + seconds
        words: dict[int, dict[str, Any]] = {}
        refused: set[int] = set()
        with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as open_ones:
            for rank, question in questions.items():
                nonce = secrets.token_hex(16)
                message = self._script.write(f"question to {rank}", {"nonce": nonce, **question})
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
                        words[call.rank] = self._script.read(f"answer to {call.nonce}", word)
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

    def __init__(self, rank: int, message: bytes, nonce: str) -> None:
        self.rank, self.left, self.nonce, self._come = rank, message, nonce, b""

    def get_on(self, caller: socket.socket) -> bytes | None:
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
        return self._come if self._come.endswith(b"\n") else None


class _Script:
    """Lines that are signed. `about` is signed, too, and does not travel: both ends know it."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def write(self, about: str, words: Mapping[str, Any]) -> bytes:
        text = json.dumps(words).encode()
        return self._signature(about, text) + b" " + text + b"\n"

    def read(self, about: str, line: bytes) -> dict[str, Any]:
        """ValueError unless a rank of the job has written it."""
        signature, _, text = line.removesuffix(b"\n").partition(b" ")
        if not hmac.compare_digest(signature, self._signature(about, text)):
            raise ValueError("not signed by a rank of this job")
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("not an object")
        return found

    def _signature(self, about: str, text: bytes) -> bytes:
        return hmac.digest(self._key, about.encode() + b"\n" + text, "sha256").hex().encode()


def _serve(listener: socket.socket, wake: socket.socket, script: _Script, rank: int, answer: Answer) -> None:
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
                            _reply(caller, more, script, rank, answer)
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
        if error.errno in (errno.EMFILE, errno.ENFILE):  # the listener stays ready: without a pause this were a busy loop
            time.sleep(PAUSE)
        return None
    caller.setblocking(False)
    return caller


def _unwelcome(callers: Mapping[socket.socket, tuple[float, bytes]]) -> list[socket.socket]:
    """Who takes too long, and the eldest of too many, or of those who together say too much."""
    now = time.monotonic()
    held, found = sum(len(line) for _, line in callers.values()), []
    for number, (caller, (since, line)) in enumerate(callers.items()):
        if now - since > PATIENCE or len(callers) - number > CALLERS or held > HELD:
            found.append(caller)
            held -= len(line)
    return found


def _read(caller: socket.socket, line: bytes) -> bytes | None:
    """What came so far; None where the caller is gone or says too much."""
    try:
        piece = caller.recv(1 << 16)
    except BlockingIOError:
        return line
    except OSError:
        return None
    return line + piece if piece and len(line) + len(piece) <= LONGEST else None


def _reply(caller: socket.socket, line: bytes, script: _Script, rank: int, answer: Answer) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a stranger's line is no reason to stop answering
        question = script.read(f"question to {rank}", line)
        nonce = question.pop("nonce")
        reply = script.write(f"answer to {nonce}", answer(question))
        caller.settimeout(PATIENCE)
        caller.sendall(reply)


def _hang_up(caller: socket.socket, waiting: selectors.BaseSelector, callers: dict[socket.socket, tuple[float, bytes]]) -> None:
    waiting.unregister(caller)
    caller.close()
    del callers[caller]
