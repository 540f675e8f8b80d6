"""A small CNN on 1437 digits of 8x8 pixels, which come with Phalanx: about 99 % on the other 360, within seconds."""

from phalanx.train.config import RunConfig
from phalanx.train.optimizers import SgdConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import OptimizerConfig, RateConfig

config = RunConfig(
    name="digits",
    epochs=24,
    batch=60,
    data=DataConfig(source="digits", mean=(0.0192,), std=(0.0236,)),  # pixels are 0 to 16, of 255
    optimizer=OptimizerConfig.of(SgdConfig(nesterov=True, weight_decay=5e-4)),
    rate=RateConfig(peak=0.1, warmup=3),
    label_smoothing=0.1,
)
