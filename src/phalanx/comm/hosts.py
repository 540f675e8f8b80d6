"""Which ranks share a host: the kernel and the network namespace decide, not the host's name.

Names repeat (two machines called `localhost`), and several namespaces or containers share a kernel but not a network. So the key
is the kernel's boot id with the inode of the network namespace. Ranks with the same key can reach each other over loopback.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx._kernel import boot_id


def host_key() -> str:
    """A text that is equal on two ranks exactly when they share a kernel and a network."""
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
        """From the key of every rank."""
        found: dict[str, list[int]] = {}
        for rank, key in enumerate(keys):
            found.setdefault(key, []).append(rank)
        return Hosts(tuple(tuple(ranks) for ranks in found.values()))

    def place(self, rank: int) -> tuple[int, int]:
        """(inter_rank, intra_rank): the host's number, and the rank's number on it."""
        for number, ranks in enumerate(self.ranks):
            if rank in ranks:
                return number, ranks.index(rank)
        raise ValueError(f"rank {rank} is on none of {len(self.ranks)} hosts")

    @property
    def grid(self) -> tuple[int, int] | None:
        """(hosts, ranks per host) where that is a rectangle, else None."""
        widths = {len(ranks) for ranks in self.ranks}
        return (len(self.ranks), widths.pop()) if len(widths) == 1 else None
