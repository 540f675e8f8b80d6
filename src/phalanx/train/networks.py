"""The networks that a run can train, each with its own options. See own_network.py for your own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from phalanx.nn import models


@dataclass(frozen=True)
class SampleFacts:
    """What a network needs to know about the data: the shape of a sample, and the number of classes, if any."""

    shape: tuple[int, ...]
    classes: int | None

    def __str__(self) -> str:
        if len(self.shape) == 3:
            return f"images of {' x '.join(map(str, self.shape))}"
        return f"samples of {' x '.join(map(str, self.shape)) or 'one number'}"

    def image(self) -> tuple[int, int]:
        """Channels and classes, for a network that takes images. ValueError if samples are not images."""
        if len(self.shape) != 3 or self.classes is None:
            raise ValueError("it takes images with labels")
        return self.shape[0], self.classes

    def text(self) -> tuple[int, int]:
        """Length of a sample and size of the vocabulary, for a network that takes text. ValueError if it is not text."""
        if len(self.shape) != 1 or self.classes is None:
            raise ValueError("it takes text, such as data.source=handbook")
        return self.shape[0], self.classes


class NetworkConfig(ABC):
    """A network."""

    has_batchnorm: ClassVar[bool] = True
    torch_weights: ClassVar[bool] = False  # whether torch's own rules draw its initial weights, instead of nn/models/initial.py

    @abstractmethod
    def build(self, facts: SampleFacts) -> nn.Module:
        """Build the network with weights from torch's generator. ValueError if it cannot take such data."""


@dataclass(frozen=True, kw_only=True)
class SmallCnnConfig(NetworkConfig):
    """Three convolutions, for images of a few pixels."""

    has_batchnorm = False
    torch_weights = True
    width: int = 32

    def build(self, facts: SampleFacts) -> nn.Module:
        in_channels, classes = facts.image()
        return models.small_cnn(classes, in_channels=in_channels, width=self.width)


@dataclass(frozen=True, kw_only=True)
class MlpConfig(NetworkConfig):
    """A perceptron with two hidden layers."""

    torch_weights = True
    width: int = 256

    def build(self, facts: SampleFacts) -> nn.Module:
        in_channels, classes = facts.image()
        return models.mlp(classes, in_channels=in_channels, width=self.width)


@dataclass(frozen=True, kw_only=True)
class StridedCnnConfig(NetworkConfig):
    """Convolutions whose strides replace pooling."""

    width: int = 16

    def build(self, facts: SampleFacts) -> nn.Module:
        in_channels, classes = facts.image()
        return models.strided_cnn(classes, in_channels=in_channels, width=self.width)


@dataclass(frozen=True, kw_only=True)
class ResNetCifarConfig(NetworkConfig):
    """The ResNet of 6n+2 layers for CIFAR; depths 20, 32, 44, 56 and 110 are the paper's."""

    depth: int
    zero_gamma: bool = False

    def build(self, facts: SampleFacts) -> nn.Module:
        in_channels, classes = facts.image()
        return models.resnet_cifar(self.depth, classes, in_channels=in_channels, zero_gamma=self.zero_gamma)


@dataclass(frozen=True, kw_only=True)
class ResNet9Config(NetworkConfig):
    """Page's ResNet-9."""

    width: int = 64

    def build(self, facts: SampleFacts) -> nn.Module:
        in_channels, classes = facts.image()
        return models.resnet9(classes, in_channels=in_channels, width=self.width)


@dataclass(frozen=True, kw_only=True)
class ResNet18Config(NetworkConfig):
    """ResNet-18."""

    zero_gamma: bool = False

    def build(self, facts: SampleFacts) -> nn.Module:
        in_channels, classes = facts.image()
        return models.resnet18(classes, in_channels=in_channels, zero_gamma=self.zero_gamma)


@dataclass(frozen=True, kw_only=True)
class ResNet50Config(NetworkConfig):
    """ResNet-50."""

    zero_gamma: bool = False

    def build(self, facts: SampleFacts) -> nn.Module:
        in_channels, classes = facts.image()
        return models.resnet50(classes, in_channels=in_channels, zero_gamma=self.zero_gamma)


@dataclass(frozen=True, kw_only=True)
class GoogLeNetConfig(NetworkConfig):
    """GoogLeNet with batch norms."""

    auxiliary_heads: bool = False

    def build(self, facts: SampleFacts) -> nn.Module:
        in_channels, classes = facts.image()
        return models.googlenet(classes, in_channels=in_channels, auxiliary_heads=self.auxiliary_heads)


@dataclass(frozen=True, kw_only=True)
class GptConfig(NetworkConfig):
    """A small GPT, for text. Its context is the length of a sample."""

    has_batchnorm = False
    torch_weights = True
    depth: int = 4
    width: int = 128
    heads: int = 4
    dropout: float = 0.0

    def build(self, facts: SampleFacts) -> nn.Module:
        context, vocabulary = facts.text()
        return models.gpt(vocabulary, context=context, depth=self.depth, width=self.width, heads=self.heads, dropout=self.dropout)


NETWORKS: dict[str, type[NetworkConfig]] = {
    "small_cnn": SmallCnnConfig,
    "mlp": MlpConfig,
    "strided_cnn": StridedCnnConfig,
    "resnet_cifar": ResNetCifarConfig,
    "resnet9": ResNet9Config,
    "resnet18": ResNet18Config,
    "resnet50": ResNet50Config,
    "googlenet": GoogLeNetConfig,
    "gpt": GptConfig,
}
