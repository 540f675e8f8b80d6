"""The 15-minute paper: ResNet-50 on ImageNet with batches of 32,768 without LARS, 74.9 % on 1,024 P100.

Akiba, Suzuki, Fukuda, "Extremely Large Minibatch SGD: Training ResNet-50 on ImageNet in 15 Minutes" (arXiv 1711.04325). SGD that
begins as RMSprop, a slow start, batch norm without moving averages. Values marked "second hand" are quoted from others.
"""

from phalanx.optim import lr
from phalanx.train.config import RunConfig
from phalanx.train.model import BatchNormConfig, ModelConfig
from phalanx.train.networks import ResNet50Config
from phalanx.train.optimizers import RmspropWarmupConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import CommConfig, OptimizerConfig, RateConfig

config = RunConfig(
    name="imagenet-15-minutes",
    epochs=90,
    batch=32768,  # 32 (second hand) on each of 1,024 GPUs
    model=ModelConfig.of(
        ResNet50Config(),
        channels_last=True,  # ours
        batchnorm=BatchNormConfig(last_batch=True),  # the last mini-batch's statistics, all-reduced before validation
    ),
    data=DataConfig(
        source="imagefolder:data/imagenet", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), flip=True, crop=224
    ),
    optimizer=OptimizerConfig.of(
        RmspropWarmupConfig(
            momentum=0.9,  # second hand
            weight_decay=1e-4,  # ours: usual
            rmsprop_rate=3e-4,  # second hand
            ramp_center=10,  # beta_center
            ramp_period=5,  # beta_period
        )
    ),
    rate=RateConfig(
        rule=0.1 * lr.slow_start(),  # 0.5, 0.075, 0.01 and 0.001 of the base rate for 40, 30, 15 and 5 epochs
        scaling="linear",  # base rate 0.1 * batch / 256: 12.8
        reference=256,
    ),
    comm=CommConfig(wire="float16"),  # gradients are sent in 16 bits, all else is 32
    evaluate_every=5,  # ours
)
