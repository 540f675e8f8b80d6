"""The data of a run: where to find them, and how to prepare images for training and for testing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

import phalanx.data
from phalanx.comm.communicator import Communicator
from phalanx.data import BatchPlan, CentreCrop, Chain, Flip, Loader, Normalise, PadCrop, RandomResizedCrop
from phalanx.data.draws import Draws
from phalanx.data.position import Last
from phalanx.data.source import Encoded
from phalanx.data.transforms import Transform
from phalanx.train.settings import setting

Image = TypeVar("Image", bytes, Tensor)


@dataclass(frozen=True, slots=True)
class Until(Generic[Image]):
    """`before` in the epochs before `epoch` (None: in all of them), then `after`."""

    epoch: int | None
    before: Callable[[Image, Draws], Tensor]
    after: Callable[[Image, Draws], Tensor]

    def __call__(self, image: Image, draws: Draws) -> Tensor:
        return (self.before if self.epoch is None or draws.epoch < self.epoch else self.after)(image, draws)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data, and how images are cut and mirrored for training and left alone for testing."""

    source: str = setting("digits", "Data to train with, as `phalanx.data.open` takes it, such as cifar10:DIR.")
    test: str | None = setting(None, "Data to test with; none for the test set of `data.source`.")
    mean: tuple[float, ...] = setting((0.5,), "Mean of each channel, from 0 to 1, that normalisation subtracts.")
    std: tuple[float, ...] = setting((0.5,), "Standard deviation of each channel, by which normalisation divides.")
    pad: int = setting(0, "Pixels of padding around images in memory; a random crop brings them back to their size.")
    flip: bool = setting(False, "Mirror half of the training images.")
    crop: int | None = setting(None, "Height and width to which images from files are cut; none for 224.")
    resize: int = setting(256, "Shorter side to which test images from files are scaled before the centre is cut out.")
    area: tuple[float, float] = setting((0.08, 1.0), "Smallest and largest share of an image that a random crop covers.")
    aspect: tuple[float, float] = setting((3 / 4, 4 / 3), "Smallest and largest ratio of width to height of a random crop.")
    plain_from: int | None = setting(
        None,
        "Epoch from which training images are only mirrored: no padding, and the largest square in the centre. None for never.",
    )
    last: Last = setting("drop", "What to do with the last samples of an epoch if they fill no batch.")
    test_batch: int = setting(1000, "Samples per batch of an evaluation, over all ranks.")
    workers: int | None = setting(None, "Processes per rank that prepare samples; none to choose, 0 to use the rank itself.")
    on_bad: Literal["error", "skip"] = setting("error", "Stop at a sample that cannot be read, or skip it.")

    def __post_init__(self) -> None:
        Normalise(self.mean, self.std)  # raises for values that fit no image
        for name, least in (("pad", 0), ("crop", 1), ("resize", 1), ("test_batch", 1), ("workers", 0), ("plain_from", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: at least {least}")
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(f"area={self.area}: shares of the image, more than 0, at most 1, the smaller first")
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise ValueError(f"aspect={self.aspect}: width to height, more than 0, the smaller first")

    def open(self, split: Literal["train", "test"]) -> Any:
        """The source of a split."""
        return phalanx.data.open(self.source if split == "train" or self.test is None else self.test, split=split)

    def loaders(
        self,
        train: Any,
        test: Any,
        comm: Communicator,
        *,
        plan: BatchPlan,
        micro_batch: int | None,
        seed: int,
        channels_last: bool,
    ) -> tuple[Loader, Loader]:
        """For training, shuffled and augmented; for testing, each sample once."""
        normalise = Normalise(self.mean, self.std, channels_last=channels_last)
        encoded = isinstance(train, Encoded)
        cut: list[Transform] = [Until(self.plain_from, PadCrop(self.pad), PadCrop(0))] if self.pad else []
        mirror: list[Transform] = [Flip()] if self.flip and not encoded else []
        options: dict[str, Any] = {"seed": seed, "workers": self.workers, "on_bad": self.on_bad}
        crop = self.crop or 224
        return (
            Loader(
                train,
                comm,
                batch=plan,
                micro_batch=micro_batch,
                last=self.last,
                transform=Chain(*cut, *mirror, normalise),
                decode=Until(
                    self.plain_from,
                    RandomResizedCrop(crop, self.area, self.aspect, self.flip),
                    RandomResizedCrop(crop, (1.0, 1.0), (1.0, 1.0), self.flip),
                )
                if encoded
                else None,
                **options,
            ),
            Loader(
                test,
                comm,
                batch=math.ceil(self.test_batch / comm.size) * comm.size,
                shuffle=False,
                transform=normalise,
                decode=CentreCrop(crop, max(crop, self.resize)) if isinstance(test, Encoded) else None,
                **options,
            ),
        )

    def shape(self, train: Any) -> tuple[int, int, int]:
        """Channels, height and width of what the network gets."""
        if isinstance(train, Encoded):
            return 3, self.crop or 224, self.crop or 224
        image = train[0][0]
        return int(image.shape[0]), int(image.shape[1]), int(image.shape[2])
