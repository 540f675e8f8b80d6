"""Fujitsu's ResNet-50 on ImageNet: batches of 86,016 on 2,048 V100, 1,350 updates, 75.9 % and more in 70.4 s.

The paper, "Yet Another Accelerated SGD: ResNet-50 Training on ImageNet in 74.7 seconds" (Yamazaki et al., arXiv 1903.12650,
75.08 % with batches of 81,920), prints few hyper-parameters. Three months later the same group published its code and parameter
file for MLPerf Training v0.6 (open division, same machine): the numbers below are from there, `Fujitsu/benchmarks/resnet/
implementations/mxnet/JobScripts/parameters` in mlcommons/training_results_v0.6, by the names that they have there.

Differences: they evaluate each rank's part with the rank's own moving averages of batch norm, while we average these over the
ranks first. Their kernel multiplies the weight decay by the peak rate, but only in the ratio of LARS. They evaluate after the
epochs 2, 6, 10, ..., 90. Their all-reduce is `comm.algorithm=torus:512x4`; it is left out so that other clusters can run
the recipe.
"""

from phalanx.train.config import RunConfig
from phalanx.train.model import BatchNormConfig, ModelConfig
from phalanx.train.networks import ResNet50Config
from phalanx.train.optimizers import LarsConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import CommConfig, OptimizerConfig, RateConfig

config = RunConfig(
    name="imagenet-fujitsu-74s",
    epochs=90,  # --num-epochs
    batch=86016,  # --batch-size 42 on each of 2,048 GPUs
    model=ModelConfig.of(
        ResNet50Config(  # --network resnet-v1b-fl --num-layers 50: strides in the 3x3 convolutions, as ours
            zero_gamma=False  # USE_ZERO_GAMMA_INIT=0
        ),
        initialise="order",  # --weight_seed, equal on all ranks: nothing is broadcast
        batchnorm=BatchNormConfig(statistics="own", momentum=0.1),  # --batchnorm-mom 0.9, the share of the past
        channels_last=True,  # --conv-layout NHWC
        precision="float16",  # --dtype float16, with float32 weights
    ),
    data=DataConfig(
        source="imagefolder:data/imagenet",
        mean=(0.485, 0.456, 0.406),  # usual ones: not in the parameter file
        std=(0.229, 0.224, 0.225),
        flip=True,
        crop=224,  # --image-shape 4,224,224, the fourth channel is padding
        area=(0.05, 0.9),  # --min-random-area, --max-random-area
        aspect=(0.666667, 1.5),  # --min-random-aspect-ratio, --max-random-aspect-ratio
        plain_from=85,  # --no_augument_epoch
        last="pad",  # get_epoch_size() rounds up: 15 steps per epoch
    ),
    optimizer=OptimizerConfig.of(
        LarsConfig(  # USE_FJSGD_LARS_ACTIVE=1
            trust_coefficient=0.0025,  # USE_FJSGD_LARC_ETA
            eps=1e-9,  # in the kernel, src/operator/mxnet_op.h
            momentum=0.96,  # --mom
            weight_decay=5e-5,  # --wd, and --bias_wd False; batch norms have none either
        )
    ),
    rate=RateConfig(
        peak=13.0,  # --lr
        warmup=36,  # --warmup-epochs; --warmup-strategy linear is the default
        decay="polynomial",  # --lr_decay_mode power, --decay_after_warmup True, --smooth_decay True: in every step
        power=2.2,  # --lr_decay
        decay_epochs=52,  # --decay_steps 780, of 15 per epoch
        end=0.0025,  # --end_lr_ratio
    ),
    comm=CommConfig(
        wire="float16",  # gradients of float16 weights are sent unchanged
        growing=3,  # HOROVOD_CUBIC_TRANSFER_MODE=1, HOROVOD_FIXED_TRANSFERSIZE=3: groups end after 3, 24, 81, 161 tensors
    ),
    label_smoothing=0.1 * 1000 / 999,  # --smooth_alpha 0.1, which MXNet spreads over the 999 other classes
    evaluate_every=4,  # --eval-period
    target=0.759,  # --accuracy-threshold
    log_every=5,  # --disp-batches
    mllog=True,
)
