"""8-bit gradients in training: ranks stay equal, nothing is lost, and checkpoints continue bit for bit."""

import copy
import warnings

import pytest
import torch
from tests.long import often
from torch import nn

import phalanx
from phalanx.comm.compound import quantised_for
from phalanx.comm.hosts import Hosts

SHAPES = [(3, 3), (4, 2), *often((1, 1), (2, 2), (5, 5), (8, 4))]  # ranks, hosts


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 5))


START = network()


def batch(rank, step, size=8):
    own = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(size, 12, generator=own)
    return x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long()


def loss(model, rank, step):
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def make(comm, wire, model=None, **options):
    model = copy.deepcopy(START) if model is None else model
    sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return model, phalanx.create_multi_node_optimizer(sgd, comm, wire=wire, **({"bucket_bytes": 1000} | options))


def train(comm, wire, steps=12, **options):
    model, opt = make(comm, wire, **options)
    for step in range(steps):
        opt.zero_grad()
        loss(model, comm.rank, step).backward()
        opt.step()
    return weights(model)


def on(ranks, hosts, work):
    return phalanx.run_local(ranks, work, hosts=hosts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "wire", [phalanx.Int8(block=16), phalanx.Int8(rounding="stochastic", level="rank")], ids=["host", "rank"]
)
def test_ranks_stay_equal_and_train_as_without(shape, wire):
    coded, plain = on(*shape, lambda comm: train(comm, wire)), on(*shape, lambda comm: train(comm, None))
    assert all(torch.equal(own, coded[0]) for own in coded)
    moved = (plain[0] - weights(START)).norm()
    assert float((coded[0] - plain[0]).norm()) < 0.02 * float(moved)
    compresses = shape[1] > 1 or (wire.level == "rank" and shape[0] > 1)
    assert torch.equal(coded[0], plain[0]) == (not compresses)


@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (5, 5)], ids=str)
def test_the_error_of_one_mean_is_bounded_by_what_blocks_hold(shape):
    """One rounding on the way to a sum, at most half a step of the block each, and one of the sum."""
    ranks, hosts = shape

    def gradients(rank):
        own = torch.Generator().manual_seed(rank)
        return torch.randn(3000, generator=own) * 10 ** torch.randn(3000, generator=own)

    def mean(comm):
        p = nn.Parameter(torch.zeros(3000))
        opt = phalanx.create_multi_node_optimizer(torch.optim.SGD([p], lr=1.0), comm, wire=phalanx.Int8(block=64))
        (p * gradients(comm.rank)).sum().backward()
        opt.step()
        return p.grad.clone()

    found = on(ranks, hosts, mean)
    assert all(torch.equal(own, found[0]) for own in found)
    inside = ranks // hosts
    by_host = [sum(gradients(h * inside + k).double() for k in range(inside)) for h in range(hosts)]
    # a block lies within the numbers that are at most 64 away
    spread = nn.functional.max_pool1d(torch.stack(by_host).abs()[None], 127, 1, 63)[0].sum(0)
    bound = 2.01 * spread / 254 / ranks
    assert bool(((found[0] - sum(by_host) / ranks).abs() <= bound).all())


def test_without_error_feedback_small_gradients_beside_large_ones_never_arrive():
    def drift(comm, feedback):
        p = nn.Parameter(torch.zeros(64))
        wire = phalanx.Int8(block=64, error_feedback=feedback)
        opt = phalanx.create_multi_node_optimizer(torch.optim.SGD([p], lr=1.0), comm, wire=wire)
        slope = torch.full((64,), 0.1)
        slope[::4] = 127.0
        for _ in range(50):
            opt.zero_grad()
            (p * slope).sum().backward()
            opt.step()
        return float(-p.detach()[41])

    assert on(2, 2, lambda comm: drift(comm, feedback=False)) == [0.0, 0.0]
    with_it = on(2, 2, lambda comm: drift(comm, feedback=True))
    assert with_it[0] == with_it[1] == pytest.approx(5.0, abs=1.0)


