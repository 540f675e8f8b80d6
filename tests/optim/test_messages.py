"""What is said when something is wrong, how often ranks communicate, and that nothing is left behind."""

import copy
import gc
import re
import warnings
import weakref

import pytest
import torch
from tests.optim.oracle import (
    SMALL,
    AllReduce,
    ReplicaError,
    X,
    create_multi_node_optimizer,
    flat,
    loss_of,
    plain_step,
    sgd,
    shard,
)
from torch.utils.checkpoint import checkpoint

import phalanx

# ---- replicas that differ ---------------------------------------------------------------------------------------------------


def first_step(comm, change, **options):
    """The ReplicaError of this rank at its first step, as text."""
    own = change(copy.deepcopy(SMALL), comm.rank)
    opt = create_multi_node_optimizer(sgd(own), comm, **{k: v(comm.rank) for k, v in options.items()})
    own(X[0][:2].to(own[0].weight.dtype)).sum().backward()
    with pytest.raises(ReplicaError) as caught:
        opt.step()
    return str(caught.value)


def nudge(*ranks):
    def change(model, rank):
        if rank in ranks:
            with torch.no_grad():
                model[2].weight[3, 4] += 1e-12
        return model

    return change


def swap(model, rank):
    """The same values in another order."""
    if rank == 1:
        with torch.no_grad():
            model[0].weight.copy_(model[0].weight.flip(0))
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nudge(2), "parameters differ between ranks: rank 2 from rank 0, in 2.weight. "),
        (nudge(1, 3), "parameters differ between ranks: ranks 1, 3 from rank 0, in 2.weight. "),
        (nudge(0), "parameters differ between ranks: ranks 1, 2, 3 from rank 0, in 2.weight. "),
        (swap, "parameters differ between ranks: rank 1 from rank 0, in 0.weight. "),
    ],
)
def test_replicas_that_start_different(change, words):
    texts = phalanx.run_local(4, lambda comm: first_step(comm, change), timeout=10)
    for text in texts:
        assert words in text
        assert "seed_everything" in text
        assert "bcast_parameters" in text


SHAPES = {
    "a layer more": lambda model, rank: torch.nn.Sequential(*model, torch.nn.Linear(3, 3).double()) if rank == 2 else model,
    "a wider layer": lambda model, rank: torch.nn.Sequential(*model[:4], torch.nn.Linear(8, 5).double()) if rank == 2 else model,
    "another dtype": lambda model, rank: model.float() if rank == 2 else model,
    "a frozen layer": lambda model, rank: model[0].requires_grad_(rank != 2) and model,
}


@pytest.mark.parametrize("how", SHAPES)
def test_models_that_are_different(how):
    torch.manual_seed(0)
    for text in phalanx.run_local(3, lambda comm: first_step(comm, SHAPES[how]), timeout=10):
        assert "number of parameters, their shapes, dtypes, memory formats or requires_grad differ" in text
        assert "rank 2 from rank 0" in text


@pytest.mark.parametrize(
    "options",
    [
        {"wire": lambda rank: torch.float16 if rank == 1 else None},
        {"bucket_bytes": lambda rank: 1000 if rank == 1 else None},
        {"double_buffering": lambda rank: rank == 1},
        {"sync": lambda rank: AllReduce(weighted=rank == 1)},
    ],
    ids=["wire", "bucket_bytes", "double_buffering", "sync"],
)
def test_options_that_differ(options):
    for text in phalanx.run_local(2, lambda comm: first_step(comm, lambda model, _: model, **options), timeout=10):
        assert "options of create_multi_node_optimizer differ between ranks: rank 1 from rank 0" in text


def test_recording_on_one_rank_is_no_difference():
    def train(comm):
        own = copy.deepcopy(SMALL)
        sync = AllReduce(record=comm.rank == 0)
        opt = create_multi_node_optimizer(sgd(own), comm, sync=sync)
        plain_step(own, opt, comm, 0)
        if comm.rank:
            with pytest.raises(ValueError, match="record=True"):
                opt.report()
            return 0
        return len(opt.report())

    assert phalanx.run_local(2, train) == [1, 0]


