"""The small CNN on Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv 1708.07747): about 92 % in 10 epochs."""

from phalanx.train.config import RunConfig
from phalanx.train.model import ModelConfig
from phalanx.train.networks import SmallCnnConfig
from phalanx.train.optimizers import SgdConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import OptimizerConfig, RateConfig

config = RunConfig(
    name="fashion-mnist",
    epochs=10,
    batch=128,
    model=ModelConfig.of(SmallCnnConfig(width=32)),
    data=DataConfig(source="fashion-mnist:data/fashion-mnist", mean=(0.286,), std=(0.353,), flip=True),
    optimizer=OptimizerConfig.of(SgdConfig(nesterov=True, weight_decay=5e-4)),
    rate=RateConfig(peak=0.1, warmup=1),
)
