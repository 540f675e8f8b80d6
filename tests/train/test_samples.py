"""The data of a run: what becomes of the last samples of an epoch, and when augmentation ends."""

from dataclasses import replace

import pytest
import torch
from tests.train.runs import TINY, distance, on_trainer, run

from phalanx.train.config import ConfigError, override


@pytest.mark.parametrize(("last", "steps"), [("drop", 11), ("pad", 12), ("keep", 12)])
def test_steps_of_an_epoch(last, steps):
    """1437 digits: 11 batches of 120 and 117 more."""
    config = replace(TINY, epochs=1, data=replace(TINY.data, last=last))
    result, weights = run(config, 2)
    assert result.steps == steps
    assert distance(weights, run(config)[1]) < 1e-4  # 58 and 59 samples of the last batch count by their number


def test_augmentation_ends():
    data = replace(TINY.data, pad=1, plain_from=1)
    plain = replace(TINY, data=replace(data, pad=0))

    def first_images(trainer):
        found = []
        for _ in range(2):
            steps = list(trainer.loader.steps())
            found.append(steps[0].micro[0][0].clone())
        return found

    augmented = on_trainer(replace(TINY, data=data), 1, first_images)[0]
    as_they_are = on_trainer(plain, 1, first_images)[0]
    assert not torch.equal(augmented[0], as_they_are[0])
    assert torch.equal(augmented[1], as_they_are[1])
    always = on_trainer(replace(TINY, data=replace(data, plain_from=None)), 1, first_images)[0]
    assert not torch.equal(always[1], as_they_are[1])


def test_what_is_refused():
    with pytest.raises(ConfigError, match="plain_from=-1: at least 0"):
        override(TINY, {"data.plain_from": "-1"})
    with pytest.raises(ConfigError, match="one of drop, pad, keep"):
        override(TINY, {"data.last": "leave"})
