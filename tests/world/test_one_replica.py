"""One replica for the ranks of a host, by default: whatever a script does, the same bits result as with a replica for each.

Every act is played twice, with the default and with `fused=False`, in the middle of the same training; parameters, momentum,
gradients and whatever the act looked at are compared, on each rank.
"""

import copy
import io
import os
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import phalanx
from phalanx.comm.transports import shm

pytestmark = pytest.mark.skipif(bool(shm.UNAVAILABLE), reason=shm.UNAVAILABLE)

STEPS = 9
WHEN = 4  # the step before which the acts take place


class Play:
    """A model in training on one rank."""

    def __init__(self, comm, fused, options, act):
        self.comm, self.act, self.seen = comm, act, []
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 17, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(612, 501), torch.nn.Linear(501, 10)
        ).to(memory_format=torch.channels_last)
        self.head = torch.nn.Linear(10, 10)  # some acts add it
        self.params = list(self.net.parameters())
        make = {"sgd": torch.optim.SGD, "lars": phalanx.Lars}[options.get("make", "sgd")]
        others = {key: value for key, value in options.items() if key != "make"}
        self.inner = make(self.params, **{"lr": 0.05, "momentum": 0.9, **others})
        sync = phalanx.AllReduce(overlap=False, fused=fused)
        self.opt = phalanx.create_multi_node_optimizer(self.inner, comm, sync=sync)
        self.step = self.opt.step
        self.saved = None

    def gradients(self, t):
        g = torch.Generator().manual_seed(100 * t + self.comm.rank)
        x, y = torch.randn(4, 3, 8, 8, generator=g), torch.randint(0, 10, (4,), generator=g)
        loss = cross_entropy(self.head(self.net(x)), y)
        self.opt.zero_grad()
        loss.backward()
        return loss

    def see(self, *values):
        self.seen += [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in values]

    def run(self):
        shared = []
        for t in range(STEPS):
            self.act(self, t)
            self.gradients(t)
            self.step()
            self.see(*(p.grad for p in self.params))
            shared.append(self.opt.one_replica)
        self.see(*self.params, *(self.opt.state[p].get("momentum_buffer") for p in self.params))
        return shared


def play(comm, act, options, expected):
    one, many = Play(comm, None, options, act), Play(comm, False, options, act)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shared = one.run()
        assert not any(many.run())
    assert "".join("-1"[now] for now in shared) == expected
    assert len(one.seen) == len(many.seen)
    for mine, his in zip(one.seen, many.seen, strict=True):
        assert same(mine, his)
    return one.params[0].detach().clone()


def same(x, y):
    """Bit by bit, where NaN equals NaN."""
    return torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) if isinstance(x, torch.Tensor) else x == y


# ---- the acts ---------------------------------------------------------------------------------------------------------------


def nothing(play, t):
    pass


def noise_of_each_rank(play, t):
    """As sharpness-aware minimisation does: away, a gradient, and back."""
    if t == WHEN:
        torch.manual_seed(play.comm.rank)
        before = [p.detach().clone() for p in play.params]
        for p in play.params:
            p.data.add_(torch.randn_like(p))
        play.see(*play.params)
        play.comm.barrier()
        play.see(play.gradients(t), *play.params)
        with torch.no_grad():
            for p, old in zip(play.params, before):
                p.copy_(old)


def decay_by_hand(play, t):
    """What all ranks do is done to each once, not W times to one."""
    if t == WHEN:
        with torch.no_grad():
            play.params[2].mul_(0.5)


def averaged_weights_on_rank_0(play, t):
    """Swapped in for an evaluation, while the others are in the next forward already."""
    if t == WHEN and play.comm.rank == 0:
        mine = [p.detach().clone() for p in play.params]
        for p in play.params:
            p.data.fill_(0.01)
        play.see(play.net(torch.ones(2, 3, 8, 8)))
        for p, old in zip(play.params, mine):
            p.data.copy_(old)


def going_back(play, t):
    if t == WHEN - 1:
        play.saved = copy.deepcopy((play.net.state_dict(), play.opt.state_dict()))
    if t == WHEN + 1:
        play.net.load_state_dict(play.saved[0])
        play.opt.load_state_dict(play.saved[1])


def other_memory_on_the_last_rank(play, t):
    if t == WHEN and play.comm.rank == play.comm.size - 1:
        play.params[2].data = play.params[2].data.clone()


def memory_shared_by_torch(play, t):
    if t == WHEN:
        play.net.share_memory()


