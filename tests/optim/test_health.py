"""Errors that no exception shows: replicas that drift apart, NaN from one rank, the same data on every rank."""

import copy
import logging
import warnings

import pytest
import torch
from tests.optim.oracle import SMALL, AllReduce, ReplicaError, X, Y, create_multi_node_optimizer, flat, loss_of, plain_step, sgd

import phalanx
from phalanx.grad.drift import bit_sum


@pytest.mark.parametrize("culprits", [[1], [0], [1, 3]])
@pytest.mark.parametrize("every", [1, 4])
def test_replicas_that_become_different_are_named(culprits, every):
    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(
            torch.optim.SGD(own.named_parameters(), lr=0.1), comm, sync=AllReduce(check_every=every)
        )
        for t in range(8):
            if t == 2 and comm.rank in culprits:
                with torch.no_grad():
                    own[2].weight[3, 4] += 1e-12
            try:
                plain_step(own, opt, comm, t)
            except ReplicaError as error:
                return t, str(error)
        return None

    who = "rank 1" if culprits == [1] else "rank 0" if culprits == [0] else "ranks 1, 3"
    for steps, text in phalanx.run_local(5, train, timeout=20):
        assert steps == (2 if every == 1 else 3)  # found in the step of the next check
        assert f"parameters of {who} differ from the other ranks', in 2.weight" in text
        assert "bcast_parameters" in text


def test_equal_replicas_pass_and_the_check_can_be_switched_off():
    def train(comm, every, nudge):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, sync=AllReduce(check_every=every))
        for t in range(6):
            plain_step(own, opt, comm, t)
            if nudge and comm.rank == 1:
                with torch.no_grad():
                    own[0].bias += 1
        return flat(own)

    for every, nudge in ((1, False), (2, False), (0, True)):
        phalanx.run_local(3, lambda comm, every=every, nudge=nudge: train(comm, every, nudge), timeout=20)


@pytest.mark.parametrize("wrong", [-1, 1.5, None])
def test_check_every_is_a_number_of_steps(wrong):
    with pytest.raises(ValueError, match="check_every="):
        AllReduce(check_every=wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("count", [0, 1, 3, 7, 8, 9, 1000])
def test_one_bit_changes_the_sum(dtype, count):
    x = torch.randn(count + 1, dtype=dtype)[1:]  # not on a multiple of eight bytes
    before = bit_sum(x)
    assert torch.equal(before, bit_sum(x.clone()))
    for i in {0, count // 2, count - 1} & set(range(count)):
        y = x.clone()
        flat_bytes = torch.view_as_real(y).view(-1).view(torch.uint8) if dtype.is_complex else y.view(torch.uint8)
        flat_bytes[i * dtype.itemsize] ^= 1
        assert not torch.equal(before, bit_sum(y))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_with_nan_is_named_once_on_all_ranks(value, overlap):
    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, sync=AllReduce(overlap=overlap), bucket_bytes=200)
        for t in range(5):
            opt.zero_grad()
            (loss_of(own, comm, t) * (value if t >= 2 and comm.rank == 1 else 1.0)).backward()
            opt.step()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        phalanx.run_local(3, train, timeout=20)
    texts = [str(warning.message) for warning in told]
    assert len(texts) == 3  # once per rank
    assert all(text.startswith("step 3: the gradients of rank 1 are not finite") for text in texts)


def test_a_scaler_that_skips_steps_with_inf_is_no_reason_to_warn():
    def train(comm):
        own = copy.deepcopy(SMALL).float()
        opt = create_multi_node_optimizer(sgd(own), comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales = []
        for t in range(4):
            opt.zero_grad()
            loss = ((own(X[t].float()) - Y[t].float()) ** 2).mean() + comm.rank * 0
            scaler.scale(loss * (float("inf") if t == 1 and comm.rank == 1 else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
        return flat(own), scales

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = phalanx.run_local(2, train, timeout=20)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.isfinite(results[0][0]).all()
    assert results[0][1] == results[1][1] == [1024.0, 512.0, 512.0, 512.0]


@pytest.mark.parametrize("same", [True, False])
def test_ranks_that_read_the_same_data_are_warned_once(same, caplog):
    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm)
        for t in range(3):
            opt.zero_grad()
            loss_of(own, None if same else comm, t).backward()
            opt.step()

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        phalanx.run_local(3, train, timeout=20)
    found = [record.message for record in caplog.records if "same first gradients" in record.message]
    assert len(found) == (1 if same else 0)
    assert not same or "scatter_dataset" in found[0]
