"""Evaluation over all ranks: every sample counts once for any shard sizes, and all ranks get the same bits.

    def evaluate(model):                                        # on this rank's shard
        ...
        return {"accuracy": (right, seen), "loss": (loss_sum, seen)}      a sum and a count for each
        return {"accuracy": right / seen, "loss": loss_mean}, seen        or means, and the count of all of them

    evaluate = phalanx.create_multi_node_evaluator(evaluate, comm)        # returns {"accuracy": ..., "loss": ...}

The name is ChainerMN's. ChainerMN takes the unweighted mean of the ranks' means, which is wrong if shards have different sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy
import torch

from phalanx.comm.communicator import Communicator

HOW = (
    "return a sum and a count for each, {'accuracy': (right, seen)}, or the means and their count, ({'accuracy': right / seen}, "
    "seen); without counts the mean over unequal shards would be wrong"
)

Totals = dict[str, tuple[float, float, bool]]  # name -> (sum or mean, count, whether it is a mean)


def create_multi_node_evaluator(evaluate: Any, comm: Communicator) -> Callable[..., dict[str, float]]:
    """Wrap an evaluation of one shard so that it returns the results over all ranks.

    Args:
        evaluate: A function, or an object with a method `evaluate`. For its shard it returns a sum and a count per result,
            `{"accuracy": (right, seen)}`, or means and their count, `({"accuracy": right / seen}, seen)`. A rank whose shard is
            empty returns a count of 0, or no results: `({}, 0)` or `{}`.
        comm: The communicator of all ranks that evaluate together.

    Returns:
        A function that takes the arguments of `evaluate` and returns the means over all samples, the same on all ranks. All ranks
        call it together. A result without any samples is NaN.

    Raises:
        TypeError: If `evaluate` cannot be called, or `comm` is not a communicator.

    Example:
        >>> import phalanx
        >>> def on_shard(comm):
        ...     seen = 10 * (comm.rank + 1)
        ...     return phalanx.create_multi_node_evaluator(lambda: {"accuracy": (9, seen)}, comm)()
        >>> phalanx.run_local(2, on_shard)
        [{'accuracy': 0.6}, {'accuracy': 0.6}]
    """
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm is what phalanx.create_communicator() returns, got {type(comm).__name__}")
    local = getattr(evaluate, "evaluate", evaluate)
    if not callable(local):
        raise TypeError(f"evaluate is a function or has a method evaluate, got {type(evaluate).__name__}")

    @functools.wraps(local, updated=())
    def over_all_ranks(*args: Any, **options: Any) -> dict[str, float]:
        def evaluate_together() -> list[Any]:
            own, problem = local(*args, **options), None
            try:
                totals = read_results(own)
            except (TypeError, ValueError) as error:
                totals, problem = {}, f"{type(error).__name__}: {error}"
            return comm.allgather_obj((totals, problem))

        ranks = comm.as_one(evaluate_together)  # restarted if a rank dies, because its samples count, too
        for rank, (_, text) in enumerate(ranks):
            if text is not None:
                raise TypeError(f"the results of rank {rank}: {text}")
        return combine([own for own, _ in ranks])

    return over_all_ranks


def read_results(results: Any) -> Totals:
    """Read the results of one shard in either form. The TypeError explains how to return counts."""
    if isinstance(results, tuple) and len(results) == 2 and isinstance(results[0], Mapping):
        means, count = results
        seen = _count(count, "the count")
        return {_name(name): (_number(mean, name) if seen else 0.0, seen, True) for name, mean in means.items()}
    if not isinstance(results, Mapping):
        raise TypeError(f"got a {type(results).__name__}: {HOW}")
    totals: Totals = {}
    for name, value in results.items():
        if not isinstance(value, tuple) or len(value) != 2:
            raise TypeError(f"{name!r} has no count: {HOW}")
        total, count = _number(value[0], name), _count(value[1], name)
        if total and not count:
            raise ValueError(f"{name!r} sums up to {total!r} over no samples: {HOW}")
        totals[_name(name)] = (total, count, False)
    return totals


def combine(shards: list[Totals]) -> dict[str, float]:
    """The mean over all samples of all shards. Sums are exact and rounded once."""
    names = list(dict.fromkeys(name for totals in shards for name in totals))
    for rank, totals in enumerate(shards):
        has_samples = any(is_mean and count for _, count, is_mean in totals.values())
        if has_samples and (missing := [name for name in names if name not in totals]):
            raise ValueError(f"rank {rank} has samples, but no {missing[0]!r}; it returned {', '.join(totals)}")
    return {name: _mean([totals[name] for totals in shards if name in totals]) for name in names}


def _mean(parts: list[tuple[float, float, bool]]) -> float:
    """The mean. Finite numbers are summed as fractions, exact in any order; others in rank order."""
    parts = [(value, count, is_mean) for value, count, is_mean in parts if count]
    if not parts:
        return math.nan
    if not all(math.isfinite(value) for value, _, _ in parts):
        return sum(value * count if is_mean else value for value, count, is_mean in parts) / sum(count for _, count, _ in parts)
    total = sum((Fraction(value) * (Fraction(count) if is_mean else 1) for value, count, is_mean in parts), Fraction())
    return float(total / sum(Fraction(count) for _, count, _ in parts))


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not the name of a result: use a str")
    return name


def _number(value: Any, name: Any) -> float:
    """A plain number. An int of any size stays an int."""
    if isinstance(value, torch.Tensor | numpy.generic | numpy.ndarray) and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, int | float):
        raise TypeError(f"{name!r} is a {type(value).__name__}, not a number: {HOW}")
    return value


def _count(value: Any, name: Any) -> float:
    count = _number(value, name)
    if not 0 <= count < math.inf:
        raise ValueError(f"{name!r} counts {count!r} samples: a number, 0 or more")
    return count
