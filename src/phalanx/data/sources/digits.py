"""scikit-learn's digits, a data set that comes with the package.

1797 images of 8 x 8, values 0 to 16: the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI
Machine Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0) as in `sklearn.datasets.load_digits()`, in its order.
digits.npz holds `images` (uint8), `labels` (uint8) and `test`, the numbers of the 360 held-out samples: 36 of each
class, drawn once by

    draw = numpy.random.RandomState(0)
    test = sorted(i for k in range(10) for i in draw.permutation(numpy.flatnonzero(labels == k))[:36])

They are stored, so the split does not depend on a generator. The other 1437 are for training. Both keep the order of the file.
"""

from __future__ import annotations

import threading
from importlib.resources import files

import numpy as np
import torch

from phalanx.data.source import Arrays

CLASSES = tuple("0123456789")

_reading = threading.Lock()  # numpy parses a header with `ast`, which two threads of Python 3.11 cannot do at once (SystemError)


def load(split: str) -> Arrays:
    """1437 digits for training or the 360 others, uint8 N x 1 x 8 x 8 with values 0 to 16."""
    with _reading, (files(__package__) / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as stored:
        images, labels, test = stored["images"], stored["labels"], stored["test"]
    held_out = np.isin(np.arange(len(labels)), test)
    chosen = ~held_out if split == "train" else held_out
    return Arrays(torch.from_numpy(images[chosen][:, None]), torch.from_numpy(labels[chosen]).long(), CLASSES, "digits")
