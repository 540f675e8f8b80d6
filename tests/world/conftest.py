"""The worlds that tests run on: `world` is each size in turn, on processes that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.world.plays import AT_ONCE, WARM_UP
from tests.world.pool import Pool
from tests.world.programs.herd import Case, Herd, Outcome, play

ONLY = int(os.environ["PHALANX_TEST_WORLD"]) if os.environ.get("PHALANX_TEST_WORLD") else None  # make test-4
SIZES = (ONLY,) if ONLY else (1, 2, 3)  # others by `make test-N`; CI adds 4, 5 and 8


class Pools:
    """One pool per size and environment, made when first asked for."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, tuple[tuple[str, str], ...]], Pool] = {}

    def of(self, size: int, **env: str) -> Pool:
        return self._made.setdefault((size, tuple(sorted(env.items()))), Pool(size, env=env))

    def kill(self) -> None:
        for pool in self._made.values():
            pool.kill()


POOLS = Pools()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    yield POOLS
    POOLS.kill()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ranks that wait for the next test look around all the time, which takes a tenth of a core: not for tests of other rooms."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        POOLS.kill()


@pytest.fixture(params=SIZES, ids=lambda n: f"{n}-ranks")
def world(request: pytest.FixtureRequest, pools: Pools) -> Pool:
    """A world of each size in turn."""
    return pools.of(request.param)


@pytest.fixture
def pair(pools: Pools) -> Pool:
    """Two ranks, for what needs exactly two."""
    if ONLY not in (None, 2):
        pytest.skip(f"needs 2 ranks, PHALANX_TEST_WORLD is {ONLY}")
    return pools.of(2)


@pytest.fixture
def debug_world(pools: Pools) -> Pool:
    """Three ranks (or PHALANX_TEST_WORLD) that compare what they are about to do."""
    if ONLY == 1:
        pytest.skip("one rank agrees with itself")
    return pools.of(ONLY or 3, PHALANX_DEBUG="1")


@pytest.fixture(scope="module")
def plays(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Future[Outcome]]]:
    """The outcome of every selected case, by its id."""
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    found = [item.callspec.params["case"] for item in items if "case" in item.callspec.params]
    herd = Herd()
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        play(herd, WARM_UP, tmp_path_factory.mktemp("world"))
        yield {id(case): pool.submit(play, herd, case, tmp_path_factory.mktemp("world")) for case in found}
    finally:
        pool.shutdown(cancel_futures=True)
        herd.close()


@pytest.fixture
def outcome(case: Case, plays: dict[int, Future[Outcome]]) -> Outcome:
    return plays[id(case)].result()
