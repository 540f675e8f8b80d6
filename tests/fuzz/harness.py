"""What all fuzzers share: a parser reads mutated inputs, and for each it succeeds or raises the error that it documents.

    PARSER = Parser("codec", read=decode, errors=(ValueError,), seeds=(...,), mutators=BINARY)

    @pytest.mark.parametrize("cases", blocks())
    def test_codec(cases):
        fuzz(PARSER, cases)

A case is a number: parser and number give the input, so a failure can be repeated. Each case has 2 seconds of processor time
and 256 MB. `PHALANX_FUZZ=200000` asks for that many cases instead of 500 (2,000 with PHALANX_TEST_LONG=1);
`PHALANX_FUZZ_SHARD=0/2` runs every second of them; `PHALANX_FUZZ_MINUTES=12` skips blocks of cases that would begin later.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from tests.long import times

CASES = int(os.environ.get("PHALANX_FUZZ", times(2000, seldom=500)))
SHARD, SHARDS = map(int, os.environ.get("PHALANX_FUZZ_SHARD", "0/1").split("/"))
UNTIL = time.monotonic() + 60 * float(os.environ.get("PHALANX_FUZZ_MINUTES", "inf"))
BLOCK = 2_000  # cases of one test, which has 180 s like every other, also on a busy machine
SECONDS = 2.0  # of processor time; on a busy machine other jobs do not count
PATIENCE = 30.0  # seconds on the clock: a parser that sleeps uses no processor
MEGABYTES = 256
ROOM = 2 << 30  # bytes of address space beyond what the process has, so that a bomb is a MemoryError and not a dead machine
LOOK = 20  # cases between two looks at the memory
FAILED = Path(__file__).parents[2] / "out" / "fuzz"  # inputs of cases that failed

Mutator = Callable[[Random, bytes, Sequence[bytes]], bytes]


@dataclass(frozen=True)
class Parser:
    """What is fuzzed. `read` takes an input and returns, or raises one of `errors`; `seeds` are inputs that it must accept.

    `repair` makes checksums right again, in most cases, so that nonsense
    gets past them.
    """

    name: str
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    mutators: tuple[Mutator, ...]
    repair: Callable[[bytes], bytes] | None = None

    def case(self, number: int) -> bytes:
        """The input of a case: a seed after one to four mutations."""
        rng = Random(f"{self.name} {number}")
        data = rng.choice(self.seeds)
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
            data = rng.choice(self.mutators)(rng, data, self.seeds)
        return self.repair(data) if self.repair and rng.random() < 0.9 else data


def blocks(share: float = 1.0, least: int = 2000) -> list[range]:
    """The cases of this run, in blocks of which each fits into one test. A slow parser gets a `share` of them, or the `least`."""
    count = max(min(CASES, least), round(CASES * share))
    return [range(start + SHARD, min(start + BLOCK, count), SHARDS) for start in range(0, count, BLOCK)]


class TooSlow(BaseException):
    """A case used up its time."""


def fuzz(parser: Parser, cases: range, *, seconds: float = SECONDS, megabytes: float = MEGABYTES) -> Counter[str]:
    """Run the cases; an AssertionError says which one went wrong, and how. Returns how often each outcome came."""
    if time.monotonic() > UNTIL:
        pytest.skip("the minutes are over")
    for seed in parser.seeds:
        parser.read(seed)  # outside of the net: a seed that is refused is a mistake of the test
    outcomes: Counter[str] = Counter()
    with _watched(seconds) as begin, _bounded():
        peak = _Peak(megabytes)
        for number in cases:
            outcomes[_run(parser, number, begin)] += 1
            if number // SHARDS % LOOK == 0 and peak.exceeded():
                suspects = range(max(cases.start, number - LOOK * SHARDS), number + 1, SHARDS)
                raise AssertionError(_who_needs_memory(parser, suspects, peak))
        if peak.exceeded():
            raise AssertionError(_who_needs_memory(parser, cases[-LOOK:], peak))
    return outcomes


@contextlib.contextmanager
def calm(seconds: float = SECONDS, megabytes: float = MEGABYTES) -> Iterator[None]:
    """For one input: what happens inside takes no more time and memory than a case may; TooSlow or AssertionError otherwise."""
    with _watched(seconds) as begin, _bounded():
        peak = _Peak(megabytes)
        begin()
        yield
        assert not peak.exceeded(), f"{peak.grown() / 1e6:.0f} MB"


def _run(parser: Parser, number: int, begin: Callable[[], None]) -> str:
    data = parser.case(number)
    begin()
    try:
        parser.read(data)
    except parser.errors as error:
        text = str(error)
        if len(text) > 20_000:
            raise AssertionError(f"{_named(parser, number, data)}: a message of {len(text)} characters") from None
        return "refused"
    except TooSlow as slow:
        raise AssertionError(f"{_named(parser, number, data)}: {slow}") from slow
    except Exception as error:
        raise AssertionError(f"{_named(parser, number, data)}: {type(error).__name__}: {str(error)[:300]}") from error
    return "accepted"


def _named(parser: Parser, number: int, data: bytes) -> str:
    FAILED.mkdir(parents=True, exist_ok=True)
    path = FAILED / f"{parser.name.replace(' ', '-')}-{number}"
    path.write_bytes(data)
    return f"{parser.name}, case {number} ({len(data)} bytes, {path})"


# ---- the net -------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _watched(seconds: float) -> Iterator[Callable[[], None]]:
    """Raises TooSlow in a case that takes too long; what it yields is called at the beginning of each."""
    started = [time.process_time(), time.monotonic()]

    def begin() -> None:
        started[:] = time.process_time(), time.monotonic()

    def look(*_: object) -> None:
        used, waited = time.process_time() - started[0], time.monotonic() - started[1]
        if used > seconds or waited > PATIENCE:
            begin()  # once
            raise TooSlow(f"{used:.1f} s of processor time, {waited:.1f} s on the clock")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, seconds / 8, seconds / 8)
    try:
        yield begin
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """With ROOM for more address space, and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class _Peak:
    """The most memory that was resident since the last reset, beyond what was resident then."""

    def __init__(self, megabytes: float) -> None:
        self.limit = megabytes * 1e6
        self.reset()

    def reset(self) -> None:
        # memory that earlier tests freed may still be resident, and would hide what a case takes
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark begins anew
        self.before = _status("VmRSS")

    def grown(self) -> int:
        return _status("VmHWM") - self.before

    def exceeded(self) -> bool:
        return self.grown() > self.limit


def _who_needs_memory(parser: Parser, suspects: Sequence[int], peak: _Peak) -> str:
    """The case of these that fills the memory."""
    grown = peak.grown()
    for number in suspects:
        peak.reset()
        data = parser.case(number)
        with contextlib.suppress(*parser.errors):
            parser.read(data)
        if peak.exceeded():
            return f"{_named(parser, number, data)}: {peak.grown() / 1e6:.0f} MB"
    return f"{parser.name}: {grown / 1e6:.0f} MB after all of the cases {suspects}, of which none alone takes as much: a leak?"


def _status(name: str) -> int:
    """A size of this process, in bytes."""
    with open("/proc/self/status", "rb") as file:
        return int(file.read().split(name.encode() + b":", 1)[1].split(None, 1)[0]) * 1024
