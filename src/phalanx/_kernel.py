"""Which kernel this process runs on. Needs only the standard library, so any room can import it."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """A text that differs between any two running kernels; OSError where the kernel is not Linux."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
