"""Create the communicator that a configuration asks for, or check that a given one matches it."""

from __future__ import annotations

from phalanx.comm.communicator import Communicator
from phalanx.comm.create import create_communicator
from phalanx.schedule import Schedule
from phalanx.schedule.names import find_all_reduce, find_schedule
from phalanx.train.setting_text import ConfigError
from phalanx.train.update import CommConfig


def find_algorithm(config: CommConfig, ranks: int) -> Schedule | None:
    """The schedule that `comm.algorithm` names, verified as an all-reduce of `ranks` ranks, or None."""
    if config.algorithm is None:
        return None
    return find_all_reduce(config.algorithm, ranks, f"comm.algorithm={config.algorithm}")


def create_communicator_for(config: CommConfig) -> Communicator:
    """Create the communicator of this job's ranks, with the configuration's algorithm, which it verifies, and timeout."""
    algorithm = None if config.algorithm is None else find_schedule(config.algorithm)
    if config.elastic:
        return create_communicator(
            algorithm, timeout=config.timeout, elastic=True, min_ranks=config.min_ranks, max_ranks=config.max_ranks
        )
    return create_communicator(algorithm, timeout=config.timeout)


def check_communicator(config: CommConfig, comm: Communicator) -> None:
    """Raise ConfigError if `comm` does not match a setting: another algorithm, or another timeout.

    Settings with default values match anything.
    """
    if config.elastic and not comm.elastic:
        raise ConfigError("comm.elastic=true, but the communicator is not elastic: create_communicator(elastic=True)")
    if config.algorithm is not None and not config.elastic:  # a schedule is for one number of ranks
        wanted = find_schedule(config.algorithm)
        if comm.schedule != wanted:
            raise ConfigError(
                f"comm.algorithm={config.algorithm}, but the communicator of {comm.size} ranks runs {comm.schedule.name}: "
                "call train(config) without a communicator to create the right one, or leave comm.algorithm out"
            )
    if config.timeout != CommConfig.timeout and not _may_be(config.timeout, comm.patience):
        raise ConfigError(
            f"comm.timeout={config.timeout:g}, but the communicator gives up after {comm.patience:g} s without progress: "
            "call train(config) without a communicator to create the right one, or leave comm.timeout out"
        )


def _may_be(timeout: float, patience: float) -> bool:
    """Whether a communicator with this timeout has this patience: the timeout minus the time to find missing ranks."""
    slack = 1e-6
    return patience - slack <= timeout <= min(1.5 * patience, patience + 4.0) + slack
