"""The process that has imported torch and phalanx and forks programs from that state; tests/warm/popen.py says what for.

It has one thread and runs no operation of torch: a child that is forked later would hang in its own. It ends when its connection
does, and takes along the programs that still run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import time
import types
import warnings
import weakref

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SOURCES = os.environ["PYTHONPATH"]
LIBRARIES = [*(path for path in sys.path if path not in (HERE, SOURCES)), SOURCES]
HUGE = 2 << 20  # bytes of a huge page
MADV_COLLAPSE = 25  # of madvise(2)
CLONE_NEWNET = 0x40000000  # of setns(2)
CODE = (type, types.FunctionType, types.ModuleType)
CONSTANTS = (str, bytes, int, float, tuple, frozenset)  # a mere look at them, in a child, would copy their pages
ABOVE = 512  # descriptors of ours are above those that a program may be given by number


@atexit.register  # before all others, so that it runs after all others
def end_early() -> None:
    """End here, where the exit code is known and all exit handlers have run: the program and phalanx go, libraries stay.

    What Python does next would write to most pages of what is imported, and so copy them, in 0.15 s.
    """
    if not exit_codes:
        spare_libraries()
        return
    new = list(itertools.takewhile(lambda name: name not in imported, reversed(sys.modules)))
    go = {name: sys.modules.pop(name) for name in [*new, "__main__"]}
    contents = [(vars(module), list(vars(module))) for name, module in go.items() if is_ours(name) and module]
    go.clear()
    gc.collect()
    for names, variables in [*contents, *changeable]:  # their values are frozen: no collection finds them
        names.update({name: None for name in variables if not isinstance(names.get(name), CODE)})
    with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or not what it was: Python has a code for that
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_codes[-1])


def spare_libraries() -> None:
    """Leave libraries as they are when the interpreter ends: to take them apart takes 0.1 s. The program and phalanx go."""
    for name, module in list(sys.modules.items()):
        if "site-packages" in str(getattr(module, "__file__", "")) and not is_ours(name):
            for kept in (module, vars(module)):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            del sys.modules[name]


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("phalanx", "tests")


imported: set[str] = set()  # modules, before the program
changeable: list[tuple[dict, list[str]]] = []  # of our modules among them: what may hold something of the program
exit_codes: list[int] = []  # of the program, unless it ended by an exception
finalizers: list[weakref.finalize] = []  # of libraries: torch would remove each of its operators

sys.path[0] = ROOT
from tests.warm.popen import LARGEST, Python, Request, Zygote  # noqa: E402  after the line that finds it

popen = subprocess.Popen
subprocess.Popen = Python  # type: ignore[misc]  before others import it: what a launcher starts is warm too


def main() -> None:
    connection = socket.socket(fileno=_lift(int(sys.argv[1])))
    _import_all()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    gc.freeze()  # what is imported is shared with the children, and not searched for garbage when they end
    use_huge_pages()
    request, descriptors = serve(connection, takes_along=True)
    while request.launches:
        if request.new_session:
            os.setsid()  # before the zygote: ranks are in the session of their launcher, whose terminal interrupts them
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            Python.zygote = Zygote(socket.socket(fileno=_lift(ours.detach())))
            break
        ours.close()
        _enter(request.network)  # what a launcher starts is on its host
        for descriptor in descriptors:
            os.close(descriptor)
        # ranks outlive their launcher, if only by a moment; what a test started and forgot does not outlive pytest
        request, descriptors = serve(theirs, takes_along=request.tests)
    if request.tests:
        subprocess.Popen = popen  # type: ignore[misc]
    become(request, descriptors)
    try:
        run(request.words)
    except SystemExit as end:
        if not request.ends_wholly and isinstance(end.code, int | None):
            exit_codes.append(end.code or 0)
        raise
    if not request.ends_wholly:
        exit_codes.append(0)


def _import_all() -> None:
    import pytest
    import torch._dynamo  # the first optimizer would import it, in a second
    import torch.distributed.checkpoint  # half a second in each worker of pytest
    import torch.distributed.run

    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):  # as pyproject.toml has it for tests, which find these imported
            warnings.simplefilter("error", kind)
        import phalanx.cli.main
        import phalanx.comm.create
        import phalanx.comm.transports.torch
        import phalanx.train.trainer

    imported.update(sys.modules)
    for module in [sys.modules[name] for name in imported if is_ours(name)]:
        names = vars(module)
        changeable.append((names, [name for name, value in names.items() if not isinstance(value, (*CODE, *CONSTANTS))]))
    finalizers.extend(finalizer for finalizer in weakref.finalize._registry if finalizer.atexit)
    end_with_finalizers(wanted=False)
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"{len(tasks)} threads after importing {pytest}, {torch} and {phalanx}"


def use_huge_pages() -> None:
    """A fork copies a table of all pages: of 230 MB in pages of 4 kB that takes 30 ms here, in pages of 2 MB 8 ms.

    A kernel before 6.1 does not know the request, and others may refuse it: then nothing changes.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as maps:
        areas = [line.split() for line in maps]
    for span, permissions, _, _, file, *name in areas:
        if permissions == "rw-p" and file == "0" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in span.split("-"))
            begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
            if begin < end:
                madvise(begin, end - begin, MADV_COLLAPSE)


