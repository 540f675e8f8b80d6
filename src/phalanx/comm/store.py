"""The key-value store of a job, as Phalanx uses it: torch's own, or one that signs its values (signed.py)."""

from __future__ import annotations

import datetime
from typing import Any, Protocol

FOR_EVER = datetime.timedelta(days=30)


class Store(Protocol):
    """The methods of a torch.distributed store that Phalanx calls. A HashStore serves ranks that are threads."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def multi_set(self, keys: list[str], values: list[str]) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def delete_key(self, key: str) -> bool: ...


def clear(store: Any) -> None:
    """Remove all keys of a store with a prefix, if torch can list them."""
    for key in store.list_keys() if hasattr(store, "list_keys") else ():
        store.delete_key(key)
