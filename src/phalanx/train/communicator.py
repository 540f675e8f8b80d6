"""The communicator that a configuration asks for: create it, or check that a given one is it."""

from __future__ import annotations

from phalanx.comm.communicator import Communicator
from phalanx.comm.create import create_communicator
from phalanx.schedule import Schedule
from phalanx.schedule.names import find_all_reduce, find_schedule
from phalanx.train.setting_text import ConfigError
from phalanx.train.update import CommConfig


def find_algorithm(config: CommConfig, ranks: int) -> Schedule | None:
    """The schedule that `comm.algorithm` names, proved to be an all-reduce of `ranks` ranks; None if it names none."""
    if config.algorithm is None:
        return None
    return find_all_reduce(config.algorithm, ranks, f"comm.algorithm={config.algorithm}")


def create_communicator_for(config: CommConfig) -> Communicator:
    """The communicator of all ranks of this job, with the algorithm (which it verifies) and the timeout of the configuration."""
    algorithm = None if config.algorithm is None else find_schedule(config.algorithm)
    if config.elastic:
        return create_communicator(
            algorithm, timeout=config.timeout, elastic=True, min_ranks=config.min_ranks, max_ranks=config.max_ranks
        )
    return create_communicator(algorithm, timeout=config.timeout)


def check_communicator(config: CommConfig, comm: Communicator) -> None:
    """Raise ConfigError if `comm` ignores a setting: it runs another algorithm, or waits for another time.

    A setting that has its default asks for nothing.
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
    """Whether a communicator with this timeout has this patience: the timeout, less the time to find out who is missing."""
    slack = 1e-6
    return patience - slack <= timeout <= min(1.5 * patience, patience + 4.0) + slack
