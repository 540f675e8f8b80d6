"""Tar shards, and the index that is kept beside one: samples that lie within the file, or SourceError."""

import json
import os
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data import tars
from tests.fuzz.harness import Parser, blocks, fuzz
from tests.fuzz.mutate import BINARY, structure

from phalanx.data.source import SourceError
from phalanx.data.sources import saved_index
from phalanx.data.sources.shard_index import index_shard, make_index
from phalanx.data.sources.tar import TarError, Window

SAMPLES = (
    tars.sample("a") + tars.sample("b/c", label=b" 7\n", ext="png"),
    tars.member("x.jpg", b"i") + tars.member("x.json", b'{"label": 3, "more": [1]}') + tars.member("x.txt", b"t"),
    tars.pax(path="long/name.jpg", size=5) + tars.member("short", b"image") + tars.member("long/name.cls", b"1"),
    tars.member("long", b"d" * 120 + b".jpg\0", "L") + tars.member("cut", b"image") + tars.member("dir/", b"", "5"),
    tars.header("b.jpg", 3, raw_size=tars.base256(3)) + bytes(512) + tars.pax("g", a="x") + tars.member("b.cls", b"0"),
)  # fmt: skip
BLOCK = 512


def resum(data):
    """Every header with the sum that it has now."""
    out = bytearray(data)
    for at in range(0, len(out) - BLOCK + 1, BLOCK):
        if out[at + 257 : at + 262] == b"ustar":
            out[at + 148 : at + 156] = b" " * 8
            out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + BLOCK])
    return bytes(out)


def within(index, length):
    """Every sample lies in the file, and has a label and a name."""
    assert len(index.offsets) == len(index.sizes) == len(index.labels) == len(index.names)
    for k in range(len(index)):
        assert 0 <= index.offsets[k] <= length - index.sizes[k]
        assert index.labels[k] >= 0
        assert isinstance(index.names[k], str)


def read_tar(data):
    descriptor = os.memfd_create("shard")
    try:
        os.write(descriptor, data)
        within(make_index(Window(descriptor), "shard.tar"), len(data))
    finally:
        os.close(descriptor)


TAR = Parser("tar", read_tar, (TarError,), tuple(sample + tars.END for sample in SAMPLES), BINARY, repair=resum)


@pytest.mark.parametrize("cases", blocks())
def test_tar(cases):
    assert set(fuzz(TAR, cases)) == {"accepted", "refused"}


# ---- the index beside it -------------------------------------------------------------------------------------------------------


def recrc(data):
    """With the checksum and the length of the header that it has now."""
    begin = len(saved_index.MAGIC) + saved_index.HEAD.size
    if len(data) < begin:
        return data
    (length,) = struct.unpack_from("<Q", data, len(saved_index.MAGIC) + 4)
    return saved_index.MAGIC + saved_index.HEAD.pack(zlib.crc32(data[begin:]), length) + data[begin:]


def header(rng, data, seeds):
    """The header changed as JSON, and its length with it."""
    begin = len(saved_index.MAGIC) + saved_index.HEAD.size
    if len(data) < begin:
        return data
    (length,) = struct.unpack_from("<Q", data, len(saved_index.MAGIC) + 4)
    new = structure(rng, data[begin : begin + length], seeds)
    new += b" " * (-(begin + len(new)) % 8)
    return data[: begin - 8] + struct.pack("<Q", len(new)) + new + data[begin + length :]


@pytest.fixture(scope="module")
def shard(memory):
    """A shard whose index was saved: its path, and the index."""
    path = tars.write(memory / "train-0.tar", *SAMPLES[:2])
    os.environ["XDG_CACHE_HOME"], before = str(path.parent / "cache"), os.environ.get("XDG_CACHE_HOME")
    index_shard(str(path))
    yield path, path.with_name("train-0.tar.index").read_bytes()
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.mark.parametrize("cases", blocks())
def test_saved_index(shard, cases):
    path, content = shard
    beside = path.with_name("other.index")

    def read(data):
        beside.write_bytes(data)
        if saved_index.read(beside) is None:
            raise SourceError("as good as none")

    parser = Parser("saved index", read, (SourceError,), (content,), (*BINARY, header, header, header), repair=recrc)
    assert set(fuzz(parser, cases)) == {"accepted", "refused"}


@pytest.mark.parametrize("cases", blocks(0.25))
def test_shard_index(shard, cases):
    path, content = shard
    length = path.stat().st_size

    def read(data):
        path.with_name("train-0.tar.index").write_bytes(data)
        within(index_shard(str(path))[1], length)

    parser = Parser("shard index", read, (SourceError,), (content,), (*BINARY, header, header, header), repair=recrc)
    assert set(fuzz(parser, cases)) == {"accepted"}  # what is not right is made anew


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
    st.dictionaries(
        st.text(max_size=5), st.tuples(st.sampled_from(sorted(saved_index.DTYPES)), st.lists(st.integers(0, 99))), max_size=3
    ),
)
def test_an_index_reads_back_equal(tmp_path_factory, facts, arrays):
    beside = tmp_path_factory.mktemp("index") / "x.index"
    index = saved_index.Saved("stamp", facts, {name: np.array(values, kind) for name, (kind, values) in arrays.items()})
    assert saved_index.save(index, beside) == beside
    again = saved_index.load(beside, "stamp")
    assert again is not None
    assert again.facts == json.loads(json.dumps(facts))
    assert {name: (a.dtype.str, a.tolist()) for name, a in again.arrays.items()} == {
        name: (a.dtype.str, a.tolist()) for name, a in index.arrays.items()
    }
