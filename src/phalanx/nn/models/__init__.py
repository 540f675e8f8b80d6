"""Standard benchmark networks, with the published parameter counts and shapes."""

from phalanx.nn.models.googlenet import GoogLeNet, googlenet
from phalanx.nn.models.gpt import Gpt, gpt
from phalanx.nn.models.mlp import Mlp, mlp
from phalanx.nn.models.resnet import ResNet, resnet18, resnet50
from phalanx.nn.models.resnet9 import ResNet9, resnet9
from phalanx.nn.models.resnet_cifar import CifarResNet, resnet_cifar
from phalanx.nn.models.small_cnn import SmallCnn, small_cnn
from phalanx.nn.models.strided_cnn import StridedCnn, strided_cnn

__all__ = [
    "CifarResNet",
    "GoogLeNet",
    "Gpt",
    "Mlp",
    "ResNet",
    "ResNet9",
    "SmallCnn",
    "StridedCnn",
    "googlenet",
    "gpt",
    "mlp",
    "resnet9",
    "resnet18",
    "resnet50",
    "resnet_cifar",
    "small_cnn",
    "strided_cnn",
]
