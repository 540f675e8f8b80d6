"""Tar shards: patterns, samples by number, the saved index; and hostile archives, which must be skipped by name or refused."""

import gzip
import io
import os
import pickle
import random
import tarfile
import time
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.data.tars import BLOCK, END, base256, header, member, pax, sample, write

from phalanx.data.image import BadSample
from phalanx.data.source import Encoded, SourceError
from phalanx.data.source import open as open_source
from phalanx.data.sources import shard_index, shards
from phalanx.data.sources.pattern import expand
from phalanx.data.sources.tar import MAX_EXTENSION

MEMORY = 64 << 20  # bytes that a hostile archive may cost
SECONDS = 5.0  # and time


@pytest.fixture(autouse=True)
def _cache_of_our_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def everything(source):
    return [(source.name(i).split(": ", 1)[1], *source[i]) for i in range(len(source))]


# ---- patterns --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("a-{8..10}", ["a-8", "a-9", "a-10"]),
        ("{x,y}/{0..1}", ["x/0", "x/1", "y/0", "y/1"]),
        ("{a}{}", ["{a}{}"]),
    ],
)
def test_braces(pattern, wanted):
    assert expand(pattern) == wanted


@pytest.mark.parametrize("pattern", ["{5..2}", "{0..999999999}", "{0..999}{0..999}", "{0..99999999999999999}"])
def test_braces_without_end_are_refused(pattern):
    with pytest.raises(SourceError):
        expand(pattern)


def test_files_of_a_pattern(tmp_path):
    for name in ("train-00", "train-01", "val-00"):
        write(tmp_path / f"{name}.tar", sample(name.replace("-", "_"), label=b"1"))
    for pattern in ("train-{00..01}.tar", "train-*.tar", "train-0[01].tar", "{split}-*.tar", "{split}-{00,01}.tar"):
        assert len(open_source(f"shards:{tmp_path}/{pattern}")) == 2
    for split in ("val", "validation", "test"):
        assert everything(open_source(f"shards:{tmp_path}/{{split}}-*.tar", split)) == [("val_00.jpg", b"image", 1)]
    with pytest.raises(SourceError, match=r"of 3 files .*train-02.tar missing"):
        open_source(f"shards:{tmp_path}/train-{{00..02}}.tar")
    with pytest.raises(SourceError, match=r"no such file: check"):
        open_source(f"shards:{tmp_path}/other-*.tar")
    with pytest.raises(SourceError, match=r"tried as train"):
        open_source(f"shards:{tmp_path}/no-{{split}}.tar")
    with pytest.raises(SourceError, match=r"which of them are held out\? Write \{split\}"):
        open_source(f"shards:{tmp_path}/train-*.tar", "val")


# ---- samples ---------------------------------------------------------------------------------------------------------------


def written_by_tarfile(path, files, form):
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_tarfile_writes_is_read(tmp_path, form):
    long = "d" * 90 + "/" + "e" * 90  # more than the 100 characters of a header
    unicode = "fünf" if form != tarfile.USTAR_FORMAT else "five"
    files = [
        ("a.jpg", b"1" * 1000), ("a.cls", b"3\n"), ("a.txt", b"ignored"),
        (f"{long}.png", b"2"), (f"{long}.cls", b" 0 "),
        ("d/b.json", b'{"label": 2, "x": [1]}'), ("d/b.JPEG", b"3" * 511), ("d/b.seg.png", b"mask"),
        (f"{unicode}.webp", b"4" * 512), (f"{unicode}.json", b'{"label": 9}'), (f"{unicode}.cls", b"1"),
        ("README", b"no sample"), (".hidden.jpg", b"x"), ("only.json", b"{}"), ("only.txt", b"x"),
    ]  # fmt: skip
    written_by_tarfile(tmp_path / "s.tar", files, form)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = open_source(f"shards:{tmp_path}/s.tar")
    assert isinstance(source, Encoded)
    assert everything(source) == [
        ("a.jpg", b"1" * 1000, 3), (f"{long}.png", b"2", 0), ("d/b.JPEG", b"3" * 511, 2), (f"{unicode}.webp", b"4" * 512, 1),
    ]  # fmt: skip
    assert source.classes == ("0", "1", "2", "3")
    assert source[-1] == source[3]
    with pytest.raises(IndexError):
        source.read(4)


