"""The communicator on GPUs: devices, streams, the host that never waits, and what happens when a rank is gone.

Every test runs the product's own code on the simulated CUDA, in several legal interleavings.
"""

from __future__ import annotations

import pytest
import torch
from tests.simulated_cuda.launch import die, launch
from tests.simulated_cuda.seeds import seeds
from tests.simulated_cuda.simulated import simulated
from tests.simulated_cuda.simulation import process, simulation

import phalanx
from phalanx.comm import queued
from phalanx.comm.streams import communication_stream
from phalanx.schedule import halving_doubling, ring, torus

ANY = seeds(3)


def on_gpus(world, fn, *, seed, hosts=1, **options):
    with simulated(hosts=hosts, gpus_per_host=world // hosts, seed=seed):
        return launch(world, fn, **options)


@pytest.mark.parametrize("seed", ANY)
@pytest.mark.parametrize("schedule", [ring(4), halving_doubling(4), torus(2, 2)], ids=lambda s: s.name)
def test_an_all_reduce_never_makes_the_host_wait(schedule, seed):
    """Also one of messages: NCCL's wait with a time limit would block."""

    def play(comm):
        x = torch.full((8,), float(comm.rank), device="cuda")
        before = len(process().syncs)
        for _ in range(3):
            comm.all_reduce_async(x, op="mean").wait()
        waited = process().syncs[before:]
        return [str(sync) for sync in waited], x.cpu().tolist()

    for waited, values in on_gpus(4, play, seed=seed, hosts=2, algorithm=schedule):
        assert waited == []
        assert values == [1.5] * 8


@pytest.mark.parametrize("seed", ANY)
def test_every_verb_stays_on_the_devices_of_its_ranks(seed):
    """No thread creates a context on GPU 0 of another rank, and what is received lands on the GPU of the receiver."""

    def play(comm):
        own = torch.device("cuda", torch.cuda.current_device())
        x = torch.full((3,), float(comm.rank), device="cuda")
        got = [
            comm.all_reduce(x.clone()),
            comm.bcast(x.clone() if comm.rank == 0 else None),
            comm.reduce_scatter(x.repeat(2)[:4]),
        ]
        got += comm.allgather(x)
        got += comm.alltoall([x, x + 10])
        got += [comm.scatter([x, x + 1] if comm.rank == 0 else None)]
        if comm.rank == 0:
            comm.send(x + 5, dest=1)
            got += comm.gather(x) or []
        else:
            got += [comm.recv(source=0)]
            comm.gather(x)
        comm.barrier()
        assert all(y.device == own for y in got)
        return process().contexts, process().local, [y.cpu().tolist() for y in got]

    zero, one = on_gpus(2, play, seed=seed)
    assert zero[0] == {zero[1]} == {0}
    assert one[0] == {one[1]} == {1}
    three = lambda value: [float(value)] * 3  # noqa: E731
    assert zero[2] == [three(1), three(0), [1.0, 1.0], three(0), three(1), three(0), three(1), three(0), three(0), three(1)]
    assert one[2] == [three(1), three(0), [1.0, 1.0], three(0), three(1), three(10), three(11), three(1), three(5)]


@pytest.mark.parametrize("seed", seeds(10))
def test_a_result_is_not_overwritten_while_the_caller_still_reads_it(seed):
    """It is memory of the communication stream, which the allocator would give to the next communication."""

    def play(comm):
        total = torch.zeros(64, device="cuda")
        for i in range(6):
            parts = comm.allgather(torch.full((64,), float(comm.rank + i), device="cuda"))
            total += parts[0] + parts[1]
            del parts
        return total.cpu().tolist()

    expected = [float(sum(2 * i + 1 for i in range(6)))] * 64
    assert on_gpus(2, play, seed=seed) == [expected, expected]


@pytest.mark.parametrize("seed", seeds(10))
def test_a_tensor_may_be_dropped_as_soon_as_it_is_on_its_way(seed):
    def play(comm):
        results = []
        for i in range(5):
            pending = comm.all_reduce_async(torch.full((64,), float(i), device="cuda"))
            torch.full((64,), -1.0, device="cuda")  # memory that was freed too early would be used for this
            results.append(pending)
        return [pending.wait().sum().cpu().item() for pending in results]

    assert on_gpus(2, play, seed=seed) == [[128.0 * i for i in range(5)]] * 2


@pytest.mark.parametrize("seed", ANY)
def test_all_communication_of_a_device_uses_one_stream(seed):
    def play(comm):
        device = torch.device("cuda", torch.cuda.current_device())
        streams = {communication_stream(device)}
        for _ in range(40):
            comm.all_reduce(torch.ones(2, device="cuda"))
            streams.add(communication_stream(device))
        return len(streams)

    assert on_gpus(2, play, seed=seed) == [1, 1]


@pytest.mark.parametrize("seed", ANY)
def test_on_several_hosts_an_all_reduce_is_one_call_of_nccl(seed):
    def play(comm):
        calls = simulation().own["world"].calls[comm.rank]
        before = len(calls)
        mean = comm.all_reduce(torch.full((6,), float(comm.rank), device="cuda"), op="mean")
        return mean.cpu().tolist(), calls[before:]

    for mean, calls in on_gpus(4, play, seed=seed, hosts=2):
        assert mean == [1.5] * 6
        [call] = calls
        assert call.startswith("all_reduce world")
        assert "AVG" in call


@pytest.mark.parametrize("seed", ANY)
def test_groups_of_nccl_have_no_gloo_beside_them(seed):
    """gloo connects every pair of ranks of a group, and resolves the host's name to do so."""
    calls = on_gpus(4, lambda comm: simulation().own["world"].calls[comm.rank], seed=seed, hosts=2, algorithm=torus(2, 2))
    groups = [call for call in calls[0] if call.startswith("new_group")]
    assert groups
    assert all(call.endswith("nccl") for call in groups)
    assert all([call for call in own if call.startswith("new_group")] == groups for own in calls)


@pytest.mark.parametrize("seed", ANY)
def test_dtypes_that_nccl_does_not_know(seed):
    def play(comm):
        x = torch.tensor([1 + comm.rank, 2], dtype=torch.int16).cuda()
        z = torch.tensor([1 + 1j, comm.rank + 0j]).cuda()
        return comm.all_reduce(x).cpu().tolist(), comm.all_reduce(z).cpu().tolist()

    assert on_gpus(2, play, seed=seed) == [([3, 4], [2 + 2j, 1 + 0j])] * 2


class FutureOnDevice:
    """torch's future of a device, which the CPU build refuses to make: it remembers the stream that completed it."""

    def __init__(self, *, devices):
        self.devices = devices

    def set_result(self, value):
        self.value, self.come = value, torch.cuda.current_stream().record_event()

    def wait(self):
        torch.cuda.current_stream().wait_event(self.come)
        return self.value


class Bucket:
    """A bucket of gradients, as DDP passes it to its hook."""

    def __init__(self, gradients):
        self._gradients = gradients

    def buffer(self):
        return self._gradients

    def index(self):
        return 0


@pytest.mark.parametrize("seed", seeds(10))
def test_the_hook_of_ddp_completes_on_the_device(seed, monkeypatch):
    monkeypatch.setattr(torch.futures, "Future", FutureOnDevice)

    def play(comm):
        gradients = torch.full((64,), float(comm.rank), device="cuda")
        before = len(process().syncs)
        future = phalanx.ddp_hook(comm, Bucket(gradients))
        mean = future.wait() * 2
        waited = len(process().syncs) - before
        return waited, future.devices == [gradients.device], mean.cpu().unique().tolist()

    assert on_gpus(2, play, seed=seed) == [(0, True, [1.0])] * 2


# ---- failure ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", ANY)
def test_a_rank_that_does_not_come_is_named(seed):
    """The kernels of the others wait for it; their hosts learn of it without waiting for the device, and the kernels end."""

    def play(comm):
        comm.all_reduce(torch.ones(2, device="cuda"))
        if comm.rank == 1:
            queued.time.sleep(100)  # on the simulated clock
            return "slept"
        x = torch.ones(4, device="cuda")
        comm.all_reduce(x)  # queued, and returns
        try:
            x.cpu()  # would wait for ever
            comm.all_reduce(x)
        except phalanx.CommunicationError as error:
            return list(error.missing)
        return "no error"

    assert on_gpus(3, play, seed=seed, timeout=20.0) == [[1], "slept", [1]]


@pytest.mark.parametrize("seed", ANY)
def test_a_rank_that_dies_is_named_while_the_others_wait_for_their_devices(seed):
    def play(comm):
        x = torch.ones(4, device="cuda")
        comm.all_reduce(x)
        if comm.rank == 2:
            die()
        comm.all_reduce(x)
        try:
            x.cpu()
            comm.all_reduce(x)
        except phalanx.CommunicationError as error:
            return list(error.missing)
        return "no error"

    results = on_gpus(3, play, seed=seed, timeout=20.0)
    assert results[:2] == [[2], [2]]