def end_with_finalizers(*, wanted: bool) -> None:
    for finalizer in finalizers:
        finalizer.atexit = wanted


def serve(connection: socket.socket, *, takes_along: bool) -> tuple[Request, list[int]]:
    """Fork on request. Only the new processes return, each with its request and its descriptors."""
    running: list[int] = []  # pidfds
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, LARGEST, 64)
        if not message:
            for program in running:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(program, signal.SIGKILL)
            os._exit(0)
        reading, writing = os.pipe()
        middle = os.fork()
        if middle == 0:
            between = os.getpid()
            if program := os.fork():
                os.write(writing, str(program).encode())
                os._exit(0)
            for descriptor in (reading, writing, *running):
                os.close(descriptor)
            connection.close()
            while os.getppid() == between:  # a program may ask who started it
                time.sleep(0.0005)
            return Request(**json.loads(message)), descriptors
        os.waitpid(middle, 0)
        answer = os.read(reading, 64)
        if takes_along:
            ended = {program for program, _ in _ready(running)}
            for program in ended:
                os.close(program)
            running = [program for program in running if program not in ended]
            with contextlib.suppress(ProcessLookupError):
                running.append(os.pidfd_open(int(answer)))
        connection.send(answer)
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)


def _ready(descriptors: list[int]) -> list[tuple[int, int]]:
    look = select.poll()
    for descriptor in descriptors:
        look.register(descriptor, select.POLLIN)
    return look.poll(0)


def _enter(network: str | None) -> None:
    if network:
        with open(network) as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0, network


def become(request: Request, descriptors: list[int]) -> None:
    """A fresh process: signals, session, directory, environment, streams. SIGUSR1 prints all its stacks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.new_session and not request.launches:
        os.setsid()
    _enter(request.network)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    with contextlib.suppress(OSError, AttributeError):  # torch has read TORCH_CPP_LOG_LEVEL, and does so again
        ctypes.CDLL("libc10.so")._ZN3c1011initLoggingEv()
    lifted = [_lift(descriptor) for descriptor in descriptors]
    for given, number in zip(lifted, request.descriptors, strict=True):
        os.dup2(given, number)
        os.close(given)
    if request.terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    if request.ends_wholly:
        atexit.unregister(end_early)
        end_with_finalizers(wanted=True)
    else:  # after Python itself has ended: to take libtorch apart takes 0.2 s
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does this by itself
    for name, number, mode, errors in (("in", 0, "r", "strict"), ("out", 1, "w", "strict"), ("err", 2, "w", "backslashreplace")):
        lines = 1 if name == "err" else -1
        stream = open(number, mode, lines, encoding=sys.__stdout__.encoding, errors=errors, closefd=False)  # noqa: SIM115  it stays
        setattr(sys, f"std{name}", stream)
        setattr(sys, f"__std{name}__", stream)


def run(words: list[str]) -> None:
    """`python WORDS`."""
    if words[0] == "-u" or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True, write_through=True)
        words = words[words[0] == "-u" :]
    sys.orig_argv = [sys.executable, *words]
    sys.path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *LIBRARIES]
    with contextlib.suppress(ImportError):
        import sitecustomize  # noqa: F401  as every interpreter does, before the program
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(module))
    elif words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        if "." in words[1]:
            sys.modules.pop(words[1], None)  # runpy warns of a module that is there already
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def _lift(descriptor: int) -> int:
    """The same, under a number that no program has been promised."""
    lifted = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, ABOVE)
    os.close(descriptor)
    return lifted


main()
