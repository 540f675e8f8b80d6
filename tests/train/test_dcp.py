"""Directories of torch.distributed.checkpoint: ours are read by torch, torch's by us, bit for bit, and nothing in them is run."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import phalanx
from phalanx.comm.start import start_ranks
from phalanx.train.checkpoint import CheckpointError
from phalanx.train.checkpoint.dcp import load_dcp, read_dcp, save_dcp
from phalanx.train.checkpoint.dcp_metadata import parse_metadata

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.95)),
    "lars": lambda params: phalanx.Lars(params, lr=0.1),
}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5)).to(
        memory_format=torch.channels_last
    )


def trained(kind: str, *, named: bool = False, seed: int = 0, steps: int = 2):
    """A model and an optimizer in two groups, after some steps."""
    model = network(seed)
    params = list(model.named_parameters()) if named else list(model.parameters())
    optimizer = OPTIMIZERS[kind]([{"params": params[1:]}, {"params": params[:1], "weight_decay": 0.01}])
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def bits(value):
    """Nested state with tensors as their bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), bytes(flat.view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {key: bits(own) for key, own in value.items() if key not in ("param_names", "initial_lr")}
    return [bits(own) for own in value] if isinstance(value, list) else value


def theirs(path: Path, state: dict[str, object]) -> Path:
    """As plain torch writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path)
    return path


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_what_we_write_we_read(tmp_path, kind, named, steps):
    model, optimizer = trained(kind, named=named, steps=steps)
    progress = {"step": 7, "losses": [0.5, float("inf")], "best": None, "mean": torch.tensor(0.25, dtype=torch.float64)}
    save_dcp(tmp_path / "c", model=model, optimizer=optimizer, progress=progress)
    other, fresh = trained(kind, named=named, seed=1)
    found = {"step": 0}
    load_dcp(tmp_path / "c", model=other, optimizer=fresh, progress=found)
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert bits(fresh.state_dict()) == bits(optimizer.state_dict())
    assert bits(found) == bits(progress)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"], "nothing is left of the writing"


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_what_we_write_torch_reads(tmp_path, kind):
    model, optimizer = trained(kind)
    save_dcp(tmp_path / "c", model=model, optimizer=optimizer)
    other, fresh = trained(kind, seed=1)
    names, by_name = get_state_dict(other, fresh)
    state = {"model": names, "optimizer": by_name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "c")
    set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert bits(fresh.state_dict()) == bits(optimizer.state_dict())


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("wrapper", ["", "module.", "module._orig_mod."])
@pytest.mark.parametrize("by_name", [False, True])
def test_what_torch_writes_we_read(tmp_path, kind, wrapper, by_name):
    """Plain state dicts, those of get_state_dict, and those of a model inside DistributedDataParallel and torch.compile."""
    model, optimizer = trained(kind)
    names, own = get_state_dict(model, optimizer) if by_name else (model.state_dict(), optimizer.state_dict())
    theirs(tmp_path / "c", {"model": {wrapper + key: x for key, x in names.items()}, "optim": own, "epoch": 3})
    other, fresh = trained(kind, seed=1)
    load_dcp(tmp_path / "c", model=other, optim=fresh)
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert bits(fresh.state_dict()) == bits(optimizer.state_dict())
    assert read_dcp(tmp_path / "c", "epoch") == {"epoch": 3}


DTYPES = ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "uint16", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_every_type_and_shape(tmp_path, dtype, shape):
    x = torch.randn(shape).mul(3).to(getattr(torch, dtype))
    theirs(tmp_path / "c", {"x": x})
    assert bits(read_dcp(tmp_path / "c")) == bits({"x": x})


SHARDED = """
import faulthandler
faulthandler.dump_traceback_later(100, exit=True)  # it stood still once in many thousand runs
import os, sys, warnings, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
warnings.simplefilter("ignore")
kind, out = sys.argv[1:]
dist.init_process_group("gloo", f"file://{out}.store", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
whole = {key: x.clone() for key, x in model.state_dict().items()}
if kind == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    fully_shard(model)
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.ones(2, 7)).sum().backward()
opt.step()
if kind == "ddp":
    dcp.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, checkpoint_id=out)
else:
    names, own = get_state_dict(model, opt)
    dcp.save({"model": names, "optimizer": own}, checkpoint_id=out)