def another_optimizer(play, t):
    """Of torch alone, on the same parameters, on rank 0: the replicas differ from then on, as they would anyhow."""
    if t == WHEN and play.comm.rank == 0:
        with play.opt.no_sync():
            play.gradients(t)
        torch.optim.SGD(play.params[:2], lr=0.1).step()


def momentum_written(play, t):
    if t == WHEN:
        for p in play.params:
            play.opt.state[p]["momentum_buffer"].mul_(0.5)


def a_view_from_before(play, t):
    if t == 0:
        play.saved = play.params[2].detach()
    play.see(play.saved)


def a_view_from_within(play, t):
    if t == WHEN:
        play.saved = play.params[2].detach()
    if t > WHEN:
        play.see(play.saved)
    if t == WHEN + 2:
        play.saved += 1.0


def edited_options(play, t):
    play.opt.param_groups[0]["lr"] = 0.1 / (t + 1)
    play.opt.param_groups[0]["momentum"] = 0.1 * t + 0.1
    play.opt.param_groups[0]["weight_decay"] = 0.01 * (t % 2)


def options_of_each_rank(play, t):
    """A mistake, and the replicas differ from then on, as they would anyhow."""
    play.opt.param_groups[0]["lr"] = 0.1 + (0.1 * play.comm.rank if t >= WHEN else 0.0)


def momentum_that_begins(play, t):
    play.opt.param_groups[0]["momentum"] = 0.9 if t >= WHEN else 0.0


def clipping(play, t):
    def step():
        play.opt.synchronize()
        play.see(torch.nn.utils.clip_grad_norm_(play.params, 0.05))
        play.opt.step()

    play.step = step


def replaced_gradients(play, t):
    """One in another memory format than its parameter."""

    def step():
        play.opt.synchronize()
        if t == WHEN:
            play.params[0].grad = play.params[0].grad.clone(memory_format=torch.contiguous_format) * 2
        play.opt.step()

    play.step = step


def scaler(play, t):
    if t == 0:
        play.saved = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def step():
        for p in play.params:
            p.grad.mul_(play.saved.get_scale() * (float("inf") if t == WHEN else 1.0))
        play.saved.scale(torch.ones(()))
        play.saved.step(play.opt)
        play.saved.update()
        play.see(play.saved.get_scale())

    play.step = step


def closure(play, t):
    if t == WHEN:
        play.step = lambda: play.see(play.opt.step(lambda: play.gradients(t)))
    else:
        play.step = play.opt.step


def step_hook(play, t):
    if t == WHEN:

        def look(inner, *_):
            play.see(len(inner.param_groups[0]["params"]), *(p.grad for p in play.params))
            handle.remove()

        handle = play.inner.register_step_pre_hook(look)


def scheduler(play, t):
    """On the inner optimizer: it counts that optimizer's steps, and warns where there are none."""
    if t == 0:
        play.saved = torch.optim.lr_scheduler.StepLR(play.inner, 2, 0.5)

        def step():
            play.opt.step()
            play.saved.step()

        play.step = step


def added_and_frozen(play, t):
    if t == WHEN:
        play.opt.add_param_group({"params": list(play.head.parameters()), "lr": 0.02})
    play.params[2].requires_grad_(t != WHEN + 2)


def saved_alone(play, t):
    """A checkpoint of one parameter is as long as the parameter."""
    if t == WHEN:
        for x in (play.params[0], play.opt.state[play.params[0]]["momentum_buffer"]):
            file = io.BytesIO()
            torch.save(x.detach(), file)
            play.see(file.tell() < 10_000)
            file.seek(0)
            play.see(torch.load(file))
        play.see(*copy.deepcopy(play.net).parameters())


def twice_through_a_graph(play, t):
    if t == WHEN:
        x = play.net[3](torch.ones(1, 612, requires_grad=True)).sum()
        x.backward(retain_graph=True)
        play.opt.step()
        with suppress(RuntimeError):  # "modified by an inplace operation"
            x.backward()
            play.see("no error")
        play.opt.step()


def child_of_a_fork(play, t):
    """It sees the parameters as they were when it was born, though the parent goes on; and what it writes is its own."""
    if t == WHEN:
        play.see(*play.params)
        (read, write), (ready, go) = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            os.read(ready, 1)  # until the parent has trained on
            total = b"".join(p.detach().contiguous().numpy().tobytes() for p in play.params[:2])
            play.params[0].data.fill_(9.0)
            os.write(write, total)
            os._exit(0)
        play.saved = child, read, go, b"".join(p.detach().contiguous().numpy().tobytes() for p in play.params[:2])
    if t == WHEN + 3:
        child, read, go, wanted = play.saved
        os.write(go, b"x")
        told = b""
        while len(told) < len(wanted):
            told += os.read(read, 1 << 20)
        os.waitpid(child, 0)
        play.see(told == wanted)
        assert told == wanted
        assert play.params[0].detach().contiguous().numpy().tobytes() != wanted[: play.params[0].nbytes]


