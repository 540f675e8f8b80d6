"""Wrong usage of the command line: the error that ends a verb with exit code 2, and a check before anything starts."""

from __future__ import annotations

from phalanx.schedule.names import InputError


class UsageError(InputError):
    """The command line makes no sense; the message says what would."""


def check_environment() -> None:
    """Raise UsageError for a PHALANX_ variable that makes no sense: one line here is better than one from each rank."""
    from phalanx.comm.settings import check_settings

    try:
        check_settings()
    except ValueError as error:  # a ScheduleError is one
        raise UsageError(str(error)) from None
