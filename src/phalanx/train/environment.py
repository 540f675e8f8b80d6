"""The environment of a run: versions, hosts, schedule and command, without which its numbers mean little."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import phalanx
from phalanx.comm.communicator import Communicator
from phalanx.comm.launch import LaunchError, discover
from phalanx.comm.settings import AGENT
from phalanx.grad.gossip import level_of
from phalanx.schedule import Schedule, gossip, gossip_period, to_text
from phalanx.train.task import Task
from phalanx.train.update import CommConfig

DRAWN = 64  # ranks; larger schedules are not recorded as text


def describe_environment(comm: Communicator, config: CommConfig, task: Task, *, per_sample: int) -> dict[str, Any]:
    """The environment as plain data, with the schedule as text and the task's vocabulary for reports."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command(sys.argv),
        "launcher": launcher(),
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
        "schedule": describe_schedule(comm, config),
        "task": task.describe() | {"per_sample": per_sample},
    }


def launcher() -> str:
    """The launcher that started the ranks."""
    if AGENT in os.environ:
        return "phalanx"
    try:
        return discover().how
    except LaunchError:
        return "its own process group"


def command(argv: list[str]) -> list[str]:
    """The command of this process as you would type it, without a launcher."""
    program, *rest = argv or [""]
    path = Path(program)
    if path.name == "__main__.py":
        return ["python", "-m", path.parent.name, *rest]
    return ["python", program, *rest] if path.suffix == ".py" else [path.name, *rest]


def describe_schedule(comm: Communicator, config: CommConfig) -> dict[str, Any]:
    """The schedule that carries gradients or mixes replicas: its name, its participants, and its text if it is not too large."""
    schedule = schedule_of(comm, config)
    seats = level_of(comm, config.gossip) if config.sync == "gossip" else "rank"
    return {"name": schedule.name, "seats": seats, "text": to_text(schedule) if schedule.world <= DRAWN else None}


def schedule_of(comm: Communicator, config: CommConfig) -> Schedule:
    """The schedule that carries gradients or, with gossip, mixes replicas."""
    return first_rounds(comm, config) if config.sync == "gossip" else comm.schedule


def first_rounds(comm: Communicator, config: CommConfig) -> Schedule:
    """The gossip rounds until every rank's information has reached every other rank. Then partners rotate or repeat."""
    sync = config.gossip
    level = level_of(comm, sync)
    seats = comm.size if level == "rank" else comm.inter_size
    rounds = [gossip(seats, i, sync.topology, sync.seed, rotate=sync.rotate) for i in range(gossip_period(seats, sync.topology))]
    after = "then they rotate" if sync.rotate else "then these again"
    name = f"gossip of {seats} {level}s, {sync.topology}: partners of the first {len(rounds)} steps, {after}"
    return Schedule(name, seats, 1, tuple(step for own in rounds for step in own.steps), goal="mixing")
