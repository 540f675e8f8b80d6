"""The data of a run: where they are, and how images are prepared for training and testing.

Other data, such as text, reaches the network unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import default_collate

import phalanx.data
from phalanx.comm.communicator import Communicator
from phalanx.data import BatchPlan, CentreCrop, Chain, Flip, Loader, Normalise, PadCrop, RandomResizedCrop
from phalanx.data.draws import Draws
from phalanx.data.position import Last
from phalanx.data.route import BatchPolicy
from phalanx.data.scatter import item_of
from phalanx.data.source import Encoded
from phalanx.data.sources.text import Text
from phalanx.data.transforms import Transform
from phalanx.train.argument_text import check_arguments
from phalanx.train.own_source import is_own_source, open_own_source
from phalanx.train.settings import setting

Image = TypeVar("Image", bytes, Tensor)
FOR_IMAGES = ("pad", "flip", "crop", "plain_from")  # settings that only affect images


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
    """The data, and how training images are cropped and mirrored. Test images are not augmented."""

    HEAD: ClassVar[str] = "source"

    source: str = setting(
        "digits",
        "Data to train with, as `phalanx.data.open` takes it, such as cifar10:DIR; or the import path of your own source.",
    )
    args: dict[str, Any] = setting({}, "Argument NAME of your own source, given by an import path.")
    test: str | None = setting(None, "Data to test with; none for the test set of `data.source`.")
    context: int = setting(64, "Characters of a sample of text.")
    mean: tuple[float, ...] = setting((0.5,), "Images: mean of each channel, from 0 to 1, that normalisation subtracts.")
    std: tuple[float, ...] = setting((0.5,), "Images: standard deviation of each channel, by which normalisation divides.")
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
    last: Last = setting("drop", "What to do with the last samples of an epoch if they do not fill a batch.")
    test_batch: int = setting(1000, "Samples per batch of an evaluation, over all ranks.")
    workers: int | None = setting(None, "Processes per rank that prepare samples; none to choose, 0 to use the rank itself.")
    on_bad: Literal["error", "skip"] = setting("error", "Stop at a sample that cannot be read, or skip it.")

    def __post_init__(self) -> None:
        Normalise(self.mean, self.std)  # raises for values that fit no image
        check_arguments(self.args, "args")
        if self.args and not is_own_source(self.source):
            raise ValueError(f"args ({', '.join(self.args)}) are for your own source, not for {self.source}")
        for name, least in (
            ("context", 1),
            ("pad", 0),
            ("crop", 1),
            ("resize", 1),
            ("test_batch", 1),
            ("workers", 0),
            ("plain_from", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: at least {least}")
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(f"area={self.area}: shares of the image, more than 0, at most 1, the smaller first")
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise ValueError(f"aspect={self.aspect}: width to height, more than 0, the smaller first")

    def open(self, split: Literal["train", "test"]) -> Any:
        """The source of a split."""
        spec = self.source if split == "train" or self.test is None else self.test
        if is_own_source(spec):
            return open_own_source(spec, self.args, split)
        found = phalanx.data.open(spec, split=split)
        return replace(found, context=self.context) if isinstance(found, Text) else found

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
        on_change: BatchPolicy = "keep_batch",
    ) -> tuple[Loader, Loader]:
        """The loaders: shuffled and augmented for training, each sample once for testing."""
        options: dict[str, Any] = {"seed": seed, "workers": self.workers, "on_bad": self.on_bad}
        test_batch = math.ceil(self.test_batch / comm.size) * comm.size
        if not holds_images(train):
            return (
                Loader(train, comm, batch=plan, micro_batch=micro_batch, last=self.last, on_change=on_change, **options),
                Loader(test, comm, batch=test_batch, shuffle=False, **options),
            )
        normalise = Normalise(self.mean, self.std, channels_last=channels_last)
        encoded = isinstance(train, Encoded)
        cut: list[Transform] = [Until(self.plain_from, PadCrop(self.pad), PadCrop(0))] if self.pad else []
        mirror: list[Transform] = [Flip()] if self.flip and not encoded else []
        crop = self.crop or 224
        return (
            Loader(
                train,
                comm,
                batch=plan,
                micro_batch=micro_batch,
                last=self.last,
                on_change=on_change,
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
                batch=test_batch,
                shuffle=False,
                transform=normalise,
                decode=CentreCrop(crop, max(crop, self.resize)) if isinstance(test, Encoded) else None,
                **options,
            ),
        )

    def example(self, train: Any) -> Any:
        """A batch of one sample, as the loader yields it. Images have zero pixels."""
        if isinstance(train, Encoded):
            return torch.zeros(1, 3, self.crop or 224, self.crop or 224), torch.zeros(1, dtype=torch.long)
        batch = default_collate([item_of(train, 0)])
        return (torch.zeros(batch[0].shape), *batch[1:]) if holds_images(train) else batch

    def check(self, channels: int | None) -> None:
        """Raise ValueError for settings that do not fit the data. `channels` is None if it has no images."""
        if channels is None:
            for f in fields(self):
                if f.name in FOR_IMAGES and (value := getattr(self, f.name)) != f.default:
                    raise ValueError(f"data.{f.name}={value} is for images, and data.source={self.source} has none of uint8")
        elif len(self.mean) != channels:
            raise ValueError(f"data.mean={self.mean}: give one for each channel; data.source={self.source} has {channels}")


def holds_images(source: Any) -> bool:
    """Whether samples are images, encoded or uint8, which the settings prepare."""
    if isinstance(source, Encoded):
        return True
    sample = item_of(source, 0)
    x = sample[0] if isinstance(sample, tuple | list) and sample else sample
    return isinstance(x, Tensor) and x.dtype == torch.uint8 and x.dim() == 3
