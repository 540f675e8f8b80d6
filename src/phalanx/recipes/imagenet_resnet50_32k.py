"""ResNet-50 on ImageNet with batches of 32,768 and MLPerf's settings: 75.9 % after about 56 epochs, for a cluster you may have.

Any number of ranks that divides 32,768 works. `micro_batch` limits what one GPU holds: 64 GPUs take 4 micro-steps of 128.

The numbers are those of MLPerf's reference convergence point for this batch (mlcommons/logging, mlperf_logging/rcp_checker/
training_4.0.0/rcps_resnet.json): runs with them reached 75.9 % after 56 epochs on average. The rest is from
MLPerf's reference code (mlcommons/training, resnet-tf2), lars_util.py and lars_optimizer.py.
"""

from phalanx.optim.lars import MLPERF
from phalanx.train.config import RunConfig
from phalanx.train.model import ModelConfig
from phalanx.train.networks import ResNet50Config
from phalanx.train.optimizers import LarsConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import CommConfig, OptimizerConfig, RateConfig

STEPS_PER_EPOCH = 40  # 1,281,167 samples in batches of 32,768, the last one padded

config = RunConfig(
    name="imagenet-resnet50-32k",
    epochs=57,  # the schedule below ends in the midst of the last one
    batch=32768,
    micro_batch=128,  # ours: what 16 GB hold in 16 bits
    model=ModelConfig.of(
        ResNet50Config(),
        initialise="name",
        channels_last=True,
        precision="bfloat16",  # ours: any 16 bits will do
    ),
    data=DataConfig(
        source="imagefolder:data/imagenet",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        flip=True,
        crop=224,
        area=(0.05, 1.0),  # MLPerf's closed division, from the comments in Fujitsu's parameter file
        aspect=(3 / 4, 4 / 3),
        last="pad",
    ),
    optimizer=OptimizerConfig.of(
        LarsConfig(
            trust_coefficient=MLPERF["trust_coefficient"],  # eeta=0.001 in lars_optimizer.py
            eps=0.0,  # rules of MLPerf, and the log of the reference code, which computes with 1e-7
            momentum=0.94,
            weight_decay=2.5e-5,
        )
    ),
    rate=RateConfig(
        peak=21.2,
        warmup=16,
        decay="polynomial",
        power=2.0,
        # 2,267 decay steps. Counted from the first step they end after 56.7 epochs, where the runs reached their target; counted
        # from the end of the warm-up it would be 72.7.
        decay_epochs=2267 / STEPS_PER_EPOCH - 16,
        end=1e-4 / 21.2,  # end_learning_rate=0.0001 in lars_util.py
    ),
    comm=CommConfig(wire="bfloat16"),
    label_smoothing=0.1,
    evaluate_every=4,  # rules of MLPerf
    target=0.759,  # rules of MLPerf
    log_every=5,
    mllog=True,
)
