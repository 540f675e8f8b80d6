"""The multi-node evaluator against one process with all samples, exactly, for shards of all kinds."""

import math
from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

import phalanx
from phalanx.train.evaluate import combine, read_results

shards_of_samples = st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=6), min_size=1, max_size=5)


def as_sums(shard):
    return {"value": (sum(shard), len(shard)), "positive": (torch.tensor(sum(x > 0 for x in shard)), len(shard))}


def as_means(shard):
    return (
        ({"value": sum(shard) / len(shard), "positive": numpy.float64(sum(x > 0 for x in shard) / len(shard))}, len(shard))
        if shard
        else ({}, 0)
    )


@settings(max_examples=25, deadline=None)
@given(shards_of_samples)
def test_exact_for_any_shards_and_the_same_on_all_ranks(shards):
    def play(comm):
        evaluate = phalanx.create_multi_node_evaluator(as_sums, comm)
        return evaluate(shards[comm.rank])

    results = phalanx.run_local(len(shards), play)
    samples = [x for shard in shards for x in shard]
    assert all(repr(result) == repr(results[0]) for result in results)
    if samples:
        assert results[0]["value"] == float(Fraction(sum(samples), len(samples)))
        assert results[0]["positive"] == sum(x > 0 for x in samples) / len(samples)
    else:
        assert all(math.isnan(value) for value in results[0].values())


@settings(max_examples=times(200, seldom=80), deadline=None)
@given(shards_of_samples)
def test_means_with_their_count(shards):
    samples = [x for shard in shards for x in shard]
    found = combine([read_results(as_means(shard)) for shard in shards])
    if samples:
        wanted = sum(samples) / len(samples)
        assert abs(found["value"] - wanted) <= 1e-15 * max(map(abs, samples))
    else:
        assert found == {}


def test_the_unweighted_mean_would_be_seen():
    shards = [[0, 0, 0], [8]]
    assert combine([read_results(as_means(shard)) for shard in shards])["value"] == 2.0
    assert sum(as_means(shard)[0]["value"] for shard in shards) / 2 == 4.0


def test_the_order_of_ranks_does_not_matter():
    shards = [{"x": (0.1 * k, 3)} for k in range(5)] + [{"x": (1e300, 1)}, {"x": (-1e300, 1)}]
    forward = combine([read_results(own) for own in shards])
    assert forward == combine([read_results(own) for own in reversed(shards)])
    assert forward["x"] == pytest.approx(1.0 / 17, rel=1e-15)  # 1e300 has gone without a trace


def test_an_empty_shard_may_say_nan_or_nothing():
    full = {"loss": 0.25}, 4
    for empty in [({"loss": math.nan}, 0), ({}, 0), {}, {"loss": (0, 0)}]:
        assert combine([read_results(full), read_results(empty)]) == {"loss": 0.25}


def test_infinity_is_not_hidden():
    assert combine([read_results({"x": (math.inf, 1)}), read_results({"x": (1.0, 1)})]) == {"x": math.inf}


def test_an_object_with_evaluate_and_arguments():
    class Judge:
        def evaluate(self, x, *, scale):
            return {"x": (x * scale, 1)}

    evaluate = phalanx.run_local(3, lambda comm: phalanx.create_multi_node_evaluator(Judge(), comm)(comm.rank, scale=2))
    assert evaluate == [{"x": 2.0}] * 3


@pytest.mark.parametrize("wrong", [{"accuracy": 0.9}, 0.9, {"accuracy": torch.tensor(0.9)}, None, ({"a": 1}, 2, 3)])
def test_without_counts_there_is_no_mean(wrong):
    with pytest.raises(TypeError, match=r"'accuracy': \(right, seen\)"):
        read_results(wrong)


@pytest.mark.parametrize("wrong", [({"a": 1.0}, -1), {"a": (1.0, math.nan)}, {"a": (1.0, 0)}])
def test_impossible_counts(wrong):
    with pytest.raises(ValueError, match="samples"):
        read_results(wrong)


def test_a_wrong_result_of_one_rank_raises_on_all():
    def play(comm):
        evaluate = phalanx.create_multi_node_evaluator(lambda: {"a": 1.0} if comm.rank == 1 else {"a": (1.0, 2)}, comm)
        with pytest.raises(TypeError, match=r"the results of rank 1: .*'a' has no count"):
            evaluate()
        comm.barrier()

    phalanx.run_local(3, play)


def test_a_rank_with_samples_but_without_a_result_is_named():
    with pytest.raises(ValueError, match="rank 1 has samples, but no 'top5'"):
        combine([read_results(({"top1": 1.0, "top5": 1.0}, 2)), read_results(({"top1": 1.0}, 2))])


def test_wrong_arguments():
    with pytest.raises(TypeError, match="comm"):
        phalanx.create_multi_node_evaluator(as_sums, None)
    with phalanx.create_communicator() as comm, pytest.raises(TypeError, match="evaluate is a function"):
        phalanx.create_multi_node_evaluator(3, comm)
