"""Networks that the field measures with, with the counts and shapes that were published."""

from phalanx.nn.models.googlenet import GoogLeNet, googlenet
from phalanx.nn.models.resnet import ResNet, resnet18, resnet50
from phalanx.nn.models.resnet_cifar import CifarResNet, resnet_cifar

__all__ = ["CifarResNet", "GoogLeNet", "ResNet", "googlenet", "resnet18", "resnet50", "resnet_cifar"]
