"""Find ranks with the same state and choose the writer: for every version of a tensor, the lowest rank that has it.

Data-parallel training has one version of the parameters and, with local batch normalisation, one of the running statistics per
rank; gossip has one of everything per replica. Ranks find out by comparing fingerprints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.envelope import bytes_of
from phalanx.train.checkpoint.entries import Entry
from phalanx.train.checkpoint.tree import Tensors

WIDTH = 1024  # words in a row of a fingerprint
SMALL = WIDTH * 8  # bytes up to which the content itself is hashed

Table = dict[str, str]  # fingerprints by name: of tensors, and of the structure of entries


def fingerprint(x: torch.Tensor) -> str:
    """A hash of the sums of all rows and all columns of the content's words, which differs for different contents.

    It is several times faster than hashing all bytes and runs on the device of `x`, because training pauses for it. Sums wrap
    around, so they are exact, and any difference within one row or one column shows.
    """
    flat = bytes_of(x.detach().contiguous())
    seen = hashlib.sha256(f"{x.dtype}{list(x.shape)}".encode())
    whole = 0 if flat.numel() <= SMALL else flat.numel() // SMALL * SMALL
    if whole:
        begin = flat[:whole]
        if begin.storage_offset() % 8:  # a view that begins in the middle of a word
            begin = begin.clone()
        words = begin.view(torch.int64).view(-1, WIDTH)
        sums = torch.cat([words.sum(0), words.sum(1)])
        seen.update(sums.cpu().numpy().tobytes())
    seen.update(flat[whole:].cpu().numpy().tobytes())
    return seen.hexdigest()


def tabulate(entries: Mapping[str, Entry]) -> Table:
    """The fingerprints of all tensors, and of the structure of every entry under its own name."""
    table = {}
    for name, entry in entries.items():
        structure = json.dumps([entry.kind, entry.tree, entry.shapes], allow_nan=False)
        table[structure_of(name)] = hashlib.sha256(structure.encode()).hexdigest()
        table |= {tensor: fingerprint(x) for tensor, x in entry.tensors.items()}
    return table


def structure_of(entry: str) -> str:
    """The table key of an entry's structure. The colon keeps it apart from names of tensors."""
    return f"{entry}:"


def compare(table: Table, comm: Communicator) -> list[Table]:
    """For every rank, its fingerprints that differ from rank 0's. Usually there are none, so little is sent."""
    first = comm.bcast_obj(table if comm.rank == 0 else None)
    return comm.allgather_obj({name: own for name, own in table.items() if first.get(name) != own})


def find_owners(deviations: Sequence[Table]) -> dict[str, tuple[int, ...]]:
    """For every name with several versions, the lowest rank with the same version as each rank."""
    owners = {}
    for name in sorted({name for deviation in deviations for name in deviation}):
        lowest: dict[str | None, int] = {None: 0}
        for rank, deviation in enumerate(deviations):
            lowest.setdefault(deviation.get(name), rank)
        owners[name] = tuple(lowest[deviation.get(name)] for deviation in deviations)
    return owners


def owns(rank: int, name: str, owners: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether `rank` writes its version of `name`."""
    return rank == (owners[name][rank] if name in owners else 0)


def own_tensors(rank: int, entries: Mapping[str, Entry], owners: Mapping[str, tuple[int, ...]]) -> Tensors:
    """The tensors that `rank` writes, not copied."""
    return {name: x for entry in entries.values() for name, x in entry.tensors.items() if owns(rank, name, owners)}
