"""The lock of a directory in an elastic job whose rank 0 dies while it takes the lock."""

import json
import os
from dataclasses import dataclass

from phalanx.train.checkpoint.lock import one_job


@dataclass
class Survivor:
    """What rank 1 sees: rank 0 dies in the round, which is then done again among the others."""

    rank: int = 1

    def as_one(self, work):
        work()
        self.rank = 0
        return work()

    def bcast_obj(self, obj):
        return obj


def test_the_next_rank_0_takes_the_lock(tmp_path):
    with one_job(tmp_path, Survivor()):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []
