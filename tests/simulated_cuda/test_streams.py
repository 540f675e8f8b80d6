"""Streams, events, the seed and the allocator of the simulated CUDA. Each claim has a control with the mistake."""

import pytest
import torch
from tests.simulated_cuda.order import UnorderedAccessError
from tests.simulated_cuda.simulated import simulated

SEEDS = range(20)


def test_torch_has_gpus_inside_only():
    with simulated(gpus_per_host=3):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 3
        assert torch.ones(2, device="cuda:1").device == torch.device("cuda", 1)
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(2, device="cuda")


def two_streams(seed, *, waits):
    """A write on one stream and a read on another."""
    with simulated(seed=seed) as made:
        side = torch.cuda.Stream()
        x = torch.zeros(4, device="cuda")
        x += 1
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        else:
            made.errors.clear()  # look at the values
            torch.cuda.synchronize()
        return y.tolist(), list(made.trace)


def test_ordered_streams_give_one_result_for_every_seed():
    assert {tuple(two_streams(seed, waits=True)[0]) for seed in SEEDS} == {(2.0,) * 4}


def test_a_missing_wait_gives_another_result_for_some_seed():
    results = {tuple(two_streams(seed, waits=False)[0]) for seed in SEEDS}
    assert (2.0,) * 4 in results
    assert len(results) > 1


def test_a_seed_can_be_replayed_and_seeds_differ():
    runs = [two_streams(seed, waits=False)[1] for seed in SEEDS]
    assert runs == [two_streams(seed, waits=False)[1] for seed in SEEDS]
    assert len({tuple(run) for run in runs}) > 3


def read_without_a_wait(seed):
    with simulated(seed=seed):
        side = torch.cuda.Stream()
        x = torch.zeros(4, device="cuda")
        x += 1
        with torch.cuda.stream(side):
            x * 2


@pytest.mark.parametrize("seed", range(4))
def test_a_missing_wait_is_an_unordered_access_for_every_seed(seed):
    both_places = r"(?s)add_\.Tensor writes it.*test_streams.*mul\.Tensor reads it.*test_streams"
    with pytest.raises(UnorderedAccessError, match=both_places):
        read_without_a_wait(seed)


def test_parts_of_one_buffer_do_not_disturb_each_other():
    with simulated():
        side = torch.cuda.Stream()
        x = torch.zeros(8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        x.record_stream(side)
        with torch.cuda.stream(side):
            x[:4].add_(1)
        x[4:].add_(2)
        torch.cuda.current_stream().wait_stream(side)
        assert x.tolist() == [1.0] * 4 + [2.0] * 4


def test_a_host_that_has_waited_orders_what_comes_later():
    with simulated():
        side = torch.cuda.Stream()
        x = torch.ones(4, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            y = x * 2
        side.synchronize()
        assert (y + x).tolist() == [3.0] * 4


def test_events_are_timed_and_a_wait_uses_the_recording_it_finds():
    with simulated():
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(1_000_000)
        end.record()
        end.synchronize()
        assert 0.9 < begin.elapsed_time(end) < 2
        assert end.query()
        later = torch.cuda.Event()
        assert later.query()  # never recorded
        side = torch.cuda.Stream()
        side.wait_event(later)
        assert side.query()


# ---- memory --------------------------------------------------------------------------------------------------------------------


def free_while_read(seed, *, records):
    with simulated(seed=seed):
        side = torch.cuda.Stream()
        x = torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        if records:
            x.record_stream(side)
        del x
        z = torch.full((4,), 7.0, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        return y.tolist(), z.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_record_stream_protects_memory_that_another_stream_reads(seed):
    assert free_while_read(seed, records=True) == ([2.0] * 4, [7.0] * 4)


@pytest.mark.parametrize("seed", range(3))
def test_a_missing_record_stream_is_caught(seed):
    with pytest.raises(UnorderedAccessError, match="tensors are gone"):
        free_while_read(seed, records=False)


def test_memory_of_a_dead_tensor_is_reused_on_its_stream_and_holds_nan():
    with simulated() as made:
        x = torch.ones(4, device="cuda")
        where = x.data_ptr()
        del x
        y = torch.empty(4, device="cuda")
        assert y.data_ptr() == where
        assert y.isnan().all().item()
        assert made.processes[0].device(0).memory.reused >= 1
        with torch.cuda.stream(torch.cuda.Stream()):
            assert torch.empty(4, device="cuda").data_ptr() != where


def test_a_view_keeps_the_memory_and_so_does_a_graph():
    with simulated():
        w = torch.ones(4, device="cuda", requires_grad=True)
        loss = (w.exp().view(2, 2) * 2).sum()
        loss.backward()
        assert torch.allclose(w.grad.cpu(), 2 * torch.ones(4).exp())
