"""The worlds that these tests run on. Ranks of a pool have gloo as their default group, and make groups of Phalanx beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.world.pool import Pool


@pytest.fixture(scope="module", params=(2, 3), ids=lambda n: f"{n}-ranks")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = Pool(request.param)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    made = Pool(4)
    yield made
    made.kill()
