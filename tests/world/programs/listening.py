"""At which addresses and ports a process listens, as the kernel has it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from pathlib import Path


def listeners(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports of all TCP sockets on which the process listens."""
    inodes = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                address, port = words[1].split(":")
                # words of 32 bits, each in the order of this machine
                raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
                found.append((str(ipaddress.ip_address(raw)), int(port, 16)))
    return found
