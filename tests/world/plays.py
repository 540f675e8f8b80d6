"""Worlds that are struck, several at a time: a test is parametrized with `cases`, and asks for its `outcome` (conftest.py)."""

from __future__ import annotations

import pytest
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

    return pytest.mark.parametrize("case", found, ids=name)