# the steps after which there is one replica (1), or one for each rank (-)
ACTS = {
    nothing: "-11111111",
    noise_of_each_rank: "-111--111",
    decay_by_hand: "-111--111",
    averaged_weights_on_rank_0: "-111--111",
    going_back: "-1111--11",
    other_memory_on_the_last_rank: "-111--111",
    memory_shared_by_torch: "-111-----",
    another_optimizer: "-111-----",
    momentum_written: "-111--111",
    a_view_from_before: "---------",
    a_view_from_within: "-11111---",
    edited_options: "-11111111",
    options_of_each_rank: "-111-----",
    momentum_that_begins: "-111--111",
    clipping: "-11111111",
    replaced_gradients: "-111--111",
    scaler: "-11111111",
    closure: "-1111--11",
    step_hook: "-111--111",
    scheduler: "-11111111",
    added_and_frozen: "-111--111",
    saved_alone: "-11111111",
    twice_through_a_graph: "-11111111",
    child_of_a_fork: "-11111111",
}


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_nobody_notices(pair, act):
    first, second = pair.run(play, act, {}, ACTS[act])
    assert torch.equal(first, second) == (act not in (options_of_each_rank, another_optimizer))


OPTIONS = [
    {"momentum": 0.0},
    {"weight_decay": 1e-3, "nesterov": True},
    {"dampening": 0.5, "maximize": True},
    {"foreach": True, "weight_decay": 1e-3},
    {"fused": True, "weight_decay": 1e-3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_bits_for_all_options(pools, options):
    results = pools.of(3).run(play, nothing, options, "-11111111")
    assert all(torch.equal(own, results[0]) for own in results)


LARS = {"make": "lars", "lr": 5.0, "weight_decay": 1e-3}


@pytest.mark.parametrize("act", [nothing, going_back, edited_options, added_and_frozen], ids=lambda act: act.__name__)
@pytest.mark.parametrize("ranks", [2, 3])
def test_lars_has_parts_of_whole_layers(pools, act, ranks):
    results = pools.of(ranks).run(play, act, LARS, ACTS[act])
    assert all(torch.equal(own, results[0]) for own in results)


@pytest.mark.parametrize("options", [{"nesterov": True}, {"lr_in_momentum": False}], ids=str)
def test_lars_with_its_options(pair, options):
    first, second = pair.run(play, nothing, LARS | options, "-11111111")
    assert torch.equal(first, second)


@pytest.mark.parametrize("options", [{"foreach": True}, {"momentum": 0.0}], ids=str)
def test_lars_that_is_not_the_native_cores_has_a_replica_for_each(pair, options):
    pair.run(play, nothing, LARS | options, "---------")


@pytest.mark.parametrize("act", [nothing, noise_of_each_rank, child_of_a_fork], ids=lambda act: act.__name__)
def test_also_on_five_ranks(pools, act):
    results = pools.of(5).run(play, act, {}, ACTS[act])
    assert all(torch.equal(own, results[0]) for own in results)


def pages(comm, act):
    """Bytes that this rank has for itself, of the memory in which its parameters are."""
    training = Play(comm, None, {}, act)
    for t in range(WHEN + 1):
        act(training, t)
        training.gradients(t)
        training.step()
    address = training.params[2].data_ptr()
    for text in Path("/proc/self/smaps").read_text().split("VmFlags")[:-1]:
        lines = text.splitlines()
        where = next(line for line in lines if "-" in line.split(" ")[0])
        begin, end = (int(word, 16) for word in where.split(" ")[0].split("-"))
        if begin <= address < end:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
    raise AssertionError("no such mapping")


def test_the_kernel_counts_one_replica(pair):
    assert all(own <= 1 << 14 for own in pair.run(pages, nothing))
    assert all(own > 1 << 20 for own in pair.run(pages, decay_by_hand))  # as it counts one for each rank


def small_and_other(comm):
    shared = []
    for width, make in ((8, torch.optim.SGD), (600, torch.optim.Adam)):
        torch.manual_seed(0)
        net = torch.nn.Linear(width, width)
        opt = phalanx.create_multi_node_optimizer(make(net.parameters(), lr=0.01), comm)
        for _ in range(4):
            net(torch.ones(2, width)).sum().backward()
            opt.step()
        shared.append(opt.one_replica)
    return shared == [False, False]


def test_small_models_and_other_optimizers_stay_as_they_are(pair):
    assert all(pair.run(small_and_other))