def test_random_archives_agree_with_tarfile(tmp_path):
    """tarfile is the oracle for honest archives of any size and format."""
    draw = random.Random(0)
    for k in range(60):
        files = []
        for i in range(draw.randint(1, 12)):
            key = draw.choice(["", "dir/", "x" * draw.randint(1, 120) + "/"]) + f"k{i}"
            files += [(f"{key}.jpg", draw.randbytes(draw.randint(1, 3000))), (f"{key}.cls", str(draw.randint(0, 99)).encode())]
        path = tmp_path / f"{k}.tar"
        written_by_tarfile(path, files, draw.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
        with tarfile.open(path) as archive:
            oracle = {m.name: archive.extractfile(m).read() for m in archive}
        assert {name: data for name, data, _ in everything(open_source(f"shards:{path}"))} == {
            name: data for name, data in oracle.items() if name.endswith(".jpg")
        }


def test_classes_have_names_if_a_file_says_so(tmp_path):
    path = write(tmp_path / "s.tar", sample("a", label=b"1"), sample("b", label=b"2"))
    (tmp_path / "classes.json").write_text('["cat", "dog"]')
    with pytest.warns(UserWarning, match=r"left out 1: .*s.tar: b.jpg: label 2, but there are 2 classes"):
        source = open_source(f"shards:{path}")
    assert source.classes == ("cat", "dog")
    assert len(source) == 1
    for bad in ("[", '{"a": 1}', "[1]", "[]", "[" * 100_000):
        (tmp_path / "classes.json").write_text(bad)
        with pytest.raises(SourceError, match=r"classes.json: (is not JSON|wanted a list)"):
            open_source(f"shards:{path}")
    other = tmp_path / "other"
    other.mkdir()
    write(other / "s.tar", sample("a"))
    (tmp_path / "classes.json").write_text('["cat", "dog"]')
    (other / "classes.json").write_text('["dog", "cat"]')
    with pytest.raises(SourceError, match="name different classes"):
        open_source(f"shards:{tmp_path}/{{.,other}}/s.tar")


def many(tmp_path, shards_count=5, each=40):
    for s in range(shards_count):
        parts = [sample(f"{s}_{i}", image=f"{s} {i} ".encode() * (i + 1), label=str(i % 7).encode()) for i in range(each)]
        write(tmp_path / f"s{s}.tar", *parts)
    return f"shards:{tmp_path}/s*.tar"


def opened(folder):
    """The files in it that this process has open. Other descriptors come and go with other threads."""
    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return [name for link in links if os.path.lexists(link) and (name := os.readlink(link)).startswith(f"{folder}/")]


def test_threads_pickles_and_few_descriptors(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "OPEN_SHARDS", 2)
    source = open_source(many(tmp_path))
    wanted = everything(source)
    assert len(wanted) == 200
    source = pickle.loads(pickle.dumps(source))
    order = random.Random(1).sample(range(200), 200)
    with ThreadPoolExecutor(8) as pool:
        got = dict(zip(order, pool.map(source.__getitem__, order)))
    assert [got[i] for i in range(200)] == [(data, label) for _, data, label in wanted]
    assert 0 < len(opened(tmp_path)) <= 2
    del source
    assert opened(tmp_path) == []


def test_indexed_once_and_again_when_changed(tmp_path, monkeypatch):
    spec = many(tmp_path, 2, 3)
    made = []
    real = shard_index.make_index
    monkeypatch.setattr(shard_index, "make_index", lambda window, path: made.append(path) or real(window, path))
    first = everything(open_source(spec))
    assert len(made) == 2
    assert everything(open_source(spec)) == first
    assert len(made) == 2
    assert (tmp_path / "s0.tar.index").is_file()
    write(tmp_path / "s0.tar", sample("new", label=b"5"))
    assert everything(open_source(spec)) == [("new.jpg", b"image", 5), *first[3:]]
    assert len(made) == 3
    index = tmp_path / "s1.tar.index"
    good = index.read_bytes()
    for k in range(0, len(good), 17):
        index.write_bytes(good[:k] + bytes([good[k] ^ 0x10]) + good[k + 1 :])
        assert everything(open_source(spec))[1:] == first[3:]
    assert len(made) == 3 + len(range(0, len(good), 17))


def test_a_shard_that_changes_under_us_is_noticed(tmp_path):
    source = open_source(many(tmp_path, 1, 3))
    write(tmp_path / "s0.tar", sample("x"))
    with pytest.raises(SourceError, match="has changed since it was indexed"):
        source.read(0)
    opened = open_source(f"shards:{tmp_path}/s0.tar")
    opened.read(0)
    os.truncate(tmp_path / "s0.tar", BLOCK + 2)
    with pytest.raises(BadSample, match=r"s0.tar: x.jpg: 2 of its 5 bytes exist"):
        opened.read(0)
    (tmp_path / "s0.tar").unlink()
    with pytest.raises(BadSample, match="No such file"):
        pickle.loads(pickle.dumps(opened)).read(0)


# ---- hostile archives ------------------------------------------------------------------------------------------------------

GOOD = sample("good", label=b"1")


def skipped_cases():
    """(what, parts, why): one sample of two is left out, by name."""
    yield "absolute path", [sample("/tmp/canary")], "absolute path"
    yield "leads out", [sample("../../canary")], "leads out"
    yield "leads out within", [sample("a/../../canary")], "leads out"
    yield "leads out by pax", [pax(path="../canary.jpg"), member("b.jpg", b"x"), member("b.cls", b"0")], "leads out"
    yield "absolute by long name", [member("@LongLink", b"/tmp/canary.jpg\0", "L"), member("b.jpg", b"x")], "absolute"
    yield "symbolic link", [header("b.jpg", 0, "2", link=b"/etc/passwd"), member("b.cls", b"0")], "a link"
    yield "hard link", [header("b.jpg", 0, "1", link=b"good.jpg"), member("b.cls", b"0")], "a hard link"
    yield "link that claims data", [header("b.jpg", 1 << 30, "2", link=b"/etc/passwd")], "a link"
    yield "character device", [header("b.jpg", 0, "3")], "a device"
    yield "block device", [header("b.jpg", 0, "4")], "a device"
    yield "fifo", [header("b.jpg", 0, "6")], "a fifo"
    yield "label is a link", [member("b.jpg", b"x"), header("b.cls", 0, "2", link=b"/etc/hostname")], "a link"
    yield "unknown type", [member("b.jpg", b"x", "Z"), member("b.cls", b"0")], "unknown type 'Z'"
    yield "no label", [member("b.jpg", b"x")], "without a label"
    yield "no image", [member("b.cls", b"0")], "label without an image"
    yield "a TIFF", [member("b.tif", b"II*"), member("b.cls", b"0")], "TIFF is not read"
    yield "empty image", [sample("b", image=b"")], "empty image"
    yield "empty label", [sample("b", label=b"")], "no whole number"
    yield "label of letters", [sample("b", label=b"cat")], "no whole number.*cat"
    yield "label with a fraction", [sample("b", label=b"1.0")], "no whole number"
    yield "label of other digits", [sample("b", label="٣".encode())], "no whole number"
    yield "label in hexadecimal", [sample("b", label=b"0x1")], "no whole number"
    yield "negative label", [sample("b", label=b"-1")], "label -1 is out of range"
    yield "label beyond 2**31", [sample("b", label=b"2147483648")], "out of range"
    yield "label of a million digits", [sample("b", label=b"9" * 1_000_000)], "too many for a .cls"
    yield "label beyond unnamed classes", [sample("b", label=b"2147483647")], "at most 65536 classes"
    yield "label is NULs", [sample("b", label=b"\0\0\0")], "no whole number"
    yield "json is none", [member("b.jpg", b"x"), member("b.json", b"{")], "json is not JSON"
    yield "json without label", [member("b.jpg", b"x"), member("b.json", b"{}")], "no whole number"
    yield "json is a list", [member("b.jpg", b"x"), member("b.json", b"[1]")], "no whole number"
    yield "json label true", [member("b.jpg", b"x"), member("b.json", b'{"label": true}')], "no whole number"
    yield "json label is text", [member("b.jpg", b"x"), member("b.json", b'{"label": "1"}')], "no whole number"
    yield "json of brackets", [member("b.jpg", b"x"), member("b.json", b"[" * 60_000)], "json is not JSON"
    yield "json of digits", [member("b.jpg", b"x"), member("b.json", b'{"label": ' + b"9" * 60_000 + b"}")], "json is not JSON"
    yield "json too long", [member("b.jpg", b"x"), member("b.json", b" " * 70_000)], "too many for a .json"
    yield "key twice", [sample("good", image=b"other")], "come before"
    yield "key twice, apart", [sample("c"), sample("good", image=b"other")], "come before"
    yield "two images", [member("b.jpg", b"x"), member("b.png", b"x"), member("b.cls", b"0")], "several images"
    yield "two labels", [member("b.jpg", b"x"), member("b.cls", b"0"), member("b.cls", b"1")], "several images or labels"
    yield "image and label apart", [member("b.jpg", b"x"), member("z.txt", b""), member("b.cls", b"0")], "without"


def refused_cases():
    """(what, bytes, why): the shard is not what it should be."""
    end = END
    yield "nothing", b"", "an empty file"
    yield "text", b"hello\n" * 200, "not a tar file"
    yield "noise", random.Random(0).randbytes(5000), "not a tar file|compressed"
    yield "gzip", gzip.compress(GOOD + end), "compressed .gzip.: .*unpack it"
    yield "bzip2", b"BZh9" + bytes(600), "compressed .bzip2."
    yield "xz", b"\xfd7zXZ\0" + bytes(600), "compressed .xz."
    yield "zstd", b"\x28\xb5\x2f\xfd" + bytes(600), "compressed .zstd."
    yield "a picture", b"\xff\xd8\xff\xe0" + bytes(1000), "not a tar file"
    yield "zeros only", end, "no sample in 1 shards"
    yield "half a header", GOOD[:300], "not a tar file"
    yield "no end", GOOD, "truncated"
    yield "cut in an image", sample("b", image=b"x" * 5000)[:3000], "truncated: 'b.jpg' at byte 0 has 5000"
    yield "cut in a label", GOOD[: 3 * BLOCK], "truncated: 'good.cls'"
    yield "size beyond the file", GOOD + header("b.jpg", 1 << 30) + end, "truncated: 'b.jpg'"
    yield "largest octal size", GOOD + header("b.jpg", 0, raw_size=b"77777777777\0") + end, "truncated: 'b.jpg'"
    yield "size of 2**80", GOOD + header("b.jpg", 0, raw_size=base256(1 << 80)) + end, "truncated: 'b.jpg'"
    yield "negative size", GOOD + header("b.jpg", 0, raw_size=base256(-512)) + end, "negative or impossible"
    yield "odd base 256", GOOD + header("b.jpg", 0, raw_size=b"\xc0" + b"\xff" * 11) + end, "negative or impossible"
    yield "minus in octal", GOOD + header("b.jpg", 0, raw_size=b"-0000000512\0") + end, "is not a size"
    yield "letters for a size", GOOD + header("b.jpg", 0, raw_size=b"abcdefghijk\0") + end, "is not a size"
    yield "sum wrong", GOOD + header("b.jpg", 0, raw_sum=b"000001\0 ") + end, "no header where one is expected"
    yield "sum of letters", GOOD + header("b.jpg", 0, raw_sum=b"zzzzzz\0 ") + end, "no header where one is expected"
    yield "written over", GOOD + b"\xaa" * 1024 + end, "no header where one is expected"
    yield "two joined by cat", GOOD + end + GOOD + end, "after the end of the archive"
    yield "gigabyte of zeros behind", GOOD + bytes(2 << 20), "after the end of the archive"
    yield "sparse", GOOD + header("b.jpg", 0, "S") + end, "is sparse"
    yield "sparse by pax", GOOD + pax(GNU__sparse__major="1") + member("b.jpg", b"x") + end, "is sparse"
    yield "pax bomb", GOOD + header("p", 1 << 30, "x") + bytes(1024) + end, "extended headers, the last of 1073741824"
    yield "pax too long", GOOD + member("p", b"x" * (MAX_EXTENSION + 1), "x") + end, "extended headers"
    yield "long name bomb", GOOD + header("l", 1 << 33 >> 1, "L") + end, "extended headers"
    yield "chain of headers", GOOD + pax(a="1") * 5000 + end, "9 extended headers"
    yield "header without member", GOOD + pax(path="b.jpg") + end, "without a member"
    yield "pax size beyond", GOOD + pax(size=str(10**15)) + member("b.jpg", b"x") + end, "truncated: 'b.jpg'"
    yield "pax size negative", GOOD + pax(size="-1") + member("b.jpg", b"x") + end, "is not a size"
    yield "pax size of digits", GOOD + pax(size="9" * 5000) + member("b.jpg", b"x") + end, "is not a size"
    yield "pax size of letters", GOOD + pax(size="big") + member("b.jpg", b"x") + end, "is not a size"
    yield "pax length wrong", GOOD + member("p", b"99 path=b.jpg\n", "x") + member("b.jpg", b"x") + end, "damaged extended"
    yield "pax length zero", GOOD + member("p", b"0 path=b.jpg\n", "x") + member("b.jpg", b"x") + end, "damaged extended"
    yield "pax length of letters", GOOD + member("p", b"abc", "x") + member("b.jpg", b"x") + end, "damaged extended"
    yield "global rename", GOOD + pax("g", path="evil.jpg") + member("b.jpg", b"x") + end, "a global header"
    yield "global damaged", GOOD + member("p", b"7 \n", "g") + end, "damaged extended"


SKIPPED, REFUSED = list(skipped_cases()), list(refused_cases())


def test_there_are_enough():
    assert len(SKIPPED) + len(REFUSED) >= 40


@pytest.fixture
def fence(tmp_path):
    """Nothing but the index is written, memory and time are bounded."""
    canary = tmp_path / "canary"
    inside = tmp_path / "in"
    inside.mkdir()
    tracemalloc.start()
    begun = time.monotonic()
    yield inside
    seconds, (_, peak) = time.monotonic() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < SECONDS
    assert peak < MEMORY
    assert not canary.exists()
    assert {p.name for p in inside.iterdir()} <= {"s.tar", "s.tar.index"}
    assert not os.path.lexists("/tmp/canary.jpg")


@pytest.mark.parametrize(("what", "parts", "why"), SKIPPED, ids=[case[0] for case in SKIPPED])
def test_bad_members_are_left_out_by_name(fence, what, parts, why):
    path = write(fence / "s.tar", GOOD, member("between.txt", b""), *parts)
    for _ in range(2):  # as indexed, and as saved
        with pytest.warns(UserWarning, match=rf"left out .*s\.tar: .*({why})"):
            source = open_source(f"shards:{path}")
        kept = {name: (data, label) for name, data, label in everything(source)}
        kept.pop("c.jpg", None)  # which stands between two of one key
        assert kept == {"good.jpg": (b"image", 1)}
        assert source.skipped.count >= 1


@pytest.mark.parametrize(("what", "data", "why"), REFUSED, ids=[case[0] for case in REFUSED])
def test_bad_archives_are_refused_by_name(fence, what, data, why):
    path = fence / "s.tar"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=rf"s\.tar.*({why})"):
        open_source(f"shards:{path}")


