"""The PHALANX_ environment variables and the limits of timeouts, checked before anything is started or sent.

PHALANX_FORM        moves or collectives: run schedules over plain torch.distributed, without shared memory
PHALANX_SCHEDULES   a file of `phalanx plan --schedules`
PHALANX_AGENT       the process that started this rank: set by `phalanx train`, `phalanx run` and `phalanx bench`
PHALANX_ELASTIC     where the ranks of `phalanx run` meet; PHALANX_MEMBER is which of them this is; set by `phalanx run`
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from phalanx.comm.planned import check_planned

FORM = "PHALANX_FORM"
AGENT = "PHALANX_AGENT"
LONGEST = 1e6  # seconds, about eleven days; beyond some weeks the milliseconds of poll(2) overflow


def check_settings(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError for a variable with an invalid value."""
    forced_form(environ)
    agent(environ)
    check_planned(environ)


def forced_form(environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return True if schedules run as collectives, False if as moves, None if the transport decides."""
    form = environ.get(FORM)
    if form not in (None, "moves", "collectives"):
        raise ValueError(f"{FORM}={form!r}: use moves or collectives, or leave it unset")
    return None if form is None else form == "collectives"


def agent(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the id of the process that started this rank, if `phalanx train` or `phalanx bench` did."""
    text = environ.get(AGENT)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 11):
        raise ValueError(f"{AGENT}={text!r} is not the number of a process: unset it, phalanx sets it for its ranks")
    return int(text)


def check_timeout(timeout: float) -> None:
    """Raise unless `timeout` is a valid number of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout={timeout!r}: use a number of seconds")
    if not 0 < timeout <= LONGEST:
        raise ValueError(f"timeout={timeout!r}: use seconds, more than 0 and at most {LONGEST:,.0f}")


def check_ranks(least: int, most: int | None) -> None:
    """Raise unless these are valid limits for the ranks of an elastic job."""
    for name, value in (("min_ranks", least), ("max_ranks", most)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: a number of ranks, at least 1")
    if most is not None and most < least:
        raise ValueError(f"min_ranks={least} is more than max_ranks={most}")
