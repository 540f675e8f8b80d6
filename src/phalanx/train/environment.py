"""Where a run ran: versions, hosts, schedule, command. The second thing that anybody asks about a number."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from typing import Any

import torch

import phalanx
from phalanx.comm.communicator import Communicator
from phalanx.schedule import to_text


def describe_environment(comm: Communicator) -> dict[str, Any]:
    """Plain data; the schedule as text, so that a report can draw it."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "versions": {
            "phalanx": phalanx.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "host": platform.node(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "ranks": comm.size,
        "hosts": comm.inter_size,
        "schedule": {"name": comm.schedule.name, "text": to_text(comm.schedule) if comm.size <= 64 else None},
    }
