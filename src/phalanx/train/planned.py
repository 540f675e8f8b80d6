"""A plan as `phalanx plan --json FILE` writes it, followed by a run: which settings it means, and for what it was made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.train.config import ConfigError, RunConfig

FILE = "plan.json"  # in the directory of a run that followed one
WIRES = {4: "none", 2: "float16"}


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What a plan says about a run. `content` is all of it, for the report."""

    path: Path
    ranks: int
    hosts: int
    batch: float
    settings: dict[str, str]  # by path, as `--set` takes them
    content: dict[str, Any]

    def check(self, config: RunConfig, ranks: int) -> None:
        """Raise where the plan is for another run than this."""
        if ranks != self.ranks:
            raise ConfigError(
                f"{self.path} is a plan for {self.ranks} ranks on {self.hosts} host(s), here are {ranks}: run it there, or plan"
                f" with --ranks {ranks}"
            )
        batches = sorted({stage.batch for stage in config.plan.stages})
        if self.batch not in batches:
            told = ", ".join(map(str, batches))
            raise ConfigError(
                f"{self.path} is a plan for a batch of {self.batch:g}, the recipe has {told}: plan with that --batch"
            )


def read_plan(path: Path) -> PlannedRun:
    """The plan in a file; ConfigError where it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        hosts, per_host, batch, run = (content[name] for name in ("hosts", "per_host", "batch", "run"))
        return PlannedRun(path, hosts * per_host, hosts, float(batch), _settings(run, hosts), content)
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--plan {path}: not a plan as `phalanx plan --json FILE` writes it ({error})") from None


def _settings(run: dict[str, Any], hosts: int) -> dict[str, str]:
    schedule, sync = str(run["schedule"]), run["sync"]
    settings = {"comm.wire": WIRES[run["wire_bytes"]]}
    if sync == "gossip":
        level = "host" if schedule.startswith("gossip-hosts") else "rank"
        return settings | {"comm.sync": "gossip", "comm.gossip.level": level}
    # on one host a ring is one call, which is what a communicator does without being told a schedule
    algorithm = "none" if hosts == 1 and schedule.startswith("ring:") else schedule
    settings |= {"comm.sync": "allreduce", "comm.algorithm": algorithm, "comm.bucket_bytes": str(int(run["group_bytes"]))}
    return settings | {"comm.double_buffering": "true" if sync == "double buffering" else "false"}