@pytest.mark.parametrize("options", [{}, {"double_buffering": True}], ids=["plain", "double buffering"])
@pytest.mark.parametrize("rounding", ["stochastic", *often("nearest")])
def test_a_checkpoint_continues_bit_for_bit(options, rounding, tmp_path):
    wire = phalanx.Int8(block=32, rounding=rounding)

    def run(comm, steps, folder=None, resume=False):
        model, opt = make(comm, wire, **options)
        first = 0
        if folder is not None:
            checkpoints = phalanx.Checkpointer(folder, comm)
            if resume:
                first = checkpoints.load(model=model, opt=opt.optimizer, communication=opt.communication)
        for step in range(first, steps):
            opt.zero_grad()
            loss(model, comm.rank, step).backward()
            opt.step()
        if folder is not None and not resume:
            checkpoints.save(steps, model=model, opt=opt.optimizer, communication=opt.communication)
            checkpoints.close()
        return weights(model)

    whole = on(4, 2, lambda comm: run(comm, 9))
    on(4, 2, lambda comm: run(comm, 5, tmp_path))
    assert torch.equal(on(4, 2, lambda comm: run(comm, 9, tmp_path, resume=True))[0], whole[0])
    # on another number of ranks the errors begin anew, and the ranks still agree
    other = on(2, 2, lambda comm: run(comm, 9, tmp_path, resume=True))
    assert torch.equal(other[0], other[1])
    # negative control: without the errors the run takes another course
    assert not torch.equal(on(4, 2, lambda comm: forgetful(comm, tmp_path, wire, options))[0], whole[0])


def forgetful(comm, folder, wire, options):
    model, opt = make(comm, wire, **options)
    unused = make(comm, None, **options)[1]
    step = phalanx.Checkpointer(folder, comm).load(model=model, opt=opt.optimizer, communication=unused.communication)
    for now in range(step, 9):
        opt.zero_grad()
        loss(model, comm.rank, now).backward()
        opt.step()
    return weights(model)


def test_a_gradient_that_is_not_finite_is_reported_and_fills_its_block_on_all_ranks():
    def run(comm):
        p = nn.Parameter(torch.zeros(200))
        opt = phalanx.create_multi_node_optimizer(torch.optim.SGD([p], lr=1.0), comm, wire=phalanx.Int8(block=16))
        slope = torch.ones(200)
        if comm.rank == 2:
            slope[70] = float("inf")
        (p * slope).sum().backward()
        first = p.grad.clone()
        opt.zero_grad()
        p.sum().backward()
        return first, p.grad.clone()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = on(4, 2, run)
    assert all(bool(first[70].isnan()) and torch.equal(first.isnan(), found[0][0].isnan()) for first, _ in found)
    assert int(found[0][0].isnan().sum()) <= 16
    assert all(bool(later.isfinite().all()) and torch.allclose(later, torch.ones(200)) for _, later in found)
    assert any("is not finite: some rank's gradient was not" in str(w.message) for w in caught)


def test_accumulation_missing_gradients_and_new_parameters():
    def run(comm):
        model, opt = make(comm, phalanx.Int8(block=32), copy.deepcopy(START))
        with opt.no_sync():
            loss(model, comm.rank, 0).backward()
        loss(model, comm.rank, 1).backward()
        opt.step()
        kept = opt.communication.state_dict()["wires"]
        head = nn.Linear(5, 5)
        with torch.no_grad():
            for p in head.parameters():
                p.fill_(0.1)
        opt.add_param_group({"params": list(head.parameters())})
        opt.zero_grad()
        if comm.rank != 1:  # joins with zeros
            model(batch(comm.rank, 2)[0]).sum().backward()  # the head has no gradient anywhere
        opt.step()
        errors = [own["error"] for own in kept.values()]
        return weights(model), len(kept), float(sum(e.abs().sum() for e in errors))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = on(3, 3, run)
    assert all(torch.equal(w, found[0][0]) for w, _, _ in found)
    assert all(count == 4 and size > 0 for _, count, size in found)


