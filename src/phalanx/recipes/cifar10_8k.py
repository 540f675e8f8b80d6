"""Batches of 8,192 on CIFAR-10, 16 % of it per step: like fashion-mnist-8k, it shows what large batches cost.

It reaches 56.5 % after 30 epochs (3 seeds), where batches of 128 reach 56.9 %, about the most for a perceptron.
benchmarks/study_large_batch.py found the rate; a linear decay, with its best rate, reaches 55.5 %.
"""

from phalanx.data import Stage
from phalanx.train.config import RunConfig
from phalanx.train.model import ModelConfig
from phalanx.train.networks import MlpConfig
from phalanx.train.optimizers import LarsConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import OptimizerConfig, RateConfig

config = RunConfig(
    name="cifar10-8k",
    epochs=30,
    stages=(Stage(10, 2048), Stage(20, 8192)),
    micro_batch=128,
    model=ModelConfig.of(MlpConfig(width=256)),
    data=DataConfig(
        source="cifar10:data/cifar-10-batches-bin",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.247, 0.2435, 0.2616),
        last="keep",
    ),
    optimizer=OptimizerConfig.of(LarsConfig(weight_decay=5e-4)),
    rate=RateConfig(peak=32.0, scaling="linear", reference=8192, warmup=4, decay="polynomial", power=2),
    label_smoothing=0.1,
    log_every=1,
)
