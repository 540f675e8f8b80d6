"""One replica of parameters and momentum per host: the same training, nothing that a user notices."""

import copy
import warnings

import pytest
import torch
from tests.optim.lars_oracle import Oracle
from torch.nn.functional import cross_entropy

import phalanx
from phalanx.native import core
from phalanx.optim.lars import MLPERF

pytestmark = pytest.mark.skipif(bool(core.UNAVAILABLE), reason=core.UNAVAILABLE)

FUSED = phalanx.AllReduce(fused=True)
ADAM = (torch.optim.Adam, torch.optim.AdamW)
# a large eps: the gradient of a bias before batch norm is rounding alone, which Adam would magnify
ADAM_OPTIONS = [{"lr": 0.01, "eps": 1e-2}, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-2, "weight_decay": 0.1}]
OPTIONS = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    {"lr": 0.05, "momentum": 0.9, "nesterov": True},
]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 6, 3), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(216, 10)
    )
    return net.to(memory_format=torch.channels_last)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(120, 1, 8, 8, generator=g), torch.randint(0, 10, (120,), generator=g)


def gradients(net: torch.nn.Module, step: int, comm: phalanx.Communicator) -> None:
    net.train()
    x, y = (part[comm.rank :: comm.size] for part in batch(step))
    net.zero_grad()
    cross_entropy(net(x), y).backward()


def flat(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def train(comm, options, sync, steps=6, schedule=False, kind=torch.optim.SGD):
    net = model()
    opt = phalanx.create_multi_node_optimizer(kind(net.parameters(), **options), comm, sync=sync)
    rates = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5) if schedule else None
    for step in range(steps):
        gradients(net, step, comm)
        opt.step()
        if rates is not None:
            rates.step()
    return net, opt


def compare(comm, options, kind=torch.optim.SGD):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused, inner = train(comm, options, FUSED, schedule=True, kind=kind)
    usual, other = train(comm, options, phalanx.AllReduce(overlap=False), schedule=True, kind=kind)
    torch.testing.assert_close(flat(fused), flat(usual), rtol=1e-5, atol=1e-6)
    assert not torch.equal(flat(fused), flat(model()))
    if options.get("momentum") or kind in ADAM:
        mine, his = inner.state_dict()["state"], other.state_dict()["state"]
        assert mine.keys() == his.keys()
        for key, state in mine.items():
            assert state.keys() == his[key].keys()
            for name, value in state.items():
                torch.testing.assert_close(value, his[key][name], rtol=1e-4, atol=1e-5)
    return flat(fused)


def test_fused_training_equals_the_usual_one(world):
    first, *others = world.run(compare, OPTIONS[1])
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_so_it_does_with_all_options(pair, options):
    first, second = pair.run(compare, options)
    assert torch.equal(first, second)


@pytest.mark.parametrize("options", ADAM_OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ADAM)
def test_adam_and_adamw_are_fused(pair, kind, options):
    first, second = pair.run(compare, options, kind)
    assert torch.equal(first, second)


def test_adamw_is_fused_in_every_world(world):
    first, *others = world.run(compare, ADAM_OPTIONS[1], torch.optim.AdamW)
    assert all(torch.equal(first, other) for other in others)


def resume(comm, kind, options):
    """A checkpoint of a fused run continues in a fused run, in a plain one, and in plain torch."""
    net, opt = train(comm, options, FUSED, steps=3, kind=kind)
    saved = copy.deepcopy((net.state_dict(), opt.state_dict()))
    for step in range(3, 6):
        gradients(net, step, comm)
        opt.step()
    for sync in (FUSED, phalanx.AllReduce(overlap=False)):
        again = model()
        made = phalanx.create_multi_node_optimizer(kind(again.parameters(), **options), comm, sync=sync)
        if sync.fused:  # also into one that has its replica already
            gradients(again, 0, comm)
            made.step()
            comm.barrier()
        again.load_state_dict(saved[0])
        made.load_state_dict(copy.deepcopy(saved[1]))  # torch would share the step counters
        comm.barrier()
        for step in range(3, 6):
            gradients(again, step, comm)
            made.step()
        torch.testing.assert_close(flat(again), flat(net), rtol=1e-5, atol=1e-6)
    kind(model().parameters(), **options).load_state_dict(saved[1])