def test_a_replica_error_is_no_end():
    """After the remedy the same optimizer goes on."""

    def train(comm):
        own = nudge(1)(copy.deepcopy(SMALL), comm.rank)
        opt = create_multi_node_optimizer(sgd(own), comm)
        with pytest.raises(ReplicaError):
            plain_step(own, opt, comm, 0)
        phalanx.bcast_parameters(own, comm, root=comm.size - 1)
        plain_step(own, opt, comm, 0)
        return flat(own)

    a, b = phalanx.run_local(2, train, timeout=10)
    assert torch.equal(a, b)


# ---- overflow ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("double_buffering", [False, True])
def test_an_overflow_on_the_wire_is_told_once_with_the_name(double_buffering):
    def train(comm):
        own = torch.nn.ModuleDict({name: torch.nn.Linear(3, 1, bias=False) for name in ("calm", "loud", "still")})
        for layer in own.values():
            torch.nn.init.ones_(layer.weight)
        opt = create_multi_node_optimizer(
            torch.optim.SGD(own.named_parameters(), lr=0.0), comm, wire=torch.float16, double_buffering=double_buffering
        )
        for _ in range(3):
            opt.zero_grad()
            sum(layer(torch.full((1, 3), 1e6 if name == "loud" else 1.0)).sum() for name, layer in own.items()).backward()
            opt.step()
        return [bool(layer.weight.grad.isfinite().all()) for layer in own.values()]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert phalanx.run_local(2, train) == [[True, False, True]] * 2
    assert len(told) == 2  # once per rank
    for warning in told:
        assert re.match(r"the mean gradient of loud.weight is not finite: .*float16 .*65504", str(warning.message))


def test_no_word_where_nothing_overflows():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        def train(comm):
            own = copy.deepcopy(SMALL)
            opt = create_multi_node_optimizer(sgd(own), comm, wire=torch.float16)
            for t in range(3):
                plain_step(own, opt, comm, t)

        phalanx.run_local(2, train)


# ---- wrong arguments --------------------------------------------------------------------------------------------------------


def make_with(**changed):
    arguments = {"optimizer": sgd(copy.deepcopy(SMALL)), "comm": phalanx.create_communicator(), **changed}
    return create_multi_node_optimizer(arguments.pop("optimizer"), arguments.pop("comm"), **arguments)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"optimizer": SMALL}, TypeError, "optimizer is a torch.optim.Optimizer, got Sequential"),
        ({"optimizer": torch.optim.SGD}, TypeError, "got type"),
        ({"comm": None}, TypeError, r"comm is what phalanx.create_communicator\(\) returns, got NoneType"),
        ({"sync": "allreduce"}, TypeError, "got str"),
        ({"sync": AllReduce}, TypeError, "got type"),
        ({"wire": torch.float32}, TypeError, "wire=torch.float32: torch.float16, torch.bfloat16"),
        ({"wire": "fp16"}, TypeError, "wire='fp16'"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes=0"),
        ({"bucket_bytes": -5}, ValueError, "bucket_bytes=-5"),
        ({"bucket_bytes": 2.5e7}, TypeError, "bucket_bytes=25000000.0: an int"),
        ({"bucket_bytes": "25MB"}, TypeError, "bucket_bytes='25MB': an int"),
        ({"bucket_bytes": 1000, "sync": AllReduce(growing=3)}, ValueError, "one of them"),
    ],
)
def test_wrong_arguments(changed, error, words):
    with pytest.raises(error, match=words):
        make_with(**changed)


def test_more_wrong_arguments():
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match="growing="):
            AllReduce(growing=wrong)
    opt = make_with()
    with pytest.raises(TypeError, match="multi-node optimizer already"):
        make_with(optimizer=opt)
    with pytest.raises(TypeError):
        make_with(unknown=1)


# ---- how often ranks communicate --------------------------------------------------------------------------------------------


