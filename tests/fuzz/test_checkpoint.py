"""Checkpoints whose checksums are right and whose content is nonsense: damaged, passed over, and named; never another error."""

import hashlib
import json
import shutil
import warnings

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.harness import Parser, blocks, fuzz
from tests.fuzz.mutate import JSON
from tests.train.conftest import Training, same, save_two_steps

import phalanx
from phalanx import Checkpointer
from phalanx.schedule.plain_json import loads
from phalanx.train.checkpoint import CheckpointError
from phalanx.train.checkpoint.manifest import Manifest, Sum
from phalanx.train.checkpoint.tree import decode, encode, references, storable


def seal(body):
    """A manifest with this body, and the checksum of it."""
    text = body[:-1].rstrip() + b"\n}"
    return text[:-2] + f',\n "sha256": "{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()


def unsealed(data):
    return data[: data.rindex(b',\n "sha256"')] + b"\n}"


# ---- the manifest --------------------------------------------------------------------------------------------------------------

FILES = {"rank-00000.json": Sum(3, "0" * 64), "rank-00001.safetensors": Sum(5, "f" * 64)}
MANIFESTS = (
    Manifest(7, 2, {"pairs": [["seed", 1], ["lr", 0.1]]}, ("model", "optimizer"), FILES, {"model/w": (0, 1), "model:": (0, 0)}),
    Manifest(0, 1, None, ("x",), {"rank-00000.json": Sum(1, "a" * 64)}, {}),
)


def read_manifest(body):
    found = Manifest.from_bytes(seal(body))
    assert Manifest.from_bytes(found.to_bytes()) == found
    assert found.world >= 1
    assert [found.owner(name, found.world - 1) for name in ("model/w", "y")]


MANIFEST = Parser("manifest", read_manifest, (ValueError,), tuple(unsealed(m.to_bytes()) for m in MANIFESTS), JSON)


@pytest.mark.parametrize("cases", blocks())
def test_manifest(cases):
    assert set(fuzz(MANIFEST, cases)) == {"accepted", "refused"}


names = st.text(st.sampled_from("abcxyz_"), min_size=1, max_size=4)
sums = st.builds(Sum, st.integers(0, 2**50), st.text("0123456789abcdef", min_size=64, max_size=64))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_a_manifest_reads_back_equal(data, world):
    owners = st.dictionaries(names, st.lists(st.integers(0, world - 1), min_size=world, max_size=world).map(tuple), max_size=3)
    manifest = Manifest(
        data.draw(st.integers(0, 10**12)),
        world,
        encode(data.draw(st.dictionaries(st.text(), st.floats() | st.integers() | st.text())), "config")[0],
        tuple(data.draw(st.lists(names, unique=True))),
        {f"rank-{i:05}.json": own for i, own in enumerate(data.draw(st.lists(sums, max_size=3)))},
        data.draw(owners),
    )
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


# ---- the tree ------------------------------------------------------------------------------------------------------------------

VALUES = {
    "w": torch.arange(6.0).reshape(2, 3),
    "nested": [(1, 2.5, None), {"a": True, 3: "text", (1, 2): b"bytes"}, float("nan"), 2**80, torch.Size([2, 3])],
    "dense": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "odd": torch.zeros(3, dtype=torch.complex64),
    "scalar": numpy.float32(1.5),
    "array": numpy.arange(3, dtype=">i2"),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "empty": torch.empty(0, 3),
}
TREE, TENSORS = encode(VALUES, "state")
STORED = {name: storable(x).clone() for name, x in TENSORS.items()}
MODULE, MODULE_TENSORS = encode(torch.nn.BatchNorm1d(2).state_dict(), "module")
STORED |= {name: storable(x).clone() for name, x in MODULE_TENSORS.items()}


def read_tree(data):
    tree = loads(data)
    names = references(tree)
    decode(tree, {name: x for name, x in STORED.items() if name in names})


TREES = Parser("tree", read_tree, (ValueError,), (json.dumps(TREE).encode(), json.dumps(MODULE).encode()), JSON)


@pytest.mark.parametrize("cases", blocks())
def test_tree(cases):
    assert set(fuzz(TREES, cases)) == {"accepted", "refused"}


# ---- a directory ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of the steps 1 and 2, and what is in step 1."""
    directory = tmp_path_factory.mktemp("checkpoints")
    with phalanx.create_communicator() as comm, Checkpointer(directory, comm, config={"seed": 1}) as checkpoints:
        first = save_two_steps(checkpoints)
        yield directory, first, comm


def load(directory, comm, first):
    """The step that was loaded: of step 1 all is there, or nothing has changed."""
    training = Training()
    before = training.everything()
    with warnings.catch_warnings(), Checkpointer(directory, comm, config={"seed": 1}) as checkpoints:
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            step = checkpoints.load(**training.state)
        except CheckpointError:
            assert same(training.everything()["model"], before["model"])
            raise
    assert step in (1, 2)
    if step == 1:
        found = {k: v for k, v in training.everything().items() if k != "rng"}
        # torch's schedulers keep every attribute that a state once gave them: those of nonsense, too, beside the ones of step 1
        found["scheduler"] = {k: v for k, v in found["scheduler"].items() if k in first["scheduler"]}
        assert same(found, {k: v for k, v in first.items() if k != "rng"})


@pytest.mark.parametrize("cases", blocks(0.01, least=30))
@pytest.mark.parametrize("part", ["manifest.json", "rank-00000.json"])
def test_directory(saved, memory, part, cases):
    source, first, comm = saved
    directory = memory / f"{part}-{cases.start}"
    shutil.copytree(source, directory)
    manifest, other = directory / "step-000000002" / "manifest.json", directory / "step-000000002" / "rank-00000.json"
    body, structure = unsealed(manifest.read_bytes()), other.read_bytes()

    def read(data):
        if part == "manifest.json":
            manifest.write_bytes(seal(data))
        else:
            other.write_bytes(data)
            content = json.loads(body)
            content["files"]["rank-00000.json"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            manifest.write_bytes(seal(json.dumps(content, indent=1).encode()))
        load(directory, comm, first)

    seed = body if part == "manifest.json" else structure
    fuzz(Parser(f"checkpoint {part}", read, (CheckpointError,), (seed,), JSON), cases)