@pytest.mark.parametrize(("kind", "options"), [(torch.optim.SGD, OPTIONS[1]), (torch.optim.AdamW, ADAM_OPTIONS[1])])
def test_checkpoints_do_not_notice(pools, kind, options):
    pools.of(3).run(resume, kind, options)


def clipped(comm, sync):
    net = model()
    opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), comm, sync=sync)
    for step in range(3):
        gradients(net, step, comm)
        opt.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        opt.step()
    net.eval()
    return flat(net), net(batch(9)[0][:4]).detach()


def both_clipped(comm):
    for mine, his in zip(clipped(comm, FUSED), clipped(comm, phalanx.AllReduce(overlap=False))):
        torch.testing.assert_close(mine, his, rtol=1e-4, atol=1e-5)


def test_clipping_after_synchronize(pools):
    pools.of(2).run(both_clipped)


def frozen_and_added(comm):
    runs = []
    for sync in (FUSED, phalanx.AllReduce(overlap=False)):
        net = model()
        conv, _, _, _, head = net
        opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(conv.parameters(), lr=0.1, momentum=0.9), comm, sync=sync)
        for step in range(6):
            if step == 2:
                opt.add_param_group({"params": list(head.parameters()), "lr": 0.02})
            conv.weight.requires_grad_(step != 4)
            gradients(net, step, comm)
            opt.step()
        runs.append(flat(net))
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)


def test_parameters_added_and_frozen(pools):
    pools.of(2).run(frozen_and_added)


def refused(comm, native):
    net = model()
    adam = torch.optim.AdamW(net.parameters(), amsgrad=True) if native else torch.optim.SGD(net.parameters(), lr=0.1)
    opt = phalanx.create_multi_node_optimizer(adam, comm, sync=FUSED)
    gradients(net, 0, comm)
    with pytest.warns(UserWarning, match="amsgrad" if native else "share memory"):
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        gradients(net, 1, comm)
        opt.step()
    return flat(net)


@pytest.mark.parametrize("native", [True, False])
def test_what_cannot_be_fused_runs_as_usual_and_says_so_once(pools, native):
    first, second = pools.of(2, **({} if native else {"PHALANX_NATIVE": "0"})).run(refused, native)
    assert torch.equal(first, second)
    assert not torch.equal(first, flat(model()))


def memory(comm):
    net = torch.nn.Linear(1000, 1000)
    phalanx.bcast_parameters(net, comm)
    opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), comm, sync=FUSED)
    net(torch.ones(2, 1000)).sum().backward()
    opt.step()
    before = net.weight.detach().clone()
    comm.barrier()
    if comm.rank == 0:
        with torch.no_grad():
            net.weight[0, 0] = 123.0
    comm.barrier()
    return net.weight[0, 0].item(), before[0, 0].item()


def test_there_is_one_replica_on_the_host(pools):
    for seen, before in pools.of(3).run(memory):
        assert seen == 123.0 != before


# ---- LARS ----------------------------------------------------------------------------------------------------------------------

LARS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "trust_coefficient": 0.1}
LARS_OPTIONS = [
    LARS,
    {**LARS, "nesterov": True},
    {**LARS, "lr_in_momentum": False, **MLPERF},
    {**LARS, "momentum": 0.0, "weight_decay": 0.0},
]


def test_fused_lars_equals_the_usual_one(world):
    first, *others = world.run(compare, LARS, phalanx.Lars)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("options", LARS_OPTIONS[1:], ids=str)
def test_so_it_does_with_its_variants(pair, options):
    first, second = pair.run(compare, options, phalanx.Lars)
    assert torch.equal(first, second)


def skip_some(p):
    return p.ndim < 2 or p.shape[0] == 10


