"""Format seconds. In its own file, because the report does not import torch."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`5.2 s`, `3:05 min`, `1:02:03 h`."""
    whole = round(seconds)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d} h"
