"""All sinks of a run. If one fails, you get one warning, and the run and the other sinks continue."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from phalanx.train.config import ConfigError, RunConfig
from phalanx.train.sinks.later import Later
from phalanx.train.sinks.mlflow import MLflow
from phalanx.train.sinks.mlperf import MLPerfLog
from phalanx.train.sinks.sink import Row, RunFacts, Sink
from phalanx.train.sinks.tensorboard import TensorBoard
from phalanx.train.sinks.wandb import WeightsAndBiases

PACKAGES = ("tensorboard", "wandb", "mlflow")  # each is the name of a setting, of a module and of a package


def check_sinks(config: RunConfig) -> None:
    """Raise ConfigError for a missing package before training starts, rather than after the first interval."""
    for package in PACKAGES:
        value = getattr(config, package)
        if value and importlib.util.find_spec(package) is None:
            shown = "true" if value is True else value
            raise ConfigError(
                f"{package}={shown}, but the package is not installed: pip install {package} (or phalanx[logging] for all)"
            )


class Sinks:
    """Several sinks as one. `warn` is called once for each that fails, from any thread."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._sinks: list[Sink] = []

    def add(self, sink: Sink) -> None:
        """Call `sink` in the training thread."""
        self._sinks.append(sink)

    def add_server(self, sink: Sink) -> None:
        """Call `sink` in its own thread."""
        self._sinks.append(Later(sink, lambda error: self._say(sink, error)))

    def begin(self, facts: RunFacts) -> None:
        self._each(lambda sink: sink.begin(facts))

    def write(self, row: Row) -> None:
        self._each(lambda sink: sink.write(row))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, call: Callable[[Sink], Any]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001, PERF203  a sink may raise anything, and training continues
                self._sinks.remove(sink)
                self._say(sink, error)

    def _say(self, sink: Sink, error: Exception) -> None:
        text = " ".join(str(error).split())[:300]
        self._warn(f"{sink.name} fails, and training continues without it: {type(error).__name__}: {text}")


def open_sinks(config: RunConfig, warn: Callable[[str], None]) -> Sinks:
    """Open the sinks that the settings name."""
    sinks = Sinks(warn)
    if config.mllog:
        sinks.add(MLPerfLog(config))
    if config.tensorboard:
        sinks.add(TensorBoard())
    if config.wandb:
        sinks.add_server(WeightsAndBiases(config.wandb))
    if config.mlflow:
        sinks.add_server(MLflow(config.mlflow))
    sinks.write({"kind": "init"})
    return sinks
