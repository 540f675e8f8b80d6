"""Whether a configuration can be trained, checked before any rank starts: one line here is better than one from each rank."""

from __future__ import annotations

from typing import Any

from phalanx.train.config import ConfigError, RunConfig
from phalanx.train.initial_weights import check_init
from phalanx.train.sinks import check_sinks


def open_sources(config: RunConfig) -> tuple[Any, Any]:
    """The data to train and to test with."""
    try:
        return config.data.open("train"), config.data.open("test")
    except (ValueError, OSError) as error:  # a SourceError is a ValueError, and so is a name that no file can have
        raise ConfigError(f"data.source={config.data.source}: {error}") from None


def check(config: RunConfig, ranks: int, train: Any, test: Any) -> None:
    """Raise ConfigError for what does not fit together: model and data, batch and ranks, rate and epochs."""
    check_sinks(config)
    if config.init is not None:
        check_init(config.init)
    source, samples = config.data.source, len(train)
    if len(train.classes) < 2:
        raise ConfigError(f"data.source={source} has {len(train.classes)} classes: at least 2")
    if len(test.classes) != len(train.classes):
        raise ConfigError(
            f"{len(train.classes)} classes to train, but {len(test.classes)} to test: is data.test from another data set?"
        )
    if ranks > samples:
        raise ConfigError(f"{ranks} ranks, but data.source={source} has {samples} samples to train: use fewer ranks or more data")
    try:
        for stage in config.plan.stages:
            if stage.batch > samples:
                raise ValueError(
                    f"batch={stage.batch}, but data.source={source} has {samples} samples to train: use a smaller batch"
                )
            stage.split(ranks, config.micro_batch)
        config.course  # noqa: B018  raises if rate, momentum and plan contradict each other
        config.model.batchnorm.check(ranks)
        shape = config.data.shape(train)
        if len(config.data.mean) != shape[0]:
            raise ValueError(f"data.mean={config.data.mean}: give one for each channel; data.source={source} has {shape[0]}")
        config.model.check(shape, len(train.classes))
    except ValueError as error:
        raise ConfigError(str(error)) from None
