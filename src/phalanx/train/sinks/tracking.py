"""DIR/tracking.json: the ids of a run in other tools, so that a resumed run continues there."""

from __future__ import annotations

from pathlib import Path

from phalanx.schedule.plain_json import loads
from phalanx.train.rows import write_json
from phalanx.train.sinks.sink import RunFacts

FILE = "tracking.json"


def recall(facts: RunFacts, tool: str) -> str | None:
    """The id that an earlier start of this run got from `tool`."""
    if facts.out is None or not facts.resume:
        return None
    found = _read(facts.out / FILE).get(tool)
    return found if isinstance(found, str) else None


def remember(facts: RunFacts, tool: str, name: str) -> None:
    """Keep the id for later starts."""
    if facts.out is not None:
        path = facts.out / FILE
        write_json(path, (_read(path) if facts.resume else {}) | {tool: name})


def _read(path: Path) -> dict[str, object]:
    try:
        found = loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
