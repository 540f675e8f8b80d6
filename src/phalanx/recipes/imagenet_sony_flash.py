"""Sony's ResNet-50 on ImageNet, as far as published: batches of 34,816 that become 69,632, 75.03 % in 224 s on 2,176 V100.

"Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash" (Mikami et al., arXiv 1811.05233). Values marked
"published" are in its abstracts or in reports about it (NVIDIA's, Sony's and InfoQ's of November 2018). Values marked "ours" are
in none of the texts we found, and come from MLPerf, whose settings are public. This recipe has not been trained: it shows how to
write batch-size control.
"""

from phalanx.data import Stage
from phalanx.train.config import RunConfig
from phalanx.train.model import BatchNormConfig, ModelConfig
from phalanx.train.networks import ResNet50Config
from phalanx.train.optimizers import LarsConfig
from phalanx.train.samples import DataConfig
from phalanx.train.update import CommConfig, OptimizerConfig, RateConfig

config = RunConfig(
    name="imagenet-sony-flash",
    epochs=90,  # ours: usual, and not contradicted by what is published
    stages=(
        Stage(epochs=30, batch=34816),  # published: "34K", 16 on each of 2,176 GPUs; that it ends after 30 epochs is ours
        Stage(epochs=60, batch=69632),  # published: "68K", 32 on each
    ),
    model=ModelConfig.of(
        ResNet50Config(),  # published
        channels_last=True,  # ours
        batchnorm=BatchNormConfig(last_batch=True),  # ours, from the 15-minute paper (arXiv 1711.04325)
        precision="float16",  # published: forward and backward in FP16
    ),
    data=DataConfig(
        source="imagefolder:data/imagenet",
        mean=(0.485, 0.456, 0.406),  # ours, as the rest here: usual
        std=(0.229, 0.224, 0.225),
        flip=True,
        crop=224,
    ),
    optimizer=OptimizerConfig.of(
        LarsConfig(  # published
            trust_coefficient=0.001,  # default of NNL's solver (sony/nnabla, src/nbla/solver/generic/lars.cpp)
            eps=1e-6,  # default of the same solver, which adds it only if the sum is below it
            momentum=0.94,  # ours: MLPerf's for 32,768
            momentum_rule="noise",  # ours: the paper follows Smith et al. (arXiv 1711.00489): keep rate / (batch (1 - momentum))
            weight_decay=2.5e-5,  # ours: MLPerf's for 32,768
        )
    ),
    rate=RateConfig(
        peak=21.2,  # ours: MLPerf's for 32,768
        warmup=5,  # published: the first 5 epochs, at the small batch
        decay="polynomial",  # ours
        power=2.0,  # ours: MLPerf's
    ),
    comm=CommConfig(wire="float16"),  # ours; published: torus all-reduce, as comm.algorithm=torus:64x34 says
    label_smoothing=0.1,  # published for the second version, 122 s; the amount is that of Sony's examples (sony/nnabla-examples)
    evaluate_every=4,  # ours
)
