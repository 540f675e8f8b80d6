"""What a Checkpointer has loaded and saved, so that steps never decrease and two runs never mix. The same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.train.checkpoint.errors import CheckpointError
from phalanx.train.checkpoint.places import CheckpointPlace


@dataclass
class History:
    """`newest`: the step last saved or loaded; `last`: the place of the last save, which may not be complete yet."""

    newest: int | None = None
    last: CheckpointPlace | None = None
    loaded: bool = False
    known: frozenset[CheckpointPlace] = frozenset()
    rejected: frozenset[CheckpointPlace] = frozenset()  # damaged

    def check_step(self, step: Any) -> None:
        """Raise ValueError unless `step` may be saved now."""
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step={step!r}: an int, 0 or more")
        if self.newest is not None and step < self.newest:
            raise ValueError(f"step {step} after step {self.newest}: steps go up")

    def check(self, places: Sequence[CheckpointPlace], directory: Path) -> None:
        """Raise if another run has saved in `directory` since: the checkpoints of two runs would be mixed."""
        strange = max((place for place in places if place not in self.known), default=None)
        if strange is None:
            return
        if not self.loaded and not self.known:
            raise CheckpointError(
                f"{directory} holds checkpoints of an earlier run, up to step {strange.step}: load() first to "
                "continue it, or use another directory"
            )
        raise CheckpointError(
            f"{directory / strange.name} was saved by another job or Checkpointer since this one last looked: "
            "load() to continue from there, or use another directory"
        )

    def saves(self, place: CheckpointPlace) -> None:
        """Record that a save to this place begins."""
        self.newest, self.last, self.known = place.step, place, self.known | {place}

    def loads(self, place: CheckpointPlace | None, known: frozenset[CheckpointPlace]) -> None:
        """Record that the checkpoint at `place` was loaded; None if there was none."""
        self.newest, self.known, self.loaded = place.step if place is not None else self.newest, known, True

    # ---- for a rank that joins an elastic job ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The history as plain data."""
        sets = {name: sorted((p.step, p.attempt) for p in getattr(self, name)) for name in ("known", "rejected")}
        last = None if self.last is None else (self.last.step, self.last.attempt)
        return {"newest": self.newest, "loaded": self.loaded, "last": last} | sets

    @staticmethod
    def of(state: dict[str, Any]) -> History:
        """Restore what `state` returned."""
        known, rejected = (frozenset(CheckpointPlace(*pair) for pair in state[name]) for name in ("known", "rejected"))
        last = None if state["last"] is None else CheckpointPlace(*state["last"])
        return History(state["newest"], last, state["loaded"], known, rejected)
