"""Wrong usage of the command line: the error that ends a verb with exit code 2, and a check before anything starts."""

from __future__ import annotations

from phalanx.schedule.names import InputError


class UsageError(InputError):
    """Wrong usage. The message says what is valid."""


def check_environment() -> None:
    """Raise UsageError for an invalid PHALANX_ variable: one line here is better than one from each rank."""
    from phalanx.comm.settings import check_settings

    try:
        check_settings()
    except ValueError as error:  # a ScheduleError is one
        raise UsageError(str(error)) from None