def counted(comm):
    """Every all-reduce that is started, by whom and what: any other verb is a negotiation, and fails."""
    calls, start = [], comm.all_reduce_async

    def all_reduce_async(x, op="sum", *, label=""):
        calls.append(x.numel() * x.element_size())
        return start(x, op, label=label)

    def forbidden(*_, **__):
        raise AssertionError("a negotiation after the first step")

    comm.all_reduce_async = all_reduce_async
    return calls, forbidden


VERBS = ["bcast", "gather", "allgather", "scatter", "alltoall", "send", "recv", "barrier", "reduce_scatter"]
OBJ_VERBS = ["bcast_obj", "gather_obj", "allgather_obj", "allreduce_obj"]


@pytest.mark.parametrize("double_buffering", [False, True])
@pytest.mark.parametrize(
    ("bucket_bytes", "groups"),
    [(1, 6), (1 << 30, 1), (3200, 2)],  # of 64+24, 1024+64, 2560+128 bytes, from the back: 3*8 | 8*3*8 ...
)
@pytest.mark.parametrize("overlap", [True, False])
def test_one_all_reduce_per_group_and_step_and_nothing_else(bucket_bytes, groups, overlap, double_buffering):
    def train(comm):
        own = copy.deepcopy(SMALL)
        calls, forbidden = counted(comm)
        opt = create_multi_node_optimizer(
            sgd(own), comm, bucket_bytes=bucket_bytes, double_buffering=double_buffering, sync=AllReduce(overlap=overlap)
        )
        plain_step(own, opt, comm, 0)
        for verb in VERBS + OBJ_VERBS:
            setattr(comm, verb, forbidden)
        per_step = []
        for t in range(1, 6):
            calls.clear()
            opt.zero_grad()
            loss_of(own, comm, t).backward()
            in_backward = len(calls)
            opt.step()
            per_step.append((in_backward, len(calls)))
        return per_step

    for per_step in phalanx.run_local(3, train):
        assert per_step == [(0 if double_buffering else groups, groups)] * 5


def test_no_sync_communicates_nothing_and_then_overlaps_again():
    def train(comm):
        own = copy.deepcopy(SMALL)
        calls, _ = counted(comm)
        opt = create_multi_node_optimizer(sgd(own), comm, bucket_bytes=1, sync=AllReduce(overlap=True))
        seen = []
        for t in range(3):
            calls.clear()
            opt.zero_grad()
            with opt.no_sync():
                loss_of(own, comm, t).backward()
                loss_of(own, comm, t).backward()
            inside = len(calls)
            loss_of(own, comm, t).backward()
            seen.append((inside, len(calls)))
            opt.step()
        return seen[1:]  # in the first step the groups are not known yet

    assert phalanx.run_local(2, train) == [[(0, 6), (0, 6)]] * 2


def test_a_surprise_costs_one_repetition():
    """A second piece of a gradient that nobody expected: all but the last group go twice, once; then its group waits."""

    def train(comm):
        own = copy.deepcopy(SMALL)
        calls, _ = counted(comm)
        opt = create_multi_node_optimizer(sgd(own), comm, bucket_bytes=1, sync=AllReduce(overlap=True))
        seen = []
        for t in range(5):
            calls.clear()
            opt.zero_grad()
            x = shard(comm, X[t]).clone().requires_grad_()
            out = own(x)
            if t in (2, 3):  # the last layer once more, inside a backward of its own
                out = out + checkpoint(own[4], own[:4](x), use_reentrant=True)
            (out**2).mean().backward()
            opt.step()
            seen.append(len(calls))
        return seen[1:]

    assert phalanx.run_local(3, train) == [[6, 11, 6, 6]] * 3


def test_backwards_that_are_not_equally_many_on_all_ranks_are_an_error():
    """Rank 0 alone has a second backward: no rank takes gradients of one step for those of another."""

    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, bucket_bytes=200, sync=AllReduce(overlap=True))
        plain_step(own, opt, comm, 0)
        try:
            for t in (1, 2):
                opt.zero_grad()
                for _ in range(2 if comm.rank == 0 else 1):
                    loss_of(own, comm, t).backward()
                opt.step()
        except phalanx.CommunicationError as error:
            return str(error)
        return "nothing"

    words = phalanx.run_local(2, train, timeout=3)
    assert "gradients of step 2, backward 2" in words[0]
    assert "gradients of step 3, backward 1" in words[1]


