"""Simulated CUDA: several GPUs with NCCL in one process, for tests. Torch has them inside `with simulated(...)`.

    with simulated(hosts=2, gpus_per_host=2, seed=7):
        launch(4, lambda comm: comm.all_reduce(torch.ones(3, device="cuda")))     # the product's own code, rank by rank

What a GPU does is queued and runs later, in an order that the seed decides among all that streams, events and NCCL allow:

    program         tensor.py, kernels.py      queues                         step() picks a ready head
    y = x * 2   ->  y has a shape, no values   stream 1: [mul] [record a]  ->  y has values now
    comm stream     streams, events            stream 2: [wait a] [all_reduce, rank 0 of 2]
    del x           memory.py                  stream 1: ... [fill x with NaN]; the next tensor gets its memory

Three things are wrong with a program that is wrong: its values for some seed, its order for every seed (order.py finds accesses
that nothing orders), or what it asks of the host (`Process.syncs`, `Process.contexts`). A seed replays all of it, threads too.

    conductor.py, host_threads.py    ranks and their threads take turns, on a clock that jumps over waits
    simulation.py, device.py         processes, devices, streams, events; what runs next
    memory.py, order.py              the allocator; which accesses are ordered
    tensor.py, kernels.py            a tensor on a device, and what its operations become
    copies.py, functions.py          host and device; `device="cuda"` in torch's functions
    cuda.py, autograd.py             torch.cuda; the thread of backward
    nccl.py, gloo.py, store.py       what carries bytes
    groups.py, collectives.py, distributed.py    torch.distributed
    launch.py                        ranks of a job, with the product's communicator
    training.py, verbs.py, scenarios.py, mutants.py    programs to run on it, and mistakes to find

It knows nothing of speed, of a GPU's own arithmetic, and of kernels that read outside of their tensors. A backward runs on the
stream of its caller, except where gradients are added to parameters (autograd.py).

Everything that is replaced in torch is listed below, and put back at the end.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from tests.simulated_cuda import autograd, cuda, functions
from tests.simulated_cuda.conductor import here
from tests.simulated_cuda.simulation import Simulation, _current
from tests.simulated_cuda.tensor import CudaTensor
from torch.utils._device import _device_constructors

from phalanx.train.checkpoint import tree


@contextlib.contextmanager
def simulated(*, hosts: int = 1, gpus_per_host: int = 2, seed: int = 0, one_nccl_kernel: bool = True) -> Iterator[Simulation]:
    """Inside, the calling thread is rank 0 on host 0; `launch` starts more. Errors of the program are raised at the end."""
    made = Simulation(hosts=hosts, gpus=gpus_per_host, seed=seed, one_nccl_kernel=one_nccl_kernel)
    _current.append(made)
    collecting = gc.isenabled()
    gc.disable()  # tensors die where the program drops them, in every replay
    made.conductor.enter("rank 0", made.process(0))
    try:
        with contextlib.ExitStack() as patches:
            for owner, name, value in _replacements(made):
                patches.enter_context(_replaced(owner, name, value))
            patches.callback(
                torch.__future__.set_swap_module_params_on_conversion, torch.__future__.get_swap_module_params_on_conversion()
            )
            torch.__future__.set_swap_module_params_on_conversion(True)  # model.cuda() keeps its parameters
            yield made
            made.conductor.end()
        made.over = True
        if made.errors:
            raise made.errors[0]
    except BaseException as error:
        made.over = True
        with contextlib.suppress(BaseException):
            made.conductor.end()
        if made.errors and error is not made.errors[0]:
            raise made.errors[0] from error  # what the program raised may be a consequence
        raise
    finally:
        _device_constructors.cache_clear()  # of `with torch.device("meta")`: it has seen our factories
        here.thread = None
        _current.pop()
        if collecting:
            gc.enable()


def _replacements(made: Simulation) -> Iterator[tuple[Any, str, Any]]:
    for name, value in cuda.NAMES.items():
        yield torch.cuda, name, value
    yield from functions.replacements()
    yield torch.accelerator, "is_available", lambda: True
    yield tree, "DENSE", (torch.Tensor, CudaTensor)  # of the product: what has memory of its own is saved
    yield torch.autograd, "_engine_run_backward", autograd.run_backward
    yield torch.cuda.amp.common, "amp_definitely_not_available", lambda: False
    optimizer = sys.modules["torch.optim.optimizer"]  # its name in torch.optim is deleted
    yield optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, CudaTensor]  # type: ignore[attr-defined]
    yield torch, "autocast", _autocast
    yield torch.amp, "autocast", _autocast


_MISSING = object()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


_real_autocast = torch.autocast


class _autocast(_real_autocast):  # noqa: N801
    """torch.autocast("cuda"): to C++ our tensors are on the CPU, so it is the CPU's list of operations.

    Without its cache, which has one lock for all threads: a rank would hold it while another has its turn.
    """

    def __init__(
        self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().__init__(device_type, dtype, enabled, False)
