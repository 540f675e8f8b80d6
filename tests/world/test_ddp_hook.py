"""phalanx.ddp_hook: DistributedDataParallel with our schedules has the gradients of plain DistributedDataParallel."""

import copy

import pytest
import torch
from tests.optim.oracle import MODEL, flat, loss_of
from tests.world.conftest import ONLY

from phalanx import ddp_hook

# MODEL has 170 KB in 6 tensors: at 0.05 MB several buckets, one of them larger than what takes the shortest way
CAP = 0.05


def gradients(comm, hook, steps=3):
    own = copy.deepcopy(MODEL)
    model = torch.nn.parallel.DistributedDataParallel(own, bucket_cap_mb=CAP)
    buckets = []
    if hook is not None:

        def counting(state, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            buckets.append(bucket.index())
            return hook(state, bucket)

        model.register_comm_hook(comm, counting)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for t in range(steps):
        opt.zero_grad()
        loss_of(model, comm, t).backward()
        seen.append(torch.cat([p.grad.reshape(-1) for p in own.parameters()]))
        opt.step()
    return seen, flat(own), buckets


def compare(comm):
    plain, plain_weights, _ = gradients(comm, None)
    ours, weights, buckets = gradients(comm, ddp_hook)
    assert len(set(buckets)) > 1
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
        assert mine.abs().max() > 0
    torch.testing.assert_close(weights, plain_weights, rtol=1e-9, atol=1e-12)
    return weights


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_plain_ddp(pools, size):
    if ONLY not in (None, size):
        pytest.skip(f"needs {size} ranks, PHALANX_TEST_WORLD is {ONLY}")
    results = pools.of(size).run(compare)
    assert all(torch.equal(other, results[0]) for other in results)


def registered_directly(comm):
    """DDP looks at the hook's annotations; ours must pass without a wrapper."""
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(MODEL))
    model.register_comm_hook(comm, ddp_hook)
    loss_of(model, comm, 0).backward()
    return model.module[0].weight.grad.clone()


def test_the_hook_itself_can_be_registered(pair):
    a, b = pair.run(registered_directly)
    assert torch.equal(a, b)


class Broken:
    """A communicator whose all-reduce fails on its way."""

    def all_reduce_async(self, x, op):
        return self

    def wait(self):
        raise RuntimeError("rank 7 did not come")


def failing(comm):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(Broken(), ddp_hook)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


def test_a_failed_all_reduce_ends_backward_with_its_reason(pair):
    for text in pair.run(failing):
        assert "rank 7 did not come" in text
