"""`phalanx.data.open`: its table, and the sources that live in memory, from files made here and from published ones."""

import contextlib
import gzip
import importlib.util
import os
import pickle
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

from phalanx.data.source import Arrays, Encoded, Skipped, SourceError, Takes
from phalanx.data.source import open as open_source
from phalanx.data.sources import SPECS
from phalanx.data.sources.plain_pickle import PickleRefused, load_plain

REAL = Path(os.environ.get("PHALANX_DATA", "/nonexistent"))  # the published archives, unpacked


# ---- the table -------------------------------------------------------------------------------------------------------------


def test_an_unknown_spec_lists_those_that_exist():
    with pytest.raises(SourceError, match="no source is called 'imagenet'") as caught:
        open_source("imagenet:/data")
    for row in SPECS.values():
        assert row.form in str(caught.value)


def test_the_documentation_has_every_spec():
    text = (Path(__file__).parents[2] / "docs" / "sources.md").read_text(encoding="utf-8")
    assert [row.form for row in SPECS.values() if f"`{row.form}`" not in text] == []


@pytest.mark.parametrize("spec", ["digits:/x", "cifar10", "cifar10:", "synthetic:", "imagefolder", "shards:"])
def test_a_spec_of_another_form_is_told_its_form(spec):
    with pytest.raises(SourceError, match=f"does not have the form {spec.split(':')[0]}"):
        open_source(spec)


def test_an_unknown_split_lists_those_that_exist():
    with pytest.raises(SourceError, match="'dev'; there are train, val, validation, test"):
        open_source("digits", "dev")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "imagefolder"])
def test_a_missing_directory_is_named_with_what_it_should_hold(name, tmp_path):
    with pytest.raises(SourceError, match=rf"{name}:.*/nowhere: no such directory.*(hold|wanted)"):
        open_source(f"{name}:{tmp_path}/nowhere")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "imagefolder"])
def test_an_empty_directory_says_what_was_looked_for(name, tmp_path):
    with pytest.raises(SourceError, match=r"found no (train-images-idx3-ubyte|data_batch_1.bin|train.bin)|has no folders"):
        open_source(f"{name}:{tmp_path}")


def test_skipped_counts_all_and_remembers_some():
    skipped = Skipped()
    for k in range(100):
        skipped = skipped.plus(f"file {k}", "bad")
    assert skipped.count == 100
    assert skipped.examples[0] == ("file 0", "bad")
    assert len(skipped.joined(skipped).examples) == len(skipped.examples) == 20
    assert skipped.joined(skipped).count == 200


# ---- arrays ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=times(60, seldom=24), deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 8), max_size=12), st.sampled_from(["numpy", "torch", "strided"]))
def test_take_is_item_by_item(n, wanted, form):
    a = Arrays(torch.arange(n * 6).view(n, 1, 2, 3), torch.arange(n) * 7)
    rows = np.array([k % n for k in wanted], np.int64)
    indices = {"numpy": rows, "torch": torch.from_numpy(rows), "strided": rows[::-1][::-1]}[form]
    x, y = a.take(indices)
    assert x.shape == (len(wanted), 1, 2, 3)
    for k, i in enumerate(rows):
        assert torch.equal(x[k], a[i][0])
        assert int(y[k]) == a[i][1]


