"""ResNet-9 on CIFAR-10, for a CPU: a quarter of the width of its source, few epochs, a linear decay to zero.

Rate and decay are those of Page's "How to train your ResNet" (0.4 for batches of 512), scaled linearly to a batch of 128.
"""

from phalanx.train.config import RunConfig
from phalanx.train.model import ModelConfig
from phalanx.train.networks import ResNet9Config
from phalanx.train.optimizers import SgdConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import OptimizerConfig, RateConfig

config = RunConfig(
    name="cifar10",
    epochs=20,
    batch=128,
    model=ModelConfig.of(ResNet9Config(width=16), channels_last=True),
    data=DataConfig(
        source="cifar10:data/cifar-10-batches-bin", mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616), pad=4, flip=True
    ),
    optimizer=OptimizerConfig.of(SgdConfig(nesterov=True, weight_decay=5e-4)),
    rate=RateConfig(peak=0.1, warmup=3, decay="linear"),
    label_smoothing=0.1,
)
