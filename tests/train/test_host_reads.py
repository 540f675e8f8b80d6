"""A training step reads no value of a tensor: on a GPU each read would wait until the queue is empty. Shown on CPU tensors."""

from dataclasses import replace

import pytest
import torch
from tests.host_reads import HostReads
from tests.train.runs import DIGITS, TINY, on_trainer

from phalanx.train.model import BatchNormConfig, ModelConfig
from phalanx.train.stragglers import Times
from phalanx.train.update import OptimizerConfig, RateConfig

NETWORK = ModelConfig(name="resnet_cifar", depth=8)


def reads_of_a_step(config):
    """Of forward, loss, backward, update and log; what ranks exchange is tested with grad."""

    def act(trainer):
        steps = trainer.loader.steps()
        trainer.update(next(steps), 0.1, input_seconds=0.0)  # makes state
        step = next(steps)
        with HostReads() as reads:
            for x, y in step.micro:
                with trainer.optimizer.no_sync():
                    loss, right = trainer.backward(x, y, share=len(y) / step.samples, events=None)
            trainer.optimizer.optimizer.step()
            noted = {"rate": 0.1, "batch": step.batch, "times": Times(), "travelling": 0.0, "groups": 1}
            trainer.log.step(number=2, epoch=0.2, samples=step.samples, loss=loss, right=right, **noted)
        return reads.seen

    return on_trainer(config, 1, act)[0]


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, label_smoothing=0.1, micro_batch=60),
        replace(TINY, model=replace(NETWORK, precision="bfloat16", channels_last=True)),
        replace(TINY, model=replace(NETWORK, batchnorm=BatchNormConfig(last_batch=True))),
        replace(TINY, optimizer=OptimizerConfig(name="rmsprop_warmup"), rate=RateConfig(peak=0.05)),
    ],
    ids=["plain", "smoothed, in parts", "bfloat16", "last batch", "rmsprop"],
)
def test_a_step_reads_nothing(config):
    assert reads_of_a_step(config) == []


def test_reads_are_seen():
    """The negative control."""
    with HostReads() as reads:
        x = torch.ones(3)
        float(x.sum())
        x.tolist()
        x[0] = 2.0
        torch.where(x > 1, 0.0, x)  # on the device
    assert len(reads.seen) == 3


@pytest.mark.parametrize("batch", [36, 360])
def test_an_evaluation_reads_once(batch):
    """However many batches it has."""

    def act(trainer):
        trainer.model.eval()
        with HostReads() as reads:
            trainer.score()
        return reads.seen

    assert on_trainer(replace(TINY, data=replace(DIGITS, test_batch=batch)), 1, act) == [["torch.Tensor.tolist"]]
