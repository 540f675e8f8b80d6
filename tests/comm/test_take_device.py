"""Which GPU a rank takes when it joins: the choice, the agreement between hosts, and the check that no GPU has two ranks."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.launch import Launch, LaunchError
from phalanx.comm.transports.torch import process_group


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs per host, seen by every rank; `taken` collects what ranks make current."""
    taken = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.__setitem__(threading.get_ident(), device.index))
    monkeypatch.setattr(process_group, "host_key", lambda: threading.current_thread().name)

    def properties(device):
        return SimpleNamespace(uuid=f"{threading.current_thread().name}/{device.index}")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return taken


def join(launches, hosts, *, nccl=True):
    """What every rank takes, or raises."""
    store, results = dist.HashStore(), {}

    def play(launch):
        try:
            results[launch.rank] = process_group.take_device(launch, store, nccl=nccl).index
        except LaunchError as error:
            results[launch.rank] = str(error)

    threads = [threading.Thread(target=play, args=[launch], name=host, daemon=True) for launch, host in zip(launches, hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[rank] for rank in range(len(launches))]


def test_the_local_rank_is_the_gpu(gpus):
    launches = [Launch("torchrun", rank, 4, local_rank=rank % 2, local_world=2) for rank in range(4)]
    assert join(launches, ["a", "a", "b", "b"]) == [0, 1, 0, 1]


def test_ranks_without_a_local_rank_agree_by_their_hosts(gpus):
    launches = [Launch("environment", rank, 4, placed=False) for rank in range(4)]
    assert join(launches, ["a", "b", "a", "b"]) == [0, 0, 1, 1]


def test_more_ranks_than_gpus(gpus):
    launches = [Launch("torchrun", rank, 3, local_rank=rank, local_world=3) for rank in (2,)]
    store = dist.HashStore()
    with pytest.raises(LaunchError, match=r"3 ranks on this host, but 2 GPUs.*backend='gloo'"):
        process_group.take_device(launches[0], store, nccl=True)
    assert process_group.take_device(launches[0], store, nccl=False).index == 0


def test_one_visible_gpu_that_two_ranks_share(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launches = [Launch("torchrun", rank, 2, local_rank=rank, local_world=2) for rank in range(2)]
    for words in join(launches, ["a", "a"]):
        assert "ranks 0, 1 all have GPU a/0" in words
        assert "CUDA_VISIBLE_DEVICES" in words
