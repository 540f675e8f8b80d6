"""A few steps of every rank as spans, in one Chrome trace: ui.perfetto.dev and chrome://tracing open it.

    rank 0   training      | input | forward | backward        | wait | update |
             all-reduce                        | group 0 |
                                                    | group 1      |

Spans use `time.perf_counter()`, which on Linux is one clock for all processes of a host. Clocks of different hosts are aligned
at a barrier, so between hosts a trace is accurate to the duration of a barrier. On a GPU, the spans are those of the thread that
queues the work.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.comm.communicator import Communicator
from phalanx.grad.reducer import TransferTime
from phalanx.train.config import RunConfig
from phalanx.train.rows import write_json

TRAVELS = ("all-reduce", "exchange")  # communication: a group of gradients, or with gossip a replica


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of time on a rank, in seconds. `kind` is "step", "phase" (part of one), or one of TRAVELS."""

    kind: str
    name: str
    begun: float
    ended: float
    step: int
    bytes: int = 0


# ---- on one rank ---------------------------------------------------------------------------------------------------------------


class Tracer:
    """Records `config.trace_steps` steps of the second epoch on this rank, or of the first if there is no second.

    If there are enough steps, the first one of the epoch is skipped, because its input takes longer.
    """

    def __init__(self, config: RunConfig, comm: Communicator, out: Path | None) -> None:
        self._comm, self._out = comm, out
        self._exchanges = config.comm.sync != "allreduce"  # exchanges replicas, or parts of them
        self._epoch = min(1, config.epochs - 1)
        self._wanted = config.trace_steps if out is not None else 0
        self._left = 0  # steps left to record
        self._active = False
        self._spans: list[Span] = []
        self._begun = self._mark = 0.0
        self._number = 0

    def state_dict(self) -> dict[str, Any]:
        """Which steps are still to be recorded: a joining rank records them with the others."""
        return {"wanted": self._wanted, "left": self._left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._wanted, self._left = state["wanted"], state["left"]

    def begin_step(self, epoch: int, index: int, steps: int, *, number: int, at: float) -> None:
        """Begin a step at `at`, when it waits for input: step `index` of `steps` in its epoch, `number` in the run."""
        if self._wanted and epoch == self._epoch and index == int(steps > self._wanted):
            self._left, self._wanted = min(self._wanted, steps), 0
        self._active = self._left > 0
        self._begun = self._mark = at
        self._number = number

    def mark(self, phase: str, at: float | None = None) -> None:
        """End a phase of this step at `at` or now. It began when the previous one ended."""
        if self._active:
            ended = max(time.perf_counter() if at is None else at, self._mark)
            self._spans.append(Span("phase", phase, self._mark, ended, self._number))
            self._mark = ended

    def end_step(self, transfers: Iterable[TransferTime]) -> None:
        """End the step. After the last one, gather and write the spans of all ranks. All ranks call it."""
        if not self._active:
            return
        self._spans.append(Span("step", f"step {self._number}", self._begun, self._mark, self._number))
        for number, way in enumerate(sorted(transfers, key=lambda way: way.left)):
            kind, name = ("exchange", "exchange") if self._exchanges else ("all-reduce", f"group {number}")
            self._spans.append(Span(kind, name, way.left, way.ended, self._number, way.bytes))
        self._left -= 1
        if self._left == 0:
            ranks = gather(self._spans, self._comm)
            if self._comm.rank == 0 and self._out is not None:
                write_json(self._out / "trace.json", to_chrome(ranks))
            self._spans = []


def gather(spans: Sequence[Span], comm: Communicator) -> list[list[Span]]:
    """The spans of all ranks, on the clock of rank 0's host."""
    comm.barrier()
    now = time.perf_counter()
    plain = [[s.kind, s.name, s.begun, s.ended, s.step, s.bytes] for s in spans]
    ranks = comm.allgather_obj((comm.inter_rank, comm.intra_rank, now, plain))
    clocks = {host: at for host, place, at, _ in ranks if place == 0}
    here = clocks[ranks[0][0]]
    return [[_shifted(Span(*words), here - clocks[host]) for words in own] for host, _, _, own in ranks]


def _shifted(span: Span, seconds: float) -> Span:
    return Span(span.kind, span.name, span.begun + seconds, span.ended + seconds, span.step, span.bytes)


# ---- as a file -----------------------------------------------------------------------------------------------------------------


def to_chrome(ranks: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """Chrome's trace format: ranks are processes, thread 0 trains, and overlapping messages get a thread each."""
    first = min((span.begun for own in ranks for span in own), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, own in enumerate(ranks):
        lanes = place_on_lanes([span for span in own if span.kind in TRAVELS])
        what = next((span.kind for span in lanes), "")
        named = ["training", *(f"{what} {lane}" for lane in range(1 + max(lanes.values(), default=-1)))]
        events.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        events += [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": i, "args": {"name": name}} for i, name in enumerate(named)
        ]
        for span in sorted(own, key=lambda span: (span.begun, -span.ended)):  # a step before its first phase
            more = {"bytes": span.bytes} if span.kind in TRAVELS else {}
            event = {"name": span.name, "cat": span.kind, "ph": "X", "pid": rank, "tid": 1 + lanes[span] if span in lanes else 0}
            begun, ended = (round((at - first) * 1e6, 3) for at in (span.begun, span.ended))
            events.append(event | {"ts": begun, "dur": round(ended - begun, 3), "args": {"step": span.step} | more})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def place_on_lanes(spans: Sequence[Span]) -> dict[Span, int]:
    """A lane for each span, the lowest that is free, so that spans of one lane do not overlap."""
    free_from: list[float] = []
    lanes: dict[Span, int] = {}
    for span in sorted(spans, key=lambda span: span.begun):
        lane = next((i for i, at in enumerate(free_from) if at <= span.begun), len(free_from))
        free_from[lane : lane + 1] = [span.ended]
        lanes[span] = lane
    return lanes
