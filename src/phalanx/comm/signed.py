"""Store keys that only ranks of the job can write: each value carries a signature made with the job's secret.

torch's store trusts anyone who can connect to its port. So what Phalanx reads there (alarms, verdicts, places of shared memory)
is signed together with the full name of its key. A value that a stranger wrote, or copied from another key or job, counts as not
written: the reader warns once and keeps waiting. A stranger who reaches the port can still delete keys, or write torch's own
keys, which are not signed. SECURITY.md describes who should be able to reach it.
"""

from __future__ import annotations

import datetime
import hmac
import logging
import time
from typing import Any

import torch.distributed as dist

log = logging.getLogger("phalanx")

SIGNATURE = 64  # hex digits of an HMAC-SHA256
LOOK = 0.05  # seconds between two reads of a key that a stranger has written to
TRIES = 100  # attempts to write a key that a stranger keeps overwriting
NOTHING = b"?"  # what `peek` gets for a missing key; no signed value looks like this


class Signer:
    """The key of one job. It signs what a rank writes, and recognises what ranks have written."""

    def __init__(self, secret: str, token: str) -> None:
        """`token` is new for every meeting of a job, so a signature of one meeting is invalid in another."""
        self._key = hmac.digest(secret.encode(), b"phalanx " + token.encode(), "sha256")
        self._warned = False

    def sign(self, key: str, value: str) -> str:
        return f"{self._signature(key, value.encode())} {value}"

    def read(self, key: str, found: bytes) -> bytes | None:
        """Return what a rank of this job wrote, or None if a stranger did, with a warning the first time."""
        if self.recognises(key, found):
            return found[SIGNATURE + 1 :]
        if not self._warned:
            self._warned = True
            log.warning(
                "phalanx: ignored the value of %s in the job's store: no rank of this job wrote it, so another process can reach "
                "the store (no further warnings; see SECURITY.md)",
                key,
            )
        return None

    def recognises(self, key: str, found: bytes) -> bool:
        return found[SIGNATURE : SIGNATURE + 1] == b" " and hmac.compare_digest(
            found[:SIGNATURE], self._signature(key, found[SIGNATURE + 1 :]).encode()
        )

    def _signature(self, key: str, value: bytes) -> str:
        name = key.encode()
        return hmac.digest(self._key, len(name).to_bytes(4, "big") + name + value, "sha256").hex()


def peek(store: Any, key: str) -> bytes | None:
    """Return what a key holds now, or None if it does not exist: `get` of torch's stores would wait for it."""
    # compare_set writes only if it finds what was expected, and creates a key only if that is empty
    found: bytes = store.compare_set(key, NOTHING, NOTHING)
    return None if found == NOTHING else found


class SignedStore:
    """A store under `prefix` whose values only ranks of the job can write. `seconds` bounds a `get`."""

    def __init__(self, store: Any, prefix: str, signer: Signer, seconds: float) -> None:
        self._store: Any = dist.PrefixStore(prefix, store)  # its type lacks multi_set, the object has it
        self._prefix, self._signer, self._seconds = prefix, signer, seconds

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._sign(key, value))

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._store.multi_set(keys, [self._sign(key, value) for key, value in zip(keys, values)])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values as soon as ranks have written all of them."""
        until = time.monotonic() + self._seconds
        return [self._read(key, found, until) for key, found in zip(keys, self._store.multi_get(keys))]

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys)) and all(self._peek(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        until = time.monotonic() + timeout.total_seconds()
        self._store.wait(keys, timeout)
        for key, found in zip(keys, self._store.multi_get(keys)):
            self._read(key, found, until)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` unless a rank has written before, and return the current value. `expected` must be empty."""
        if expected:
            raise ValueError("a signed store can only compare with an empty value")
        mine = self._sign(key, desired)
        before = b""
        for _ in range(TRIES):
            found: bytes = self._store.compare_set(key, before, mine)
            value = self._signer.read(self._name(key), found)
            if value is not None:
                return value
            before = found  # from a stranger: replace it, unless a rank does so first
        raise RuntimeError(f"a process that is not a rank of this job keeps writing to {self._name(key)}")

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def list_keys(self) -> list[str]:
        return list(self._store.list_keys()) if hasattr(self._store, "list_keys") else []

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _sign(self, key: str, value: str) -> str:
        return self._signer.sign(self._name(key), value)

    def _peek(self, key: str) -> bytes | None:
        found = peek(self._store, key)
        return None if found is None else self._signer.read(self._name(key), found)

    def _read(self, key: str, found: bytes, until: float) -> bytes:
        value = self._signer.read(self._name(key), found)
        # don't delete it: a rank may write between the read and the deletion
        while value is None:
            if time.monotonic() > until:
                raise RuntimeError(f"no rank of this job has written {self._name(key)}")
            time.sleep(LOOK)
            value = self._peek(key)
        return value
