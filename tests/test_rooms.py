"""The rooms of src/phalanx and the directions of their imports: who may know whom.

`violations` is a function of a file's place and its text, so that the checker itself is tested: by sources that it must reject.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "phalanx"
NATIVE = "phalanx._native"
COLLECTIVES_LIVE_IN = "comm/transports/torch.py"

# What a room may import besides itself and the standard library. Rooms are named by their path below phalanx.
ROOMS = {
    "schedule": {"": ()},
    "cluster": {"": ("phalanx.schedule", "numpy")},
    "comm": {"": ("phalanx.schedule", "torch", NATIVE), "launch": ("mpi4py",)},  # an mpirun over hosts tells no address
    "grad": {"": ("phalanx.comm", "torch"), "partners": ("phalanx.schedule",)},
    "optim": {
        "": ("torch",),
        "multi_node": ("phalanx.grad", "phalanx.comm"),
        "one_pass": ("phalanx.grad", "phalanx.comm"),
        "lars": ("phalanx.comm",),  # the door to the native core
        "gossip_step": ("phalanx.grad", "phalanx.comm"),
        "host_replica": ("phalanx.comm",),
        "host_step": ("phalanx.comm",),
    },
    "nn": {"": ("torch",), "batchnorm": ("phalanx.comm",)},
    "data": {
        "": ("phalanx.comm", "phalanx.schedule.printable", "torch", "numpy"),
        "image": ("simplejpeg", "PIL"),
    },  # the one place that decodes
    "train": {"": None},  # everything
    "cli": {"": None},
    "recipes": {"": ("phalanx.train", "phalanx.data", "phalanx.optim")},
}

# Functions of torch.distributed that communicate, or make what communicates, by how their names begin.
COLLECTIVES = (
    "all_", "allgather", "allreduce", "barrier", "batch_isend_irecv", "broadcast", "gather", "irecv", "isend",
    "monitored_barrier", "new_group", "new_subgroups", "P2POp", "recv", "reduce", "scatter", "send", "split_group",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mention:
    """Something that a source names by its full dotted name, and whether it was an import."""

    name: str
    line: int
    imported: bool


def mentions(path: str, source: str) -> Iterator[Mention]:
    """Every module that `source` imports, and every dotted name that it reaches through them, aliases resolved."""
    tree = ast.parse(source)
    package = ["phalanx", *Path(path).parent.parts]
    alias: dict[str, str] = {}

    def absolute(module: str) -> str:
        name = module.lstrip(".")
        level = len(module) - len(name)
        return ".".join([*package[: len(package) - level + 1], *([name] if name else [])]) if level else name

    def full(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return alias.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = full(node.value)
            return owner and f"{owner}.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
            owner, name = full(node.args[0]), node.args[1]
            return owner and f"{owner}.{name.value if isinstance(name, ast.Constant) else '*'}"
        return None

    nodes = sorted((n for n in ast.walk(tree) if hasattr(n, "lineno")), key=lambda n: (n.lineno, n.col_offset))
    for node in nodes:
        if isinstance(node, ast.Import):
            for item in node.names:
                alias[item.asname or item.name.split(".")[0]] = item.name if item.asname else item.name.split(".")[0]
                yield Mention(item.name, node.lineno, imported=True)
        elif isinstance(node, ast.ImportFrom):
            module = absolute("." * node.level + (node.module or ""))
            for item in node.names:
                alias[item.asname or item.name] = f"{module}.{item.name}"
                yield Mention(f"{module}.{item.name}", node.lineno, imported=True)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            if name := full(node.value):
                alias[node.targets[0].id] = name
        elif isinstance(node, ast.Attribute | ast.Call):
            if name := full(node):
                yield Mention(name, node.lineno, imported=False)
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
                target = node.args[0] if node.args else None
                if isinstance(target, ast.Constant):
                    name = absolute(target.value)
                elif Path(path).name == "__init__.py" and _begins_with_own_name(target):
                    name = ".".join(package)  # a room's table of lazy names reaches nothing but the room
                else:
                    name = "*"
                yield Mention(name, node.lineno, imported=True)


def _begins_with_own_name(target: ast.expr | None) -> bool:
    """Whether `target` is written f"{__name__}.{...}"."""
    return isinstance(target, ast.JoinedStr) and ast.unparse(target)[2:].startswith("{__name__}.")


def violations(path: str, source: str) -> list[str]:
    """What the file `path` (below src/phalanx) names although its room may not; empty if all is well."""
    room = path.split("/")[0]
    if "/" not in path:  # phalanx/__init__.py and its like: a table of names; it may load any room, and nothing else
        allowed: tuple[str, ...] | None = ("phalanx",)
    elif room not in ROOMS:
        return [f"{path}: no room is called {room}"]
    else:
        allowed = ROOMS[room][""]
        for file, more in ROOMS[room].items():
            if file and file in Path(path).with_suffix("").parts[1:]:
                allowed = (*allowed, *more)
        if allowed is not None:
            allowed = (*allowed, f"phalanx.{room}")

    found = []
    for m in mentions(path, source):
        standard = m.name.split(".")[0] in sys.stdlib_module_names
        lazy_table = path == "__init__.py" and m.name == "*"
        if m.imported and not standard and not lazy_table and allowed is not None and not _under(m.name, allowed):
            found.append(f"{path}:{m.line}: {room}/ may not import {m.name}")
        if _under(m.name, ("torch.distributed",)):
            if room != "comm":
                found.append(f"{path}:{m.line}: {m.name}: torch.distributed is named in comm/ alone")
            elif path != COLLECTIVES_LIVE_IN and m.name.rpartition(".")[2].startswith((*COLLECTIVES, "*")):
                found.append(f"{path}:{m.line}: {m.name}: collectives are named in {COLLECTIVES_LIVE_IN} alone")
    return found


def _under(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


FILES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))


def test_there_is_something_to_check():
    assert any(file.startswith("schedule/") for file in FILES)


@pytest.mark.parametrize("path", FILES)
def test_room_imports_only_what_it_may(path):
    assert violations(path, (PACKAGE / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        # directions
        ("schedule/ring.py", "import torch"),
        ("schedule/ring.py", "import numpy as np"),
        ("schedule/ring.py", "from phalanx.comm import run"),
        ("schedule/ring.py", "from ..comm.run import Runner"),
        ("schedule/ring.py", "from .. import comm"),
        ("schedule/ring.py", "import phalanx"),
        ("schedule/ring.py", "from phalanx import torus"),
        ("schedule/ring.py", "def f():\n    import torch"),
        ("schedule/ring.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("schedule/ring.py", "import importlib\nimportlib.import_module('torch')"),
        ("schedule/ring.py", "from importlib import import_module\nimport_module('..comm', __package__)"),
        ("schedule/ring.py", "from importlib import import_module\ndef f(name):\n    return import_module(name)"),
        ("schedule/ring.py", "__import__('torch')"),
        ("cluster/machine.py", "import torch"),
        ("cluster/machine.py", "from phalanx.comm import communicator"),
        ("comm/run.py", "from phalanx.cluster import simulate"),
        ("comm/run.py", "from phalanx.grad.arena import Arena"),
        ("comm/codec.py", "import msgpack"),
        ("comm/run.py", "from mpi4py import MPI"),
        ("grad/arena.py", "from phalanx.optim import lars"),
        ("grad/arena.py", "from phalanx.schedule import gossip"),
        ("optim/lars.py", "from phalanx.grad import allreduce"),
        ("optim/multi_node.py", "from phalanx.data import scatter"),
        ("nn/loss.py", "from phalanx.comm import Communicator"),
        ("data/loader.py", "from phalanx.train import config"),
        ("data/transforms.py", "import simplejpeg"),
        ("data/transforms.py", "def f():\n    from PIL import Image"),
        ("data/image.py", "import cv2"),
        ("data/__init__.py", "import importlib\nimportlib.import_module(f'phalanx.{name}')"),
        ("data/__init__.py", "import importlib\nimportlib.import_module(f'{__name__}{name}')"),
        ("data/loader.py", "import importlib\nimportlib.import_module(f'{__name__}.{name}')"),
        ("__init__.py", "import torch"),
        ("utils/misc.py", "import os"),
        # torch.distributed outside comm/
        ("grad/arena.py", "import torch.distributed as dist"),
        ("optim/lars.py", "from torch import distributed"),
        ("train/trainer.py", "from torch.distributed import all_reduce"),
        ("cli/train.py", "import torch\ntorch.distributed.barrier()"),
        ("nn/batchnorm.py", "import torch as t\nd = t.distributed"),
        ("nn/batchnorm.py", "import torch\ngetattr(torch, 'distributed')"),
        ("train/trainer.py", "from torch.distributed.run import main"),
        # collectives in comm/, but not in the one file
        ("comm/run.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("comm/run.py", "import torch.distributed as dist\ndist.isend(x, 1)"),
        ("comm/run.py", "import torch.distributed as dist\ndist.new_group([0, 1])"),
        ("comm/run.py", "import torch\ntorch.distributed.reduce_scatter_single(a, b)"),
        ("comm/run.py", "from torch import distributed as dist\nsend = dist.isend"),
        ("comm/run.py", "from torch.distributed import broadcast"),
        ("comm/run.py", "from torch.distributed import *"),
        ("comm/run.py", "from torch.distributed import distributed_c10d as c10d\nc10d.all_gather(a, b)"),
        ("comm/run.py", "import torch\nd = torch.distributed\nd.barrier()"),
        ("comm/run.py", "import torch.distributed as dist\ngetattr(dist, 'all_' + 'reduce')(x)"),
        ("comm/transports/local.py", "import torch.distributed as dist\ndist.recv(x)"),
    ],
)
def test_mutants_are_rejected(path, source):
    assert violations(path, source) != []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "schedule/ring.py",
            "from __future__ import annotations\nimport json\nfrom phalanx.schedule.ops import Move\nfrom .ops import Step",
        ),
        ("cluster/simulate.py", "import numpy as np\nfrom phalanx.schedule import lower"),
        (
            "comm/launch.py",
            "import torch.distributed as dist\ndist.init_process_group()\ndist.ReduceOp.SUM\ndist.is_initialized()",
        ),
        (
            "comm/run.py",
            "import torch\nfrom phalanx.schedule import lower\nfrom .transports.torch import Torch\nTorch().all_reduce(x)",
        ),
        ("comm/transports/torch.py", "import torch.distributed as dist\ndist.all_reduce(x)\ndist.new_group([0])"),
        ("comm/transports/shm.py", f"from {NATIVE} import all_reduce\nall_reduce(x)"),
        ("grad/allreduce.py", "import torch\nfrom phalanx.comm import Pending\nfrom .arena import Arena"),
        ("optim/multi_node.py", "from phalanx.grad import AllReduce\nfrom phalanx.optim.lars import Lars\nimport torch"),
        ("nn/batchnorm.py", "from phalanx.comm import Communicator\nimport torch"),
        ("data/sources/digits.py", "import numpy\nimport torch\nfrom phalanx.comm import Communicator"),
        ("data/image.py", "def f():\n    import simplejpeg\n    from PIL import Image"),
        ("data/__init__.py", "import importlib\nimportlib.import_module(f'{__name__}.{name}')"),
        ("train/trainer.py", "import phalanx\nfrom phalanx.grad import AllReduce\nimport matplotlib"),
        ("cli/train.py", "command = ['python', '-m', 'torch.distributed.run']"),
        (
            "__init__.py",
            "import importlib\nfrom phalanx.comm import Pending\ndef __getattr__(n):\n    return importlib.import_module(n)",
        ),
    ],
)
def test_what_the_design_allows_is_accepted(path, source):
    assert violations(path, source) == []
