"""Detects forks. A forked child has its parent's connections and memory, but to the other ranks the parent is the rank."""

from __future__ import annotations

import os

count = 0  # forks of this process and its ancestors; os.getpid() would cost more than a small sum


def _count_fork() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_count_fork)


class Owner:
    """The process that made a communicator, and the `count` of forks at that time."""

    def __init__(self) -> None:
        self.process, self.forks = os.getpid(), count

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the owner."""
        return self.forks != count

    def check(self, name: str) -> None:
        """Raise in a forked child that calls `name`."""
        if self.forks != count:
            raise RuntimeError(
                f"{name}: this communicator belongs to process {self.process}, but this is process {os.getpid()}, a fork of it:"
                " create a communicator after the fork, or start processes with spawn or forkserver"
            )
