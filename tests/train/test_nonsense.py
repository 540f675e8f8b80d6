"""Checkpoints whose checksums are right and whose content is nonsense: damaged, named, and the one before is used."""

import hashlib
import json
import os
import re
import shutil
import stat
import threading

import numpy
import pytest
import torch
from tests.train.conftest import Training, same, save_two_steps

import phalanx
from phalanx import Checkpointer
from phalanx.train.checkpoint import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of the steps 1 and 2, and what is in step 1."""
    directory = tmp_path_factory.mktemp("saved")
    with phalanx.create_communicator() as comm, Checkpointer(directory, comm) as checkpoints:
        first = save_two_steps(checkpoints)
    return directory, first


@pytest.fixture
def broken(saved, tmp_path, comm):
    """Loads from a copy of the checkpoints of which step 2 is changed; what the warning says."""
    source, first = saved
    directory = tmp_path / "checkpoints"
    shutil.copytree(source, directory)

    def load(change):
        change(directory / "step-000000002")
        training = Training()
        with Checkpointer(directory, comm) as checkpoints, pytest.warns(RuntimeWarning, match="damaged checkpoint") as told:
            assert checkpoints.load(**training.state) == 1
        now = training.everything()
        assert all(same(now[name], first[name]) for name in ("model", "optimizer", "average", "progress"))
        return str(told[0].message)

    return load


def reseal(folder, body):
    """A manifest with this body, and the checksum of it."""
    text = (body if isinstance(body, str) else json.dumps(body, indent=1)).encode()
    (folder / "manifest.json").write_bytes(text[:-2] + f',\n "sha256": "{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode())


def body_of(folder):
    body = json.loads((folder / "manifest.json").read_bytes())
    del body["sha256"]
    return body


@pytest.mark.parametrize("world", [0, -1, 1.5, 10**18, "1", None, True, [1], 2**20 + 1])
def test_the_world_is_nonsense(broken, world):
    told = broken(lambda folder: reseal(folder, body_of(folder) | {"world": world}))
    assert "manifest.json: world is" in told


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"step": -2}, "step is -2"),
        ({"step": 2.0}, "step is 2.0"),
        ({"entries": "model"}, "entries are 'model'"),
        ({"entries": ["model", "model"]}, "a list of names"),
        ({"entries": [[]]}, "a list of names"),
        ({"files": None}, "files are None"),
        ({"files": {"rank-00000.json": None}}, "SHA-256"),
        ({"files": {"rank-00000.json": {"size": "1", "sha256": "0" * 64}}}, "the size of"),
        ({"files": {"rank-00000.json": {"size": 1, "sha256": 5}}}, "SHA-256"),
        ({"owners": []}, "owners are"),
        ({"owners": {"model:": 5}}, "are not 1 ranks"),
        ({"owners": {"model:": [0.0]}}, "are not 1 ranks"),
        ({"config": {"scalar": "<f4", "bytes": ""}}, "0 bytes"),
        ({"config": {"nothing": 1}}, "unknown tag"),
        ({"format": 2}, "format 2"),
    ],
)
def test_a_field_of_the_manifest_is_nonsense(broken, change, fact):
    told = broken(lambda folder: reseal(folder, body_of(folder) | change))
    assert "manifest.json: " in told
    assert fact in told


@pytest.mark.parametrize("depth", [250, 900, 100_000])
def test_the_manifest_is_deep(broken, depth):
    deep = "[" * depth + "]" * depth
    told = broken(
        lambda folder: reseal(folder, json.dumps(body_of(folder) | {"config": "DEEP"}, indent=1).replace('"DEEP"', deep))
    )
    assert "nested" in told


def with_entry(name, change):
    """Changes what rank 0 wrote of an entry, and says so in the manifest."""

    def apply(folder):
        path = folder / "rank-00000.json"
        content = json.loads(path.read_bytes())
        own = content["entries"][name]
        content["entries"][name] = change(own) if callable(change) else own | change
        data = json.dumps(content).encode()
        path.write_bytes(data)
        files = body_of(folder)["files"] | {path.name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
        reseal(folder, body_of(folder) | {"files": files})

    return apply


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


GROUP = {"pairs": [["lr", 0.1], ["params", [0, 1, 2, 3, 4]]]}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("progress", {"tree": {"scalar": "<f4", "bytes": ""}}),
        ("progress", {"tree": {"scalar": "S1000000000", "bytes": "00"}}),
        ("progress", {"tree": {"array": {"tensor": "average", "dtype": "float32", "shape": [6]}, "kind": "S1000000000"}}),
        ("progress", {"tree": {"tensor": "average", "dtype": "float32", "shape": [6], "stride": [10**12]}}),
        ("progress", {"tree": {"tensor": "nobody", "dtype": "float32", "shape": [6]}}),
        ("progress", {"tree": {"tensor": "average", "dtype": "quint8", "shape": [6]}}),
        ("progress", {"tree": {"pairs": [[["unhashable"], 1]]}}),
        ("progress", {"tree": deep(300)}),
        ("progress", {"tree": 5}),
        ("progress", {"kind": 5}),
        ("progress", {"shapes": 5}),
        ("progress", {"shapes": [5]}),
        ("progress", lambda own: None),
        ("progress", lambda own: {"kind": "data"}),
        ("average", {"tree": 5}),
        ("model", {"tree": 5}),
        ("model", {"tree": {"pairs": [[1, 2]]}}),
        ("optimizer", {"tree": None}),
        ("optimizer", {"tree": {"pairs": []}}),
        ("optimizer", {"tree": {"pairs": [["state", 5], ["param_groups", []]]}}),
        ("optimizer", {"tree": {"pairs": [["state", {"pairs": []}], ["param_groups", 5]]}}),
        ("optimizer", {"tree": {"pairs": [["state", {"pairs": []}], ["param_groups", [5]]]}}),
        ("optimizer", {"tree": {"pairs": [["state", {"pairs": []}], ["param_groups", [{"pairs": [["params", 5]]}]]]}}),
        ("optimizer", {"tree": {"pairs": [["state", {"pairs": []}], ["param_groups", [{"pairs": [["params", ["a"]]]}]]]}}),
        ("optimizer", {"tree": {"pairs": [["state", {"pairs": [[0, 5]]}], ["param_groups", [GROUP]]]}}),
        ("rng", {"tree": 5}),
        ("rng", {"tree": {"pairs": []}}),
        ("rng", {"tree": {"pairs": [["python", 1], ["numpy", 2], ["torch", 3]]}}),
    ],
)
def test_an_entry_is_nonsense(broken, name, change):
    told = broken(with_entry(name, change))
    assert "step-000000002" in told
    assert name in told or "nobody" in told


def test_a_structure_of_another_shape_is_damaged(broken):
    def change(folder):
        data = b"[" * 100_000
        (folder / "rank-00000.json").write_bytes(data)
        files = body_of(folder)["files"] | {"rank-00000.json": {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
        reseal(folder, body_of(folder) | {"files": files})

    assert "rank-00000.json: it is nested too deeply" in broken(change)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.json", "rank-00000.safetensors"])
def test_a_fifo_does_not_hang(broken, name):
    def change(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        if name != "manifest.json":
            files = body_of(folder)["files"]
            files[name]["size"] = 0
            reseal(folder, body_of(folder) | {"files": files})

    watchdog = threading.Timer(60, os._exit, [99])  # a hang inside open() ends the whole run otherwise, after minutes
    watchdog.start()
    try:
        assert f"{name}: not a regular file" in broken(change)
    finally:
        watchdog.cancel()


def test_all_ranks_fall_back_when_one_sees_nonsense(saved, tmp_path):
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved[0], directory)
    with_entry("rng", {"tree": {"pairs": []}})(directory / "step-000000002")

    def play(comm):
        x = {"step": 0}
        with Checkpointer(directory, comm) as checkpoints:
            return checkpoints.load(progress=x, **({"rng": Generators()} if comm.rank == 1 else {"rng": Anything()})), x["step"]

    with pytest.warns(RuntimeWarning, match=re.escape("rng does not take what was saved: ValueError: empty")):
        assert phalanx.run_local(2, play) == [(1, 1), (1, 1)]


class Anything:
    """Takes every state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Generators(Anything):
    """Takes those of `RandomState`, and touches nothing: ranks are threads here."""

    def state_dict(self):
        return {"python": 1}

    def load_state_dict(self, state):
        if not state:
            raise ValueError("empty")


