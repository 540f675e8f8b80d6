"""Check a configuration before any rank starts: one error here is better than one from each rank."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.data.collate import map_tensors
from phalanx.data.scatter import length_of
from phalanx.train.config import ConfigError, RunConfig
from phalanx.train.import_path import blamed_on
from phalanx.train.initial_weights import check_init
from phalanx.train.networks import SampleFacts
from phalanx.train.own_source import count_classes
from phalanx.train.samples import holds_images
from phalanx.train.sinks import check_sinks
from phalanx.train.task import Task
from phalanx.train.tasks import TASKS


def open_sources(config: RunConfig) -> tuple[Any, Any]:
    """Open the training and test data."""
    try:
        return config.data.open("train"), config.data.open("test")
    except ConfigError:
        raise
    except (ValueError, OSError) as error:  # a SourceError is a ValueError, and so is a name that no file can have
        raise ConfigError(f"data.source={config.data.source}: {error}") from None


def check(config: RunConfig, ranks: int, train: Any, test: Any) -> SampleFacts:
    """Raise ConfigError if parts do not fit together: task, model and data, batch and ranks, rate and epochs.

    Returns what the network needs to know about the data.
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
            if not config.comm.elastic:  # an elastic world need not divide the batch
                stage.split(ranks, config.micro_batch)
        config.course  # noqa: B018  raises if rate, momentum and plan contradict each other
        config.optimizer.rule.check()
        config.model.batchnorm.check(ranks)
        facts, x, y = look_at(config, task, train, classes)
        config.data.check(facts.shape[0] if holds_images(train) else None)
        outputs = config.model.outputs_for(facts, x)
        if task.check is not None:
            try:
                task.check(outputs, facts)
            except ValueError as error:
                raise ValueError(f"model.name={config.model.name}: {error}") from None
        if config.loss.name is not None or config.task not in TASKS:
            try_loss(config, task, outputs, y)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return facts


def try_loss(config: RunConfig, task: Task, outputs: Any, y: Any) -> None:
    """Raise ConfigError unless the user's loss returns one number with a gradient for outputs of these shapes."""
    told = f"loss={config.loss.name}" if config.loss.name is not None else f"task={config.task}"
    zeros = map_tensors(lambda x: torch.zeros(x.shape, dtype=x.dtype).requires_grad_(x.is_floating_point()), outputs)
    with blamed_on(told):
        loss = task.loss(zeros, y)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(f"{told} gives {shape} for outputs and labels: return their mean loss, a tensor with one number")
    if not loss.requires_grad:
        raise ConfigError(f"{told} gives a loss without a gradient: compute it from the outputs with torch")


def look_at(config: RunConfig, task: Task, train: Any, classes: int | None) -> tuple[SampleFacts, Any, Any]:
    """What a network needs to know about the data, and one sample: the network's input, and the loss's second argument."""
    with blamed_on(f"task={config.task} does not suit data.source={config.data.source}"):
        x, y = task.unpack(config.data.example(train))
    return SampleFacts(tuple(getattr(x, "shape", (1,))[1:]), classes), x, y
