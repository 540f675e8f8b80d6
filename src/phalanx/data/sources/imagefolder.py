"""One folder of images per class, as ImageNet is published and as torchvision's ImageFolder reads it.

    DIR/train/n01440764/n01440764_10026.JPEG        with train/ and val/ (or validation/, test/) below DIR,
    DIR/n01440764/n01440764_10026.JPEG              or without: then all of DIR is for training

Classes are numbered in the order of their names; the files of a class come in torchvision's order, including subfolders. Held-out
classes have the numbers of train/. Scanning a million files takes seconds on a local disk and minutes on a network. So it is done
once, and the index is saved (saved_index.py) with the times of all folders, which change when files are added or removed.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from phalanx.data.source import HELD_OUT, Skipped, SourceError, at
from phalanx.data.sources import saved_index
from phalanx.data.sources.files import (
    EXTENSIONS,
    NOT_THE_FILES_FAULT,
    WHY_UNREAD,
    Names,
    is_image,
    is_unread,
    read_regular,
)

INDEX = ".phalanx-index"
SETTLED = 2 * 10**9  # ns: a folder changed this recently may change again within one clock tick, unnoticed
MAX_DEPTH = 32  # of folders within a class; a deeper one means a link cycle


@dataclass(frozen=True)
class Folder:
    """One folder with images: its path below the root, the number of its class, its stamp, and its files."""

    path: str
    class_number: int
    stamp: tuple[int, int, int]
    files: tuple[str, ...]


@dataclass(frozen=True)
class ImageFolder:
    """The files of one root, by number: an `Encoded` source."""

    root: str
    classes: tuple[str, ...]
    folders: tuple[str, ...]  # in order, and for each:
    class_numbers: np.ndarray = field(repr=False)  # the number of its class in `classes`
    firsts: np.ndarray = field(repr=False)  # the number of its first file; one more at the end
    files: Names = field(repr=False)
    skipped: Skipped

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: SupportsIndex) -> tuple[bytes, int]:
        return self.read(i), self.label(i)

    def _folder_of(self, k: int) -> int:
        return int(np.searchsorted(self.firsts, k, "right")) - 1

    def name(self, i: SupportsIndex) -> str:
        k = at(i, len(self))
        return os.path.join(self.root, self.folders[self._folder_of(k)], self.files[k])

    def label(self, i: SupportsIndex) -> int:
        return int(self.class_numbers[self._folder_of(at(i, len(self)))])

    def read(self, i: SupportsIndex) -> bytes:
        from phalanx.data.image import BadSample

        name = self.name(i)
        try:
            data = read_regular(name)
        except OSError as error:
            if error.errno in NOT_THE_FILES_FAULT:
                raise
            raise BadSample(name, error.strerror or str(error)) from None
        if not data:
            raise BadSample(name, "an empty file")
        return data


def load(directory: str, split: str) -> ImageFolder:
    """Open the images of a split. The top of this file describes `directory`."""
    top = Path(directory).expanduser()
    spec = f"imagefolder:{directory}"
    if not top.is_dir():
        raise SourceError(f"{spec}: no such directory; wanted one with a folder of images per class, or with train/ and val/")
    train = top / "train"
    has_train = train.is_dir()
    if split == "train":
        return open_root(train if has_train else top, None, spec)
    wanted = [split, *(name for name in HELD_OUT if name != split)]
    held_out = next((top / name for name in wanted if (top / name).is_dir()), None)
    if held_out is None:
        raise SourceError(f"{spec}: nothing is held out: looked for {', '.join(f'{name}/' for name in wanted)} below it")
    return open_root(held_out, list_classes(train) if has_train else None, spec)


def open_root(root: Path, classes: tuple[str, ...] | None, spec: str) -> ImageFolder:
    """Open the images below `root`, labelled by their index in `classes`, or in its own folders if None."""
    try:
        own = list_classes(root)
        if not own:
            raise SourceError(f"{spec}: {root} has no folders: wanted one per class, with images in it")
        saved = _saved(root, own)
        if saved is None:
            began = time.time_ns()
            folders, skipped = scan(root, own)
            saved = _to_save(own, folders, skipped)
            if all(max(folder.stamp[:2]) < began - SETTLED for folder in folders):
                saved_index.save(saved, root / INDEX)
    except OSError as error:
        raise SourceError(f"{spec}: cannot list {error.filename}: {error.strerror}") from None
    source = _from_saved(saved, root, own, classes if classes is not None else own, spec)
    source.skipped.warn(spec)
    return source


def list_classes(root: Path) -> tuple[str, ...]:
    """The folders of `root` by name; those that begin with a dot are not classes."""
    with os.scandir(root) as entries:
        return tuple(sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()))


def scan(root: Path, classes: tuple[str, ...]) -> tuple[list[Folder], Skipped]:
    """Every folder of every class, and what was left out."""
    folders: list[Folder] = []
    skipped = Skipped()
    for number, name in enumerate(classes):
        found: list[Folder] = []
        waiting = [name]
        while waiting:
            path = waiting.pop()
            if path.count("/") > MAX_DEPTH:
                raise SourceError(f"{root}: {path}: more than {MAX_DEPTH} folders deep: does a link lead back?")
            stamp = _stamp(root / path)  # before the listing, so that a change in between makes it outdated
            files = []
            with os.scandir(root / path) as entries:
                for entry in entries:
                    if is_image(entry.name) and entry.is_file():
                        files.append(entry.name)
                    elif entry.name.startswith("."):
                        continue
                    elif entry.is_dir():
                        waiting.append(f"{path}/{entry.name}")
                    elif is_unread(entry.name):
                        skipped = skipped.plus(f"{root}/{path}/{entry.name}", WHY_UNREAD)
                    elif is_image(entry.name):
                        skipped = skipped.plus(f"{root}/{path}/{entry.name}", "neither a file nor a link to one")
            found.append(Folder(path, number, stamp, tuple(sorted(files))))
        if not any(folder.files for folder in found):
            skipped = skipped.plus(f"{root}/{name}", f"a class without an image ({' '.join(sorted(EXTENSIONS))})")
        folders += sorted(found, key=lambda folder: folder.path)
    return folders, skipped


def _stamp(path: Path) -> tuple[int, int, int]:
    about = os.stat(path)
    return about.st_mtime_ns, about.st_ctime_ns, about.st_ino


def _to_save(classes: tuple[str, ...], folders: list[Folder], skipped: Skipped) -> saved_index.Saved:
    names = Names.of(name for folder in folders for name in folder.files)
    paths = Names.of(folder.path for folder in folders)
    return saved_index.Saved(
        stamp="imagefolder",  # the stamps of folders are an array: there may be many
        facts={"classes": list(classes), "skipped": [skipped.count, skipped.examples]},
        arrays={
            "folders": paths.blob,
            "folder_ends": paths.ends,
            "stamps": np.array([folder.stamp for folder in folders], np.int64).reshape(-1),
            "class_numbers": np.array([folder.class_number for folder in folders], np.int32),
            "firsts": np.cumsum([0, *(len(folder.files) for folder in folders)], dtype=np.int64),
            "files": names.blob,
            "file_ends": names.ends,
        },
    )


def _saved(root: Path, classes: tuple[str, ...]) -> saved_index.Saved | None:
    """The saved index, if it has these classes and no folder has changed since."""
    for path in saved_index.places(root / INDEX):
        saved = saved_index.read(path)
        try:
            if saved is not None and _is_current(saved, root, classes):
                return saved
        except (ValueError, KeyError, TypeError, IndexError, OSError):  # another format, or a folder is gone
            continue
    return None


def _is_current(saved: saved_index.Saved, root: Path, classes: tuple[str, ...]) -> bool:
    arrays = saved.arrays
    if saved.stamp != "imagefolder" or tuple(saved.facts["classes"]) != classes:
        return False
    paths, files = Names(arrays["folders"], arrays["folder_ends"]), Names(arrays["files"], arrays["file_ends"])
    stamps, numbers, firsts = arrays["stamps"].reshape(-1, 3), arrays["class_numbers"], arrays["firsts"]
    if not len(paths) == len(stamps) == len(numbers) == len(firsts) - 1 or set(range(len(classes))) != set(numbers.tolist()):
        return False
    if int(firsts[0]) != 0 or int(firsts[-1]) != len(files) or bool((np.diff(firsts) < 0).any()):
        return False
    if bool((files.blob == ord("/")).any()):  # file names only: an index must not point outside its folder
        return False
    for i in range(len(paths)):
        path = paths[i]
        if path.split("/")[0] != classes[int(numbers[i])] or ".." in path.split("/"):
            return False
        if _stamp(root / path) != tuple(stamps[i].tolist()):
            return False
    saved_index.read_skipped(saved.facts["skipped"])
    return True


def _from_saved(saved: saved_index.Saved, root: Path, own: tuple[str, ...], classes: tuple[str, ...], spec: str) -> ImageFolder:
    number_of = {name: number for number, name in enumerate(classes)}
    strangers = [name for name in own if name not in number_of]
    if strangers:
        raise SourceError(
            f"{spec}: {root} has {len(strangers)} classes that train/ does not have, such as {strangers[0]!r}: "
            "they have no number"
        )
    arrays = saved.arrays
    paths, files = Names(arrays["folders"], arrays["folder_ends"]), Names(arrays["files"], arrays["file_ends"])
    if not len(files):
        extensions = " ".join(sorted(EXTENSIONS))
        raise SourceError(f"{spec}: no image in the {len(own)} folders of {root}; they are known by {extensions}")
    numbers = np.array([number_of[name] for name in own], np.int32)[arrays["class_numbers"]]
    folders = tuple(paths[i] for i in range(len(paths)))
    skipped = saved_index.read_skipped(saved.facts["skipped"])
    return ImageFolder(str(root), classes, folders, numbers, arrays["firsts"], files, skipped)
