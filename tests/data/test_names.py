"""Names of samples come from archives: what is said about them is one line, without control sequences."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image
from tests.data import tars

import phalanx
from phalanx.data import BadSample
from phalanx.data.source import Skipped

ODD = "\x1b[2J\x07\r\nall is well"


def jpeg():
    file = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(file, "JPEG")
    return file.getvalue()


def said_about(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (warning,) = caught
    return str(warning.message)


def is_calm(text):
    return text.isprintable() and "all is well" in text


def test_what_a_source_leaves_out():
    assert is_calm(said_about(lambda: Skipped(1, ((ODD, "not an image"),)).warn("shards:x")))


def test_a_bad_sample():
    assert is_calm(str(BadSample(ODD, "cut short")))
    assert BadSample(ODD, "cut short").name == ODD, "whoever looks for the file needs its name as it is"


def test_a_shard_of_a_stranger(tmp_path):
    good = tars.member("a.jpg", jpeg()) + tars.member("a.cls", b"0") + tars.member("b.jpg", jpeg()) + tars.member("b.cls", b"1")
    odd = tars.member(f"{ODD}.jpg", jpeg())  # without a label
    (tmp_path / "train-0.tar").write_bytes(good + odd + b"\0" * 1024)
    assert is_calm(said_about(lambda: phalanx.data.open(f"shards:{tmp_path}/train-*.tar", "train")))


@pytest.mark.parametrize("name", ["é–→", "名前", "a b"])
def test_names_of_all_languages_stay(name):
    assert str(BadSample(name, "cut short")).startswith(name)
