"""Whether a configuration can be trained, checked before any rank starts: one line here is better than one from each rank."""

from __future__ import annotations

from typing import Any

from phalanx.data.scatter import length_of
from phalanx.train.config import ConfigError, RunConfig
from phalanx.train.import_path import blamed_on
from phalanx.train.initial_weights import check_init
from phalanx.train.networks import SampleFacts
from phalanx.train.own_source import count_classes
from phalanx.train.samples import holds_images
from phalanx.train.sinks import check_sinks
from phalanx.train.task import Task


def open_sources(config: RunConfig) -> tuple[Any, Any]:
    """The data to train and to test with."""
    try:
        return config.data.open("train"), config.data.open("test")
    except ConfigError:
        raise
    except (ValueError, OSError) as error:  # a SourceError is a ValueError, and so is a name that no file can have
        raise ConfigError(f"data.source={config.data.source}: {error}") from None


def check(config: RunConfig, ranks: int, train: Any, test: Any) -> SampleFacts:
    """Raise ConfigError for what does not fit together: task, model and data, batch and ranks, rate and epochs.

    Returns what the network has to know about the data.
    """
    check_sinks(config)
    if config.init is not None:
        check_init(config.init)
    task, source = config.find_task(), config.data.source
    with blamed_on(f"data.source={source}"):
        samples, held_out = length_of(train), length_of(test)
    for what, number in (("to train", samples), ("to test", held_out)):
        if not number:
            raise ConfigError(f"data.source={source} has no samples {what}")
    if ranks > samples:
        raise ConfigError(f"{ranks} ranks, but data.source={source} has {samples} samples to train: use fewer ranks or more data")
    classes = count_classes(train, test)
    if task.classes and (classes is None or classes < 2):
        known = f"has {classes} classes: at least 2" if classes is not None else "has no `classes`: give your source their names"
        raise ConfigError(f"data.source={source} {known}")
    try:
        for stage in config.plan.stages:
            if stage.batch > samples:
                raise ValueError(
                    f"batch={stage.batch}, but data.source={source} has {samples} samples to train: use a smaller batch"
                )
            stage.split(ranks, config.micro_batch)
        config.course  # noqa: B018  raises if rate, momentum and plan contradict each other
        config.optimizer.rule.check()
        config.model.batchnorm.check(ranks)
        facts, x = look_at(config, task, train, classes)
        config.data.check(facts.shape[0] if holds_images(train) else None)
        outputs = config.model.outputs_for(facts, x)
        if task.check is not None:
            try:
                task.check(outputs, facts)
            except ValueError as error:
                raise ValueError(f"model.name={config.model.name}: {error}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return facts


def look_at(config: RunConfig, task: Task, train: Any, classes: int | None) -> tuple[SampleFacts, Any]:
    """What a network has to know about the data, and its input for one sample."""
    with blamed_on(f"task={config.task} does not suit data.source={config.data.source}"):
        x, _ = task.unpack(config.data.example(train))
    return SampleFacts(tuple(getattr(x, "shape", (1,))[1:]), classes), x
