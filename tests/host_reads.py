"""What would make the host wait for a GPU, counted on CPU tensors: reads of a value, and copies from ordinary host memory.

    with HostReads() as reads:
        optimizer.step()
    assert reads.seen == []

It sees this thread. Whatever it finds on the CPU happens on a GPU as well, where it costs an empty queue.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "equal", "allclose", "__array__"}
COPIES = {"tensor", "as_tensor", "from_numpy"}  # from host memory that is not pinned


class HostReads:
    """Inside it, `seen` collects the names of calls that read values of tensors, or copy them from ordinary memory."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> HostReads:
        self._stack.enter_context(_Functions(self.seen))
        self._stack.enter_context(_Dispatch(self.seen))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


class _Functions(TorchFunctionMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS or name in COPIES:
            self._seen.append(resolve_name(func) or name)
        if name == "__setitem__" and isinstance(args[1], int) and not isinstance(args[2], torch.Tensor):
            self._seen.append("x[i] = a number, which torch copies to the device and waits: use fill_")
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # item, bool, float, int
            self._seen.append("a value of a tensor")
        return func(*args, **(kwargs or {}))
