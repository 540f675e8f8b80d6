"""The networks that a run can train, each with its own options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from phalanx.nn import models


class NetworkConfig(ABC):
    """A network for images."""

    has_batchnorm: ClassVar[bool] = True
    torch_weights: ClassVar[bool] = False  # whether torch's own rules draw its initial weights, instead of nn/models/initial.py

    @abstractmethod
    def build(self, in_channels: int, classes: int) -> nn.Module:
        """The network, with weights drawn from torch's generator."""


@dataclass(frozen=True, kw_only=True)
class SmallCnnConfig(NetworkConfig):
    """Three convolutions, for images of a few pixels."""

    has_batchnorm = False
    torch_weights = True
    width: int = 32

    def build(self, in_channels: int, classes: int) -> nn.Module:
        return models.small_cnn(classes, in_channels=in_channels, width=self.width)


@dataclass(frozen=True, kw_only=True)
class MlpConfig(NetworkConfig):
    """A perceptron of two hidden layers."""

    torch_weights = True
    width: int = 256

    def build(self, in_channels: int, classes: int) -> nn.Module:
        return models.mlp(classes, in_channels=in_channels, width=self.width)


@dataclass(frozen=True, kw_only=True)
class StridedCnnConfig(NetworkConfig):
    """Convolutions whose strides replace pooling."""

    width: int = 16

    def build(self, in_channels: int, classes: int) -> nn.Module:
        return models.strided_cnn(classes, in_channels=in_channels, width=self.width)


@dataclass(frozen=True, kw_only=True)
class ResNetCifarConfig(NetworkConfig):
    """The ResNet of 6n+2 layers for CIFAR; depths 20, 32, 44, 56 and 110 are the paper's."""

    depth: int
    zero_gamma: bool = False

    def build(self, in_channels: int, classes: int) -> nn.Module:
        return models.resnet_cifar(self.depth, classes, in_channels=in_channels, zero_gamma=self.zero_gamma)


@dataclass(frozen=True, kw_only=True)
class ResNet9Config(NetworkConfig):
    """Page's ResNet-9."""

    width: int = 64

    def build(self, in_channels: int, classes: int) -> nn.Module:
        return models.resnet9(classes, in_channels=in_channels, width=self.width)


@dataclass(frozen=True, kw_only=True)
class ResNet18Config(NetworkConfig):
    """ResNet-18."""

    zero_gamma: bool = False

    def build(self, in_channels: int, classes: int) -> nn.Module:
        return models.resnet18(classes, in_channels=in_channels, zero_gamma=self.zero_gamma)


@dataclass(frozen=True, kw_only=True)
class ResNet50Config(NetworkConfig):
    """ResNet-50."""

    zero_gamma: bool = False

    def build(self, in_channels: int, classes: int) -> nn.Module:
        return models.resnet50(classes, in_channels=in_channels, zero_gamma=self.zero_gamma)


@dataclass(frozen=True, kw_only=True)
class GoogLeNetConfig(NetworkConfig):
    """GoogLeNet with batch norms."""

    auxiliary_heads: bool = False

    def build(self, in_channels: int, classes: int) -> nn.Module:
        return models.googlenet(classes, in_channels=in_channels, auxiliary_heads=self.auxiliary_heads)


NETWORKS: dict[str, type[NetworkConfig]] = {
    "small_cnn": SmallCnnConfig,
    "mlp": MlpConfig,
    "strided_cnn": StridedCnnConfig,
    "resnet_cifar": ResNetCifarConfig,
    "resnet9": ResNet9Config,
    "resnet18": ResNet18Config,
    "resnet50": ResNet50Config,
    "googlenet": GoogLeNetConfig,
}
