"""Text, character by character, for models that predict the next one: `handbook` comes with Phalanx, `text:FILE` is yours.

A sample is a window of `context` characters and the character after each of them. Windows do not overlap, so an epoch shows every
character once; characters at the end that do not fill a window are dropped. The last tenth of a text is held out.

handbook.txt is the documentation of Phalanx 0.1 in printable ASCII, without the generated reference. As a data set, it
never changes, so that losses can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor

from phalanx.data.source import SourceError, as_rows, at

HELD_OUT = 10  # one tenth
MAX_BYTES = 1 << 30  # of a file: the whole text is kept in memory
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))  # what handbook.txt is made of


@dataclass(frozen=True, eq=False)
class Text:
    """Characters as numbers. A sample is a window of `context` characters and the character after each.

    Args:
        codes: The text, each character as its index in `classes`.
        classes: The vocabulary: every character that may occur, in the order of their numbers.
        context: Characters of a sample.
        name: The name of the text in messages.
    """

    codes: Tensor
    classes: tuple[str, ...]
    context: int = 64
    name: str = ""

    def __post_init__(self) -> None:
        if self.context < 1:
            raise SourceError(f"{self.name or 'Text'}: a context of {self.context}: at least 1 character")

    def __len__(self) -> int:
        return max(0, len(self.codes) - 1) // self.context

    def __getitem__(self, i: SupportsIndex) -> tuple[Tensor, Tensor]:
        x, y = self.take(np.array([at(i, len(self))]))
        return x[0], y[0]

    def take(self, indices: np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        """The windows with these numbers, and the characters that follow, both N x context."""
        starts = as_rows(indices)[:, None] * self.context
        places = starts + torch.arange(self.context + 1)
        windows = self.codes[places].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def decode(self, codes: Tensor) -> str:
        """Convert numbers back to text."""
        return "".join(self.classes[code] for code in codes.tolist())


def encode(text: str, classes: str, split: str, name: str) -> Text:
    """The part of `text` that belongs to a split."""
    cut = len(text) - len(text) // HELD_OUT
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    vocabulary = np.frombuffer(classes.encode("utf-32-le", "surrogatepass"), np.uint32)
    codes = torch.from_numpy(np.searchsorted(vocabulary, points).astype(np.int32))
    return Text(codes[:cut] if split == "train" else codes[cut:], tuple(classes), name=name)


def load_handbook(split: str) -> Text:
    """Load the text that comes with Phalanx."""
    text = (files(__package__) / "handbook.txt").read_text(encoding="ascii")
    return encode(text, PRINTABLE, split, "handbook")


def load(path: str, split: str) -> Text:
    """Load your file. Its vocabulary is every character in it, held out or not."""
    spec = f"text:{path}"
    file = Path(path)
    try:
        if not file.is_file():  # a fifo would wait for its writer
            raise SourceError(f"{spec}: there is no such file")
        if file.stat().st_size > MAX_BYTES:
            raise SourceError(f"{spec}: {file.stat().st_size:,} bytes; at most {MAX_BYTES:,}, because it is kept in memory")
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{spec}: not a text in UTF-8 (byte {error.start})") from None
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        raise SourceError(f"{spec}: {getattr(error, 'strerror', None) or error}") from None
    if not text:
        raise SourceError(f"{spec}: the file is empty")
    return encode(text, "".join(sorted(set(text))), split, spec)
