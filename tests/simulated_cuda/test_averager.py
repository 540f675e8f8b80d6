"""What the averager does on GPUs beside the mean: it overlaps, makes no host wait, and still notices what is wrong."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tests.simulated_cuda.launch import launch
from tests.simulated_cuda.scenarios import writes_on_streams
from tests.simulated_cuda.seeds import seeds
from tests.simulated_cuda.simulated import simulated
from tests.simulated_cuda.simulation import process
from torch.utils.checkpoint import checkpoint

import phalanx

ANY = seeds(3)


def on_gpus(fn, *, seed, world=2):
    with simulated(hosts=1, gpus_per_host=world, seed=seed):
        return launch(world, fn)


def warned(word, fn, seed):
    """The results of `fn`, and the warnings of all ranks that have `word`: ranks are threads, and share one list of them."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = on_gpus(fn, seed=seed)
    return results, [str(w.message) for w in seen if word in str(w.message)]


with torch.random.fork_rng():
    torch.manual_seed(0)
    NETWORK = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    )


def network():
    return copy.deepcopy(NETWORK).cuda()


def optimizer(model, comm, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return phalanx.create_multi_node_optimizer(sgd, comm, bucket_bytes=128, **options)


@pytest.mark.parametrize("seed", ANY)
def test_groups_leave_during_backward_without_being_tried_out(seed):
    """The host's clock does not see the device, so it could not tell what is faster."""

    def play(comm):
        model = network()
        opt = optimizer(model, comm, sync=phalanx.AllReduce(record=True))
        for _ in range(10):
            opt.zero_grad()
            model(torch.ones(3, 4, device="cuda") + comm.rank).sum().backward()
            opt.step()
        return [record.early_bytes > 0 for record in opt.report()]

    assert on_gpus(play, seed=seed) == [[False] + [True] * 9] * 2  # the first backward is only watched


@pytest.mark.parametrize("seed", seeds(10))
def test_a_group_waits_for_all_streams_that_have_written_to_it(seed):
    """A model may compute on side streams. Autograd then makes gradients there, and calls the hooks there."""
    writes_on_streams(seed)


def on_one_cpu():
    """The same training with the mean of both ranks' gradients, on the CPU."""

    def play(comm):
        model = copy.deepcopy(NETWORK)
        opt = optimizer(model, comm)
        for _ in range(4):
            opt.zero_grad()
            model(torch.ones(3, 4) + comm.rank).square().sum().backward()
            opt.step()
        return [p.detach().tolist() for p in model.parameters()]

    return phalanx.run_local(2, play)[0]


@pytest.mark.parametrize("seed", ANY)
def test_a_gradient_that_comes_in_pieces_is_whole(seed):
    """Reentrant checkpointing on one rank, from the second step on: its groups had left, so all go again."""

    def play(comm):
        model = network()
        opt = optimizer(model, comm)
        for step in range(4):
            opt.zero_grad()
            x = (torch.ones(3, 4, device="cuda") + comm.rank).requires_grad_()
            if step == 2 and comm.rank == 1:
                y = checkpoint(model, x, use_reentrant=True) + model(x) * 0
            else:
                y = model(x)
            y.square().sum().backward()
            opt.step()
        return [p.detach().cpu().tolist() for p in model.parameters()]

    zero, one = on_gpus(play, seed=seed)
    assert zero == one
    torch.testing.assert_close([torch.tensor(x) for x in zero], [torch.tensor(x) for x in on_one_cpu()])


@pytest.mark.parametrize("seed", ANY)
def test_a_nan_is_reported_a_few_steps_later_and_the_host_does_not_wait(seed):
    def play(comm):
        model = network()
        opt = optimizer(model, comm)
        for step in range(12):
            if step == 2:
                before = len(process().syncs)
            opt.zero_grad()
            x = torch.full((3, 4), float("nan") if comm.rank == 1 else 1.0, device="cuda")
            model(x).sum().backward()
            opt.step()
            if step == 8:
                waited = [str(sync) for sync in process().syncs[before:] if "warn_of_nan" not in str(sync)]  # once
                torch.cuda.synchronize()
        return waited

    waited, seen = warned("not finite", play, seed)
    assert waited == [[], []]
    assert len(seen) == 2  # on every rank once
    assert all("the gradients of rank 1 are not finite" in words for words in seen)


@pytest.mark.parametrize("seed", ANY)
def test_an_overflow_on_a_16_bit_wire_is_reported(seed):
    def play(comm):
        model = network()
        opt = optimizer(model, comm, wire=torch.float16)
        for step in range(6):
            opt.zero_grad()
            (model(torch.ones(3, 4, device="cuda")) * (1e9 if step == 2 else 1.0)).sum().backward()
            if step > 2:
                torch.cuda.synchronize()
            opt.step()

    assert len(warned("exceeded", play, seed)[1]) == 2  # on every rank once


@pytest.mark.parametrize("seed", ANY)
def test_replicas_that_drift_apart_are_found_at_the_next_comparison(seed):
    def play(comm):
        model = network()
        opt = optimizer(model, comm, sync=phalanx.AllReduce(check_every=2))
        for step in range(8):
            opt.zero_grad()
            model(torch.ones(3, 4, device="cuda")).sum().backward()
            opt.step()
            if step == 2 and comm.rank == 1:
                with torch.no_grad():
                    model[0].bias.add_(1.0)
        return "not found"

    with pytest.raises(phalanx.ReplicaError, match="after step 4 the parameters of rank 1 differ"):
        on_gpus(play, seed=seed)


with torch.random.fork_rng():
    torch.manual_seed(1)
    CONVOLUTIONAL = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(3 * 36, 2)
    )


@pytest.mark.parametrize("seed", ANY)
def test_a_convolutional_network_with_batch_norm_has_the_bits_of_the_cpu(seed):
    def play(comm, device):
        model = copy.deepcopy(CONVOLUTIONAL).to(device)
        opt = optimizer(model, comm)
        images = torch.arange(2.0, device=device).view(2, 1, 1, 1) * torch.ones(2, 1, 8, 8, device=device) + comm.rank
        for _ in range(3):
            opt.zero_grad()
            model(images).square().mean().backward()
            opt.step()
        return [x.cpu().tolist() for x in model.state_dict().values()]

    found = on_gpus(lambda comm: play(comm, "cuda"), seed=seed)
    assert found == phalanx.run_local(2, lambda comm: play(comm, "cpu"))
