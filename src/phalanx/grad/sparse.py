"""Averages sparse gradients for torch.optim.SparseAdam, which accepts no others: ranks gather indices and values.

For every other optimizer a sparse gradient is made dense and sent with the rest. The optimizer computes the same from zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.comm.communicator import Communicator


def wants_sparse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer refuses dense gradients."""
    return isinstance(optimizer, torch.optim.SparseAdam)


def average_sparse(params: Sequence[torch.nn.Parameter], comm: Communicator) -> None:
    """Replace every sparse gradient by its mean over the ranks. A missing one counts as empty. All ranks call it."""
    for p in params:
        mine = _coalesced(p)
        indices, values = comm.allgather(mine.indices()), comm.allgather(mine.values())
        total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values) / comm.size, p.shape, check_invariants=False)
        p.grad = total.coalesce()


def _coalesced(p: torch.nn.Parameter) -> torch.Tensor:
    if p.grad is None:
        rows = torch.empty(1, 0, dtype=torch.int64, device=p.device)
        return torch.sparse_coo_tensor(rows, p.new_empty(0, *p.shape[1:]), p.shape, check_invariants=False).coalesce()
    if p.grad.layout is not torch.sparse_coo:
        raise ValueError(f"SparseAdam needs sparse gradients, got a dense one for a parameter of shape {tuple(p.shape)}")
    return p.grad.detach().coalesce()
