"""Finds out which ranks share a host: by kernel and network namespace, not by the host's name.

Names repeat (two machines called `localhost`), and namespaces or containers may share a kernel but not a network. So the key is
the kernel's boot id and the inode of the network namespace. Ranks with the same key can reach each other over loopback.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx._kernel import boot_id


def host_key() -> str:
    """Return a text that is equal on two ranks exactly if they share a kernel and a network."""
    try:
        return f"{boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return f"{socket.gethostname()}/{uuid.getnode():x}"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The ranks of each host, hosts in the order of their lowest rank."""

    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(keys: Sequence[str]) -> Hosts:
        """Group the ranks by their keys."""
        found: dict[str, list[int]] = {}
        for rank, key in enumerate(keys):
            found.setdefault(key, []).append(rank)
        return Hosts(tuple(tuple(ranks) for ranks in found.values()))

    def place(self, rank: int) -> tuple[int, int]:
        """(inter_rank, intra_rank): the number of the host, and the number of the rank on it."""
        for number, ranks in enumerate(self.ranks):
            if rank in ranks:
                return number, ranks.index(rank)
        raise ValueError(f"rank {rank} is on none of {len(self.ranks)} hosts")

    @property
    def grid(self) -> tuple[int, int] | None:
        """(hosts, ranks per host), or None if hosts have different numbers of ranks."""
        widths = {len(ranks) for ranks in self.ranks}
        return (len(self.ranks), widths.pop()) if len(widths) == 1 else None
