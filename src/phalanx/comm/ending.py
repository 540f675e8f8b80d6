"""Ends a process of a job with the right exit status, after everything that the user's code still has to do.

An uncaught exception is printed first, then published to all ranks. Python's own shutdown follows: it joins threads (such as a
checkpoint being saved) and runs exit handlers, without a time limit. Then our own clean-up, which is bounded, and `os._exit`.
`os._exit` skips the teardown of torch, which may wait for lost peers, and which aborts the process if a thread is inside
gloo.

    exception ---> excepthooks ---> threads that Python joins ---> exit handlers ---> our clean-up ---> os._exit(1)
                   all of them      such as a checkpoint save      all of them        at most CLEAN_UP

A rank that has not yet noticed another rank's exception gets a CommunicationError wherever it is, so its `finally` blocks run.
If it is in foreign code that cannot be interrupted, the process is ended.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from phalanx._torch_private import is_excepthook
from phalanx.comm.failure import Watch
from phalanx.comm.verdict import CommunicationError
from phalanx.schedule.printable import printable

ALONE = 1.0  # seconds in which a rank's next operation may report that another rank raised; then the rank is interrupted
INTERRUPTED = 2.5  # seconds it then has to leave foreign code; after that it is ended, at most 5 s after the exception
CLEAN_UP = 2.0  # seconds for our own clean-up, after all handlers of the user
LOOK = 0.1
INSIDE_TORCH = ("phalanx-watch", "phalanx-ask", "phalanx-issuer", "phalanx-landing", "phalanx-meeting")

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_watches: list[Watch] = []
_held: list[Watch] = []  # watches whose stores this process may hold: they outlive their communicators
_unfinished: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_ended = threading.Event()  # set when the process ends without waiting for the main thread, which is in foreign code
_publishing = False
_context = 0  # id of the exception, if any, whose handler created the communicator


def guard(watch: Watch, found: Hook | None = None) -> None:
    """Publish an uncaught exception of this process to all ranks from now on, after its traceback was printed.

    `found` is the hook before torch wrapped it.
    """
    global _context
    if not _held:
        atexit.register(_leave)
    _install_hook(found or sys.excepthook)
    _install_interrupt()
    _context = id(sys.exc_info()[1])
    _held[:] = [old for old in _held if old in _watches or not old.is_over()]
    _watches.append(watch)
    _held.append(watch)


def release(watch: Watch) -> None:
    """Stop publishing exceptions for a communicator that was closed."""
    if watch in _watches:
        _watches.remove(watch)


def finish_before_end(thread: threading.Thread) -> None:
    """Let `thread`, which saves a checkpoint, finish even if this process has to be ended."""
    _unfinished.add(thread)


def say_last(words: str) -> None:
    """Print a last message to the user when there is no caller left to raise to."""
    print(f"phalanx: {printable(words)}", file=sys.stderr, flush=True)


def process_is_ending() -> bool:
    """Whether the user's program is over, and only threads that must finish are still running."""
    return _ended.is_set() or not threading.main_thread().is_alive()


# ---- an exception of this rank -------------------------------------------------------------------------------------------------


def _install_hook(found: Hook) -> None:
    """Install once per communicator: init_process_group wraps the hook it finds, and would print only after ours published."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        global _publishing
        mine = [watch for watch in _watches if watch.process == os.getpid()]
        if _publishing or not mine:  # an outer hook of ours publishes
            previous(kind, error, where)
            return
        _publishing = True
        echo = any(watch.alarmed.is_set() for watch in mine)
        short = issubclass(kind, KeyboardInterrupt) and _is_plain(found)  # every rank gets Ctrl-C, but only one prints it
        if issubclass(kind, CommunicationError) and echo:
            # another rank has printed the cause; a traceback from each of 800 ranks would bury it
            print(f"[rank {mine[0].rank}] CommunicationError: {printable(str(error))}", file=sys.stderr, flush=True)
        elif not short:
            previous(kind, error, where)
            sys.stderr.flush()
        interactive = sys.flags.interactive or hasattr(sys, "ps1")  # where the process survives
        if threading.current_thread() is threading.main_thread() and not interactive:
            _End(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)
        first = [watch.raised(error) for watch in mine]
        if short and all(first):
            print(f"[rank {mine[0].rank}] KeyboardInterrupt: all ranks end", file=sys.stderr, flush=True)

    hook.__module__ = __name__
    sys.excepthook = hook


def _is_plain(hook: Any) -> bool:
    """Whether the hook only prints: Python's own, ours, or torch's, which adds the rank."""
    return hook is sys.__excepthook__ or getattr(hook, "__module__", "") == __name__ or is_excepthook(hook)


class _End:
    """The exit handler that runs first: it runs all others and ends the process with `status`."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._handlers_done = threading.Event()
        atexit.register(self.run)
        self._handlers = atexit._ncallbacks()
        # here, because Python 3.12 starts no thread at exit
        threading.Thread(target=self._cut_short, name="phalanx-end", daemon=True).start()

    def run(self) -> None:
        if os.getpid() != _watches_process():
            return
        if atexit._ncallbacks() != self._handlers:
            return  # handlers registered after this one have already run: don't run them again, let Python finish
        atexit.unregister(self.run)
        atexit.unregister(_leave)  # the other ranks may need the store while a handler here runs
        atexit._run_exitfuncs()
        self._handlers_done.set()
        _leave()
        _exit(self._status)

    def _cut_short(self) -> None:
        self._handlers_done.wait()
        time.sleep(CLEAN_UP)
        _exit(self._status)


