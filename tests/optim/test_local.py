"""Local steps against an oracle in one process that plays all ranks: LocalSGD, DiLoCo in parts and overlapped, one partner."""

import copy
import functools
import math
from dataclasses import replace

import pytest
import torch
from tests.long import often
from tests.optim.oracle import SMALL, flat, loss_of, sgd

import phalanx
from phalanx import DiLoCo, Gossip, LocalSGD, ReplicaError, create_multi_node_optimizer
from phalanx.grad.local import flight as flights
from phalanx.grad.local.flight import partner_of
from phalanx.grad.local.parts import cut

NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def plain_step(model, opt, comm, t):
    opt.zero_grad()
    loss_of(model, comm, t % 8, next(model.parameters()).dtype).backward()  # there are data for eight
    opt.step()


class Place:
    """What a step asks a communicator for."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def trained(n, steps, sync, *, make=sgd, hosts=1, wire=None, model=SMALL, at_end=None):
    """The parameters of every rank after each step, and what `at_end` finds."""

    def run(comm):
        own = copy.deepcopy(model)
        opt = create_multi_node_optimizer(make(own), comm, sync=sync, wire=wire)
        history = []
        for t in range(steps):
            plain_step(own, opt, comm, t)
            history.append(flat(own))
        return history if at_end is None else (history, at_end(own, opt))

    return phalanx.run_local(n, run, hosts=hosts, timeout=30)


def played(n, steps, sync, *, make=sgd, model=SMALL):
    """The same in one process, by the rules of docs/slow-networks.md."""
    plan = sync.as_outer_steps() if isinstance(sync, LocalSGD) else sync
    models = [copy.deepcopy(model) for _ in range(n)]
    inner = [make(own) for own in models]
    under_way, history = [], []
    for t in range(plan.start):  # all-reduce
        for rank in range(n):
            inner[rank].zero_grad()
            loss_of(models[rank], Place(rank, n), t % 8, next(models[rank].parameters()).dtype).backward()
        for same in zip(*(own.parameters() for own in models), strict=True):
            mean = sum(p.grad for p in same) / n
            for p in same:
                p.grad = mean.clone()
        for each in inner:
            each.step()
        history.append([flat(own) for own in models])
    slow = [[torch.nn.Parameter(p.detach().clone()) for p in own.parameters()] for own in models]
    outer = [plan.build(own) for own in slow]
    parts = cut([p.numel() for p in slow[0]], plan.fragments)

    def land(part, gradients, means, sent):
        for rank in range(n):
            for i, gradient, mean in zip(parts[part], gradients[rank], means[rank], strict=True):
                slow[rank][i].data.copy_(mean)
                slow[rank][i].grad = gradient.clone()
            outer[rank].step()
            fast = list(models[rank].parameters())
            for k, i in enumerate(parts[part]):
                slow[rank][i].grad = None
                fast[i].data.copy_(slow[rank][i].data + (fast[i].data - sent[rank][k]))

    for t in range(1, steps - plan.start + 1):
        for rank in range(n):
            plain_step(models[rank], inner[rank], Place(rank, n), plan.start + t - 1)
        for flight in [flight for flight in under_way if flight[0] + plan.travels == t]:
            under_way.remove(flight)
            land(*flight[1:])
        for part in range(plan.fragments):
            if t % plan.every != (part + 1) * plan.every // plan.fragments % plan.every:
                continue
            fast = [[list(own.parameters())[i].data.clone() for i in parts[part]] for own in models]
            deltas = [[slow[r][i].data - x for i, x in zip(parts[part], fast[r], strict=True)] for r in range(n)]
            gradients, means = [], []
            for rank in range(n):
                partner = partner_of(rank, n, plan.seed, t) if plan.partners == "random" else None
                group = list(range(n)) if plan.partners == "all" else sorted({rank, rank if partner is None else partner})
                gradients.append([sum(x) / len(group) for x in zip(*(deltas[r] for r in group), strict=True)])
                own = [[slow[r][i].data for i in parts[part]] for r in group]
                means.append([sum(x) / len(group) for x in zip(*own, strict=True)])
            if plan.travels:
                under_way.append((t, part, gradients, means, fast))
            else:
                land(part, gradients, means, fast)
        history.append([flat(own) for own in models])
    return [[state[rank] for state in history] for rank in range(n)]


SYNCS = [
    LocalSGD(every=1),
    LocalSGD(every=3),
    LocalSGD(every=4, fragments=2, overlap=True),
    DiLoCo(every=3),
    DiLoCo(every=4, outer=NESTEROV, fragments=4, overlap=True),
    DiLoCo(every=4, outer=functools.partial(torch.optim.Adam, lr=0.01), fragments=2),
    DiLoCo(every=4, fragments=2, overlap=3),
    DiLoCo(every=2, partners="random", seed=5),
    DiLoCo(every=4, partners="random", fragments=2, overlap=True),
    LocalSGD(every=2, start=3),
    DiLoCo(every=3, fragments=3, overlap=True, start=4),
    DiLoCo(every=2, partners="random", start=3),
]
STARTED = DiLoCo(every=2, fragments=2, overlap=True, start=5)


@pytest.mark.parametrize("n", [1, 3, *often(2, 4, 5, 8)])
def test_all_ranks_do_what_one_process_does_that_plays_them(n):
    for sync in SYNCS if 1 < n < 5 else SYNCS[3:10:2]:
        make = adamw if sync == DiLoCo(every=3) else sgd
        found, wanted = trained(n, 10, sync, make=make), played(n, 10, sync, make=make)
        for mine, his in zip(found, wanted, strict=True):
            for t, (a, b) in enumerate(zip(mine, his, strict=True)):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda text, t=t, sync=sync: f"{sync}, {t}: {text}")


@pytest.mark.parametrize("sync", [LocalSGD(every=2), DiLoCo(every=4, outer=NESTEROV, fragments=2, overlap=True)], ids=repr)
def test_a_part_that_is_sent_in_pieces_is_the_same(monkeypatch, sync):
    """With empty tensors at the end of a piece, alone in one, and beside another type."""
    model = torch.nn.ParameterList(
        [torch.zeros(0), torch.ones(40), torch.ones(3, dtype=torch.float64), torch.zeros(0), torch.ones(7)]
    )

    def run(comm):
        own = copy.deepcopy(model)
        opt = create_multi_node_optimizer(plain_sgd(own), comm, sync=sync)
        for step in range(8):
            opt.zero_grad()
            sum((p.double() * (1 + comm.rank + step)).square().sum() for p in own).backward()
            opt.step()
        opt.average_()
        return [p.detach().clone() for p in own]

    whole = phalanx.run_local(3, run)
    for nbytes in (1, 100, 170):
        monkeypatch.setattr(flights, "PIECE", nbytes)
        for mine, wanted in zip(phalanx.run_local(3, run), whole, strict=True):
            assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(mine, wanted, strict=True))


def test_local_sgd_of_every_step_is_all_reduce_for_plain_sgd_and_not_with_momentum():
    for n in (1, 2, 3, 4):
        local = trained(n, 6, LocalSGD(every=1), make=plain_sgd)
        together = trained(n, 6, phalanx.AllReduce(), make=plain_sgd)
        for mine, wanted in zip(local, together, strict=True):
            torch.testing.assert_close(mine[-1], wanted[-1], rtol=1e-9, atol=1e-11)
    with_adam = [trained(3, 6, sync, make=adamw)[0][-1] for sync in (LocalSGD(every=1), phalanx.AllReduce())]
    assert not torch.allclose(*with_adam, rtol=1e-6)  # negative control: the state of the inner optimizer stays with its rank


def test_replicas_are_equal_after_an_outer_step_and_only_then():
    history = trained(3, 8, DiLoCo(every=4))
    equal = [all(torch.equal(own[t], history[0][t]) for own in history) for t in range(8)]
    assert equal == [False, False, False, True] * 2


def test_the_mean_moves_by_the_mean_of_the_inner_updates_whatever_is_under_way():
    """LocalSGD in parts, overlapped, of plain SGD on a loss whose gradient does not depend on the parameters."""

    def run(comm, sync):
        p, q = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64)), torch.nn.Parameter(torch.zeros(7, dtype=torch.float64))
        opt = create_multi_node_optimizer(torch.optim.SGD([p, q], lr=1.0), comm, sync=sync)
        for t in range(11):
            p.grad, q.grad = torch.full_like(p, comm.rank + t), torch.full_like(q, comm.rank * t)
            opt.step()
        opt.average_()
        return p.detach(), q.detach()

    for sync in (LocalSGD(every=4, fragments=2, overlap=True), LocalSGD(every=5), LocalSGD(every=4, fragments=2, overlap=4)):
        for p, q in phalanx.run_local(3, lambda comm, sync=sync: run(comm, sync), timeout=30):
            torch.testing.assert_close(p, torch.full_like(p, -(11 * 1 + 55)))
            torch.testing.assert_close(q, torch.full_like(q, -55.0))


RESUMED = [DiLoCo(every=4, fragments=2, overlap=True), DiLoCo(every=4, partners="random", overlap=3), STARTED]


@pytest.mark.parametrize("sync", RESUMED)
@pytest.mark.parametrize("stop", [1, 4, 5, 7])
def test_resuming_is_exact_whatever_is_under_way(sync, stop):
    def run(comm, *, stop):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, sync=sync)
        for t in range(10):
            if t == stop:
                saved = copy.deepcopy((own.state_dict(), opt.state_dict()))
                own = copy.deepcopy(SMALL)
                opt = create_multi_node_optimizer(sgd(own), comm, sync=sync)
                own.load_state_dict(saved[0])
                opt.load_state_dict(saved[1])
            plain_step(own, opt, comm, t)
        assert opt.steps == 10
        return flat(own)

    through = phalanx.run_local(3, lambda comm: run(comm, stop=None), timeout=30)
    resumed = phalanx.run_local(3, lambda comm: run(comm, stop=stop), timeout=30)
    assert all(torch.equal(a, b) for a, b in zip(through, resumed, strict=True))


def test_a_checkpoint_keeps_the_outer_state_and_a_copy_trains_alike(tmp_path):
    def run(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, sync=DiLoCo(every=3, overlap=2))
        for t in range(4):
            plain_step(own, opt, comm, t)
        with phalanx.Checkpointer(tmp_path, comm) as checkpoints:
            checkpoints.save(4, model=own, optimizer=opt)
        twin_model = copy.deepcopy(SMALL)
        twin = create_multi_node_optimizer(sgd(twin_model), comm, sync=DiLoCo(every=3, overlap=2))
        with phalanx.Checkpointer(tmp_path, comm) as checkpoints:
            assert checkpoints.load(model=twin_model, optimizer=twin) == 4
        for model, each in ((own, opt), (twin_model, twin)):
            for t in range(4, 9):
                plain_step(model, each, comm, t)
        return torch.equal(flat(own), flat(twin_model))

    assert phalanx.run_local(2, run, timeout=30) == [True, True]


def test_a_deep_copy_trains_on_alike_and_by_itself():
    def run(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, sync=DiLoCo(every=3, overlap=2))
        for t in range(4):
            plain_step(own, opt, comm, t)
        model, twin = copy.deepcopy((own, opt))
        before = flat(own)
        for t in range(4, 8):
            plain_step(model, twin, comm, t)
        assert torch.equal(flat(own), before)
        for t in range(4, 8):
            plain_step(own, opt, comm, t)
        return torch.equal(flat(own), flat(model))

    assert phalanx.run_local(2, run, timeout=30) == [True, True]


def test_the_first_steps_are_those_of_all_reduce_and_an_older_state_brings_them_back():
    wanted = trained(3, 5, phalanx.AllReduce())
    found = trained(3, 7, STARTED)
    assert all(torch.equal(a, b) for mine, his in zip(found, wanted, strict=True) for a, b in zip(mine[:5], his, strict=True))
    assert not torch.equal(found[0][5], found[1][5])  # then ranks go their own ways

    def run(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, sync=STARTED)
        for t in range(4):
            plain_step(own, opt, comm, t)
        with pytest.raises(RuntimeError, match="first local step"):
            _ = opt.outer
        saved = copy.deepcopy((own.state_dict(), opt.state_dict()))
        model, twin = copy.deepcopy((own, opt))
        ends = []
        for each, by in ((own, opt), (model, twin)):
            for t in range(4, 8):
                plain_step(each, by, comm, t)
            ends.append(flat(each))
        own.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        for t in range(4, 8):
            plain_step(own, opt, comm, t)
        return [*ends, flat(own)]

    assert all(torch.equal(end, ends[0]) for ends in phalanx.run_local(3, run, timeout=30) for end in ends)


@pytest.mark.parametrize("sync", [LocalSGD(every=2, start=4), LocalSGD(every=2, level="host"), Gossip(level="host")], ids=str)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_rank_without_a_backward_joins_at_the_step_and_new_parameters_come_later(sync, first):
    def run(comm):
        p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=1.0), comm, sync=sync)
        for t in range(4):
            opt.zero_grad()
            if comm.rank == 0 or t < first:
                (p.sum() + q.sum()).backward()
            opt.step()
            if t == 1:
                opt.add_param_group({"params": [q]})
        return p.detach(), q.detach()

    for p, q in phalanx.run_local(2, run, timeout=10):  # a host of two ranks, whose mean is 1 or 1/2
        assert torch.equal(p, torch.full_like(p, -first - (4 - first) / 2))
        assert torch.equal(q, torch.full_like(q, -1.0))


def test_an_overflow_on_one_rank_skips_the_update_of_all_that_average(recwarn):
    """All backwards are in no_sync, so the gradients become means in `step`."""

    def run(comm, sync):
        p = torch.nn.Parameter(torch.ones(4))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=1.0), comm, sync=sync)
        for t in range(2):
            opt.zero_grad()
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            with opt.no_sync():
                scaler.scale(p.sum() * (math.inf if t == 0 and comm.rank == 1 else 1.0)).backward()
            scaler.step(opt)
        return p.detach()

    for sync in (LocalSGD(every=9, start=4), LocalSGD(every=9, level="host"), Gossip(level="host")):
        for p in phalanx.run_local(2, functools.partial(run, sync=sync), timeout=10):
            assert torch.equal(p, torch.zeros_like(p)), sync


@pytest.mark.parametrize("sync", [LocalSGD(every=2, start=9), LocalSGD(every=9, level="host")], ids=str)
def test_a_closure_computes_the_gradients_that_are_averaged(sync, recwarn):
    def run(comm):
        p = torch.nn.Parameter(torch.zeros(2))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=1.0), comm, sync=sync)

        def closure():
            opt.zero_grad()
            loss = p.sum() * (1 + comm.rank)
            loss.backward()
            return loss

        for _ in range(3):
            opt.step(closure)
        return p.detach()

    assert all(torch.equal(p, torch.full_like(p, -4.5)) for p in phalanx.run_local(2, run, timeout=10))
    assert not recwarn.list  # none says that a gradient is missing


def test_states_of_other_optimizers_and_of_other_starts():
    def run(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, sync=DiLoCo(every=3))
        for t in range(4):
            plain_step(own, opt, comm, t)
        saved = copy.deepcopy(opt.state_dict())
        opt.load_state_dict(opt.optimizer.state_dict())  # of the inner optimizer alone: nothing else changes
        assert opt.steps == 4
        for t in range(4, 6):
            plain_step(own, opt, comm, t)
        later = create_multi_node_optimizer(sgd(own), comm, sync=DiLoCo(every=3, start=6))
        with pytest.raises(ValueError, match="start of at most 4"):
            later.load_state_dict(saved)
        return flat(own)

    found = phalanx.run_local(3, run, timeout=30)
    assert all(torch.equal(end, found[0]) for end in found)  # after the outer step of step 6


def test_the_mean_of_equal_replicas_is_not_rounded():
    def run(comm):
        own = torch.nn.Sequential(copy.deepcopy(SMALL), torch.nn.BatchNorm1d(3).double())
        opt = create_multi_node_optimizer(sgd(own), comm, sync=DiLoCo(every=3, start=2))
        opt.follow(own)
        for t in range(2):
            plain_step(own, opt, comm, t)
            before, statistics = flat(own), own[1].running_mean.clone()
            opt.average_()
            assert torch.equal(flat(own), before)
        return statistics, own[1].running_mean.clone()

    found = phalanx.run_local(3, run, timeout=30)
    assert not torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(mean, found[0][1]) for _, mean in found)


def test_hosts_act_as_one_after_the_first_steps():
    history = trained(4, 5, LocalSGD(every=3, start=2), hosts=2)
    for t in range(5):
        assert torch.equal(history[0][t], history[1][t])
        assert torch.equal(history[0][t], history[2][t]) == (t in (0, 1, 4))


def test_the_outer_optimizer_may_be_a_function_arguments_or_an_example():
    lr = {"lr": 0.5, "momentum": 0.8}
    model = torch.nn.Linear(2, 2)
    forms = [lr, functools.partial(torch.optim.SGD, **lr), torch.optim.SGD(model.parameters(), **lr)]
    results = [trained(2, 6, DiLoCo(every=2, outer=outer))[0][-1] for outer in forms]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    example = torch.optim.AdamW(model.parameters(), lr=0.3, betas=(0.5, 0.6))
    made = DiLoCo(every=2, outer=example).build([torch.nn.Parameter(torch.ones(2))])
    assert (type(made), made.defaults["lr"], made.defaults["betas"]) == (torch.optim.AdamW, 0.3, (0.5, 0.6))
    usual = DiLoCo(every=2).build([torch.nn.Parameter(torch.ones(2))])
    assert {name: usual.defaults[name] for name in NESTEROV} == NESTEROV


def test_wires_round_what_travels_and_nothing_else():
    exact, rounded = (trained(2, 6, DiLoCo(every=2, wire=wire))[0][-1] for wire in (None, torch.bfloat16))
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, rtol=0.02, atol=0.02)
    history = trained(3, 4, LocalSGD(every=2), wire=torch.bfloat16)
    assert all(torch.equal(own[-1], history[0][-1]) for own in history)
    with pytest.raises(ValueError, match="set one of them"):
        trained(1, 1, DiLoCo(every=2, wire=torch.bfloat16), wire=torch.float16)


EIGHT = phalanx.Int8(block=16)
NARROW = copy.deepcopy(SMALL).float()  # only float32 is encoded
CODED = {
    "whole": DiLoCo(every=2, wire=EIGHT),
    "parts, overlapped": DiLoCo(
        every=3, fragments=3, overlap=1, wire=phalanx.Int8(block=32, rounding="stochastic", level="rank")
    ),
}


@pytest.mark.parametrize("sync", CODED.values(), ids=CODED)
@pytest.mark.parametrize("shape", [(3, 3), (4, 2), *often((2, 2), (5, 5), (8, 4))], ids=str)
def test_eight_bits_keep_ranks_equal_and_near_what_full_precision_does(sync, shape):
    n, hosts = shape
    coded = trained(n, 12, sync, hosts=hosts, model=NARROW, at_end=lambda model, opt: (opt.average_(), flat(model))[1])
    plain = trained(
        n, 12, replace(sync, wire=None), hosts=hosts, model=NARROW, at_end=lambda model, opt: (opt.average_(), flat(model))[1]
    )
    assert all(torch.equal(end, coded[0][1]) for _, end in coded)
    moved = float((plain[0][1] - flat(NARROW)).norm())
    assert 0 < float((coded[0][1] - plain[0][1]).norm()) < 0.05 * moved


def test_after_an_outer_step_of_eight_bits_all_replicas_have_the_same_bits():
    history = trained(4, 6, DiLoCo(every=2, wire=EIGHT), hosts=4, model=NARROW)
    for t in (1, 3, 5):
        assert all(torch.equal(own[t], history[0][t]) for own in history)
    assert not torch.equal(history[0][2], history[1][2])


def test_error_feedback_brings_small_steps_through_that_rounding_would_lose():
    """One number of a block moves a thousand times as fast as the other, which is below half a code."""

    def run(comm, feedback):
        p = torch.nn.Parameter(torch.zeros(16))
        wire = phalanx.Int8(block=16, error_feedback=feedback)
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=1.0), comm, sync=DiLoCo(1, {"lr": 1.0}, wire=wire))
        for _ in range(50):
            p.grad = torch.cat([torch.tensor([1000.0]), torch.ones(15)])
            opt.step()
        return p.detach()

    kept, lost = (phalanx.run_local(2, functools.partial(run, feedback=feedback), hosts=2)[0] for feedback in (True, False))
    assert float(kept[1]) == pytest.approx(-50, abs=9)  # one code is 1000 / 127
    assert float(lost[1]) == 0.0


@pytest.mark.parametrize("sync", CODED.values(), ids=CODED)
def test_a_checkpoint_of_eight_bit_outer_steps_continues_bit_for_bit(sync):
    def run(comm, stop, forget):
        model = copy.deepcopy(NARROW)
        opt = create_multi_node_optimizer(sgd(model), comm, sync=sync)
        for t in range(10):
            if t == stop:
                saved = copy.deepcopy(opt.state_dict())
                if forget:
                    saved["local"]["rounds"]["wires"] = {}
                opt = create_multi_node_optimizer(sgd(model), comm, sync=sync)
                opt.load_state_dict(saved)
            plain_step(model, opt, comm, t)
        return flat(model)

    whole, resumed, forgetful = (
        phalanx.run_local(3, functools.partial(run, stop=stop, forget=forget), hosts=3, timeout=30)
        for stop, forget in ((None, False), (5, False), (5, True))
    )
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(whole, forgetful, strict=True))  # what was rounded away matters


def test_errors_of_eight_bits_follow_their_parameters_to_other_parts():
    def run(comm):
        first, second = torch.nn.Parameter(torch.zeros(16)), torch.nn.Parameter(torch.zeros(64))
        sync = DiLoCo(1, {"lr": 1.0}, wire=phalanx.Int8(block=16))
        opt = create_multi_node_optimizer(torch.optim.SGD([first], lr=1.0), comm, sync=sync)
        for _ in range(3):
            first.grad = torch.cat([torch.tensor([1000.0]), torch.ones(15)])
            opt.step()
        before = opt.state_dict()["local"]["rounds"]["wires"]["0"]["error"]
        opt.add_param_group({"params": [second]})
        first.grad, second.grad = torch.zeros(16), torch.zeros(64)
        opt.step()
        return float(before.abs().sum()), first.detach()

    for error, after in phalanx.run_local(2, run, hosts=2):
        assert error > 0
        assert float(after[1]) < 0  # the error of the first three steps arrived with the fourth


def test_pseudo_gradients_that_are_not_finite_are_reported():
    def run(comm):
        p = torch.nn.Parameter(torch.zeros(40))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=1.0), comm, sync=DiLoCo(1, wire=EIGHT))
        p.grad = torch.full((40,), math.inf if comm.rank else 1.0)
        opt.step()
        return p.detach()

    with pytest.warns(UserWarning, match="infinite or NaN"):
        found = phalanx.run_local(2, run, hosts=2)
    assert all(not bool(torch.isfinite(p).any()) for p in found)


def test_ranks_of_a_host_act_as_one():
    """4 ranks on 2 hosts: those of a host stay equal in every step, the hosts differ until the outer step."""
    history = trained(4, 3, LocalSGD(every=3), hosts=2)
    for t in range(3):
        assert torch.equal(history[0][t], history[1][t])
        assert torch.equal(history[2][t], history[3][t])
        assert torch.equal(history[0][t], history[2][t]) == (t == 2)
    alone = trained(4, 3, LocalSGD(every=3, level="rank"), hosts=2)
    assert not torch.equal(alone[0][0], alone[1][0])


def test_average_is_the_exact_mean_and_ends_the_spread():
    def at_end(own, opt):
        before = opt.spread()
        mean = opt.comm.all_reduce(flat(own), op="mean") if not opt.sync.overlap else None
        opt.average_()
        return before, mean, flat(own), opt.spread()

    for sync in (LocalSGD(every=4), DiLoCo(every=4, fragments=2, overlap=True), DiLoCo(every=2, partners="random")):
        found = [result for _, result in trained(3, 6, sync, at_end=at_end)]
        for before, mean, after, spread in found:
            assert before > 0
            assert spread == 0
            assert torch.equal(after, found[0][2])
            assert mean is None or torch.allclose(mean, after, rtol=1e-12, atol=1e-13)


def test_batch_norm_statistics_are_averaged_with_the_replicas():
    def run(comm):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        phalanx.init_parameters_(model, seed=1)
        opt = create_multi_node_optimizer(sgd(model), comm, sync=LocalSGD(every=2))
        opt.follow(model)
        for t in range(2):
            opt.zero_grad()
            model(torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * t + comm.rank))).pow(2).sum().backward()
            opt.step()
        own = model[1].running_var.clone()
        opt.average_()
        return own, model[1].running_var.clone()

    (a, mean_a), (b, mean_b) = phalanx.run_local(2, run, timeout=30)
    assert not torch.equal(a, b)
    assert torch.equal(mean_a, mean_b)
    torch.testing.assert_close(mean_a, (a + b) / 2)


def test_parameters_that_come_later_take_part():
    def run(comm):
        p, q = (torch.nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(2))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=1.0), comm, sync=LocalSGD(every=2))
        for t in range(6):
            if t == 3:
                opt.add_param_group({"params": [q], "lr": 2.0})
            p.grad, q.grad = torch.full_like(p, comm.rank), torch.full_like(q, comm.rank)
            opt.step()
        return p.detach(), q.detach()

    for p, q in phalanx.run_local(3, run, timeout=30):
        assert torch.allclose(p, torch.full_like(p, -6.0))
        assert torch.allclose(q, torch.full_like(q, -6.0))


def test_schedulers_accumulation_and_a_scaler_that_overflows_on_one_rank():
    def run(comm):
        p = torch.nn.Parameter(torch.ones(4))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=0.1), comm, sync=LocalSGD(every=2))
        schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for t in range(4):
            opt.zero_grad()
            with opt.no_sync():
                scaler.scale(p.sum()).backward()
            factor = math.inf if t == 1 and comm.rank == 0 else 1.0
            scaler.scale((p * factor).sum()).backward()
            scaler.step(opt)
            scaler.update()
            schedule.step()
        return p.detach(), opt.steps, opt.param_groups[0]["lr"]

    a, b = phalanx.run_local(2, run, timeout=30)
    assert torch.equal(a[0], b[0])
    assert torch.isfinite(a[0]).all()
    assert a[1:] == (4, 0.025)


def test_replicas_that_start_different_and_options_that_differ_are_refused():
    def different(comm):
        p = torch.nn.Parameter(torch.full((3,), float(comm.rank)))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=0.1), comm, sync=LocalSGD(every=5))
        p.grad = torch.ones_like(p)
        with pytest.raises(ReplicaError, match="bcast_parameters"):
            opt.step()

    def options(comm, outer):
        p = torch.nn.Parameter(torch.ones(3))
        sync = DiLoCo(every=5 + comm.rank) if outer is None else DiLoCo(every=5, outer=outer(comm.rank))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=0.1), comm, sync=sync)
        p.grad = torch.ones_like(p)
        with pytest.raises(ReplicaError, match="options"):
            opt.step()

    phalanx.run_local(2, different, timeout=30)
    phalanx.run_local(2, lambda comm: options(comm, None), timeout=30)
    phalanx.run_local(2, lambda comm: options(comm, lambda rank: {"lr": 0.5 + rank}), timeout=30)
    # a function has no text that ranks could compare, so what it makes is compared
    made = lambda params: torch.optim.SGD(params, lr=0.7)  # noqa: E731
    assert len(trained(2, 6, DiLoCo(every=3, outer=made))) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalSGD(every=0), r"LocalSGD\(every=0\): at least 1"),
        (lambda: LocalSGD(every=2, start=-1), r"LocalSGD\(start=-1\): at least 0"),
        (lambda: LocalSGD(every=2.0), r"LocalSGD\(every=2.0\): a whole number"),
        (lambda: DiLoCo(every=2, fragments=3), "at most one part leaves in a step"),
        (lambda: DiLoCo(every=2, overlap=3), "at most every=2"),
        (lambda: DiLoCo(every=2, outer=3), "functools.partial"),
        (lambda: DiLoCo(every=2, partners="two"), "one of 'all', 'random'"),
        (lambda: DiLoCo(every=2, partners="random", level="host"), "partners are ranks"),
        (lambda: DiLoCo(every=2, level="rack"), "one of 'rank', 'host'"),
        (lambda: DiLoCo(every=2, outer=lambda params: 3).build([]), "made a int"),
        (lambda: trained(1, 1, LocalSGD(every=9, fragments=9)), "only 6 parameters to cut"),
    ],
)
def test_bad_options_are_named_with_the_remedy(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_what_does_not_go_together_is_refused():
    def run(comm):
        opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        with pytest.raises(ValueError, match="overlap=True"):
            create_multi_node_optimizer(opt, comm, sync=LocalSGD(every=2), double_buffering=True)
        with pytest.raises(TypeError, match="LocalSGD"):
            create_multi_node_optimizer(opt, comm, sync="local")
        with pytest.raises(ValueError, match="local steps send parts"):
            create_multi_node_optimizer(opt, comm, sync=LocalSGD(every=2), bucket_bytes=1 << 20)
        create_multi_node_optimizer(opt, comm, sync=LocalSGD(every=2, start=1), bucket_bytes=1 << 20)  # for its first step
        return repr(create_multi_node_optimizer(opt, comm, sync=DiLoCo(every=2)).sync)

    assert "every=2" in phalanx.run_local(1, run)[0]
    assert Gossip() != LocalSGD(every=1)


def test_parts_are_about_equal_and_in_order():
    for sizes in ([5, 1, 1, 1, 5], [1] * 7, [100, 1, 1], [3, 3, 3, 3], [1, 2, 3, 4, 5, 6, 7]):
        for parts in range(1, len(sizes) + 1):
            found = cut(sizes, parts)
            assert [i for part in found for i in part] == list(range(len(sizes)))
            assert len(found) == parts
            assert all(found)
    assert cut([5, 1, 1, 1, 5], 3) == [range(1), range(1, 4), range(4, 5)]


def test_every_pair_is_mutual_and_in_time_all_meet():
    for n in (2, 3, 4, 5, 8):
        for number in range(20):
            met = [partner_of(rank, n, 1, number) for rank in range(n)]
            assert all(other is None or met[other] == rank != other for rank, other in enumerate(met))
            assert met.count(None) == n % 2
        assert {partner_of(0, n, 1, number) for number in range(100)} >= set(range(1, n))
