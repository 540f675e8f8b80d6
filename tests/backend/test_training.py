"""What people build on process groups trains on Phalanx as on gloo: the same numbers with the name of the backend changed."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.backend.groups import both, group_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 3


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(20, 200), torch.nn.Tanh(), torch.nn.Linear(200, 200), torch.nn.Linear(200, 2))


def train(net, optimizer, batches):
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches(rank):
    return [torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * step + rank)) for step in range(STEPS)]


def with_ddp(group, rank, **options):
    own = model()
    net = DistributedDataParallel(own, process_group=group, bucket_cap_mb=0.05, **options)  # several buckets
    losses = train(net, torch.optim.SGD(net.parameters(), lr=0.1), batches(rank))
    return losses, torch.cat([p.detach().reshape(-1) for p in own.parameters()])


def with_zero(group, rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    own = model()
    net = DistributedDataParallel(own, process_group=group)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    losses = train(net, optimizer, batches(rank))
    return losses, torch.cat([p.detach().reshape(-1) for p in own.parameters()])


def with_fsdp(group, rank):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    losses = train(net, torch.optim.Adam(net.parameters(), lr=0.01), batches(rank))
    return losses, torch.cat([p.full_tensor().detach().reshape(-1) for p in net.parameters()])


def with_tensors(group, rank):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(48.0).reshape(8, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = (rows @ distribute_tensor(whole.T.contiguous(), mesh, [Shard(1)])).full_tensor()
    return [columns.to_local().sum().item(), rows.mean().full_tensor().item()], product


def with_a_sampler(group, rank):
    numbers = TensorDataset(torch.arange(10.0))
    sampler = DistributedSampler(numbers, num_replicas=dist.get_world_size(group), rank=dist.get_rank(group), seed=5)
    total = torch.zeros(1)
    for (x,) in DataLoader(numbers, batch_size=2, sampler=sampler):
        total += x.sum()
    dist.all_reduce(total, group=group)
    return [total.item()], total


def compare(comm, work, options):
    torch.manual_seed(comm.rank)
    with warnings.catch_warnings(), both() as (ours, theirs):
        warnings.simplefilter("ignore")  # torch warns about its own modules when it imports them
        losses, weights = work(ours, comm.rank, **options)
        expected, expected_weights = work(theirs, comm.rank, **options)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    torch.testing.assert_close(weights, expected_weights)
    assert weights.abs().max() > 0
    everywhere = comm.bcast(weights.clone(), 0)
    assert torch.equal(everywhere, weights)  # ranks agree to the bit


@pytest.mark.parametrize(
    ("work", "options"),
    [
        (with_ddp, {}),
        (with_ddp, {"gradient_as_bucket_view": True, "static_graph": True}),
        (with_ddp, {"find_unused_parameters": True}),
        (with_zero, {}),
        (with_fsdp, {}),
        (with_tensors, {}),
        (with_a_sampler, {}),
    ],
    ids=lambda each: each.__name__ if callable(each) else "-".join(each),
)
def test_trains_as_on_gloo(pair, work, options):
    pair.run(compare, work, options)


def functional(comm):
    from torch.distributed import _functional_collectives as functional

    with group_of("phalanx") as group:
        x = torch.full((5,), comm.rank + 1.0)
        total = functional.all_reduce(x, "sum", group)
        whole = functional.all_gather_tensor(x, 0, group)
        part = functional.reduce_scatter_tensor(torch.arange(2.0 * comm.size), "sum", 0, group)
        assert total.tolist() == [comm.size * (comm.size + 1) / 2] * 5
        assert whole.tolist() == [rank + 1.0 for rank in range(comm.size) for _ in range(5)]
        assert part.tolist() == [comm.size * (2.0 * comm.rank + i) for i in range(2)]


def test_functional_collectives(pair):
    pair.run(functional)


def with_works_of_cpp(comm):
    """As on torch 2.6."""
    from phalanx.backend import work

    work.DROPS_PYTHON = True
    try:
        compare(comm, with_ddp, {})
        functional(comm)
    finally:
        work.DROPS_PYTHON = False


def test_trains_with_the_works_that_torch_2_6_needs(pair):
    pair.run(with_works_of_cpp)


def save_and_load(comm, place):
    with warnings.catch_warnings(), group_of("phalanx") as group:
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint as dcp

        net = model()
        expected = copy.deepcopy(net.state_dict())
        dcp.save({"model": net.state_dict()}, checkpoint_id=place, process_group=group)
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        state = {"model": net.state_dict()}
        dcp.load(state, checkpoint_id=place, process_group=group)
        assert all(torch.equal(state["model"][name], expected[name]) for name in expected)


def test_checkpoints_are_saved_and_loaded(pair, tmp_path):
    pair.run(save_and_load, str(tmp_path / "checkpoint"))
