"""Lines of MLPerf's log (https://github.com/mlcommons/logging) on rank 0's standard output, for runs that you want to submit.

:::MLLOG {"namespace": "", "time_ms": 1592000000000, "event_type": "INTERVAL_START", "key": "run_start", "value": null, ...}
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Literal, TextIO

from phalanx.train.config import RunConfig

Event = Literal["INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"]


class MLLog:
    """Epochs are counted from 1, as MLPerf does. A run succeeds at its target or, without one, at its end."""

    def __init__(self, config: RunConfig, stream: TextIO | None = None) -> None:
        self._config, self._stream = config, stream or sys.stdout
        self._epoch: int | None = None  # the epoch under way
        self._write("INTERVAL_START", "init_start")

    def begin(self, *, train: int, test: int) -> None:
        """Everything is built: hyperparameters, then the clock starts."""
        config = self._config
        rule = config.optimizer.rule
        settings = {
            "submission_benchmark": config.name,
            "seed": config.seed,
            "global_batch_size": config.plan.stages[0].batch,
            "train_samples": train,
            "eval_samples": test,
            "opt_name": config.optimizer.name,
            "opt_base_learning_rate": config.rate.peak,
            "opt_momentum": getattr(rule, "momentum", None),  # torch's other optimizers have none
            "opt_weight_decay": getattr(rule, "weight_decay", None),
            "opt_learning_rate_warmup_epochs": config.rate.warmup,
        }
        for key, value in settings.items():
            self._write("POINT_IN_TIME", key, value)
        self._write("INTERVAL_END", "init_stop")
        self._write("INTERVAL_START", "run_start")

    def begin_epoch(self, epoch: int) -> None:
        self._end_epoch()
        self._epoch = epoch + 1
        self._write("INTERVAL_START", "epoch_start", epoch_num=self._epoch)

    def _end_epoch(self) -> None:
        """End the epoch under way, complete or not."""
        if self._epoch is not None:
            self._write("INTERVAL_END", "epoch_stop", epoch_num=self._epoch)
            self._epoch = None

    def begin_evaluation(self, epoch: int) -> None:
        self._end_epoch()
        self._write("INTERVAL_START", "eval_start", epoch_num=epoch)

    def evaluation(self, epoch: int, value: float) -> None:
        """The result that decides: MLPerf calls it accuracy, also where it is a loss."""
        self._write("POINT_IN_TIME", "eval_accuracy", value, epoch_num=epoch)
        self._write("INTERVAL_END", "eval_stop", epoch_num=epoch)

    def end(self, why: str) -> None:
        """`why` as in the run's result."""
        self._end_epoch()
        success = why == ("epochs" if self._config.target is None else "target")
        self._write("INTERVAL_END", "run_stop", status="success" if success else "aborted")

    def _write(self, event: Event, key: str, value: Any = None, **metadata: Any) -> None:
        line = {"namespace": "", "time_ms": time.time_ns() // 1_000_000, "event_type": event, "key": key, "value": value}
        self._stream.write(f":::MLLOG {json.dumps(line | {'metadata': metadata})}\n")
        self._stream.flush()
