"""The key-value store of a simulated job: torch's interface, waits on the conductor's clock."""

from __future__ import annotations

import datetime
from typing import Any

from tests.simulated_cuda.simulation import simulation

GET = datetime.timedelta(seconds=300)


class Store:
    """What a TCPStore serves, for all simulated processes."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key], GET)
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta = GET) -> None:
        if not simulation().conductor.wait(lambda: self.check(keys), timeout.total_seconds(), f"the keys {keys} of the store"):
            raise RuntimeError(f"wait timeout after {timeout}, keys: {keys}")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        found = self._values.get(key)
        if (found is None and _bytes(expected) == b"") or found == _bytes(expected):
            self._values[key] = _bytes(desired)
        return self._values.get(key, _bytes(expected))

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values):
            self.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def list_keys(self) -> list[str]:
        return list(self._values)

    def num_keys(self) -> int:
        return len(self._values)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        pass


class PrefixStore:
    """The keys of another store under a prefix."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self.underlying_store = prefix, store

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def list_keys(self) -> list[str]:
        start = self._name("")
        return [key[len(start) :] for key in self.underlying_store.list_keys() if key.startswith(start)]

    def __getattr__(self, method: str) -> Any:
        call = getattr(self.underlying_store, method)

        def prefixed(keys: Any, *rest: Any) -> Any:
            return call([self._name(key) for key in keys] if isinstance(keys, list) else self._name(keys), *rest)

        return prefixed


class TCPStore:
    """No simulated job has one; the product asks whether a store is."""


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
