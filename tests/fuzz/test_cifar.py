"""CIFAR's pickles, read without the unpickler: pixels and labels, or SourceError. Changed by bytes and by opcodes."""

import contextlib
import io
import pickle
import pickletools
from itertools import pairwise

import numpy as np
import pytest
from tests.fuzz.harness import Parser, blocks, fuzz
from tests.fuzz.mutate import BINARY

from phalanx.data.source import SourceError
from phalanx.data.sources.cifar import LAYOUTS, PIXELS, read_python
from phalanx.data.sources.plain_pickle import PickleRefused, load_plain

ROWS = {
    b"data": np.arange(12, dtype=np.uint8).reshape(2, 6),
    b"labels": [3, 1],
    b"filenames": [b"a.png", "é"],
    b"batch_label": b"one",
}
PYTHON_2 = b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x03K\x01eU\x04nameq\x04U\x03abcq\x05T\x04\0\0\0wxyzJ\x01\0\0\0u."
DOUBLE = b"q\x63h\x63\x86"  # the top of the stack becomes a pair of itself


def opcodes(rng, data, seeds):
    """Opcodes removed, repeated, exchanged, or taken from another pickle; or one of ours, many times."""
    own, other = _split(data), _split(rng.choice(seeds))
    at = rng.randrange(len(own))
    match rng.randrange(5):
        case 0:
            del own[at]
        case 1:
            own[at:at] = [own[at]] * rng.choice((1, 2, 30, 300))
        case 2:
            place = rng.randrange(len(own))
            own[at], own[place] = own[place], own[at]
        case 3:
            begin = rng.randrange(len(other))
            own[at:at] = other[begin : begin + rng.choice((1, 2, 5))]
        case _:
            own[at:at] = [DOUBLE * rng.choice((1, 5, 40, 40, 500))]
    return b"".join(own)[: 1 << 16]


def _split(data):
    """The pickle as opcodes with their arguments; what cannot be read is one piece."""
    places = {0, len(data)}
    with contextlib.suppress(Exception):  # as far as it goes
        places.update(place for _, _, place in pickletools.genops(io.BytesIO(data)))
    return [data[start:stop] for start, stop in pairwise(sorted(places))] or [data]


PLAIN = Parser(
    "pickle",
    load_plain,
    (PickleRefused,),
    (*(pickle.dumps(ROWS, protocol) for protocol in (2, 3, 4, 5)), PYTHON_2),
    (*BINARY, opcodes, opcodes, opcodes, opcodes),
)


@pytest.mark.parametrize("cases", blocks())
def test_plain_pickle(cases):
    assert set(fuzz(PLAIN, cases)) == {"accepted", "refused"}


@pytest.mark.parametrize("cases", blocks(0.25, least=500))
def test_cifar(memory, cases):
    layout, path = LAYOUTS["cifar10"][1], memory / "data_batch_1"

    def read(data):
        path.write_bytes(data)
        pixels, labels = read_python(path, layout)
        assert pixels.shape == (len(labels), PIXELS)

    image = {b"data": np.zeros((1, PIXELS), np.uint8), b"labels": [7]}
    seeds = tuple(pickle.dumps(image, protocol) for protocol in (2, 3, 4, 5))
    assert set(fuzz(Parser("CIFAR", read, (SourceError,), seeds, (opcodes, opcodes, *BINARY)), cases)) == {"accepted", "refused"}


def test_work_is_linear_however_often_a_text_is_encoded():
    """Python 2's bytes are calls, `_codecs.encode(text, "latin1")`: a call takes five bytes and makes as many as the text has."""
    text = "x" * 100_000
    once = pickle.dumps(text.encode(), 2)
    assert load_plain(once) == text.encode()
    call = b"h\x01h\x06R"  # the function and its arguments from the memo
    assert once.count(b"R") == 1
    body = once[: once.index(b"R")].replace(b"q\x00", b"q\x01", 1)
    with pytest.raises(PickleRefused):
        load_plain(body + b"q\x06R" + call * 20_000 + b".")
