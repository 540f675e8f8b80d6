"""The ResNet-9 of the DAWNBench record runs for CIFAR: few layers, wide where images are small, which also suits a CPU.

Source: Page, "How to train your ResNet", 2018, a cut-down version of Coleman's and of He's networks: a stem, then three times a
convolution with pooling that doubles the channels, the first and the last followed by a residual block of two convolutions.

Differences from it: `width` is its first number of channels, 64 there; the last pooling adapts to the image. The logits are
scaled by 0.125 as in the source, because the maximum of many features is large.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.nn.models.images import check_images
from phalanx.nn.models.initial import initialize_

SCALE = 0.125  # of the logits


class Convolution(nn.Module):
    """3x3, batch norm and ReLU; `pool` halves the image in between."""

    def __init__(self, inputs: int, width: int, *, pool: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.pool:  # before the norm, which then has a quarter of the pixels; Page pools after it
            x = F.max_pool2d(x, 2)
        return F.relu(self.bn(x), inplace=True)


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = Convolution(width, width), Convolution(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.conv1(x))


class ResNet9(nn.Module):
    """Channels `width`, 2, 4 and 8 times that."""

    def __init__(self, num_classes: int, *, in_channels: int, width: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.stem = Convolution(in_channels, width)
        self.layer1 = nn.Sequential(Convolution(width, 2 * width, pool=True), Residual(2 * width))
        self.layer2 = Convolution(2 * width, 4 * width, pool=True)
        self.layer3 = nn.Sequential(Convolution(4 * width, 8 * width, pool=True), Residual(8 * width))
        self.fc = nn.Linear(8 * width, num_classes)
        initialize_(self)

    def forward(self, x: Tensor) -> Tensor:
        check_images(x, self.in_channels)
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.fc(F.adaptive_max_pool2d(x, 1).flatten(1)) * SCALE


def resnet9(num_classes: int = 10, *, in_channels: int = 3, width: int = 64) -> ResNet9:
    """The ResNet-9 of the DAWNBench record runs, for images of at least 8x8 pixels.

    Args:
        num_classes: The number of logits.
        in_channels: The channels of the images.
        width: The channels of the first layer.

    Returns:
        The network.

    Example:
        >>> phalanx.models.resnet9(width=4)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return ResNet9(num_classes, in_channels=in_channels, width=width)
