"""Compares replicas, to find a bit that flipped in memory, or a script that treats its ranks differently.

After a step all ranks hold the same parameters and the same optimizer state, bit for bit. So they compare sums of their bits. One
number per rank shows whether they agree. Only if they don't, they exchange all sums, which name the rank and the tensors. With
three ranks or more the majority is right. With two, you cannot tell which one is right.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.envelope import bytes_of
from phalanx.comm.streams import HostCopy
from phalanx.comm.verdict import name_ranks
from phalanx.grad.replicas import ReplicaError, some

OptimizerState = Mapping[Any, Mapping[str, Any]]  # as in torch's optimizers
REASONS = (
    "They were equal at the first step. Usual reasons: gradients or parameters changed by hand on one rank, a checkpoint loaded "
    "on one rank, different learning rates, a step that one rank skipped; or, if your script does none of that, a bit that "
    "flipped in the memory of its host"
)
REMEDY = 'phalanx.bcast_parameters(model, comm) makes parameters equal again; AllReduce(on_difference="heal") copies what differs'


@dataclass(frozen=True, slots=True)
class Difference:
    """Ranks whose parameters or optimizer state differed from the others'.

    Args:
        step: The step after which it was found.
        ranks: The ranks that differ from the majority. Without a majority, all of them, because any of them may be right.
        tensors: The names of the tensors that differ.
        healed: Whether the ranks got the content of the majority, and training continued.
    """

    step: int
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    healed: bool = False


def bit_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bytes of `x`, eight at a time. It is exact, so equal contents have equal sums on any processor."""
    dense = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    flat = bytes_of(dense.contiguous())
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum()


def bit_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a number per tensor, on the device of the first, so that one copy to the host is enough."""
    return torch.stack([bit_sum(x).to(tensors[0].device) for x in tensors]) if tensors else torch.zeros(0, dtype=torch.int64)


def contents(names: Mapping[torch.nn.Parameter, str], state: OptimizerState) -> dict[str, torch.Tensor]:
    """Return everything that is equal on all ranks after a step: parameters, and the tensors of the optimizer's state."""
    found: dict[str, torch.Tensor] = {name: p.detach() for p, name in names.items()}
    for p, name in names.items():
        own = state.get(p, {})
        found |= {
            f"{key} of {name}": x for key, x in sorted(own.items()) if isinstance(x, torch.Tensor) and x.layout is torch.strided
        }
    return found


class Compared:
    """The result of a comparison: the largest sum of bits of any rank, and the largest negative one."""

    def __init__(self, step: int, ends: torch.Tensor) -> None:
        self.step = step
        self._ends = HostCopy(ends)

    def equal(self) -> bool:
        """Whether all ranks had the same sum."""
        return sum(self._ends.tolist()) % (1 << 64) == 0  # modulo 2**64, because the device computed them in 64 bits


def minority(every: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the ranks that differ from more than half of all, or None if no content has such a majority."""
    usual = max(every, key=every.count)
    if 2 * every.count(usual) <= len(every):
        return None
    return tuple(rank for rank, own in enumerate(every) if own != usual)


class Drift:
    """Compares the replicas of the ranks of `comm`. All ranks call it the same way."""

    def __init__(self, comm: Communicator, *, heals: bool) -> None:
        self._comm, self._heals = comm, heals
        self._compared: Compared | None = None  # on a GPU: the comparison whose result is still being copied to the host
        self.found: list[Difference] = []

    def check(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Raise ReplicaError, on all ranks, if replicas that started equal have become different, or heal them."""
        sums = bit_sums(list(tensors.values()))
        ends = self._comm.all_reduce(torch.stack([sums.sum(), -sums.sum()]), op="max")
        now = Compared(step, ends)
        if ends.is_cuda:  # read when the next one is made, so that the host does not wait for the device
            now, self._compared = self._compared or now, now
            if now is self._compared:
                return
        if not now.equal():
            self._judge(tensors, sums, now.step)

    def _judge(self, tensors: Mapping[str, torch.Tensor], sums: torch.Tensor, step: int) -> None:
        """Find out which ranks and tensors differ. Then raise or heal."""
        every = [tuple(own.tolist()) for own in self._comm.allgather(sums.cpu())]
        where = tuple(name for name, own in zip(tensors, zip(*every)) if len(set(own)) > 1)
        who = minority(every)
        same_tensors = len({len(own) for own in every}) == 1
        ranks = tuple(range(self._comm.size)) if who is None else who
        healed = self._heals and who is not None and same_tensors
        self.found.append(Difference(step, ranks, where, healed))
        what = "optimizer state" if all(" of " in name for name in where) else "parameters"
        if who is None:
            two = "With two ranks" if len(every) == 2 else f"Without a majority among {len(every)} ranks"
            others = tuple(rank for rank, own in enumerate(every) if own != every[0])
            raise ReplicaError(
                f"after step {step} the {what} of {name_ranks(others)} differ from rank 0's, in {some(where)}. {two} you cannot "
                f"tell which is right. {REASONS}. {REMEDY}, with three ranks or more"
            )
        differ = f"after step {step} the {what} of {name_ranks(who)} differ from the other ranks', in"
        if not healed:
            raise ReplicaError(f"{differ} {some(where)}. {REASONS}. {REMEDY}")
        source = next(rank for rank in range(self._comm.size) if rank not in who)
        for name in where:
            x = tensors[name]
            right = self._comm.bcast(x, source)
            with torch.no_grad():
                x.copy_(right)
        warnings.warn(f"{differ} {some(where)}. They got those of rank {source}, and training continues. {REASONS}", stacklevel=6)
