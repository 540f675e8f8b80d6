"""Host and device of the simulated CUDA: waits, copies, threads, autograd. Each claim has a control with the mistake."""

import pytest
import torch
from tests.simulated_cuda.conductor import me
from tests.simulated_cuda.launch import run_ranks
from tests.simulated_cuda.order import UnorderedAccessError
from tests.simulated_cuda.simulated import simulated
from tests.simulated_cuda.simulation import process

SEEDS = range(20)


def test_every_wait_of_the_host_is_counted_with_its_place():
    with simulated() as made:
        x = torch.ones(2, device="cuda")
        x = x * 2 + x.sum()
        assert made.processes[0].syncs == []
        for read in (
            lambda: x[0].item(),
            lambda: bool(x.sum()),
            x.cpu,
            x.tolist,
            lambda: float(x[1]),
            x.nonzero,
            torch.cuda.synchronize,
        ):
            before = len(made.processes[0].syncs)
            read()
            assert len(made.processes[0].syncs) == before + 1
        assert "test_host" in str(made.processes[0].syncs[0])
        torch.tensor([1.0], device="cuda")  # a copy from pageable memory
        assert len(made.processes[0].syncs) == 8


def test_a_copy_into_pinned_memory_is_stale_until_its_event():
    seen = set()
    for seed in SEEDS:
        with simulated(seed=seed) as made:
            host = torch.zeros(2, pin_memory=True)
            assert host.is_pinned()
            host.copy_(torch.ones(2, device="cuda"), non_blocking=True)
            event = torch.cuda.current_stream().record_event()
            seen.add(str(host.tolist()))
            assert made.processes[0].syncs == []
            event.synchronize()
            assert host.tolist() == [1.0, 1.0]
    assert "[nan, nan]" in seen


def test_a_copy_into_pageable_memory_waits():
    with simulated() as made:
        host = torch.zeros(2)
        host.copy_(torch.ones(2, device="cuda"), non_blocking=True)
        assert host.tolist() == [1.0, 1.0]
        assert len(made.processes[0].syncs) == 1


def test_a_copy_from_pinned_memory_reads_it_when_it_runs():
    seen = set()
    for seed in SEEDS:
        with simulated(seed=seed):
            host = torch.ones(2).pin_memory()
            x = host.to("cuda", non_blocking=True)
            host.fill_(5)  # too early
            seen.add(x[0].item())
    assert seen == {1.0, 5.0}


def test_a_thread_begins_on_device_0_and_contexts_are_counted():
    def run(rank):
        import phalanx.comm.issuer as product  # its `threading` is the simulation's

        torch.ones(1, device="cuda")
        found = []
        thread = product.threading.Thread(target=lambda: found.append(torch.ones(1, device="cuda").device.index))
        thread.start()
        thread.join()
        return found[0], sorted(process().contexts)

    with simulated(gpus_per_host=2):
        assert run_ranks(2, run) == [(0, [0]), (0, [0, 1])]  # rank 1's thread made a context on GPU 0


def test_leaving_another_devices_stream_makes_a_context_on_the_old_device():
    with simulated(gpus_per_host=2) as made:
        stream = torch.cuda.Stream(1)
        assert made.processes[0].contexts == {1}
        with torch.cuda.stream(stream):
            assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0
        assert made.processes[0].contexts == {0, 1}


def test_hooks_run_in_a_thread_of_autograd_on_the_device_and_stream_of_backward():
    def run(rank):
        seen = []
        side = torch.cuda.Stream()
        x = torch.ones(2, device="cuda", requires_grad=True)
        note = lambda *_: seen.append((me(), torch.cuda.current_device(), torch.cuda.current_stream() == side))  # noqa: E731
        x.register_hook(note)
        x.register_post_accumulate_grad_hook(note)
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            (x * 2).sum().backward()
        return [(thread is not me(), *rest) for thread, *rest in seen]

    with simulated():
        assert run_ranks(2, run) == [[(True, 0, True)] * 2, [(True, 1, True)] * 2]


def on_a_side_stream(seed, *, waits):
    """A parameter that forward uses on a side stream, and a hook that reads its gradient on the stream of backward."""
    with simulated(seed=seed):
        w, side, main = torch.ones(4, device="cuda", requires_grad=True), torch.cuda.Stream(), torch.cuda.current_stream()
        w.grad = torch.ones(4, device="cuda")  # something to add to
        seen, read = [], []

        def hook(p):
            seen.append(torch.cuda.current_stream() == side)
            if waits:
                main.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(main):
                read.append(p.grad * 2)

        w.register_post_accumulate_grad_hook(hook)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = w * 3
        main.wait_stream(side)
        y.record_stream(main)
        y.sum().backward()
        return seen, read[0].tolist(), w.grad.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_is_added_on_the_stream_on_which_forward_used_the_parameter(seed):
    assert on_a_side_stream(seed, waits=True) == ([True], [8.0] * 4, [4.0] * 4)
    with pytest.raises(UnorderedAccessError, match="mul"):
        on_a_side_stream(seed, waits=False)


@pytest.mark.parametrize("seed", range(4))
def test_versions_count_the_writes_of_the_program_when_it_makes_them(seed):
    with simulated(seed=seed):
        x = torch.ones(2, device="cuda")
        assert x._version == 0
        x.add_(1)
        x[:1].mul_(2)
        assert x._version == 2
        torch.cuda.synchronize()
        assert x._version == 2
        w = torch.ones(2, device="cuda", requires_grad=True)
        loss = (w * x).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_error_in_a_hook_comes_out_of_backward():
    def fail(grad):
        raise ValueError("a hook")

    with simulated():
        x = torch.ones(2, device="cuda", requires_grad=True)
        x.register_hook(fail)
        with pytest.raises(ValueError, match="a hook"):
            x.sum().backward()


def test_mixed_devices_are_refused():
    with simulated(), pytest.raises(RuntimeError, match=r"cuda:0 and .*cuda:1"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
    with simulated(), pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda") + torch.ones(2)


def test_random_numbers_are_drawn_by_the_host():
    def draw(seed):
        with simulated(seed=seed):
            torch.cuda.manual_seed(3)
            x = torch.nn.functional.dropout(torch.ones(64, device="cuda"))
            state = torch.cuda.get_rng_state()
            y = torch.randn(3, device="cuda")
            torch.cuda.set_rng_state(state)
            return x.tolist(), y.tolist(), torch.randn(3, device="cuda").tolist()

    first = draw(0)
    assert first[1] == first[2]
    assert all(draw(seed) == first for seed in range(1, 6))


def test_a_scaler_and_autocast_run():
    with simulated():
        model = torch.nn.Linear(3, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(torch.ones(4, 3, device="cuda"))
        assert out.dtype is torch.float16
        scaler.scale(out.float().sum()).backward()
        scaler.step(opt)
        scaler.update()
        assert torch.allclose(model.bias.grad.cpu(), torch.full((2,), 4.0))
