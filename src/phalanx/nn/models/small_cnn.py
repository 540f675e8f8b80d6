"""Three convolutions for small grey or coloured images: a first network to train, in seconds on a CPU.

On 8x8 digits it has 58,314 parameters in 8 tensors. It has no batch norm, so samples are independent, and results on one rank and
on many differ only by rounding.
"""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.nn.models.images import check_images


class SmallCnn(nn.Module):
    """Convolutions of `width` and twice 2 `width` channels, halving the image twice, and a linear classifier on 2x2 pixels."""

    def __init__(self, num_classes: int, *, in_channels: int, width: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Linear(2 * width * 4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        check_images(x, self.in_channels)
        return self.classifier(self.features(x).flatten(1))


def small_cnn(num_classes: int = 10, *, in_channels: int = 1, width: int = 32) -> SmallCnn:
    """Three convolutions for images of at least 8x8 pixels: a first network to train, in seconds on a CPU.

    Args:
        num_classes: The number of logits.
        in_channels: The channels of the images.
        width: The channels of the first layer.

    Returns:
        The network.

    Example:
        >>> phalanx.models.small_cnn()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    return SmallCnn(num_classes, in_channels=in_channels, width=width)
