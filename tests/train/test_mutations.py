"""Mutations of a checkpoint, 500 in CI: each one is detected, nothing of it is loaded, and the one before it is used."""

import hashlib
import random
import shutil

import pytest
import torch
from tests.long import times
from tests.train.conftest import Training, same

import phalanx
from phalanx import Checkpointer

MUTATIONS = times(500, seldom=150)
RANKS = 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 1 and 2 by two ranks with different replicas, and what was in step 1."""
    directory = tmp_path_factory.mktemp("saved")

    def play(comm):
        training = Training()
        with torch.no_grad():
            training.model[0].weight += comm.rank
        with Checkpointer(directory, comm) as checkpoints:
            for step in (1, 2):
                training.average += step
                training.progress["step"] = step
                checkpoints.save(step, **training.state)
                if step == 1:
                    first = training.everything()
        return first

    return directory, phalanx.run_local(RANKS, play)[0]


EDITS = [
    ('"step": 2', '"step": 3'),
    ('"world": 2', '"world": 1'),
    ('"format": 1', '"format": 2'),
    ('"model",\n', ""),
    ('"size": ', '"size": 1'),
    ("rank-00001", "rank-00000"),
    ("rank-00000.json", "../rank-00000.json"),
    ("\n   1\n", "\n   0\n"),
    ("\n", "\r\n"),
    ("{", "{ "),
]
NONSENSE = [
    ('"world": 2', '"world": 1'),
    ('"world": 2', '"world": "2"'),
    ('"step": 2', '"step": null'),
    ('"format": 1', '"format": 2'),
    ('"entries": [', '"entrances": ['),
    ('"files": {', '"files": [], "x": {'),
    ("rank-00000.json", "/etc/hosts"),
    ("rank-00001.safetensors", "rank-00007.safetensors"),
    ("\n   1\n", "\n   7\n"),
    ("{", "[{"),
]


def flip(folder, rng):
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data) * 8)
    data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)
    return f"bit {at} of {path.name}"


def cut(folder, rng):
    path = rng.choice(sorted(folder.iterdir()))
    data = path.read_bytes()
    at = rng.choice([0, len(data) - 1, rng.randrange(len(data))])
    path.write_bytes(data[:at])
    return f"{path.name} cut at {at}"


def extend(folder, rng):
    path = rng.choice(sorted(folder.iterdir()))
    path.write_bytes(path.read_bytes() + bytes(rng.choice([[0], [10], [32] * 9])))
    return f"{path.name} extended"


def zero(folder, rng):
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.choice([1, 64, 4096]))
    if not any(data[at:end]):
        data[at] = 1
    else:
        data[at:end] = bytes(end - at)
    path.write_bytes(data)
    return f"bytes {at}:{end} of {path.name} overwritten"


def remove(folder, rng):
    path = rng.choice(sorted(folder.iterdir()))
    path.unlink()
    return f"{path.name} removed"


def swap(folder, rng):
    a, b = rng.sample(sorted(folder.iterdir()), 2)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    return f"{a.name} and {b.name} swapped"


def take_from_older(folder, rng):
    older = folder.with_name("step-000000001")
    changed = [path for path in sorted(folder.iterdir()) if path.read_bytes() != (older / path.name).read_bytes()]
    path = rng.choice(changed)
    shutil.copy(older / path.name, path)
    return f"{path.name} of step 1"


def edit(folder, rng):
    path = folder / "manifest.json"
    text = path.read_text()
    old, new = rng.choice(EDITS)
    assert old in text
    path.write_text(text.replace(old, new, 1), newline="")
    return f"manifest edited: {old!r} -> {new!r}"


KINDS = (flip, flip, flip, cut, extend, zero, remove, swap, take_from_older, edit)


@pytest.mark.filterwarnings("always::RuntimeWarning")
def test_every_mutation_is_detected(saved, tmp_path, comm):
    directory, wanted = saved
    rng = random.Random(2024)
    training = Training()
    with Checkpointer(directory, comm) as checkpoints:
        assert checkpoints.load(**training.state) == 2  # intact, as it is
    work = tmp_path / "work"
    shutil.copytree(directory, work)
    folder = work / "step-000000002"
    for number in range(MUTATIONS):
        told = KINDS[number % len(KINDS)](folder, rng)
        training.average.fill_(-1)
        with Checkpointer(work, comm) as checkpoints, pytest.warns(RuntimeWarning, match="damaged checkpoint.*step-000000002"):
            assert checkpoints.load(**training.state) == 1, told
        found = training.everything()
        for name in ("model", "optimizer", "scheduler", "average", "progress"):
            assert same(found[name], wanted[name]), (told, name)
        shutil.rmtree(folder)
        shutil.copytree(directory / folder.name, folder)


@pytest.mark.parametrize(("old", "new"), NONSENSE)
def test_a_manifest_with_a_valid_seal_and_nonsense_in_it_is_damage_too(saved, tmp_path, comm, old, new):
    work = tmp_path / "work"
    shutil.copytree(saved[0], work)
    path = work / "step-000000002" / "manifest.json"
    text = path.read_text()
    body = text[: text.rindex(',\n "sha256": "')] + "\n}"
    assert old in body
    body = body.replace(old, new, 1)
    path.write_text(f'{body[:-2]},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n')
    with Checkpointer(work, comm) as checkpoints, pytest.warns(RuntimeWarning, match="damaged checkpoint.*step-000000002"):
        assert checkpoints.load(**Training().state) == 1


def test_a_checkpoint_under_another_name_is_detected(saved, tmp_path, comm):
    directory, _ = saved
    shutil.copytree(directory / "step-000000001", tmp_path / "step-000000001")
    shutil.copytree(directory / "step-000000001", tmp_path / "step-000000009")
    training = Training()
    with (
        Checkpointer(tmp_path, comm) as checkpoints,
        pytest.warns(RuntimeWarning, match="is of step 1, in a directory of step 9"),
    ):
        assert checkpoints.load(**training.state) == 1
