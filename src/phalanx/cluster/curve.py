"""Efficiency over the number of ranks: the same question for clusters of 1, 2, 4 ... ranks with the same batch per rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .question import Question
from .screen import rank_candidates


def sizes(question: Question) -> Iterator[int]:
    """Powers of two up to a host, then hosts by powers of two, then all."""
    per_host, hosts = question.cluster.per_host, question.cluster.hosts
    ranks = 1
    while ranks < per_host:
        yield ranks
        ranks *= 2
    count = 1
    while count < hosts:
        yield per_host * count
        count *= 2
    yield question.cluster.ranks


def efficiency_curve(question: Question) -> list[tuple[int, float]]:
    """For each number of ranks, the rate of the best plan divided by that of as many single devices."""
    alone = question.compute.seconds(question.per_rank) + question.compute.optimizer
    families = tuple(
        family for family in question.families if family in ("ring", "torus", "hierarchical", "gossip", "gossip-hosts")
    )
    points = []
    for ranks in dict.fromkeys(sizes(question)):
        smaller = replace(
            question,
            cluster=question.cluster.with_ranks(ranks),
            batch=question.per_rank * ranks,
            families=families or question.families,
        )
        points.append((ranks, alone / rank_candidates(smaller)[0].seconds))
    return points