def test_nonsense_everywhere_is_one_error(saved, tmp_path, comm):
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved[0], directory)
    for folder in directory.glob("step-*"):
        reseal(folder, body_of(folder) | {"world": 0})
    with Checkpointer(directory, comm) as checkpoints, pytest.warns(RuntimeWarning):  # noqa: SIM117
        with pytest.raises(CheckpointError, match=r"(?s)every checkpoint .* is damaged.*world is 0.*world is 0"):
            checkpoints.load(**Training().state)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o027])
def test_the_umask_decides_who_may_read(directory, comm, mask):
    before = os.umask(mask)
    try:
        with Checkpointer(directory, comm) as checkpoints:
            checkpoints.save(1, x=torch.ones(3))
    finally:
        os.umask(before)
    files = list((directory / "step-000000001").iterdir())
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~mask}


def test_arrays_of_any_byte_order_come_back(directory, comm):
    data = {"big": numpy.arange(5, dtype=">f8"), "little": numpy.arange(5, dtype="<i2"), "scalar": numpy.dtype(">i4").type(3)}
    with Checkpointer(directory, comm) as checkpoints:
        checkpoints.save(1, data=dict(data))
        back: dict = {}
        checkpoints.load(data=back)
    for name in ("big", "little"):
        assert back[name].dtype == data[name].dtype
        assert back[name].tolist() == data[name].tolist()
