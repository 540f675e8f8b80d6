"""The network of a run: which one, in which memory layout and precision, compiled or not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from phalanx.nn import models
from phalanx.nn.init import seed_everything

_building = threading.Lock()  # ranks that are threads of one process share its generators

Precision = Literal["float32", "bfloat16", "float16"]
Network = Literal["small_cnn", "resnet_cifar", "resnet9", "resnet18", "resnet50", "googlenet"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network. `depth` is resnet_cifar's, `width` small_cnn's and resnet9's, `auxiliary_heads` googlenet's.

    `zero_gamma` lets residual blocks begin as identities.
    """

    name: Network = "small_cnn"
    depth: int | None = None
    width: int | None = None
    zero_gamma: bool = False
    auxiliary_heads: bool = False
    channels_last: bool = False
    compile: bool = False
    precision: Precision = "float32"  # of forward and backward (autocast); parameters stay float32

    def __post_init__(self) -> None:
        if self.depth is None and self.name == "resnet_cifar":
            raise ValueError("resnet_cifar has a depth: 20, 32, 44, 56 and 110 are the paper's")
        if self.depth is not None and self.name != "resnet_cifar":
            raise ValueError(f"depth={self.depth}: only resnet_cifar has one, {self.name} has not")
        if self.width is not None and self.name not in ("small_cnn", "resnet9"):
            raise ValueError(f"width={self.width}: only small_cnn and resnet9 have one, {self.name} has not")
        if self.width is not None and self.width < 1:
            raise ValueError(f"width={self.width}: at least 1")
        if self.zero_gamma and self.name not in ("resnet_cifar", "resnet18", "resnet50"):
            raise ValueError(f"zero_gamma=True: {self.name} has no residual blocks that end with a batch norm")
        if self.auxiliary_heads and self.name != "googlenet":
            raise ValueError(f"auxiliary_heads=True: only googlenet has some, {self.name} has not")

    def build(self, *, in_channels: int, classes: int, seed: int) -> nn.Module:
        """Equal on all ranks without a broadcast: the same seed on all of them."""
        with _building:
            seed_everything(seed)
            model = self._network(in_channels, classes)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload]

    def check(self, shape: tuple[int, int, int], classes: int) -> None:
        """Raise ValueError unless the network takes images of `shape`; nothing is computed for it."""
        with torch.device("meta"), torch.no_grad():
            try:
                self._network(shape[0], classes).eval()(torch.empty(1, *shape))
            except (ValueError, RuntimeError) as error:
                size = " x ".join(map(str, shape))
                raise ValueError(f"model.name={self.name} does not take images of {size}: {error}") from None

    def _network(self, in_channels: int, classes: int) -> nn.Module:
        options: dict[str, Any] = {"zero_gamma": True} if self.zero_gamma else {}
        makers: dict[str, Callable[[], nn.Module]] = {
            "small_cnn": lambda: models.small_cnn(classes, in_channels=in_channels, width=self.width or 32),
            "resnet_cifar": lambda: models.resnet_cifar(self.depth or 20, classes, in_channels=in_channels, **options),
            "resnet9": lambda: models.resnet9(classes, in_channels=in_channels, width=self.width or 64),
            "resnet18": lambda: models.resnet18(classes, in_channels=in_channels, **options),
            "resnet50": lambda: models.resnet50(classes, in_channels=in_channels, **options),
            "googlenet": lambda: models.googlenet(classes, in_channels=in_channels, auxiliary_heads=self.auxiliary_heads),
        }
        return makers[self.name]()

    @property
    def autocast(self) -> torch.dtype | None:
        """The type of forward and backward, where it is not the parameters'."""
        return None if self.precision == "float32" else getattr(torch, self.precision)
