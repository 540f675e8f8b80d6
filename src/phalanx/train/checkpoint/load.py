"""Fill objects from a checkpoint: all of them on all ranks, or none on any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.comm.communicator import Communicator
from phalanx.train.checkpoint.agree import DamageSeenError, together, undamaged
from phalanx.train.checkpoint.differences import compare_plain, differences, some
from phalanx.train.checkpoint.entries import SavedEntry, fill, state_of
from phalanx.train.checkpoint.errors import CheckpointError, DamagedError
from phalanx.train.checkpoint.places import CheckpointPlace
from phalanx.train.checkpoint.read import Reading, read
from phalanx.train.checkpoint.tree import clone, decode


@dataclass(frozen=True, slots=True)
class Load:
    """One attempt to load the checkpoint `place` into `state`. `config` describes the training, as encoded by `encode`."""

    directory: Path
    place: CheckpointPlace
    config: Any
    comm: Communicator

    def restore(self, state: Mapping[str, Any]) -> str:
        """Fill `state` on all ranks and return "", or fill nothing anywhere and return the damage that a rank found."""
        comm = self.comm
        try:
            reading = undamaged(comm, lambda: read(self.directory, self.place, state, comm.rank, comm.size))
            saved = undamaged(comm, lambda: self._fitting(reading, state))
            backups = together(comm, lambda: {name: clone(state_of(obj)) for name, obj in state.items()})
            filled: list[str] = []
            try:
                undamaged(comm, lambda: self._fill(state, saved, filled))
            except BaseException:
                for name in filled:
                    fill(state[name], backups[name])
                raise
        except DamageSeenError as seen:
            return str(seen)
        return ""

    def _fill(self, state: Mapping[str, Any], saved: Mapping[str, SavedEntry], filled: list[str]) -> None:
        for name, obj in state.items():
            filled.append(name)
            with self._blaming(name, saved[name].kind):
                fill(obj, saved[name].value)

    @contextmanager
    def _blaming(self, name: str, kind: str) -> Iterator[None]:
        """Report an error caused by invalid state as damage of the checkpoint. Others, such as a full GPU, pass through."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            if kind == "object" and not isinstance(error, (ValueError, TypeError)):  # may be a bug in the object's own code
                raise
            reason = f"{name} does not take what was saved: {type(error).__name__}: {error}"
            raise DamagedError(self.directory / self.place.name, reason) from error

    def _fitting(self, reading: Reading, state: Mapping[str, Any]) -> Mapping[str, SavedEntry]:
        """The saved entries; CheckpointError if they belong to another model or config."""
        found = compare_plain("config", decode(self.config, {}), decode(reading.manifest.config, {}))
        found += [f"{name}: only here" for name in state if name not in reading.saved]
        for name, own in reading.saved.items():
            found += differences(name, state[name], own)
        if found:
            raise CheckpointError(
                f"{self.directory / self.place.name} belongs to something else, and nothing was loaded; "
                f"the differences:{some(found)}"
            )
        world = reading.manifest.world
        if world == self.comm.size:
            return reading.saved
        return {
            # a version that all ranks shared fits any world; if each rank had its own, an object may derive new ones
            name: self._resized(name, state[name], own) if world == 1 or reading.versions(name) > 1 else own
            for name, own in reading.saved.items()
        }

    def _resized(self, name: str, obj: Any, saved: SavedEntry) -> SavedEntry:
        derive = getattr(obj, "resized", None) if saved.kind == "object" else None
        if derive is None:
            return saved
        with self._blaming(name, saved.kind):
            return SavedEntry(saved.kind, derive(saved.value, self.comm.rank, self.comm.size))
