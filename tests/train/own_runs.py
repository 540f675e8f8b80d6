"""Small runs of networks, optimizers, losses and data that are the user's own."""

from tests.train.runs import DIGITS

from phalanx.train.check import check, open_sources
from phalanx.train.config import RunConfig, override
from phalanx.train.model import ModelConfig
from phalanx.train.update import RateConfig

TINY = RunConfig(
    name="own",
    epochs=2,
    batch=120,
    model=ModelConfig(name="own_things:Net"),
    data=DIGITS,
    rate=RateConfig(peak=1e-2, decay="constant"),
)


def examine(settings, config=TINY, ranks=1):
    """`config` with settings from text, checked as the command line does it before ranks start."""
    config = override(config, settings)
    check(config, ranks, *open_sources(config))
    return config
