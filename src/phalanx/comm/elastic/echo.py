"""Does the link between two hosts work? Every agent answers questions on a datagram port, and asks others when it has to.

A question is a random number with a signature, the answer is the same number with another one. Nothing else is answered, so the
port tells a stranger nothing and cannot be used against a third party: an answer is not longer than its question.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import threading
import time
from collections.abc import Mapping

NONCE, SIGNATURE = 16, 16  # bytes
TRIES = 4  # questions until a link counts as dead: datagrams may get lost
PATIENCE = 0.2  # seconds between two of them

Place = tuple[str, int]


class Echo:
    """Answers questions of agents of the same job at `address`."""

    def __init__(self, address: str, secret: str, token: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._key = hmac.digest(secret.encode(), b"phalanx echo " + token.encode(), "sha256")
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.settimeout(1.0)  # the thread checks from time to time whether it is still needed
        self.port: int = self._socket.getsockname()[1]
        self._family = family
        threading.Thread(target=self._serve, name="phalanx-echo", daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def unreachable(self, places: Mapping[int, Place]) -> tuple[int, ...]:
        """The agents of `places` that do not answer. Takes TRIES * PATIENCE seconds if there are any."""
        nonces = {secrets.token_bytes(NONCE): agent for agent in places}
        missing = set(places)
        with socket.socket(self._family, socket.SOCK_DGRAM) as asking:
            for _ in range(TRIES):
                for nonce, agent in nonces.items():
                    if agent in missing:
                        with contextlib.suppress(OSError):  # no route: it cannot be reached
                            asking.sendto(nonce + self._sign(b"?", nonce), places[agent])
                until = time.monotonic() + PATIENCE
                while missing and (left := until - time.monotonic()) > 0:
                    if not select.select([asking], [], [], left)[0]:
                        break
                    with contextlib.suppress(OSError):
                        words = asking.recv(256)
                        nonce, signature = words[:NONCE], words[NONCE:]
                        if nonce in nonces and hmac.compare_digest(signature, self._sign(b"!", nonce)):
                            missing.discard(nonces[nonce])
                if not missing:
                    break
        return tuple(sorted(missing))

    def _serve(self) -> None:
        while True:
            try:
                words, whence = self._socket.recvfrom(256)
            except OSError:
                if self._socket.fileno() < 0:
                    return
                continue  # no question came, or an answer could not be delivered
            nonce, signature = words[:NONCE], words[NONCE:]
            if len(nonce) == NONCE and hmac.compare_digest(signature, self._sign(b"?", nonce)):
                with contextlib.suppress(OSError):
                    self._socket.sendto(nonce + self._sign(b"!", nonce), whence)

    def _sign(self, kind: bytes, nonce: bytes) -> bytes:
        return hmac.digest(self._key, kind + nonce, "sha256")[:SIGNATURE]
