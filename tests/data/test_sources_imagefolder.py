"""Folders of images: torchvision's order, labels of the held-out set, the saved index, and files that turn bad."""

import os
import pickle
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.data.image import FORMATS, BadSample
from phalanx.data.source import Encoded, SourceError
from phalanx.data.source import open as open_source
from phalanx.data.sources import imagefolder, saved_index
from phalanx.data.sources.files import EXTENSIONS, MAX_ENCODED, UNREAD, Names

LONG_AGO = 1_500_000_000


@pytest.fixture(autouse=True)
def _cache_of_our_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def fill(root, files, *, old=True):
    """Files with their own names as content; folders as if made long ago, so that the index is saved."""
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    if old:
        settle(root)
    return root


def settle(root):
    for folder, _, _ in os.walk(root):
        os.utime(folder, (LONG_AGO, LONG_AGO))


def names_of(source):
    return [os.path.relpath(source.name(i), source.root) for i in range(len(source))]


def as_torchvision(root):
    """What torchvision.datasets.folder.make_dataset does, in its own words."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    found = []
    for number, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(root / name, followlinks=True)):
            found += [
                (os.path.join(folder, file), number) for file in sorted(files) if file.lower().endswith((".jpg", ".jpeg", ".png"))
            ]
    return found


FILES = ["b/2.jpg", "b/10.JPEG", "b/x/1.png", "b/x-y/1.png", "b/x/z/3.jpg", "a/ü.jpg", "a/n.txt", "c/q.PNG", "note.jpg"]


def test_order_and_labels_are_torchvisions(tmp_path):
    source = open_source(f"imagefolder:{fill(tmp_path, FILES)}")
    assert [(source.name(i), source.label(i)) for i in range(len(source))] == as_torchvision(tmp_path)
    assert source.classes == ("a", "b", "c")
    assert source[0] == ("a/ü.jpg".encode(), 0)
    assert source[-1] == (b"c/q.PNG", 2)
    with pytest.raises(IndexError):
        source.read(len(source))
    assert isinstance(source, Encoded)


@pytest.mark.parametrize(("split", "folder"), [("val", "val"), ("validation", "val"), ("test", "test")])
def test_splits_below(tmp_path, split, folder):
    fill(tmp_path, ["train/a/1.jpg", "train/b/1.jpg", "val/b/2.jpg", "test/b/3.jpg"])
    source = open_source(f"imagefolder:{tmp_path}", split)
    assert source.root == str(tmp_path / folder)
    assert (source.classes, source.label(0)) == (("a", "b"), 1)  # numbered as train/ is, though a/ is missing here
    assert len(open_source(f"imagefolder:{tmp_path}")) == 2


def test_nothing_held_out_and_strange_classes_are_errors(tmp_path):
    fill(tmp_path / "one", ["a/1.jpg"])
    with pytest.raises(SourceError, match=r"nothing is held out: looked for test/, val/, validation/"):
        open_source(f"imagefolder:{tmp_path / 'one'}", "test")
    fill(tmp_path / "two", ["train/a/1.jpg", "val/z/1.jpg"])
    with pytest.raises(SourceError, match=r"1 classes that train/ does not have, such as 'z'"):
        open_source(f"imagefolder:{tmp_path / 'two'}", "val")


def test_what_is_no_image_is_ignored_or_named(tmp_path):
    fill(tmp_path, ["a/1.jpg", "a/._1.jpg", ".git/x.jpg", "b/readme.txt", "c/2.jpg"])
    os.mkfifo(tmp_path / "c" / "pipe.jpg")
    (tmp_path / "c" / "broken.png").symlink_to(tmp_path / "gone")
    (tmp_path / "c" / "linked.png").symlink_to(tmp_path / "a" / "1.jpg")
    with pytest.warns(UserWarning, match="left out 3: .*without an image.*") as caught:
        source = open_source(f"imagefolder:{tmp_path}")
    assert source.skipped.count == 3
    assert {Path(name).name for name, _ in source.skipped.examples} == {"b", "pipe.jpg", "broken.png"}
    assert "pipe.jpg" in str(caught[0].message)
    assert names_of(source) == ["a/1.jpg", "c/2.jpg", "c/linked.png"]
    assert source.classes == ("a", "b", "c")  # an empty class keeps its number


def test_a_tiff_is_left_out_and_named(tmp_path):
    fill(tmp_path, ["a/1.jpg", "a/2.tif", "b/3.TIFF", "b/4.png", "b/._5.tif"])
    with pytest.warns(UserWarning, match="left out 2: .*TIFF is not read"):
        source = open_source(f"imagefolder:{tmp_path}")
    assert names_of(source) == ["a/1.jpg", "b/4.png"]
    assert {Path(name).name for name, _ in source.skipped.examples} == {"2.tif", "3.TIFF"}


def test_what_counts_as_an_image_has_a_decoder():
    from PIL import Image

    kinds = Image.registered_extensions()
    assert {kinds[extension] for extension in EXTENSIONS} <= set(FORMATS)
    assert all(kinds[extension] not in FORMATS for extension in UNREAD)


def test_no_image_at_all_is_an_error(tmp_path):
    fill(tmp_path, ["a/readme.txt", "b/c/notes.md"])
    with pytest.raises(SourceError, match=r"no image in the 2 folders of .*\.jpg"):
        open_source(f"imagefolder:{tmp_path}")


def test_a_link_that_leads_back_does_not_hang(tmp_path):
    fill(tmp_path, ["a/1.jpg"])
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    with pytest.raises(SourceError, match="does a link lead back"):
        open_source(f"imagefolder:{tmp_path}")


@pytest.mark.parametrize("how", ["gone", "empty", "folder", "fifo", "gigantic", "unreadable"])
def test_files_that_turn_bad_are_bad_samples(tmp_path, how):
    source = open_source(f"imagefolder:{fill(tmp_path, ['a/1.jpg', 'a/2.jpg'])}")
    path = tmp_path / "a" / "1.jpg"
    path.unlink()
    if how == "empty":
        path.touch()
    elif how == "folder":
        path.mkdir()
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "gigantic":
        with path.open("wb") as file:
            file.truncate(MAX_ENCODED + 1)
    elif how == "unreadable":
        path.symlink_to("/proc/self/mem")  # opens, and fails to be read at 0; permissions do not stop root
    with pytest.raises(BadSample, match=r"a/1\.jpg: \w"):
        source.read(0)
    assert source.read(1) == b"a/2.jpg"


def test_threads_and_pickles(tmp_path):
    source = open_source(f"imagefolder:{fill(tmp_path, [f'{k % 5}/{k}.jpg' for k in range(200)])}")
    source = pickle.loads(pickle.dumps(source))
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(source.__getitem__, range(200)))
    assert got == [(name.encode(), int(name[0])) for name in names_of(source)]


# ---- the saved index -------------------------------------------------------------------------------------------------------


def scans(monkeypatch):
    """How often the folders are really scanned from now on."""
    calls = []
    real = imagefolder.scan
    monkeypatch.setattr(imagefolder, "scan", lambda *args: calls.append(args) or real(*args))
    return calls


def test_scanned_once(tmp_path, monkeypatch):
    calls = scans(monkeypatch)
    monkeypatch.setattr(imagefolder, "SETTLED", -(10**12))  # ctime cannot be set back: call every folder settled
    fill(tmp_path, FILES)
    first = open_source(f"imagefolder:{tmp_path}")
    again = open_source(f"imagefolder:{tmp_path}")
    assert len(calls) == 1
    assert names_of(first) == names_of(again)
    assert [again.label(i) for i in range(len(again))] == [first.label(i) for i in range(len(first))]
    assert (tmp_path / imagefolder.INDEX).is_file()


def test_a_folder_that_has_just_changed_is_not_trusted(tmp_path, monkeypatch):
    calls = scans(monkeypatch)
    fill(tmp_path, FILES)  # its ctime is now, whatever its mtime says
    for _ in range(2):
        open_source(f"imagefolder:{tmp_path}")
    assert len(calls) == 2
    assert not (tmp_path / imagefolder.INDEX).exists()


@pytest.mark.parametrize("change", ["add", "remove", "rename", "deep", "class", "no class", "swap"])
def test_every_change_is_seen(tmp_path, monkeypatch, change):
    monkeypatch.setattr(imagefolder, "SETTLED", -(10**12))
    fill(tmp_path, FILES)
    open_source(f"imagefolder:{tmp_path}")
    time.sleep(0.02)  # more than a tick of the file system's clock
    if change == "add":
        fill(tmp_path, ["a/new.jpg"])
    elif change == "remove":
        (tmp_path / "b" / "2.jpg").unlink()
    elif change == "rename":
        (tmp_path / "b" / "2.jpg").rename(tmp_path / "b" / "3.jpg")
    elif change == "deep":
        fill(tmp_path, ["b/x/z/4.jpg"])
    elif change == "class":
        fill(tmp_path, ["aa/1.jpg"])
    elif change == "no class":
        (tmp_path / "c").rename(tmp_path / ".c")
    elif change == "swap":
        (tmp_path / "b" / "x").rename(tmp_path / "b" / "w")
    settle(tmp_path)  # mtimes are as before, as after `rsync -t` or `tar x`
    source = open_source(f"imagefolder:{tmp_path}")
    assert [(source.name(i), source.label(i)) for i in range(len(source))] == as_torchvision(tmp_path)
    assert all(os.path.exists(source.name(i)) for i in range(len(source)))


def test_damaged_indices_are_as_good_as_none(tmp_path, monkeypatch):
    monkeypatch.setattr(imagefolder, "SETTLED", -(10**12))
    fill(tmp_path, FILES)
    wanted = names_of(open_source(f"imagefolder:{tmp_path}"))
    index = tmp_path / imagefolder.INDEX
    good = index.read_bytes()
    calls = scans(monkeypatch)
    for k in [*range(0, len(good), 41), len(good) - 1]:
        index.write_bytes(good[:k] + bytes([good[k] ^ 1]) + good[k + 1 :])
        assert names_of(open_source(f"imagefolder:{tmp_path}")) == wanted
        index.write_bytes(good[:k])
        assert names_of(open_source(f"imagefolder:{tmp_path}")) == wanted
    assert len(calls) >= 20
    index.write_bytes(good)
    count = len(calls)
    open_source(f"imagefolder:{tmp_path}")
    assert len(calls) == count  # the control: undamaged, it is used


@pytest.mark.parametrize("forged", ["../../secret.jpg", "/etc/passwd", "folders", "numbers", "firsts", "nothing"])
def test_an_index_cannot_lead_elsewhere(tmp_path, monkeypatch, forged):
    monkeypatch.setattr(imagefolder, "SETTLED", -(10**12))
    root = fill(tmp_path / "root", ["a/1.jpg", "b/2.jpg"])
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    open_source(f"imagefolder:{root}")
    saved = saved_index.read(root / imagefolder.INDEX)
    arrays = dict(saved.arrays)
    if forged in ("folders", "numbers", "firsts"):
        if forged == "folders":
            other = Names.of(["a", "../x"])
            arrays |= {"folders": other.blob, "folder_ends": other.ends}
        elif forged == "numbers":
            arrays["class_numbers"] = arrays["class_numbers"] + 7
        else:
            arrays["firsts"] = arrays["firsts"] * 3
    elif forged == "nothing":
        arrays = {}
    else:
        other = Names.of([forged, "2.jpg"])
        arrays |= {"files": other.blob, "file_ends": other.ends}
    saved_index.save(saved._replace(arrays=arrays), root / imagefolder.INDEX)
    calls = scans(monkeypatch)
    source = open_source(f"imagefolder:{root}")
    assert len(calls) == 1
    assert names_of(source) == ["a/1.jpg", "b/2.jpg"]


def test_a_directory_that_takes_no_index(tmp_path, monkeypatch):
    """Root may write anywhere, so the index's own name is made to refuse it: first here, then in the cache as well."""
    monkeypatch.setattr(imagefolder, "SETTLED", -(10**12))
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    root = fill(tmp_path / "root", FILES)
    (root / imagefolder.INDEX).mkdir()
    calls = scans(monkeypatch)
    for _ in range(2):
        open_source(f"imagefolder:{root}")
    assert len(calls) == 1
    assert len(list((cache / "phalanx").iterdir())) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "root" / "note.jpg"))  # a file: nothing can be made below
    for _ in range(2):
        assert len(open_source(f"imagefolder:{root}")) == 7
    assert len(calls) == 3
    assert not list(root.glob("*.part"))


def test_a_fifo_in_place_of_the_index_does_not_hang(tmp_path):
    fill(tmp_path, FILES)
    os.mkfifo(tmp_path / imagefolder.INDEX)
    assert len(open_source(f"imagefolder:{tmp_path}")) == 7


def test_the_warning_comes_from_the_saved_index_too(tmp_path, monkeypatch):
    monkeypatch.setattr(imagefolder, "SETTLED", -(10**12))
    fill(tmp_path, ["a/1.jpg", "b/none.txt"])
    for _ in range(2):
        with pytest.warns(UserWarning, match="left out 1"):
            open_source(f"imagefolder:{tmp_path}")
    fill(tmp_path, ["b/1.jpg"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_source(f"imagefolder:{tmp_path}")
