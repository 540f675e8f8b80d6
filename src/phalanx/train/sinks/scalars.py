"""The numbers of a row, by the names that tools show.

    scalars({"kind": "evaluation", "step": 23, "top1": 0.98, "perplexity": 1.2})  ->  {"test/top-1": 0.98, "test/perplexity": 1.2}

A number without a name here keeps its own, so a task with other results needs no change.
"""

from __future__ import annotations

from phalanx.train.sinks.sink import Row
from phalanx.train.task import SPEED

GROUPS = {"interval": "train", "evaluation": "test"}
NAMES = {
    "rate": "learning rate",
    "top1": "top-1",
    "top5": "top-5",
    "wait_share": "speed/waiting",
    "overlapped_share": "speed/overlapped",
}
LEFT_OUT = {"step", "seconds", "groups"}  # axes of charts, and constants


def scalars(row: Row) -> dict[str, float]:
    """The numbers of an interval or an evaluation; other rows have none."""
    group = GROUPS.get(row["kind"])
    if group is None:
        return {}
    found = {}
    for key, value in row.items():
        if key == "times":
            found.update({f"step seconds/{part}": float(seconds) for part, seconds in value.items()})
        elif key not in LEFT_OUT and isinstance(value, int | float) and not isinstance(value, bool):
            name = f"speed/{key.replace('_', ' ')}" if key.endswith(SPEED) else NAMES.get(key, key.replace("_", " "))
            found[name if "/" in name else f"{group}/{name}"] = float(value)
    return found