def test_the_report_says_what_left_early():
    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, bucket_bytes=1, sync=AllReduce(overlap=True, record=True))
        for t in range(3):
            plain_step(own, opt, comm, t)
        return opt.report()

    for records in phalanx.run_local(2, train):
        assert [record.early_bytes > 0 for record in records] == [False, True, True]
        for record in records:
            assert record.early_bytes < record.bytes
            assert record.bytes >= flat(SMALL).numel() * 8
            assert record.wait >= 0
            assert record.wait >= record.under_way or record.early_bytes


# ---- nothing is left behind -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_dropped_optimizer_frees_its_memory_and_its_hooks(scheduled):
    own, comm = copy.deepcopy(SMALL), phalanx.create_communicator()
    opt = create_multi_node_optimizer(sgd(own), comm, sync=AllReduce(overlap=True), bucket_bytes=1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1) if scheduled else None
    for t in range(3):
        plain_step(own, opt, comm, t)
    gone = weakref.ref(opt)
    storage = weakref.ref(own[0].weight.grad.untyped_storage())
    del opt, scheduler
    if scheduled:
        gc.collect()
    assert gone() is None  # without a scheduler at once: no cycle waits for the collector
    own.zero_grad()
    comm.barrier()  # the issuing thread remembers its last operation until the next
    assert storage() is None
    calls, _ = counted(comm)
    loss_of(own, comm, 0).backward()
    assert calls == []
    assert not own[0].weight._backward_hooks


def test_arenas_are_views_of_one_storage_per_dtype():
    own, comm = copy.deepcopy(SMALL), phalanx.create_communicator()
    own[4].float()
    forward = lambda: own[4](own[:4](X[0]).float()).sum()  # noqa: E731
    opt = create_multi_node_optimizer(sgd(own), comm)
    forward().backward()
    opt.step()
    storages = {p.dtype: set() for p in own.parameters()}
    for p in own.parameters():
        storages[p.dtype].add(p.grad.untyped_storage().data_ptr())
        assert p.grad.data_ptr() % 64 == 0
    assert {dtype: len(own) for dtype, own in storages.items()} == {torch.float32: 1, torch.float64: 1}


def test_two_optimizers_one_after_the_other_on_one_model():
    """The first one is still there, waiting for the collector on some ranks; and both may be used in turn."""

    def train(comm):
        own, history, kept = copy.deepcopy(SMALL), [], []
        for k in range(3):
            opt = create_multi_node_optimizer(sgd(own), comm, sync=AllReduce(overlap=True), bucket_bytes=1)
            kept.append(opt if (comm.rank + k) % 2 else None)
            for t in range(3):
                plain_step(own, opt, comm, t)
                history.append(flat(own))
        return history

    histories = phalanx.run_local(3, train, timeout=10)
    wanted, own = [], copy.deepcopy(SMALL)
    for _ in range(3):
        opt = sgd(own)
        for t in range(3):
            plain_step(own, opt, None, t)
            wanted.append(flat(own))
    for history in histories:
        for mine, first, other in zip(history, histories[0], wanted, strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)


def test_two_optimizers_in_turn_on_one_model():
    def steps(model, opts, comm):
        history = []
        for t in range(6):
            plain_step(model, opts[t % 2], comm, t)
            history.append(flat(model))
        return history

    def train(comm):
        own = copy.deepcopy(SMALL)
        opts = [create_multi_node_optimizer(sgd(own), comm, sync=AllReduce(overlap=True), bucket_bytes=1) for _ in range(2)]
        return steps(own, opts, comm)

    histories = phalanx.run_local(3, train, timeout=10)
    own = copy.deepcopy(SMALL)
    wanted = steps(own, [sgd(own), sgd(own)], None)
    for history in histories:
        for mine, first, other in zip(history, histories[0], wanted, strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)