full = {key: (x.full_tensor() if hasattr(x, "full_tensor") else x).clone() for key, x in model.state_dict().items()}
momenta = [s["momentum_buffer"] for s in opt.state.values()]
momenta = [(x.full_tensor() if hasattr(x, "full_tensor") else x).clone() for x in momenta]
if dist.get_rank() == 0:
    torch.save({"model": full, "momenta": momenta}, out + ".pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(("kind", "ranks"), [("fsdp2", 2), ("fsdp2", 3), ("ddp", 2)])
def test_a_directory_of_plain_torch_on_several_ranks(tmp_path, kind, ranks):
    """FSDP2 writes shards from each rank, of unequal size; here there is one rank, and tensors are whole."""
    before = dict(os.environ)
    try:
        assert start_ranks(ranks, ["-c", SHARDED, kind, str(tmp_path / "c")]) == 0
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert len(list((tmp_path / "c").glob("*.distcp"))) == ranks
    wanted = torch.load(tmp_path / "c.pt", weights_only=True)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    load_dcp(tmp_path / "c", model=model, optimizer=optimizer)
    assert bits(list(model.state_dict().values())) == bits(list(wanted["model"].values()))
    assert bits([optimizer.state[p]["momentum_buffer"] for p in model.parameters()]) == bits(wanted["momenta"])


# ---- what does not fit, and what is damaged ------------------------------------------------------------------------------------


def test_another_model_changes_nothing(tmp_path):
    model, optimizer = trained("sgd")
    save_dcp(tmp_path / "c", model=model, optimizer=optimizer)
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError, match=r"(?s)nothing was loaded.*model.3.weight: only in the checkpoint"):
        load_dcp(tmp_path / "c", model=other)
    assert bits(other.state_dict()) == bits(before)
    with pytest.raises(CheckpointError, match="give the model along with it"):
        load_dcp(tmp_path / "c", optimizer=trained("sgd")[1])
    alone = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # the same parameters in one group
    with pytest.raises(CheckpointError, match="other groups of parameters"):
        load_dcp(tmp_path / "c", model=model, optimizer=alone)
    with pytest.raises(CheckpointError, match="has no net; it has model, optimizer"):
        load_dcp(tmp_path / "c", net=model)


def test_nothing_is_overwritten(tmp_path):
    save_dcp(tmp_path / "c", x=torch.ones(1))
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        save_dcp(tmp_path / "c", x=torch.zeros(1))
    assert read_dcp(tmp_path / "c")["x"].item() == 1
    (tmp_path / "empty").mkdir()
    save_dcp(tmp_path / "empty", x=torch.ones(1))
    with pytest.raises(CheckpointError, match="cannot write"):
        save_dcp("/proc/c", x=torch.ones(1))


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("where", ["metadata", "value"])
def test_nothing_in_it_is_executed(tmp_path, where):
    touched = tmp_path / "touched"
    path = tmp_path / "c"
    if where == "metadata":
        theirs(path, {"x": torch.ones(1)})
        (path / ".metadata").write_bytes(pickle.dumps(Evil(touched)))
    else:
        theirs(path, {"x": Evil(touched)})
    with pytest.raises(
        CheckpointError, match=r"names (posix|os).system" if where == "metadata" else "neither a tensor nor plain"
    ):
        read_dcp(path)
    assert not touched.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(dcp.CheckpointException):  # which is no Exception
            dcp.load({"x": torch.zeros(1) if where == "metadata" else None}, checkpoint_id=path)
    assert touched.exists(), "the control: torch's own reader runs it"


def damage(path: Path, how: str) -> None:
    (data,) = path.glob("*.distcp")
    match how:
        case "no metadata":
            (path / ".metadata").unlink()
        case "no data":
            data.unlink()
        case "cut data":
            data.write_bytes(data.read_bytes()[:-2000])
        case "cut metadata":
            metadata = path / ".metadata"
            metadata.write_bytes(metadata.read_bytes()[:-100])
        case "changed data":
            content = bytearray(data.read_bytes())
            content[100:140] = bytes(40)
            data.write_bytes(content)
        case "fifo":
            data.unlink()
            os.mkfifo(data)
        case "a path that leads out":
            metadata = path / ".metadata"
            metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"../../secret"))


@pytest.mark.parametrize(
    "how", ["no metadata", "no data", "cut data", "cut metadata", "changed data", "fifo", "a path that leads out"]
)
def test_damage_is_named(tmp_path, how):
    path = tmp_path / "c"
    theirs(path, {"a": torch.arange(1000.0), "b": torch.arange(1000.0)})
    damage(path, how)
    with pytest.raises(CheckpointError, match=str(path)):
        read_dcp(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"M\xe8\x03", b"M\xff\xff"), (b"M\xe8\x03", b"M\xe7\x03"), (b"float32", b"float64"), (b"float32", b"float99")],
)
def test_sizes_and_types_that_are_not_those_of_the_data(tmp_path, old, new):
    path = tmp_path / "c"
    theirs(path, {"a": torch.arange(1000.0)})
    metadata = path / ".metadata"
    assert old in metadata.read_bytes()
    metadata.write_bytes(metadata.read_bytes().replace(old, new))
    with pytest.raises(CheckpointError):
        read_dcp(path)


def test_a_copy_elsewhere_is_as_good(tmp_path):
    theirs(tmp_path / "c", {"a": {"b": [torch.ones(1), 2.5, "x"], "c": (1, 2)}})
    shutil.move(tmp_path / "c", tmp_path / "d")
    assert bits(read_dcp(tmp_path / "d")) == bits({"a": {"b": [torch.ones(1), 2.5, "x"], "c": (1, 2)}})
    assert parse_metadata((tmp_path / "d" / ".metadata").read_bytes()).tensors["a.b.0"].size == (1,)