def changed_from_outside(comm):
    """Against the definition, fed with the mean gradients; parameters change where torch counts it, and where it does not."""
    net = model()
    inner = phalanx.Lars(net.parameters(), **LARS, skip=skip_some)
    opt = phalanx.create_multi_node_optimizer(inner, comm, sync=FUSED)
    oracle, params = Oracle(net.parameters(), skip=skip_some), list(net.parameters())
    stale = None  # what the step after the change would do by the norm of before
    for step in range(7):
        if step in (2, 4):
            comm.barrier()
            if comm.rank == 0:
                with torch.no_grad():
                    for p in params if step == 2 else params[:1]:
                        (p if step == 2 else p.data).mul_(3.0)
            oracle.w = [3 * w if step == 2 or i == 0 else w for i, w in enumerate(oracle.w)]
            comm.barrier()
        gradients(net, step, comm)
        own = [p.grad.clone() for p in params]
        mean = [g.clone(memory_format=torch.contiguous_format) for g in own]
        for g in mean:
            comm.all_reduce(g, op="mean")
        if step == 2:
            stale = copy.deepcopy(oracle)
            stale.step(mean, **{**LARS, "trust_coefficient": LARS["trust_coefficient"] / 3})
        opt.step()
        oracle.step(mean, **LARS)
        for p, w, g in zip(params, oracle.w, own, strict=True):
            torch.testing.assert_close(p.detach().double(), torch.from_numpy(w), rtol=1e-4, atol=2e-6)
            assert torch.equal(p.grad, g), "gradients are only read"
        if step == 2:
            assert not torch.allclose(params[0].detach().double(), torch.from_numpy(stale.w[0]), rtol=1e-4, atol=2e-6)
    return flat(net)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fused_lars_notices_parameters_that_were_changed_from_outside(pools, ranks):
    first, *others = pools.of(ranks).run(changed_from_outside)
    assert all(torch.equal(first, other) for other in others)


def lars_steps(net, opt, comm, steps):
    """By gradients out of a hat: those of a model depend, in their last bits, on where its parameters lie."""
    for step in steps:
        g = torch.Generator().manual_seed(10 * step + comm.rank)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=g)
        opt.step()


def fused_lars(net, comm):
    return phalanx.create_multi_node_optimizer(phalanx.Lars(net.parameters(), **LARS), comm, sync=FUSED)


def resumed(comm):
    """Norms that are carried and norms that are summed anew have the same bits."""
    net, again = model(), model()
    opt, made = fused_lars(net, comm), fused_lars(again, comm)
    lars_steps(net, opt, comm, range(3))
    saved = copy.deepcopy((net.state_dict(), opt.state_dict()))
    lars_steps(net, opt, comm, range(3, 6))
    wanted = flat(net)
    for each, own in ((again, made), (net, opt)):  # from the beginning, and into the replica that is there
        comm.barrier()
        each.load_state_dict(saved[0])
        own.load_state_dict(saved[1])
        lars_steps(each, own, comm, range(3, 6))
        assert torch.equal(flat(each), wanted)
    lars_steps(net, opt, comm, range(1))
    assert not torch.equal(flat(net), wanted)


def test_fused_lars_resumes_bit_for_bit(pair):
    pair.run(resumed)


def lars_without_core(comm):
    with pytest.warns(UserWarning, match="share memory"):
        net, _ = train(comm, LARS, FUSED, kind=phalanx.Lars)
    return flat(net)


def lars_with_core(comm):
    return flat(train(comm, LARS, FUSED, kind=phalanx.Lars)[0])


def test_fused_lars_without_the_core_is_the_same(pools):
    without, _ = pools.of(2, PHALANX_NATIVE="0").run(lars_without_core)
    torch.testing.assert_close(pools.of(2).run(lars_with_core)[0], without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", [{"wire": torch.bfloat16}, {"double_buffering": True}])
def test_options_that_contradict_it_are_refused(option):
    comm = phalanx.create_communicator()
    with pytest.raises(ValueError, match="fused"):
        phalanx.create_multi_node_optimizer(torch.optim.SGD(model().parameters(), lr=0.1), comm, sync=FUSED, **option)
