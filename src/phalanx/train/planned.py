"""A plan that `phalanx plan --json FILE` wrote, for a run to follow: its settings, and the cluster it was made for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.schedule.limits import MAX_RANKS
from phalanx.schedule.plain_json import brief, loads, read_number, read_text, read_whole
from phalanx.train.config import ConfigError, RunConfig

FILE = "plan.json"  # in the directory of a run that followed one
WIRES = {4: "none", 2: "float16"}


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The run that a plan describes. `content` is the whole plan, for the report."""

    path: Path
    ranks: int
    hosts: int
    batch: float
    settings: dict[str, str]  # by path, as `--set` takes them
    content: dict[str, Any]

    def check(self, config: RunConfig, ranks: int) -> None:
        """Raise if the plan was made for another run."""
        if ranks != self.ranks:
            raise ConfigError(
                f"{self.path} is for {self.ranks} ranks on {self.hosts} host(s), but there are {ranks} here: run it there, "
                f"or plan with --ranks {ranks}"
            )
        batches = sorted({stage.batch for stage in config.plan.stages})
        if self.batch not in batches:
            named = ", ".join(map(str, batches))
            raise ConfigError(
                f"{self.path} is a plan for a batch of {self.batch:g}, but the recipe has {named}: plan with that --batch"
            )


def read_plan(path: Path) -> PlannedRun:
    """Read a plan from a file. ConfigError if it is not a plan."""
    try:
        return parse_plan(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--plan {path}: {NOT_A_PLAN} (it is not UTF-8)") from None


NOT_A_PLAN = "not a plan as `phalanx plan --json FILE` writes it"
LARGEST = 1 << 53  # of a batch, or of a group's bytes


def parse_plan(text: str, path: Path) -> PlannedRun:
    """Parse a plan. ConfigError, which names `path`, if it is not a plan."""
    try:
        content = loads(text)
        hosts, per_host, batch, run = (content[name] for name in ("hosts", "per_host", "batch", "run"))
        ranks = read_whole(hosts, "hosts", 1, MAX_RANKS) * read_whole(per_host, "per_host", 1, MAX_RANKS)
        if ranks > MAX_RANKS:
            raise ValueError(f"{hosts} hosts of {per_host} ranks; at most {MAX_RANKS} ranks in all")
        return PlannedRun(path, ranks, hosts, float(read_number(batch, "batch", 1, LARGEST)), _settings(run, hosts), content)
    except KeyError as error:
        raise ConfigError(f"--plan {path}: {NOT_A_PLAN} (it has no {str(error)[:60]})") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--plan {path}: {NOT_A_PLAN} ({error})") from None


def _settings(run: dict[str, Any], hosts: int) -> dict[str, str]:
    schedule, sync = read_text(run["schedule"], "schedule", 100), run["sync"]
    if sync not in ("all-reduce", "after backward", "double buffering", "gossip"):
        raise ValueError(f"sync is {brief(sync)}; 'all-reduce', 'double buffering' or 'gossip'")
    settings = {"comm.wire": WIRES[run["wire_bytes"]]}
    if sync == "gossip":
        level = "host" if schedule.startswith("gossip-hosts") else "rank"
        return settings | {"comm.sync": "gossip", "comm.gossip.level": level}
    # on one host a ring is one call, which is the communicator's default
    algorithm = "none" if hosts == 1 and schedule.startswith("ring:") else schedule
    group = int(read_number(run["group_bytes"], "group_bytes", 1, LARGEST))
    settings |= {"comm.sync": "allreduce", "comm.algorithm": algorithm, "comm.bucket_bytes": str(group)}
    return settings | {"comm.double_buffering": "true" if sync == "double buffering" else "false"}
