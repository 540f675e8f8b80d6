"""GoogLeNet, the network of GossipGraD's experiments: 7,005,832 parameters in 173 tensors for 1000 classes.

Paper: Szegedy et al., "Going Deeper with Convolutions", arXiv 1409.4842 (Inception v1, table 1).

Differences from the paper: a batch norm after every convolution (Ioffe and Szegedy, arXiv 1502.03167) instead of the biases and
the two local response normalisations, as is usual today. The two auxiliary classifiers, which batch norm makes unnecessary, are
off by default; their pooling and the last one adapt to the image. Poolings of stride 2 pad by one pixel, so that any size works;
the sizes at 224 pixels are the paper's. Weights as in `initial.py`.

Branches are named as in torchvision, but its weights do not fit: its "5x5" branch has 3x3 kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.nn.models.images import check_images
from phalanx.nn.models.initial import initialize_


class ConvNorm(nn.Module):
    """Convolution, batch norm, ReLU; the size stays unless there is a stride."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Inception(nn.Module):
    """Four branches side by side: 1x1; 1x1 then 3x3; 1x1 then 5x5; pooling then 1x1. `widths` is a row of the paper's table."""

    def __init__(self, inputs: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, reduce_three, three, reduce_five, five, pool = widths
        self.outputs = one + three + five + pool
        self.branch1 = ConvNorm(inputs, one, 1)
        self.branch2 = nn.Sequential(ConvNorm(inputs, reduce_three, 1), ConvNorm(reduce_three, three, 3))
        self.branch3 = nn.Sequential(ConvNorm(inputs, reduce_five, 1), ConvNorm(reduce_five, five, 5))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), ConvNorm(inputs, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], dim=1)


class AuxiliaryHead(nn.Module):
    """A classifier on an intermediate layer, for training only."""

    def __init__(self, inputs: int, num_classes: int) -> None:
        super().__init__()
        self.conv = ConvNorm(inputs, 128, 1)
        self.fc1 = nn.Linear(128 * 4 * 4, 1024)
        self.fc2 = nn.Linear(1024, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(F.adaptive_avg_pool2d(x, 4)).flatten(1)
        x = F.relu(self.fc1(x), inplace=True)
        return self.fc2(F.dropout(x, 0.7, self.training))


# one row of table 1 each: #1x1, #3x3 reduce, #3x3, #5x5 reduce, #5x5, pool proj; the number is that of the stage
TABLE = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
FIRST_OF_STAGE = ("4a", "5a")  # after a pooling
HEAD_AFTER = {"4a": "aux1", "4d": "aux2"}


class GoogLeNet(nn.Module):
    """A stem of three convolutions, nine Inception modules, and a linear classifier after dropout."""

    def __init__(self, num_classes: int, *, in_channels: int, auxiliary_heads: bool) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_channels, 64, 7, stride=2)
        self.conv2 = ConvNorm(64, 64, 1)
        self.conv3 = ConvNorm(64, 192, 3)
        inputs = 192
        for name, widths in TABLE.items():
            module = Inception(inputs, widths)
            inputs = module.outputs
            self.add_module(f"inception{name}", module)
            if auxiliary_heads and name in HEAD_AFTER:
                self.add_module(HEAD_AFTER[name], AuxiliaryHead(inputs, num_classes))
        self.fc = nn.Linear(inputs, num_classes)
        initialize_(self)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        check_images(x, self.conv1.conv.in_channels)
        x = F.max_pool2d(self.conv1(x), 3, stride=2, padding=1)
        x = F.max_pool2d(self.conv3(self.conv2(x)), 3, stride=2, padding=1)
        early = []
        for name in TABLE:
            if name in FIRST_OF_STAGE:
                x = F.max_pool2d(x, 3, stride=2, padding=1)
            x = self.get_submodule(f"inception{name}")(x)
            head = HEAD_AFTER.get(name)
            if self.training and head is not None and hasattr(self, head):
                early.append(self.get_submodule(head)(x))
        x = F.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1), 0.4, self.training)
        return (self.fc(x), *early) if early else self.fc(x)


def googlenet(num_classes: int = 1000, *, in_channels: int = 3, auxiliary_heads: bool = False) -> GoogLeNet:
    """GoogLeNet (Inception v1) with batch norm: 7,005,832 parameters in 173 tensors for 1000 classes.

    Args:
        num_classes: The number of logits.
        in_channels: The channels of the images.
        auxiliary_heads: Add the paper's two auxiliary classifiers: 13,385,816 parameters in 187 tensors. In training the network
            then returns three logits, (last, after 4a, after 4d). The paper adds the losses of the latter two with weight 0.3.
            In evaluation it returns the last logits only.

    Returns:
        The network.

    Example:
        >>> with torch.device("meta"):  # shapes without memory
        ...     model = phalanx.models.googlenet()
        >>> sum(p.numel() for p in model.parameters())
        7005832
    """
    return GoogLeNet(num_classes, in_channels=in_channels, auxiliary_heads=auxiliary_heads)
