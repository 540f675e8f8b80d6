"""Data sets with faults, for the loader: at the top of a module, so that worker processes can import them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from phalanx.data import BadSample, Draws, stream_share


@dataclass(frozen=True)
class World:
    """A rank without its communicator."""

    rank: int
    size: int


@dataclass(frozen=True)
class Numbers:
    """Sample i is (i, i), whatever it takes. At some numbers something happens."""

    n: int = 100
    bad: int = -1
    raises: int = -1
    dies: int = -1
    slow: float = 0.0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if self.slow:
            time.sleep(self.slow)
        if i == self.bad:
            raise BadSample("", "it is bad")
        if i == self.raises:
            raise KeyError("no such key in the user's code")
        if i == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([float(i)]), i


class Counted(Numbers):
    """Counts how many samples have been read."""

    read = 0
    lock = threading.Lock()

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        with self.lock:
            type(self).read += 1
        return super().__getitem__(i)


class Nested(Numbers):
    """Samples that are more than a pair of tensors."""

    def __getitem__(self, i: int) -> dict:
        super().__getitem__(i)
        image = torch.full((2, 3, 3), i, dtype=torch.bfloat16)
        return {"text": f"sample {i}", "pair": (torch.tensor([i, -i], dtype=torch.int16), i / 2), "image": image}


@dataclass(frozen=True)
class Files:
    """An encoded source without files: sample i is the text of i, and some are bad."""

    n: int = 60
    bad: tuple[int, ...] = ()
    classes: tuple[str, ...] = ("even", "odd")

    def __len__(self) -> int:
        return self.n

    def read(self, i: int) -> bytes:
        return b"" if i in self.bad else str(i).encode()

    def label(self, i: int) -> int:
        return i % 2

    def name(self, i: int) -> str:
        return f"folder/{i}.jpg"

    def __getitem__(self, i: int) -> tuple[bytes, int]:
        return self.read(i), self.label(i)


def decode(data: bytes, draws: Draws) -> Tensor:
    """A picture whose first pixel is the number and whose second is random, with colours side by side in memory."""
    if not data:
        raise BadSample("", "the file is empty")
    picture = torch.zeros(4, 4, 3, dtype=torch.uint8)
    picture[0, 0] = int(data)
    picture[0, 1] = int(draws.integers(7, 256)[0])
    return picture.permute(2, 0, 1)


def noise(x: Tensor, draws: Draws) -> Tensor:
    """A transform with a random number per sample, in channels-last memory where there are channels."""
    x = x.to(torch.float64) + torch.from_numpy(draws.uniform(3)).reshape(-1, *[1] * (x.dim() - 1))
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


@dataclass(frozen=True)
class Drawing(Numbers):
    """A data set with random transforms of its own, from all three global generators. `pause`: some samples take longer."""

    pause: float = 0.0

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        time.sleep(self.pause * (i % 3))
        drawn = [torch.rand(()).item(), float(numpy.random.rand()), random.random(), torch.randn(2).sum().item()]
        return torch.tensor([float(i), *drawn], dtype=torch.float64), i


class Texts(torch.utils.data.Dataset):
    """As a Hugging Face data set: dicts of tokens of different lengths."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict:
        return {"input_ids": list(range(i % 5 + 1)), "label": i, "text": f"text {i}", "weight": i / 4}


def padded(samples: list[dict]) -> dict:
    """A collate_fn as people write it: pad to the longest."""
    ids = [torch.tensor(sample["input_ids"]) for sample in samples]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1),
        "lengths": torch.tensor([len(x) for x in ids]),
        "label": torch.tensor([sample["label"] for sample in samples]),
        "text": [sample["text"] for sample in samples],
    }


def masked(samples: list) -> tuple[Tensor, Tensor]:
    """A collate_fn that draws random numbers, as masking for language models does."""
    x, y = torch.utils.data.default_collate(samples)
    return x + torch.rand(x.shape) + random.random() + float(numpy.random.rand()), y


class Stream(torch.utils.data.IterableDataset):
    """Items 0 to n - 1 as (x, y), with a random number if `draws`. At some numbers something happens."""

    def __init__(self, n: int, *, draws: bool = False, raises: int = -1, dies: int = -1, length: bool = False) -> None:
        self.n, self.draws, self.raises, self.dies, self.length = n, draws, raises, dies, length
        self.epoch = -1

    def __len__(self) -> int:
        if not self.length:
            raise TypeError("a stream without a length")
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator:
        for i in range(self.n):
            if i == self.raises:
                raise KeyError("no such key in the user's code")
            if i == self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            noise = torch.rand(()).item() + float(numpy.random.rand()) + random.random() if self.draws else 0.0
            yield torch.tensor([float(i), noise], dtype=torch.float64), i


class Shards(torch.utils.data.IterableDataset):
    """A stream that shards itself; share number s of `count` has the items s, s + count, ... of which it keeps `lengths[s]`."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator:
        mine = stream_share()
        for k in range(self.lengths[mine.index]):
            i = mine.index + k * mine.count
            yield torch.tensor([float(i)]), i


class Info(Numbers):
    """What a worker process knows about itself, as a sample."""

    def __getitem__(self, i: int) -> dict:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return {"id": info.id, "workers": info.num_workers, "seed": info.seed, "n": len(info.dataset), "pid": os.getpid()}
