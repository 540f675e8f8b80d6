"""The rooms of src/phalanx and the directions of their imports: who may know whom.

`violations` is a function of a file's place and its text, so that the checker itself is tested: by sources that it must reject.
"""

import ast
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "src" / "phalanx"
NATIVE = "phalanx._native"
COLLECTIVES_LIVE_IN = "comm/transports/torch/"
PRIVATE_NAMES_LIVE_IN = "_torch_private.py"
BACKEND_LIVES_IN = "backend/"  # a backend of torch.distributed: it has the names that torch calls
CONTENDERS_LIVE_IN = "bench/library.py"  # torch.distributed as what Phalanx is compared with
THEIR_CHECKPOINTS_LIVE_IN = "train/checkpoint/dcp_write.py"  # torch.distributed.checkpoint, a format of files
OTHERS_LIVE_IN = (CONTENDERS_LIVE_IN, THEIR_CHECKPOINTS_LIVE_IN)

# What a room may import besides itself and the standard library. Rooms are named by their path below phalanx.
ROOMS = {
    "schedule": {"": ()},
    "cluster": {"": ("phalanx.schedule", "numpy")},
    "native": {"": ("phalanx._kernel", "torch", NATIVE)},
    "comm": {
        "": ("phalanx._kernel", "phalanx.schedule", "phalanx.native", "torch"),
        "launch": ("mpi4py",),
    },  # an mpirun over hosts tells no address
    "backend": {"": ("phalanx.comm", "phalanx.native", "phalanx.schedule", "torch")},
    "grad": {"": ("phalanx.comm", "torch"), "partners": ("phalanx.schedule",), "low_rank": ("phalanx.native",)},
    "optim": {
        "": ("torch",),
        "lars": ("phalanx.native",),
        "create": ("phalanx.grad", "phalanx.comm"),
        "multi_node": ("phalanx.grad", "phalanx.comm"),
        "shared_state": ("phalanx.grad", "phalanx.comm"),
        "wrapped": ("phalanx.grad", "phalanx.comm"),
        "replica": ("phalanx.grad",),
        "averaged_step": ("phalanx.grad", "phalanx.comm"),
        "fused": ("phalanx.grad", "phalanx.comm"),
        "one_pass": ("phalanx.grad", "phalanx.comm", "phalanx.native"),
        "own_replica": ("phalanx.grad", "phalanx.comm"),
        "gossip_step": ("phalanx.grad", "phalanx.comm"),
        "local_step": ("phalanx.grad", "phalanx.comm"),
    },
    "nn": {"": ("torch",), "batchnorm": ("phalanx.comm",)},
    "data": {
        "": ("phalanx.comm", "phalanx.schedule.printable", "torch", "numpy"),
        "image": ("simplejpeg", "PIL"),
    },  # the one place that decodes
    "integrations": {
        "": ("phalanx.comm", "phalanx.grad", "phalanx.optim", "phalanx.nn", "phalanx.schedule", "torch"),
        "lightning": ("lightning",),
        "fabric": ("lightning",),
        "pytorch_lightning": ("pytorch_lightning",),
        "transformers": ("transformers",),
    },  # one file, one framework
    "train": {"": None},  # everything but ABOVE
    "bench": {"": None},
    "selftest": {"": None},
    "cli": {"": None},
    "recipes": {"": ("phalanx.train", "phalanx.data", "phalanx.optim")},
}

# What a room that may import everything else must not.
ABOVE = {
    "train": ("phalanx.bench", "phalanx.selftest", "phalanx.cli", "phalanx.integrations"),
    "bench": ("phalanx.selftest", "phalanx.cli", "phalanx.integrations"),
    "selftest": ("phalanx.cli", "phalanx.integrations"),
    "cli": ("phalanx.integrations",),
}

# Functions of torch.distributed that communicate, or make what communicates, by how their names begin.
COLLECTIVES = (
    "all_", "allgather", "allreduce", "barrier", "batch_isend_irecv", "broadcast", "gather", "irecv", "isend",
    "monitored_barrier", "new_group", "new_subgroups", "P2POp", "recv", "reduce", "scatter", "send", "split_group",
)  # fmt: skip


