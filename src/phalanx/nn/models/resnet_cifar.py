"""ResNets of 6n+2 layers for images of CIFAR's size: depth 20 has 269,722 parameters in 59 tensors for 10 classes.

Paper: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", arXiv 1512.03385, section 4.2: a 3x3 stem of 16
channels, three stages of n basic blocks with 16, 32 and 64 channels, and shortcuts without parameters (option A).

Differences from the paper: the last pooling adapts to the image; `zero_gamma` and the initial weights as in `resnet.py`. The
paper does not say where option A puts its zero channels; here they come last, as in the authors' own Torch code.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.nn.models.images import check_images
from phalanx.nn.models.initial import initialize_

WIDTHS = (16, 32, 64)


class PaddedBlock(nn.Module):
    """Two 3x3 convolutions, and a shortcut that takes every `stride`-th pixel and fills new channels with zeros."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, width - inputs
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1 and self.new_channels == 0:
            return x
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x), inplace=True)


class CifarResNet(nn.Module):
    """Three stages of `n` padded blocks between a 3x3 stem and a linear classifier."""

    def __init__(self, n: int, num_classes: int, *, in_channels: int, zero_gamma: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        inputs, stages = WIDTHS[0], []
        for width in WIDTHS:
            stage = nn.Sequential()
            for _ in range(n):
                stage.append(PaddedBlock(inputs, width, stride=1 if inputs == width else 2))
                inputs = width
            stages.append(stage)
        self.layer1, self.layer2, self.layer3 = stages
        self.fc = nn.Linear(inputs, num_classes)
        initialize_(self)
        if zero_gamma:
            for module in self.modules():
                if isinstance(module, PaddedBlock):
                    nn.init.zeros_(module.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        check_images(x, self.conv1.in_channels)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet_cifar(depth: int, num_classes: int = 10, *, in_channels: int = 3, zero_gamma: bool = False) -> CifarResNet:
    """A ResNet for images of CIFAR's size. Depth 20 has 269,722 parameters in 59 tensors for 10 classes.

    Args:
        depth: 6n+2 layers; the paper has 20, 32, 44, 56 and 110.
        num_classes: The number of logits.
        in_channels: The channels of the images.
        zero_gamma: Start the last batch norm of each residual branch at 0.

    Returns:
        The network.

    Raises:
        ValueError: If `depth` is not 6n+2.

    Example:
        >>> sum(p.numel() for p in phalanx.models.resnet_cifar(20).parameters())
        269722
    """
    n, rest = divmod(depth - 2, 6)
    if n < 1 or rest:
        raise ValueError(f"resnet_cifar({depth}): the depth is 6n+2, such as {6 * max(n, 1) + 2} or {6 * max(n, 1) + 8}")
    return CifarResNet(n, num_classes, in_channels=in_channels, zero_gamma=zero_gamma)
