"""What all readers of networks share: links as a list, bandwidths of buses, and the error."""

from __future__ import annotations

Links = list[tuple[int | str, int | str, float]]  # from, to, GB/s

MAX_NODES, MAX_LINKS = 4096, 200_000
NVLINK = 25.0  # GB/s per link and direction, since Volta
PCIE = {"PIX": 16.0, "PXB": 14.0, "PHB": 12.0, "NODE": 10.0, "SYS": 8.0}  # GB/s; roughly, of the bus between two GPUs


class FabricError(ValueError):
    """A network that makes no sense. The message names the line or the node."""
