"""ResNet-18 and ResNet-50 for images of ImageNet's size: 11,689,512 parameters in 62 tensors, 25,557,032 in 161.

Paper: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", arXiv 1512.03385.

Differences from the paper: the bottleneck strides in its 3x3 convolution, not in the first 1x1 ("v1.5": half a percent better, a
little slower, and used by the large-batch papers since Goyal 2017). The last pooling adapts to the image, so any size works.
`zero_gamma` starts the last batch norm of each residual branch at 0 (Goyal 2017, 5.1). Weights as in `initial.py`.

Names in the state dict are torchvision's, so that published weights load.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.nn.models.images import check_images
from phalanx.nn.models.initial import initialize_

WIDTHS = (64, 128, 256, 512)  # of the four stages, each on a quarter of the pixels of the one before


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = projection(inputs, width, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + shortcut, inplace=True)


class Bottleneck(nn.Module):
    """1x1 down to `width`, 3x3, 1x1 up to four times `width`, and a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = projection(inputs, 4 * width, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + shortcut, inplace=True)


def projection(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """The shortcut where shapes change (the paper's option B), else None: the identity."""
    if inputs == outputs and stride == 1:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Four stages of `block`, `counts` per stage, between a 7x7 stem and a linear classifier."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        counts: Sequence[int],
        num_classes: int,
        *,
        in_channels: int,
        zero_gamma: bool,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        stages: list[nn.Sequential] = []
        for width, count in zip(WIDTHS, counts):
            stage = nn.Sequential()
            for place in range(count):
                # the first stage keeps the size after the stem's pooling
                stage.append(block(inputs, width, stride=2 if stages and place == 0 else 1))
                inputs = width * block.expansion
            stages.append(stage)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(inputs, num_classes)
        initialize_(self)
        if zero_gamma:
            for module in self.modules():
                if isinstance(module, (BasicBlock, Bottleneck)):
                    nn.init.zeros_(module.last_norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        check_images(x, self.conv1.in_channels)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet18(num_classes: int = 1000, *, in_channels: int = 3, zero_gamma: bool = False) -> ResNet:
    """ResNet-18: 11,689,512 parameters in 62 tensors for 1000 classes.

    Args:
        num_classes: The number of logits.
        in_channels: The channels of the images.
        zero_gamma: Start the last batch norm of each residual branch at 0.

    Returns:
        The network. Its state dict has torchvision's names.

    Example:
        >>> with torch.device("meta"):  # shapes without memory
        ...     model = phalanx.models.resnet18()
        >>> sum(p.numel() for p in model.parameters())
        11689512
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, in_channels=in_channels, zero_gamma=zero_gamma)


def resnet50(num_classes: int = 1000, *, in_channels: int = 3, zero_gamma: bool = False) -> ResNet:
    """ResNet-50 v1.5: 25,557,032 parameters in 161 tensors for 1000 classes.

    Args:
        num_classes: The number of logits.
        in_channels: The channels of the images.
        zero_gamma: Start the last batch norm of each residual branch at 0 (Goyal et al., arXiv 1706.02677, 5.1).

    Returns:
        The network. Its state dict has torchvision's names.

    Example:
        >>> with torch.device("meta"):  # shapes without memory
        ...     model = phalanx.models.resnet50()
        >>> len(list(model.parameters()))
        161
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, in_channels=in_channels, zero_gamma=zero_gamma)
