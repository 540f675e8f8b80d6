"""ResNet-50 on ImageNet with plain SGD, 256 images per step: the reference of Goyal et al. (arXiv 1706.02677), 76.3 % top-1."""

from phalanx.train.config import RunConfig
from phalanx.train.model import ModelConfig
from phalanx.train.networks import ResNet50Config
from phalanx.train.optimizers import SgdConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import OptimizerConfig, RateConfig

config = RunConfig(
    name="imagenet-resnet50",
    epochs=90,
    batch=256,
    model=ModelConfig.of(ResNet50Config(zero_gamma=True), channels_last=True),
    data=DataConfig(
        source="imagefolder:data/imagenet", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), flip=True, crop=224, resize=256
    ),
    optimizer=OptimizerConfig.of(SgdConfig(weight_decay=1e-4, decay_all=False)),
    rate=RateConfig(peak=0.1, decay="step", steps=(30, 60, 80)),
    log_every=50,
)