@pytest.mark.parametrize(
    ("x", "y", "classes", "why"),
    [
        (torch.zeros(3, 2), torch.zeros(2).long(), (), "one label each"),
        (torch.zeros(3, 2), torch.zeros(3), (), "int64"),
        (torch.zeros(3), torch.tensor([0, 1, 2]), ("a", "b"), "labels run from 0 to 2, but there are 2 classes"),
        (torch.zeros(3), torch.tensor([0, -1, 1]), ("a", "b"), "labels run from -1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x, y, classes, why):
    with pytest.raises(SourceError, match=why):
        Arrays(x, y, classes)


def test_take_refuses_masks_and_fractions_and_strangers():
    a = Arrays(torch.zeros(3, 1), torch.zeros(3).long())
    for bad in (np.array([True, False, True]), np.array([0.5]), np.zeros((1, 1), np.int64)):
        with pytest.raises(TypeError, match="whole numbers"):
            a.take(bad)
    for bad in (3, -4):
        with pytest.raises(IndexError):
            a[bad]
    with pytest.raises((IndexError, RuntimeError)):
        a.take(np.array([3]))


# ---- digits ----------------------------------------------------------------------------------------------------------------


def load_digits() -> SimpleNamespace:
    """As sklearn.datasets.load_digits reads its file, without importing sklearn, which takes two seconds."""
    folder = Path(importlib.util.find_spec("sklearn").origin).parent
    data = np.loadtxt(folder / "datasets/data/digits.csv.gz", delimiter=",")
    return SimpleNamespace(images=data[:, :-1].reshape(-1, 8, 8), target=data[:, -1].astype(int))


def test_digits_are_those_of_scikit_learn():
    train, test = open_source("digits"), open_source("digits", "test")
    assert (len(train), len(test)) == (1437, 360)
    assert train.x.dtype == torch.uint8
    assert train.classes == tuple("0123456789")
    theirs = load_digits()
    # the split of the docstring, drawn again
    draw = np.random.RandomState(0)
    held_out = sorted(i for k in range(10) for i in draw.permutation(np.flatnonzero(theirs.target == k))[:36])
    rest = np.setdiff1d(np.arange(1797), held_out)
    for ours, rows in ((train, rest), (test, held_out)):
        assert np.array_equal(ours.x[:, 0].numpy(), theirs.images[rows])
        assert np.array_equal(ours.y.numpy(), theirs.target[rows])
    assert torch.bincount(test.y).tolist() == [36] * 10


@pytest.mark.parametrize("split", ["val", "validation", "test"])
def test_what_is_held_out_has_three_names(split):
    assert torch.equal(open_source("digits", split).x, open_source("digits", "test").x)


# ---- idx -------------------------------------------------------------------------------------------------------------------


def idx(array):
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist(folder, n=7, *, zipped=False, dot=False, part="train"):
    images = np.random.RandomState(0).randint(0, 256, (n, 28, 28)).astype(np.uint8)
    labels = (np.arange(n) % 10).astype(np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    for stem, suffix, data in ((f"{part}-images", "idx3-ubyte", images), (f"{part}-labels", "idx1-ubyte", labels)):
        name = f"{stem}{'.' if dot else '-'}{suffix}"
        (folder / (name + (".gz" if zipped else ""))).write_bytes(gzip.compress(idx(data)) if zipped else idx(data))
    return images, labels


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.parametrize("below", ["", "raw", "MNIST/raw", "mnist"])
def test_mnist_wherever_it_lies(tmp_path, zipped, dot, below):
    images, labels = mnist(tmp_path / below, zipped=zipped, dot=dot)
    source = open_source(f"mnist:{tmp_path}")
    assert np.array_equal(source.x[:, 0].numpy(), images)
    assert np.array_equal(source.y.numpy(), labels)
    with pytest.raises(SourceError, match="t10k-images-idx3-ubyte"):
        open_source(f"mnist:{tmp_path}", "test")


def bad_idx():
    images = idx(np.zeros((3, 28, 28), np.uint8))
    yield "truncated", images[:-1], "truncated: 2351 of the 2352 bytes"
    yield "longer", images + b"x", "longer than the 2352 bytes"
    yield "empty", b"", "begins with nothing"
    yield "labels instead of images", idx(np.zeros(3, np.uint8)), "begins with 00000801, wanted 00000803"
    yield "floats", b"\0\0\x0d\3" + images[4:], "begins with 00000d03"
    yield "half a header", images[:9], "ends inside its header"
    yield "gigantic", b"\0\0\x08\3" + b"\xff" * 12, "claims 4294967295x4294967295x4294967295"
    yield "gzip without .gz", gzip.compress(images), "is gzipped: call it"


@pytest.mark.parametrize(("what", "data", "why"), list(bad_idx()), ids=[case[0] for case in bad_idx()])
def test_bad_idx_files_are_named(tmp_path, what, data, why):
    mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(data)
    with pytest.raises(SourceError, match=rf"train-images-idx3-ubyte:? .*{why}|{why}"):
        open_source(f"mnist:{tmp_path}")


@pytest.mark.parametrize("cut", [0, 5, 30, 200])
def test_cut_gzip_files_are_named(tmp_path, cut):
    mnist(tmp_path, zipped=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(SourceError, match=r"train-images-idx3-ubyte.gz"):
        open_source(f"mnist:{tmp_path}")


def test_counts_and_labels_are_checked(tmp_path):
    mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(6, np.uint8)))
    with pytest.raises(SourceError, match=r"has 7 images, .* 6 labels"):
        open_source(f"mnist:{tmp_path}")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.full(7, 10, np.uint8)))
    with pytest.raises(SourceError, match="label 10, but mnist has 10 classes"):
        open_source(f"mnist:{tmp_path}")


# ---- cifar -----------------------------------------------------------------------------------------------------------------


def cifar_data(n, classes, seed):
    draw = np.random.RandomState(seed)
    return draw.randint(0, 256, (n, 3072)).astype(np.uint8), draw.randint(0, classes, n)


def cifar(folder, kind, version, protocol=2):
    """A small data set in the published layout; the images and fine labels of train, then of test."""
    folder.mkdir(parents=True, exist_ok=True)
    ten = kind == "cifar10"
    train = [f"data_batch_{k}" for k in range(1, 6)] if ten else ["train"]
    parts = {name: cifar_data(4 + k, 10 if ten else 100, k) for k, name in enumerate([*train, "test_batch" if ten else "test"])}
    for name, (images, labels) in parts.items():
        if version == "binary":
            columns = [labels[:, None].astype(np.uint8), images]
            rows = np.concatenate(columns if ten else [np.zeros((len(labels), 1), np.uint8), *columns], axis=1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            entries = {b"data": images, b"labels" if ten else b"fine_labels": labels.tolist(), b"batch_label": b"one"}
            (folder / name).write_bytes(pickle.dumps(entries, protocol=protocol))
    chosen = [parts[name] for name in train]
    return [tuple(np.concatenate(column) for column in zip(*chosen)), list(parts.values())[-1]]


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
@pytest.mark.parametrize(("version", "protocol"), [("binary", 0), ("python", 2), ("python", 3), ("python", 4), ("python", 5)])
@pytest.mark.parametrize("below", [False, True])
def test_cifar_in_both_versions(tmp_path, kind, version, protocol, below):
    folders = {"cifar10": ("cifar-10-batches-bin", "cifar-10-batches-py"), "cifar100": ("cifar-100-binary", "cifar-100-python")}
    folder = folders[kind][version == "python"] if below else ""
    wanted = cifar(tmp_path / folder, kind, version, protocol)
    for split, (images, labels) in zip(("train", "test"), wanted):
        source = open_source(f"{kind}:{tmp_path}", split)
        assert np.array_equal(source.x.numpy(), images.reshape(-1, 3, 32, 32))
        assert np.array_equal(source.y.numpy(), labels)
        assert len(source.classes) == {"cifar10": 10, "cifar100": 100}[kind]


def test_python_2_pickles_as_published():
    """The opcodes of the files on CIFAR's site, by hand: protocol 2, texts of Python 2, an array filled by its state."""
    data = bytes(range(12))
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85q\x03U\x01bq\x04\x87q\x05Rq\x06(K\x01K\x02K\x06\x86"
        b"cnumpy\ndtype\nq\x07U\x02u1K\x00K\x01\x87Rq\x08(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x0c\0\0\0"
        + data
        + b"tb"
    )
    value = load_plain(b"\x80\x02}q\x00(U\x04data" + array + b"U\x06labels]q\x09(K\x03K\x04eu.")
    assert value[b"labels"] == [3, 4]
    assert np.array_equal(value[b"data"].value, np.frombuffer(data, np.uint8).reshape(2, 6))


class Exploit:
    """Calls `function(*arguments)` in whoever unpickles it."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile_pickles(canary):
    for protocol in (2, 3, 4, 5):
        yield pickle.dumps({b"data": Exploit(os.mkdir, str(canary))}, protocol)
        yield pickle.dumps({b"data": Exploit(eval, f"__import__('os').mkdir({str(canary)!r})")}, protocol)
        yield pickle.dumps({b"data": np.array([1.5])}, protocol)  # not hostile, but no bytes either
        yield pickle.dumps({b"data": np.array([print], object)}, protocol)
    yield b"cos\nmkdir\n(S'" + str(canary).encode() + b"'\ntR."
    yield b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(tR}b."  # a state that is no tuple
    yield b"\x80\x02cnumpy\ndtype\nU\x01O\x85R."
    yield b"\x80\x02r\xff\xff\xff\xff."  # memo number 4294967295
    yield b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc."  # bytes that the file has not
    yield b"\x80\x02(((((t."
    yield b"\x80\x02]" + b"\x85" * 100_000 + b"."  # nested tuples: nothing may recurse over them
    yield b"\x80\x02N" * 5
    yield b"\x80\x02a."
    yield b"\x80\x02\x87."
    yield b"\x80\x02}]Ns."  # a list as a key
    yield b"\x80\x02(cos\nmkdir\no."
    yield b"\x80\x02ccopyreg\n_reconstructor\n."
    yield b"\x80\x02cnumpy\nload\n."
    yield b"\x80\x02Pid\n."
    yield b""
    yield b"\x80"
    yield os.urandom(64)


def test_hostile_pickles_execute_nothing(tmp_path):
    canary = tmp_path / "canary"
    folder = tmp_path / "data"
    cifar(folder, "cifar100", "python")
    cases = list(hostile_pickles(canary))
    assert len(cases) > 25
    for data in cases:
        (folder / "train").write_bytes(data)
        with pytest.raises(SourceError, match=r"data/train: (refused|holds no)"):
            open_source(f"cifar100:{folder}")
        assert not canary.exists()


def test_the_canary_sings_for_a_real_unpickler(tmp_path):
    canary = tmp_path / "canary"
    pickle.loads(next(hostile_pickles(canary)))
    assert canary.exists()


@settings(max_examples=times(150, seldom=60), deadline=None)
@given(st.data())
def test_mutated_pickles_are_read_or_refused(data):
    good = bytearray(
        pickle.dumps(
            {b"data": np.zeros((2, 8), np.uint8), b"labels": [1, 2], "more": ("a", 3, None)},
            data.draw(st.sampled_from([2, 4, 5])),
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PickleRefused):  # any other error is a failure
        load_plain(bytes(good))


def test_damaged_cifar_files_are_named(tmp_path):
    cifar(tmp_path, "cifar10", "binary")
    path = tmp_path / "data_batch_3.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(SourceError, match=r"data_batch_3.bin: \d+ bytes are not whole records of 3073"):
        open_source(f"cifar10:{tmp_path}")
    path.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(SourceError, match=r"data_batch_3.bin: labels from \d+ to 10, but cifar10 has 10"):
        open_source(f"cifar10:{tmp_path}")
    path.unlink()
    with pytest.raises(SourceError, match=r"data_batch_3.bin is missing beside 4 others"):
        open_source(f"cifar10:{tmp_path}")


@pytest.mark.parametrize(
    "entries",
    [
        {b"data": np.zeros((2, 3071), np.uint8), b"fine_labels": [0, 1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0]},
        {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0, -1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0, "1"]},
        {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0, 100]},
        {b"data": np.zeros((2, 3072), np.uint8)},
        {b"data": b"", b"fine_labels": []},
        [1, 2],
    ],
)
def test_pickles_of_something_else_are_named(tmp_path, entries):
    cifar(tmp_path, "cifar100", "python")
    (tmp_path / "train").write_bytes(pickle.dumps(entries, 4))
    with pytest.raises(SourceError, match=r"/train: "):
        open_source(f"cifar100:{tmp_path}")


# ---- synthetic -------------------------------------------------------------------------------------------------------------


def test_synthetic_data_are_the_same_everywhere_and_travel_light():
    source = open_source("synthetic:3x8x5,classes=7,n=1000,seed=3")
    again = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 300
    rows = np.array([999, 0, 17, 17])
    x, y = source.take(rows)
    assert (x.shape, x.dtype, y.dtype) == ((4, 3, 8, 5), torch.uint8, torch.int64)
    assert torch.equal(again.take(rows)[0], x)
    assert torch.equal(source[17][0], x[2])
    assert source[-1][1] == int(y[0])
    x, y = source.take(np.arange(1000))
    assert set(y.tolist()) == set(range(7))
    assert len({row.numpy().tobytes() for row in x}) == 1000  # all distinct
    assert 120 < x.float().mean() < 135
    assert not torch.equal(open_source("synthetic:3x8x5,classes=7,n=1000,seed=3", "test").take(rows)[0], source.take(rows)[0])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("3x", "not a shape"), ("3x-1x2", "not a shape"), ("abc", "not a shape"), ("0x3", "elements of a sample: 0"),
        ("999999x999999", "elements of a sample"), ("3,n=0", "n: 0"), ("3,classes=0", "classes: 0"),
        ("3,size=3", "'size=3' is none of"), ("3,n=x", "'n=x' is none of"), ("3,n=999999999999999999", "n: 9999"),
    ],
)  # fmt: skip
def test_synthetic_specs_that_make_no_sense(text, why):
    with pytest.raises(SourceError, match=why):
        open_source(f"synthetic:{text}")


# ---- all -------------------------------------------------------------------------------------------------------------------


def test_memory_sources_take_and_are_not_encoded():
    for spec in ("digits", "synthetic:2"):
        assert isinstance(open_source(spec), Takes)
        assert not isinstance(open_source(spec), Encoded)


def test_several_threads_take_at_once():
    source = open_source("synthetic:3x32x32,n=5000")
    rows = [np.arange(k, 5000, 50) for k in range(50)]
    wanted = [source.take(r)[0] for r in rows]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda r: source.take(r)[0], rows))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


@pytest.mark.skipif(not (REAL / "fashion-mnist").is_dir(), reason="PHALANX_DATA has no fashion-mnist")
def test_the_published_fashion_mnist():
    test = open_source(f"fashion-mnist:{REAL}", "test")
    assert test.x.shape == (10000, 1, 28, 28)
    assert torch.bincount(test.y).tolist() == [1000] * 10


@pytest.mark.skipif(not (REAL / "cifar-10-batches-bin").is_dir(), reason="PHALANX_DATA has no cifar-10-batches-bin")
def test_the_published_cifar10():
    test = open_source(f"cifar10:{REAL}", "test")
    assert test.x.shape == (10000, 3, 32, 32)
    assert torch.bincount(test.y).tolist() == [1000] * 10
