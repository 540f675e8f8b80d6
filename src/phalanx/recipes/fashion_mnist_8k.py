"""Batches of 8,192 on Fashion-MNIST, 14 % of it per step: what Sony and Fujitsu did, on a network that 2 cores can train.

It reaches 89.5 % after 24 epochs (3 seeds), where batches of 128 reach 90.4 %. benchmarks/study_large_batch.py found the rate; it
adds the techniques one by one.
"""

from phalanx.data import Stage
from phalanx.train.config import RunConfig
from phalanx.train.model import ModelConfig
from phalanx.train.networks import MlpConfig
from phalanx.train.optimizers import LarsConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import OptimizerConfig, RateConfig

config = RunConfig(
    name="fashion-mnist-8k",
    epochs=24,
    stages=(Stage(6, 2048), Stage(18, 8192)),
    micro_batch=1024,
    model=ModelConfig.of(MlpConfig(width=256)),
    data=DataConfig(source="fashion-mnist:data/fashion-mnist", mean=(0.286,), std=(0.353,), flip=True, last="keep"),
    optimizer=OptimizerConfig.of(LarsConfig(weight_decay=5e-4)),
    rate=RateConfig(peak=32.0, scaling="linear", reference=8192, warmup=4, decay="linear"),
    label_smoothing=0.1,
    log_every=1,
)
