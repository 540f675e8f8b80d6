"""MLPerf's log (https://github.com/mlcommons/logging), for runs that you want to submit, on standard output and in mllog.txt.

:::MLLOG {"namespace": "", "time_ms": 1592000000000, "event_type": "INTERVAL_START", "key": "run_start", "value": null, ...}

Every value is the run's own. MLPerf's checker tells whether a run meets a division's rules:

    python -m mlperf_logging.compliance_checker --ruleset 4.0.0 runs/imagenet-resnet50-32k/mllog.txt
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal, TextIO

from phalanx.train.config import RunConfig
from phalanx.train.optimizers import LarsConfig
from phalanx.train.sinks.sink import Row, RunFacts

Event = Literal["INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"]

FILE = "mllog.txt"
BENCHMARKS = {"resnet50": "resnet"}  # MLPerf's names of the networks that it measures


class MLPerfLog:
    """Epochs are counted from 1, as MLPerf does. A run succeeds at its target or, without one, at its end."""

    name = "mllog"

    def __init__(self, config: RunConfig, stream: TextIO | None = None) -> None:
        self._config, self._stream = config, stream or sys.stdout
        self._file: TextIO | None = None
        self._waiting: list[str] = []  # lines written before the directory is known
        self._epoch: int | None = None  # the current epoch
        self._ended = False

    def begin(self, facts: RunFacts) -> None:
        """Log the hyperparameters, then start the clock."""
        if facts.out is not None:
            self._file = (facts.out / FILE).open("a" if facts.resume else "w", encoding="utf-8")
            self._file.writelines(self._waiting)
        self._waiting = []
        for key, value in settings(facts):
            self._write("POINT_IN_TIME", key, value)
        self._write("INTERVAL_END", "init_stop")
        self._write("INTERVAL_START", "run_start")

    def write(self, row: Row) -> None:
        """Turn the beginnings and ends of epochs, evaluations and the run into events."""
        kind = row["kind"]
        if kind == "init":
            self._write("INTERVAL_START", "init_start")
        elif kind == "epoch":
            self._end_epoch()
            self._epoch = row["epoch"] + 1
            self._write("INTERVAL_START", "epoch_start", epoch_num=self._epoch)
        elif kind == "evaluating":
            self._end_epoch()
            self._write("INTERVAL_START", "eval_start", epoch_num=row["epoch"])
        elif kind == "evaluation":
            if "top1" in row:
                self._write("POINT_IN_TIME", "eval_accuracy", row["top1"], epoch_num=row["epoch"])
            self._write("INTERVAL_END", "eval_stop", epoch_num=row["epoch"])
        elif kind == "end":
            self._stop(success=row["why"] == ("epochs" if self._config.target is None else "target"))

    def close(self) -> None:
        if not self._ended:  # an exception ended the run
            self._stop(success=False)
        if self._file is not None:
            self._file.close()

    def _end_epoch(self) -> None:
        """End the current epoch, complete or not."""
        if self._epoch is not None:
            self._write("INTERVAL_END", "epoch_stop", epoch_num=self._epoch)
            self._epoch = None

    def _stop(self, *, success: bool) -> None:
        self._ended = True
        self._end_epoch()
        self._write("INTERVAL_END", "run_stop", status="success" if success else "aborted")

    def _write(self, event: Event, key: str, value: Any = None, **metadata: Any) -> None:
        content = {"namespace": "", "time_ms": time.time_ns() // 1_000_000, "event_type": event, "key": key, "value": value}
        line = f":::MLLOG {json.dumps(content | {'metadata': metadata})}\n"
        self._stream.write(line)
        self._stream.flush()
        if self._file is not None:
            self._file.write(line)
            self._file.flush()
        else:
            self._waiting.append(line)


def settings(facts: RunFacts) -> Iterator[tuple[str, Any]]:
    """The keys of a submission and of its hyperparameters, each with the value that the run has."""
    config, submission = facts.config, facts.config.submission
    environment = facts.environment
    first = config.plan.stages[0]
    yield "submission_benchmark", BENCHMARKS.get(config.model.name, config.name)
    yield "submission_division", submission.division
    yield "submission_status", submission.status
    if submission.org is not None:
        yield "submission_org", submission.org
    hosts, device = environment.get("hosts", 1), environment.get("device", "CPU")
    yield "submission_platform", submission.platform or f"{hosts} x {facts.ranks // hosts} {device}"
    yield "cache_clear", submission.cache_clear
    yield "seed", config.seed
    yield "global_batch_size", first.batch
    yield "gradient_accumulation_steps", first.split(facts.ranks, config.micro_batch).micro_steps
    yield "train_samples", facts.train_samples
    yield "eval_samples", facts.test_samples
    yield "opt_name", config.optimizer.name
    yield "model_bn_span", batchnorm_span(facts)
    yield from rates(facts)


def batchnorm_span(facts: RunFacts) -> int:
    """The samples behind a batch norm's statistics: those of a micro-batch, on one rank or on all that share them."""
    first, norms = facts.config.plan.stages[0], facts.config.model.batchnorm
    ranks = 1 if norms.statistics == "own" else norms.group or facts.ranks
    return ranks * first.batch // (facts.ranks * first.split(facts.ranks, facts.config.micro_batch).micro_steps)


def rates(facts: RunFacts) -> Iterator[tuple[str, Any]]:
    """The update rule, by general names and by those that MLPerf has for SGD and LARS.

    MLPerf counts the steps of a decay from the first step of the run, and so includes the warm-up.
    """
    config = facts.config
    rule, name, rate = config.optimizer.rule, config.optimizer.name, config.rate
    known = {key: getattr(rule, key, None) for key in ("momentum", "weight_decay")}  # torch's other optimizers have no momentum
    named: dict[str, Any] = {key: value for key, value in known.items() if value is not None}
    if rate.rule is None:
        steps_per_epoch = config.plan.steps_before(1, facts.train_samples, config.data.last)
        peak = rate.peak * rate.scaled(config.plan.stages[0].batch)
        decays = config.epochs if rate.decay_epochs is None else rate.warmup + rate.decay_epochs
        named |= {
            "base_learning_rate": peak,
            "end_learning_rate": float(f"{peak * rate.end:.12g}"),  # our setting is a fraction of the peak: undo its rounding
            "learning_rate_warmup_epochs": rate.warmup,
            "learning_rate_decay_steps": round(decays * steps_per_epoch),
        }
        if rate.decay == "polynomial":
            named["learning_rate_decay_poly_power"] = rate.power
    for key in ("base_learning_rate", "momentum", "weight_decay", "learning_rate_warmup_epochs"):
        if key in named:
            yield f"opt_{key}", named[key]
    if name in ("lars", "sgd"):
        for key, value in named.items():
            yield f"{name}_opt_{key}", value
    if isinstance(rule, LarsConfig):
        yield "lars_epsilon", rule.eps