def _watches_process() -> int:
    return _held[0].process if _held else -1


def _exit(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def _leave() -> None:
    for watch in _watches:
        watch.stop()
    for watch in _held:
        watch.linger()
    _park_threads()


def _park_threads() -> None:
    """Keep threads that wait inside torch for a lost peer from ever returning.

    A thread that returns while Python shuts down is unwound through C++ code that does not allow it, which aborts the process
    (SIGABRT; Python 3.14 lets it sleep instead). `os._exit` is no way out, because the exit status is not known here. So an
    unused signal gets pause(2) as its handler, and the thread that receives it sleeps until the process is gone.
    """
    waiting = [thread for thread in threading.enumerate() if thread.daemon and thread.name in INSIDE_TORCH]
    if not waiting or not hasattr(signal, "SIGRTMAX"):
        return
    time.sleep(LOOK)  # a thread that only waits for the GIL gets it now: it must not be stopped while it holds the GIL
    # prefer a signal other than _INTERRUPT: Python resets its own handlers, and a late signal would end the process
    number = next(_unused_signals(), None) or _INTERRUPT
    if number is None:
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
    for thread in waiting:
        if thread.is_alive() and thread.ident is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(thread.ident, number)


# ---- an exception of another rank ---------------------------------------------------------------------------------------------

_INTERRUPT: int | None = None
_due: list[tuple[Watch, CommunicationError]] = []


def end_unaware(watch: Watch, why: str) -> None:
    """End this process because another rank raised, unless it knows and ends by itself. Runs in the watch's thread.

    A rank that received the error may handle it. It fails at its next communication.
    """
    if _knows(watch, ALONE):
        return
    while _handles_an_exception():  # its own exception: let its `finally` and `except` blocks finish
        if _knows(watch, LOOK):
            return
    if _INTERRUPT is not None:
        _due.append((watch, CommunicationError(f"ended because {why}")))
        signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)
    if _knows(watch, INTERRUPTED):
        return
    print(f"[rank {watch.rank}] ended because {printable(why)}", file=sys.stderr, flush=True)
    _ended.set()
    for thread in list(_unfinished):
        thread.join()
    _exit(1)


def _knows(watch: Watch, seconds: float) -> bool:
    """Whether the user's code gets the error within `seconds`, or the process begins to end."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if watch.delivered.wait(LOOK) or watch.leaving or not threading.main_thread().is_alive():
            return True
    return False


def _handles_an_exception() -> bool:
    found: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    if isinstance(found, tuple):  # before Python 3.12
        found = found[1]
    return found is not None and id(found) != _context


def _install_interrupt() -> None:
    """Handle an unused signal by raising the error in the main thread, which the signal wakes even from a sleep."""
    global _INTERRUPT
    if _INTERRUPT is not None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGRTMAX"):
        return
    number = next(_unused_signals(), None)
    if number is not None:
        signal.signal(number, _interrupt)
        _INTERRUPT = number


def _unused_signals() -> Iterator[int]:
    return (n for n in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1) if signal.getsignal(n) == signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _due:
        watch, error = _due.pop()
        if not watch.delivered.is_set() and not watch.leaving:
            watch.delivered.set()
            raise error
