"""How the ranks of a group meet through torch's store, and how they find out which are missing after a failure.

All ranks that can write to the store do so. A rank that writes nothing is missing.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from typing import Any

from phalanx.comm.failure import CommunicationError
from phalanx.comm.verdict import name_ranks

GRACE = 4.0  # seconds for live ranks to report that the same operation failed


class Table:
    """A torch store, plus the one method that FileStore lacks. `store` has its own prefix."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        self._store.wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._store.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        with contextlib.suppress(RuntimeError):  # some stores cannot delete
            return bool(self._store.delete_key(key))
        return False


def gather(store: Table, key: str, rank: int, size: int, mine: str, timeout: float, operation: str) -> list[str]:
    """Collect what all ranks wrote under `key`. Raises a CommunicationError that names ranks missing after `timeout`."""
    keys = [f"{key}/{r}" for r in range(size)]
    store.set(keys[rank], mine)
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout))
    except RuntimeError:
        late = [r for r, each in enumerate(keys) if not store.check([each])]
        if late:
            words = f"{operation}: {name_ranks(late)} did not come within {timeout:g} s"
            raise CommunicationError(words, operation=operation, missing=late) from None
    return [word.decode() for word in store.multi_get(keys)]


def roll_call(store: Table, rank: int, size: int, number: int, timeout: float) -> list[int]:
    """After operation `number` failed, return the ranks that do not report it within a few seconds."""
    until = time.monotonic() + min(GRACE, timeout / 3)
    with contextlib.suppress(RuntimeError):  # the store may be gone
        store.set(f"failed/{rank}", str(number))
        late = set(range(size))
        while late and time.monotonic() < until:
            late = {r for r in late if not store.check([f"failed/{r}"])}
            time.sleep(0.02)
        return sorted(late)
    return []
