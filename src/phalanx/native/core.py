"""Load the extension `phalanx._native`, or record why it is unavailable. It defines the numbers of dtypes and operations."""

from __future__ import annotations

import logging
import os
from enum import Enum

import torch

log = logging.getLogger("phalanx")

SWITCHED_OFF = "PHALANX_NATIVE=0"

try:
    from phalanx import _native as _native

    UNAVAILABLE = ""
    TYPES = {getattr(torch, name): number for number, name in enumerate(_native.TYPES)}
    TYPES[torch.bool] = TYPES[torch.uint8]
    OPS = {name: number for number, name in enumerate(_native.OPS)}
    BEGUN = _native.STATUSES.index("begun")  # the number of Status.BEGUN, kept because every call compares it
except ImportError as error:
    UNAVAILABLE = f"no native core ({error})"
    TYPES, OPS, BEGUN = {}, {}, -1
    if os.environ.get("PHALANX_NATIVE") != "0":  # no warning for a core that was switched off on purpose
        log.warning("phalanx: %s: ranks of one host talk through torch.distributed; pip install with a C++ compiler", UNAVAILABLE)


class Status(Enum):
    """How a call of the core ended, named as the extension names it."""

    OK = "ok"
    DISAGREE = "disagree"
    DEAD = "dead"
    LATE = "late"
    ABORTED = "aborted"
    INTERRUPTED = "interrupted"
    REFUSED = "refused"
    BEGUN = "begun"

    @staticmethod
    def of(number: int) -> Status:
        return Status(_native.STATUSES[number])


def is_native() -> bool:
    """Whether the native core is available and not disabled by PHALANX_NATIVE=0."""
    return not UNAVAILABLE and os.environ.get("PHALANX_NATIVE") != "0"
