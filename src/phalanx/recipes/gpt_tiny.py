"""A small GPT that predicts the next character of the handbook, 247,200 characters that come with Phalanx.

4 layers of 128 (820,352 parameters), AdamW with the settings of nanoGPT. On 2 cores it takes 1 to 1.5 minutes and reaches a test
loss of 2.14 (3.1 bits per character); untrained it is 4.56, and counting pairs of characters gives 2.81.
"""

from phalanx.train.config import RunConfig
from phalanx.train.model import ModelConfig
from phalanx.train.networks import GptConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import OptimizerConfig, RateConfig

config = RunConfig(
    name="gpt-tiny",
    task="language",
    epochs=3,
    batch=8,
    model=ModelConfig.of(GptConfig(depth=4, width=128, heads=4)),
    data=DataConfig(source="handbook", context=64),
    optimizer=OptimizerConfig(name="adamw", args={"betas": [0.9, 0.99]}, weight_decay=0.1, decay_all=False),
    rate=RateConfig(peak=3e-3, warmup=0.3, end=0.1),
    log_every=20,
)
