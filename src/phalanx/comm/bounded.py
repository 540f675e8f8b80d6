"""A call that may never return, with a deadline: torch's stores can block for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def bounded(seconds: float, work: Callable[[], T], name: str) -> T:
    """The result of `work`, or its error; TimeoutError if it takes longer. `name` is that of the thread which does it."""
    result: list[T] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as caught:  # noqa: BLE001  raised in the calling thread
            error.append(caught)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if error:
        raise error.pop()  # not kept by this frame, which the error keeps
    if not result:
        raise TimeoutError("its store does not answer")
    return result[0]
