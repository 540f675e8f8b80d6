"""Worlds that are struck, several at a time: a test is parametrized with `cases`, and asks for its `outcome` (conftest.py).

To take all libraries apart in the end takes each rank a quarter of a second. In `make test` the first case of a test does so, and
the first on shared memory; in CI, which sets PHALANX_TEST_LONG=1, all cases do that do not say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from tests.long import LONG
from tests.world.programs.herd import Case

AT_ONCE = 4  # worlds that run together
WARM_UP = Case("ending", {"timeout": 60.0, "order": [0, 0]}, ranks=2, deadline=60.0)  # from a cold disk torch ends slowly


def cases(*found: Case) -> pytest.MarkDecorator:
    def name(case: Case) -> str:
        facts = [f"{key}={value}" for key, value in case.args.items() if key != "timeout"]
        facts += [case.strike.name] if case.strike else []
        facts += ["shared"] if case.shared else []
        facts += [f"absent={case.absent}"] if case.absent else []
        return "-".join([f"{case.ranks} ranks", *facts])

    return pytest.mark.parametrize("case", found if LONG else list(_few_end_wholly(found)), ids=name)


def _few_end_wholly(found: Sequence[Case]) -> Iterator[Case]:
    seen = set()
    for case in found:
        yield replace(case, wholly=case.wholly and case.shared not in seen)
        if case.wholly:
            seen.add(case.shared)
