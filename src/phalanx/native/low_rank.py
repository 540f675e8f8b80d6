"""Arithmetic on a gradient matrix and its two thin ones: by the native core on a CPU, otherwise by torch.

`m` has rows x columns, `p` rows x rank, `q` rank x columns. All are contiguous float32 on one device.
"""

from __future__ import annotations

import torch

from phalanx.native import core

CACHED = 64 << 10  # numbers that stay in a core's cache while torch reads them several times


def advance(x: torch.Tensor | None, m: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
    """`m = m - p q + x`, then `p = m q'`. Without an `x` nothing is added. The core reads and writes each number once."""
    if _in_core(m):
        added, (rows, columns) = 0 if x is None else x.data_ptr(), m.shape
        core._native.advance_matrix(added, m.data_ptr(), p.data_ptr(), q.data_ptr(), rows, columns, p.shape[1])
        return
    m.addmm_(p, q, alpha=-1.0)
    if x is not None:
        m.add_(x)
    torch.mm(m, q.t(), out=p)


def expand(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor, factor: float) -> None:
    """`x = factor * p q`. On CPUs with the same bits everywhere, with the core and without it: each rank expands for itself."""
    if _in_core(x):
        rows, columns = x.shape
        core._native.expand_matrix(p.data_ptr(), q.data_ptr(), x.data_ptr(), rows, columns, p.shape[1], factor)
    elif x.is_cpu:
        together = max(1, CACHED // x.shape[1])
        for at in range(0, len(x), together):
            into, own = x[at : at + together], p[at : at + together]
            torch.mul(own[:, :1], q[:1], out=into)
            for k in range(1, p.shape[1]):
                into.add_(own[:, k : k + 1] * q[k : k + 1])
            into.mul_(factor)
    else:
        torch.mm(p, q if factor == 1 else q * factor, out=x)


def _in_core(x: torch.Tensor) -> bool:
    return core.is_native() and x.is_cpu
