"""What MLPerf requires of a submission besides the run: submitter, division and system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.train.settings import setting


@dataclass(frozen=True, kw_only=True)
class SubmissionConfig:
    """The keys of MLPerf's log that only the submitter knows; they matter with `mllog`."""

    org: str | None = setting(None, "MLPerf: the organisation that submits; none leaves the key out of the log.")
    platform: str | None = setting(None, "MLPerf: the name of the system; none for the hosts and devices of the run.")
    division: Literal["closed", "open"] = setting("closed", "MLPerf: the division.")
    status: Literal["cloud", "onprem", "preview", "research"] = setting("onprem", "MLPerf: the availability of the system.")
    cache_clear: bool = setting(
        False, "MLPerf: whether you cleared the caches of all hosts before the run, as its rules ask; the log repeats it."
    )
