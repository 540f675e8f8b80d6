"""The records of a run: rows in `metrics.jsonl`, a progress line, and a warning about slow ranks.

DIR/config.json        the resolved configuration
DIR/environment.json   versions, hosts, schedule, command
DIR/metrics.jsonl      one row per interval, evaluation and event; see docs/report.md
DIR/checkpoints/       checkpoint/
DIR/trace.json         trace.py
DIR/report.html        report/, made at the end
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.drift import Difference
from phalanx.grad.pace import SlowRank
from phalanx.train.banner import banner, data_facts, fact_lines, name_backend, run_facts
from phalanx.train.clock import StepEvents
from phalanx.train.config import RunConfig, plain
from phalanx.train.environment import describe_environment, launcher, schedule_of
from phalanx.train.interval import OwnInterval
from phalanx.train.progress import Progress, show_progress
from phalanx.train.recorded import Recorded
from phalanx.train.report import report_or_warning
from phalanx.train.rows import write_json
from phalanx.train.sinks import RunFacts, open_sinks
from phalanx.train.stragglers import StragglerWatch, Times


class Log:
    """Writes and prints everything during a run. Rank 0 does so for all ranks."""

    def __init__(self, config: RunConfig, comm: Communicator, out: Path | None, *, resume: bool, show: bool) -> None:
        self.config, self.comm, self.out = config, comm, out
        self._show = show
        self._progress: Progress | None = None
        self._recorded = Recorded(out, lambda: open_sinks(config, self._warn_of_sink), self.warn)
        self._open()
        self.task = config.find_task()
        self.samples = (0, 0)  # to train and to test with; known when the data are open
        self.units = 1  # units of speed per sample; known when the data are open
        self._resume = resume
        self._begun, self._before = time.perf_counter(), 0.0
        self._first: tuple[float, float] | None = None  # epoch and seconds of the first interval of this start
        self._now = OwnInterval(time.perf_counter())
        self._closed: list[OwnInterval] = []  # closed but not written: on a GPU their sums are still being copied to the host
        self._watch = StragglerWatch()
        self._told_of_loss, self._noticed = False, (0, 0)
        self._running, self._step, self._changes = False, 0, 0  # the last counts membership changes that have a row

    @property
    def _speaks(self) -> bool:
        return self.comm.rank == 0 and not self.comm.is_new

    def _open(self) -> None:
        if self._speaks and not self._recorded.writes:
            self._recorded.open()
            self._progress = show_progress(self.config) if self._show else None

    @property
    def seconds(self) -> float:
        """Seconds of the run, summed over all its starts."""
        return self._before + time.perf_counter() - self._begun

    def introduce(self) -> None:
        """Show what will be trained before opening the data, which may take minutes."""
        if self._progress is None:
            return
        comm, config = self.comm, self.config
        facts = run_facts(
            config,
            ranks=comm.size,
            hosts=comm.inter_size,
            backend=name_backend(
                ranks=comm.size,
                device="cuda" if torch.cuda.is_available() else "cpu",
                threads=comm.size > 1 and launcher() == "alone",
                shares_memory=comm.shares_memory,
            ),
            schedule=schedule_of(comm, config.comm).name,
            out="nowhere" if self.out is None else str(self.out),
        )
        self._progress.say(*banner(config.name, facts, self._progress.width))

    def opened(self, *, samples: tuple[int, int], units: int, parameters: int) -> None:
        """Show the size of the data and the network once they are ready. A sample has `units` units of speed."""
        self.samples, self.units = samples, units
        if self._progress is not None:
            self._progress.say(*fact_lines(data_facts(parameters=parameters, samples=samples), self._progress.width))

    def begin(self, step: int, seconds: float) -> None:
        """Begin, right before the first step. Earlier starts of this run did `step` steps in `seconds`."""
        self._open()
        if self._speaks:
            facts = self._facts(step, resume=self._resume)
            if self.out is not None:
                write_json(self.out / "config.json", plain(self.config))
                write_json(self.out / "environment.json", facts.environment)
            self._recorded.begin(facts)
        self._before, self._begun = seconds, time.perf_counter()
        self._now.since = time.perf_counter()
        self._running, self._step, self._changes = True, step, len(self.comm.membership.history)
        self._recorded.write({"kind": "start", "step": step, "ranks": self.comm.size, "seconds": seconds})
        if self._progress is not None and self._resume:
            self._progress.say(f"resumed after step {step}" if step else "no checkpoint yet: starting from the beginning")

    def _facts(self, step: int, *, resume: bool) -> RunFacts:
        environment = describe_environment(self.comm, self.config.comm, self.task, per_sample=self.units)
        return RunFacts(self.config, self.comm.size, *self.samples, environment, self.out, step, resume)

    def begin_epoch(self, epoch: int) -> None:
        self._recorded.tell({"kind": "epoch", "epoch": epoch})

    def step(
        self,
        *,
        number: int,
        epoch: float,
        samples: int,
        batch: int,
        loss: torch.Tensor,
        right: torch.Tensor,
        rate: float,
        times: Times | StepEvents,
        travelling: float,
        groups: int,
    ) -> None:
        """Record one step of this rank; `loss` is a sum over its samples. Neither communicates nor waits for a GPU.

        `travelling`: seconds from the first group sent to the last one received; `groups`: how many there were.
        """
        self._now.add(loss=loss, right=right, samples=samples, times=times, travelling=travelling)
        self._now.latest = {"step": number, "epoch": epoch, "rate": rate, "batch": batch, "groups": groups}
        self._step = number
        self._follow()

    def interval(self, *, complete: bool = True) -> float | None:
        """Write and show the means over all ranks since the last interval. All ranks call it.

        On a GPU, an interval is written when a later one ends and its sums have reached the host on all ranks, so that no rank
        waits for its device. With `complete`, all are written now: before a checkpoint, and at the end of an epoch.

        Returns the mean seconds of a step on the slowest rank, which is the same on all ranks, or None if nothing was written.
        """
        if self._now.steps:
            self._now.close(self.seconds)
            self._closed.append(self._now)
            self._now = OwnInterval(time.perf_counter())
        left = 1 if not complete and self._closed and self._closed[-1].is_late else 0
        seconds = None
        while len(self._closed) > left:
            published = self._publish(self._closed[0], wait=not left)
            if published is None:
                break
            seconds = published
            del self._closed[0]
        if not left:
            self._now.since = time.perf_counter()  # all ranks have met; a GPU that is still computing keeps counting
        return seconds

    def _publish(self, interval: OwnInterval, *, wait: bool) -> float | None:
        """Write a row. None if some rank would have to wait for its device and `wait` is false."""
        noted: Any = None
        if wait or interval.arrived:
            sums = [*interval.sums(), interval.travelling, interval.waited]
            own = interval.times()
            noted = sums, [own.input, own.compute, own.wait, own.update]
        gathered = self.comm.allgather_obj(noted)
        if any(rank is None for rank in gathered):
            return None
        loss, right, samples, travelling, waited = (sum(sums[i] for sums, _ in gathered) for i in range(5))
        ranks = [Times(*times) for _, times in gathered]
        mean = sum(ranks, Times()) / len(ranks)
        row = interval.latest | {
            "kind": "interval",
            "seconds": interval.seconds,
            "loss": loss / max(samples, 1),
            **({"accuracy": right / max(samples, 1)} if self.task.correct else {}),
            self.task.speed: samples * self.units / interval.elapsed,
            "times": {"input": mean.input, "compute": mean.compute, "wait": mean.wait, "update": mean.update},
            "wait_share": mean.wait / mean.total if mean.total else 0.0,
            "overlapped_share": 1 - waited / travelling if travelling and self.comm.size > 1 else None,
        }
        if self.comm.elastic:
            row |= {"ranks": self.comm.size, "membership": self.comm.membership.epoch}
        self._write(row)
        if self._progress is not None:
            self._progress.interval(row, self.comm.size, self._left(row["epoch"]))
            if not math.isfinite(row["loss"]) and not self._told_of_loss:
                self._told_of_loss = True
                self._progress.warn(
                    f"the loss is {row['loss']} at step {row['step']}: try a lower rate.peak, or more rate.warmup"
                )
        # the ranks of an elastic run compare their times in every fifth step: grad/slow_ranks.py
        straggler = None if self.comm.elastic else self._watch.interval(ranks, interval.elapsed)
        if straggler is not None:
            named = {"rank": straggler.rank, "cause": straggler.cause, "factor": straggler.factor}
            self._write({"kind": "straggler", "step": interval.latest["step"], "seconds": interval.seconds, **named})
            if self._progress is not None:
                self._progress.warn(str(straggler))
        return max(times.total for times in ranks)

    def noticed(self, differences: Sequence[Difference], slow: Sequence[SlowRank]) -> None:
        """Write a row for every rank found to differ or to be slow since the last call."""
        for kind, found, told in (("difference", differences, self._noticed[0]), ("straggler", slow, self._noticed[1])):
            for each in found[told:]:
                self._write({"kind": kind, "seconds": self.seconds} | asdict(each))
        self._noticed = len(differences), len(slow)

    def begin_evaluation(self, epoch: int) -> None:
        self._recorded.tell({"kind": "evaluating", "epoch": epoch})

    def evaluation(self, step: int, epoch: int, found: dict[str, float]) -> None:
        self._write({"kind": "evaluation", "step": step, "epoch": epoch, "seconds": self.seconds, **found})
        if self._progress is not None:
            self._progress.evaluation(epoch, found, self.seconds)
        self._now.since = time.perf_counter()

    def end(self, result: Any) -> None:
        self._write({"kind": "end", **result.row()})
        report = report_or_warning(self.out) if self.out is not None and self._speaks else None
        if self._progress is not None:
            self._progress.end(result, self.out, report)

    def _left(self, epoch: float) -> float:
        """Seconds left at the pace of this start; an earlier start may have had other ranks."""
        if self._first is None:
            self._first = epoch, self.seconds
        before, seconds = self._first if epoch > self._first[0] else (0.0, 0.0)
        return (self.seconds - seconds) / max(epoch - before, 1e-9) * max(self.config.epochs - epoch, 0.0)

    def warn(self, words: str) -> None:
        """Print a warning."""
        if self._progress is not None:
            self._progress.warn(words)

    def _warn_of_sink(self, words: str) -> None:
        """Print a warning, or issue a Python warning if nothing is shown."""
        if self._progress is not None:
            self._progress.warn(words)
        else:
            warnings.warn(words, RuntimeWarning, stacklevel=2)

    def _write(self, row: dict[str, Any]) -> None:
        """Record a row, on all ranks."""
        self._follow()
        self._recorded.write(row)

    # ---- ranks that die and join -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """If ranks have died or joined, write a row for each change, and take over from a dead rank 0."""
        if not self.comm.elastic or not self._running:
            return
        if self._speaks and not self._recorded.writes:
            self._progress = show_progress(self.config) if self._show else None
            self._recorded.take_over(self._facts(self._step, resume=True))
        changes = self.comm.membership.history
        new, self._changes = changes[self._changes :], len(changes)
        for change in new:
            facts = {"membership": change.epoch, "joined": change.joined, "left": change.left, "ranks": change.size}
            more = {"redone": change.redone, "held_up": change.seconds}
            self._recorded.write({"kind": "membership", "step": self._step, "seconds": self.seconds} | facts | more)
            if self._progress is not None:
                self._progress.say(str(change))

    def state_dict(self) -> dict[str, Any]:
        """What a joining rank needs, in case it becomes the writer."""
        return {"seconds": self.seconds, "rows": self._recorded.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state on a rank that joins a run."""
        self._before, self._begun, self._running = state["seconds"], time.perf_counter(), True
        self._recorded.load(state["rows"])
        self._now = OwnInterval(time.perf_counter())

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.close()
        with contextlib.suppress(OSError):  # a full disk, already warned about
            self._recorded.close()
