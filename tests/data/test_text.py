"""Text as a source: windows side by side, the character that follows each, and files that are none."""

import os

import pytest
import torch

import phalanx
from phalanx.data.source import SourceError, Takes
from phalanx.data.sources.text import PRINTABLE, Text


def test_the_handbook_is_what_its_vocabulary_says():
    train, test = (phalanx.data.open("handbook", split) for split in ("train", "test"))
    assert isinstance(train, Takes)
    assert train.classes == test.classes == tuple(PRINTABLE)
    assert (len(train.codes), len(test.codes)) == (222_480, 24_720)
    whole = train.decode(train.codes) + test.decode(test.codes)
    assert whole.isascii()
    assert "torus" in whole
    assert max(train.codes.max(), test.codes.max()) < len(train.classes)


def test_windows_lie_side_by_side(tmp_path):
    text = "".join(chr(0x3B1 + i % 24) for i in range(250)) + "€"
    (tmp_path / "own.txt").write_text(text, encoding="utf-8")
    train, test = (phalanx.data.open(f"text:{tmp_path / 'own.txt'}", split) for split in ("train", "test"))
    assert train.decode(train.codes) + test.decode(test.codes) == text
    assert train.classes == test.classes == tuple(sorted(set(text)))
    short = Text(train.codes, train.classes, context=7)
    x, y = short.take(torch.arange(len(short)))
    assert x.shape == y.shape == (len(short), 7)
    assert short.decode(x.flatten()) == text[: len(short) * 7]
    assert short.decode(y.flatten()) == text[1 : len(short) * 7 + 1]
    assert len(short) == (len(train.codes) - 1) // 7
    assert all(torch.equal(a, b) for a, b in zip(short[-1], (x[-1], y[-1])))
    with pytest.raises(IndexError):
        short[len(short)]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 14, 15])
def test_too_little_text_has_no_samples(length):
    text = Text(torch.zeros(length, dtype=torch.int32), ("a",), context=7)
    assert len(text) == max(0, length - 1) // 7
    assert text.take(torch.arange(0))[0].shape == (0, 7)


def test_what_is_no_text(tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe")
    os.mkfifo(tmp_path / "fifo")
    for name, told in (
        ("nowhere", "there is no such file"),
        (".", "there is no such file"),
        ("empty", "the file is empty"),
        ("binary", r"not a text in UTF-8 \(byte 3\)"),
        ("fifo", "there is no such file"),
    ):
        with pytest.raises(SourceError, match=told):
            phalanx.data.open(f"text:{tmp_path / name}")
    with pytest.raises(SourceError, match="text:"):
        phalanx.data.open("text:a\0b")
    with pytest.raises(SourceError, match="at least 1 character"):
        Text(torch.zeros(3), ("a",), context=0)