def test_uneven_batches_count_by_samples():
    def run(comm, wire):
        model, opt = make(comm, wire, sync=phalanx.AllReduce(weighted=True))
        for step in range(6):
            size = 0 if (comm.rank + step) % 3 == 0 else 4 * (1 + comm.rank)
            opt.weight = size
            opt.zero_grad()
            x, y = batch(comm.rank, step, max(size, 1))
            (nn.functional.cross_entropy(model(x[:size]), y[:size]) if size else model(x).sum() * 0).backward()
            opt.step()
        return weights(model)

    coded, plain = (on(3, 3, lambda comm, w=w: run(comm, w)) for w in (phalanx.Int8(), None))
    assert all(torch.equal(own, coded[0]) for own in coded)
    assert float((coded[0] - plain[0]).norm()) < 0.03 * float((plain[0] - weights(START)).norm())


def test_a_grad_scaler_skips_a_step_that_overflows_and_training_continues():
    def run(comm):
        model, opt = make(comm, phalanx.Int8())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        for step in range(140):
            opt.zero_grad()
            scaler.scale(loss(model, comm.rank, step)).backward()
            scaler.step(opt)
            scaler.update()
        return weights(model), scaler.get_scale()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = on(2, 2, run)
    assert torch.equal(found[0][0], found[1][0])
    assert bool(found[0][0].isfinite().all())
    assert not torch.equal(found[0][0], weights(START))


@pytest.mark.parametrize("elements", [5, 1000, 1024])
@pytest.mark.parametrize("options", [{}, {"sync": phalanx.AllReduce(overlap=False)}], ids=str)
def test_one_overflow_costs_one_step_whatever_lies_beside_the_gradients(elements, options):
    """The overflow fills its block, and so the memory behind the gradients, which is sent with the next ones."""

    def run(comm):
        p, beside = nn.Parameter(torch.ones(elements)), nn.Parameter(torch.ones(3))
        sgd = torch.optim.SGD([p, beside], lr=0.01)
        opt = phalanx.create_multi_node_optimizer(sgd, comm, wire=phalanx.Int8(level="rank"), **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(8):
            own = torch.Generator().manual_seed(10 * comm.rank + step)
            opt.zero_grad()
            large = 1e38 if step == 2 and comm.rank == 1 else 1.0
            scaler.scale((p * torch.randn(elements, generator=own)).sum() * large + beside.sum()).backward()
            scaler.step(opt)
            scaler.update()
        return p.detach().clone(), scaler.get_scale()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = on(2, 2, run)
    assert torch.equal(found[0][0], found[1][0])
    assert bool(found[0][0].isfinite().all())
    assert [scale for _, scale in found] == [2.0**9, 2.0**9]


def test_hosts_with_different_numbers_of_ranks_encode_every_message():
    uneven = Hosts(((0, 1, 2), (3,)))
    assert quantised_for(uneven, "host").name == "quantised(4x1)"
    assert quantised_for(Hosts(((0, 2), (1, 3))), "host").name == "quantised(2x2)"


@pytest.mark.parametrize("options", [{"rounding": "up"}, {"level": "all"}, {"block": 100}, {"seed": -1}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        phalanx.Int8(**options)


def test_what_does_not_go_with_it_is_refused_in_a_sentence():
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with phalanx.create_communicator() as comm:
        for options, words in (
            ({"sync": phalanx.Gossip()}, "Gossip takes torch.float16"),
            ({"sync": phalanx.DiLoCo(every=2, partners="random")}, "one partner"),
            ({"sync": phalanx.DiLoCo(every=2, wire=torch.bfloat16)}, "set one of them"),
            ({"sync": phalanx.AllReduce(fused=True)}, "sends nothing"),
        ):
            with pytest.raises(ValueError, match=words):
                phalanx.create_multi_node_optimizer(sgd, comm, wire=phalanx.Int8(), **options)
        with pytest.raises(TypeError, match=r"phalanx\.Int8"):
            phalanx.create_multi_node_optimizer(sgd, comm, wire="int8")
    with pytest.raises(phalanx.ScheduleError, match=r"wire=phalanx\.Int8"):
        phalanx.run_local(2, lambda comm: None, algorithm=phalanx.schedule.quantised(2))
    with pytest.raises(TypeError, match=r"x\.float"):
        phalanx.run_local(2, lambda comm: comm.run(phalanx.schedule.quantised(2), torch.ones(4, dtype=torch.float64)))