# What objects of torch have and do not promise to have: `x._version` names no module, so it is known by its attribute.
TORCH_TYPES = (torch.Tensor, torch.UntypedStorage, torch.Generator, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
PRIVATE_ATTRIBUTES = {name for each in TORCH_TYPES for name in dir(each) if name[0] == "_" != name[1]}


@dataclass(frozen=True, slots=True)
class Mention:
    """Something that a source names by its full dotted name, and whether it was an import."""

    name: str
    line: int
    imported: bool


@functools.lru_cache(maxsize=1)  # each source is looked at twice
def every_node(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def mentions(path: str, source: str) -> Iterator[Mention]:
    """Every module that `source` imports, and every dotted name that it reaches through them, aliases resolved."""
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

    nodes = sorted((n for n in every_node(source) if hasattr(n, "lineno")), key=lambda n: (n.lineno, n.col_offset))
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
    if path == PRIVATE_NAMES_LIVE_IN:
        allowed: tuple[str, ...] | None = ("torch",)
    elif "/" not in path:  # phalanx/__init__.py and its like: a table of names; it may load any room, and nothing else
        allowed = ("phalanx",)
    elif room not in ROOMS:
        return [f"{path}: no room is called {room}"]
    else:
        allowed = ROOMS[room][""]
        for file, more in ROOMS[room].items():
            if file and file in Path(path).with_suffix("").parts[1:]:
                allowed = (*allowed, *more)
        if allowed is not None:
            private = ("phalanx._torch_private",) if "torch" in allowed else ()
            allowed = (*allowed, *private, f"phalanx.{room}")

    named = list(mentions(path, source))
    found = []
    if path != PRIVATE_NAMES_LIVE_IN:
        found += [
            f"{path}:{line}: {name}: private names of torch live in {PRIVATE_NAMES_LIVE_IN} alone"
            for line, name in [*private_names(named), *private_attributes(source)]
        ]
    for m in named:
        standard = m.name.split(".")[0] in sys.stdlib_module_names
        lazy_table = path == "__init__.py" and m.name == "*"
        if m.imported and not standard and not lazy_table and allowed is not None and not _under(m.name, allowed):
            found.append(f"{path}:{m.line}: {room}/ may not import {m.name}")
        if m.imported and _under(m.name, ABOVE.get(room, ())):
            found.append(f"{path}:{m.line}: {room}/ may not import {m.name}, which is above it")
        if _under(m.name, ("torch.distributed",)) and path not in OTHERS_LIVE_IN and not path.startswith(BACKEND_LIVES_IN):
            if room not in ("comm", PRIVATE_NAMES_LIVE_IN):
                found.append(f"{path}:{m.line}: {m.name}: torch.distributed is named in comm/ alone")
            elif not path.startswith(COLLECTIVES_LIVE_IN) and m.name.rpartition(".")[2].startswith((*COLLECTIVES, "*")):
                found.append(f"{path}:{m.line}: {m.name}: collectives are named in {COLLECTIVES_LIVE_IN} alone")
    return found


def private_names(named: Iterable[Mention]) -> Iterator[tuple[int, str]]:
    """Those below torch's modules of which a part begins with one underscore."""
    for m in named:
        if _under(m.name, ("torch",)) and any(part[:1] == "_" != part[1:2] for part in m.name.split(".")):
            yield m.line, m.name


def private_attributes(source: str) -> Iterator[tuple[int, str]]:
    """Private attributes of torch's objects, also by getattr and its like; a class of ours may have some of the same name."""
    for node in every_node(source):
        name, owner = None, None
        if isinstance(node, ast.Attribute):
            name, owner = node.attr, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr"):
            owner, name = node.args[0], getattr(node.args[1], "value", None)
        if name in PRIVATE_ATTRIBUTES and not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
            yield node.lineno, ast.unparse(node)


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
        ("train/trainer.py", "from phalanx.cli import main"),
        ("train/trainer.py", "from phalanx.bench.record import processor"),
        ("bench/ranks.py", "from phalanx.cli.terminal import tell"),
        ("bench/ranks.py", "from phalanx.selftest.result import Check"),
        ("selftest/speed.py", "from phalanx.cli.terminal import tell"),
        ("selftest/speed.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("selftest/ordering.py", "import torch\ntorch.cuda._sleep(1)"),
        ("bench/train.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
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
        ("comm/transports/torch.py", "import torch.distributed as dist\ndist.recv(x)"),
        # private names of torch
        ("grad/engine.py", "import torch\ntorch._C._current_graph_task_id()"),
        ("grad/engine.py", "from torch import _C"),
        ("grad/engine.py", "import torch\ncore = torch._C"),
        ("grad/engine.py", "import torch\ngetattr(torch, '_foreach_add_')(xs, ys)"),
        ("grad/engine.py", "import torch\ntorch.autograd.Variable._execution_engine.queue_callback(f)"),
        ("grad/untouched.py", "def f(x):\n    return x._version"),
        ("grad/untouched.py", "def f(x):\n    return getattr(x, '_version')"),
        ("grad/untouched.py", "def f(x):\n    return x.untyped_storage()._cdata"),
        ("optim/lars.py", "import torch\ntorch._fused_sgd_(ws)"),
        ("optim/lars.py", "from torch.optim.optimizer import _global_optimizer_pre_hooks"),
        ("optim/lars.py", "from torch._utils import _flatten_dense_tensors"),
        ("optim/lars.py", "def f(optimizer):\n    return optimizer._optimizer_step_pre_hooks"),
        ("train/trainer.py", "import torch as t\nt._dynamo.reset()"),
        ("cli/train.py", "from torch import nn\nnn.modules.module._global_forward_hooks"),
        ("comm/transports/torch/transport.py", "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()"),
        ("schedule/ring.py", "from phalanx._torch_private import version_of"),  # it would bring torch
        ("_torch_private.py", "from phalanx.comm import Pending"),
        ("_other.py", "import torch"),
        ("_kernel.py", "import torch"),
        ("data/loader.py", "from phalanx._kernel import boot_id"),
        ("backend/engine.py", "from phalanx.grad import AllReduce"),
        ("comm/run.py", "from phalanx.backend import register"),
        ("integrations/plan.py", "import lightning"),
        ("integrations/lightning.py", "import transformers"),
        ("integrations/transformers.py", "import torch.distributed as dist"),
        ("integrations/transformers.py", "from phalanx.train import Checkpointer"),
        ("train/trainer.py", "from phalanx.integrations.plan import Plan"),
        ("cli/train.py", "from phalanx.integrations.plan import Plan"),
        ("optim/create.py", "from phalanx.integrations.plan import Plan"),
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
        ("comm/transports/torch/transport.py", "import torch.distributed as dist\ndist.all_reduce(x)\ndist.new_group([0])"),
        ("native/team.py", f"from {NATIVE} import all_reduce\nall_reduce(x)"),
        ("grad/allreduce.py", "import torch\nfrom phalanx.comm import Pending\nfrom .arena import Arena"),
        ("optim/multi_node.py", "from phalanx.grad import AllReduce\nfrom phalanx.optim.lars import Lars\nimport torch"),
        ("nn/batchnorm.py", "from phalanx.comm import Communicator\nimport torch"),
        ("data/sources/digits.py", "import numpy\nimport torch\nfrom phalanx.comm import Communicator"),
        ("data/image.py", "def f():\n    import simplejpeg\n    from PIL import Image"),
        ("data/__init__.py", "import importlib\nimportlib.import_module(f'{__name__}.{name}')"),
        ("train/trainer.py", "import phalanx\nfrom phalanx.grad import AllReduce\nimport matplotlib"),
        ("cli/train.py", "command = ['python', '-m', 'torch.distributed.run']"),
        ("grad/engine.py", "import torch\nfrom phalanx._torch_private import version_of\ntorch.__version__"),
        ("optim/lars.py", "class A:\n    def f(self):\n        self._version = 1\n        return self._cdata"),
        (
            "_torch_private.py",
            "import torch\nimport torch.distributed as dist\ntorch._C\ndist.distributed_c10d._get_default_store()",
        ),
        ("bench/library.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("selftest/speed.py", "from phalanx.bench.library import library_all_reduce\nimport torch"),
        ("backend/work.py", "import torch.distributed as dist\nfrom phalanx.comm import forks\ndist.ProcessGroup.barrier"),
        ("bench/ranks.py", "from phalanx.train.config import RunConfig\nfrom phalanx.comm.start import Ranks"),
        (
            "integrations/lightning.py",
            "from lightning.pytorch.strategies import DDPStrategy\nfrom phalanx.comm import Communicator",
        ),
        (
            "__init__.py",
            "import importlib\nfrom phalanx.comm import Pending\ndef __getattr__(n):\n    return importlib.import_module(n)",
        ),
    ],
)
def test_what_the_design_allows_is_accepted(path, source):
    assert violations(path, source) == []