def test_files_that_are_none(tmp_path):
    os.mkfifo(tmp_path / "s.tar")
    (tmp_path / "d.tar").mkdir()
    for name in ("s", "d"):
        with pytest.raises(SourceError, match=rf"{name}\.tar"):
            open_source(f"shards:{tmp_path}/{name}.tar")


def test_mutated_archives_are_read_or_refused(tmp_path):
    """Bytes of headers changed at random: a source, or an error of ours; never another, and never a byte of another file."""
    draw = random.Random(7)
    whole = b"".join(
        [sample("a"), pax(path="n/b.jpg"), member("x.jpg", b"y" * 700), member("n/b.json", b'{"label": 3}'), sample("c")]
    )
    path = tmp_path / "s.tar"
    outcomes = set()
    for _ in range(250):
        data = bytearray(whole + END)
        for _ in range(draw.randint(1, 3)):
            k = draw.randrange(len(data))
            data[k] = draw.choice([0, 0x20, 0x2E, 0x30, 0x37, 0x80, 0xFF, draw.randrange(256)])
            if draw.random() < 0.8:  # with the sum put right, the change gets past it
                start = k - k % BLOCK
                block = bytes(data[start : start + 148]) + b" " * 8 + bytes(data[start + 156 : start + BLOCK])
                data[start + 148 : start + 156] = b"%06o\0 " % sum(block)
        path.write_bytes(bytes(data))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                source = shards.open_shards([str(path)], "mutant")
            for i in range(len(source)):
                assert source.read(i) in bytes(data)
            outcomes.add("read")
        except SourceError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_ordinary_tars_with_folders_and_comments(tmp_path):
    path = write(
        tmp_path / "s.tar", pax("g", comment="made by git"), header("d/", 0, "5"), sample("d/a"), header("e/", 4096, "5")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert everything(open_source(f"shards:{path}")) == [("d/a.jpg", b"image", 0)]


def test_names_that_are_not_utf_8_survive_the_saved_index(tmp_path):
    parts = []
    for part in (member("?.jpg", b"x"), member("?.cls", b"0")):
        block = part[:BLOCK].replace(b"?", b"\xff", 1)
        parts.append(block[:148] + b"%06o\0 " % (sum(block) + 8 * 32 - sum(block[148:156])) + block[156:] + part[BLOCK:])
    path = write(tmp_path / "s.tar", *parts)
    for _ in range(2):
        assert everything(open_source(f"shards:{path}")) == [(os.fsdecode(b"\xff.jpg"), b"x", 0)]
