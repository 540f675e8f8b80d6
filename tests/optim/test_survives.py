"""What people do to models and gradients between two steps; N ranks still equal one process."""

import copy
import random
import re
import warnings

import pytest
import torch
from tests.long import times
from tests.optim.oracle import (
    SMALL,
    AllReduce,
    X,
    Y,
    alone,
    close,
    create_multi_node_optimizer,
    flat,
    loss_of,
    no_sync,
    plain_step,
    sgd,
    shard,
    together,
)
from torch.utils.checkpoint import checkpoint

import phalanx

EAGER = {"sync": AllReduce(overlap=True), "bucket_bytes": 200}  # many groups, all of which may leave during backward
unwarned = pytest.mark.filterwarnings("ignore:.*no gradient")


# ---- zeroing and replacing gradients ----------------------------------------------------------------------------------------


def set_none(model, opt):
    for p in model.parameters():
        p.grad = None


def alternate(model, opt, ways=[0]):  # noqa: B006
    ways[0] += 1
    opt.zero_grad(set_to_none=ways[0] % 2 == 0)


ZEROS = {
    "opt, to None": lambda model, opt: opt.zero_grad(set_to_none=True),
    "opt, to zeros": lambda model, opt: opt.zero_grad(set_to_none=False),
    "opt, alternating": alternate,
    "model, to None": lambda model, opt: model.zero_grad(),
    "model, to zeros": lambda model, opt: model.zero_grad(set_to_none=False),
    "p.grad = None": set_none,
    "nobody": lambda model, opt: None,
}


@pytest.mark.parametrize("how", ZEROS)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_every_way_to_zero(how, double_buffering):
    def step(model, opt, comm, t):
        ZEROS[how](model, opt)
        loss_of(model, comm, t).backward()
        opt.step()

    if not double_buffering:
        close(together(3, step, **EAGER), alone(step))
    elif how != "nobody":  # there the sum would hold means of the step before, which one process does not have
        for mine, wanted in zip(
            together(3, step, double_buffering=True), together(3, plain_step, double_buffering=True), strict=True
        ):
            assert torch.equal(mine, wanted)


@pytest.mark.parametrize("when", ["before backward", "after the step", "after backward"])
def test_a_user_who_replaces_gradients(when):
    def step(model, opt, comm, t):
        opt.zero_grad()
        if when == "before backward":
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.01)
        loss_of(model, comm, t).backward()
        if when == "after backward":
            for p in model.parameters():
                p.grad = p.grad * 0.5
        opt.step()
        if when == "after the step":
            for p in model.parameters():
                p.grad = torch.zeros_like(p)

    close(together(3, step, **EAGER), alone(step))


@pytest.mark.parametrize("how", ["opt, to None", "opt, to zeros", "model, to None", "p.grad = None"])
def test_a_batch_that_is_thrown_away_after_its_gradients_have_left(how):
    def step(model, opt, comm, t):
        opt.zero_grad()
        if t % 2:
            (loss_of(model, comm, 7) * float("inf")).backward()
            ZEROS[how](model, opt)
        loss_of(model, comm, t).backward()
        opt.step()

    close(together(3, step, steps=5, **EAGER), alone(plain_step, steps=5))


@unwarned
def test_a_rank_that_fails_in_backward_and_goes_on_with_nothing():
    """Rank 1 runs out of memory, say, before any gradient has left. It counts as zeros."""

    def step(model, opt, comm, t):
        broken = t == 2 and (comm is None or comm.rank == 1)
        opt.zero_grad()
        loss = loss_of(model, comm, t)
        if comm is None:  # ranks 0 and 2 of 3
            own = [((model(x) - y) ** 2).mean() / 3 for x, y in zip(X[t].chunk(3), Y[t].chunk(3))]
            loss = own[0] + own[2] if broken else sum(own)
        elif broken:
            loss = loss + Fails.apply(model[2].weight).sum() * 0
        try:
            loss.backward()
        except MemoryError:
            opt.zero_grad()
        opt.step()

    close(together(3, step, **EAGER), alone(step))


class Fails(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("in the middle of backward")


# ---- parameters that come, go, freeze, or share -----------------------------------------------------------------------------


@pytest.mark.parametrize("between", [False, True], ids=["before backward", "between backward and step"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["add_param_group", "param_groups edited"])
def test_parameters_added_later(between, by_hand):
    def add(opt, model):
        if by_hand:
            opt.param_groups[0]["params"].insert(0, model.late.weight)
        else:
            opt.add_param_group({"params": [model.late.weight], "lr": 0.05})

    def step(model, opt, comm, t):
        opt.zero_grad()
        model.late.zero_grad()
        if t == 2 and not between:
            add(opt, model)
        (loss_of(model.body, comm, t) + (model.late(shard(comm, X[t])) ** 2).mean()).backward()
        if t == 2 and between:
            add(opt, model)
        opt.step()

    model = torch.nn.Module()
    model.body, model.late = copy.deepcopy(SMALL), torch.nn.Linear(20, 2, bias=False).double()
    make = lambda model: torch.optim.SGD(model.body.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    history = together(3, step, steps=5, model=model, make=make, **EAGER)
    close(history, alone(step, steps=5, model=model, make=make))
    late = model.late.weight.numel()
    assert torch.equal(history[1][-late:], model.late.weight.detach().view(-1))
    assert not torch.equal(history[2][-late:], history[1][-late:])


@unwarned
@pytest.mark.parametrize("between", [False, True], ids=["before backward", "between backward and step"])
def test_freezing_and_thawing(between):
    """In step 1 the first layer is frozen, in step 2 the last one instead of it, in step 3 nothing is."""

    def freeze(model, t):
        model[0].requires_grad_(t != 1)
        model[4].requires_grad_(t != 2)

    def step(model, opt, comm, t):
        opt.zero_grad()
        if not between:
            freeze(model, t)
        loss_of(model, comm, t).backward()
        if between:
            for layer, at in ((model[0], 1), (model[4], 2)):
                if t == at:
                    layer.zero_grad()
            freeze(model, t)
        opt.step()
        if t == 1:
            assert all(p.grad is None for p in model[0].parameters())

    # a gradient that did not come is zero here and None there: with momentum and decay that is not the same
    make = (lambda model: torch.optim.SGD(model.parameters(), lr=0.1)) if between else sgd
    history = together(3, step, steps=5, make=make, **EAGER)
    close(history, alone(step, steps=5, make=make))
    first = sum(p.numel() for p in SMALL[0].parameters())
    assert torch.equal(history[0][:first], history[1][:first])  # weight decay did not move what is frozen


class Tied(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(20, 20)
        self.again = torch.nn.Linear(20, 20)
        self.again.weight = self.inner.weight
        self.out = torch.nn.Linear(20, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.again(torch.tanh(self.inner(x)))))


def test_tied_parameters():
    torch.manual_seed(2)
    model = Tied().double()
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    close(together(3, plain_step, model=model, make=make, **EAGER), alone(plain_step, model=model, make=make))


class Scalars(torch.nn.Module):
    """0-d, empty, non-contiguous, non-dense and complex parameters."""

    def __init__(self):
        super().__init__()
        P = torch.nn.Parameter  # noqa: N806
        self.scale = P(torch.tensor(1.5))
        self.nothing = P(torch.empty(0))
        self.none_of_them = P(torch.empty(3, 0, 2))
        self.turned = P(torch.randn(3, 20).t())
        self.gaps = P(torch.randn(20, 6)[:, ::2])
        self.sheared = P(torch.randn(9).as_strided((3, 3), (3, 1)).t()[:, :2])
        self.waves = P(torch.randn(20, 3, dtype=torch.complex64))

    def forward(self, x):
        x = x.float()
        y = x @ self.turned + x @ self.gaps + (x.to(torch.complex64) @ self.waves).abs() + self.sheared.sum()
        return (y * self.scale + self.nothing.sum() + self.none_of_them.sum()).double()


@pytest.mark.parametrize("options", [EAGER, {}, {"double_buffering": True}], ids=["eager", "default", "double"])
def test_parameters_of_odd_shapes(options):
    torch.manual_seed(3)
    model = Scalars()
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.01)  # noqa: E731
    strip = lambda model: torch.view_as_real(model.waves.detach()).double().view(-1)  # noqa: E731

    def step(model, opt, comm, t):
        plain_step(model, opt, comm, t)
        assert comm is None or all(p.grad.shape == p.shape for p in model.parameters())

    def train(comm):
        own = copy.deepcopy(model)
        opt = create_multi_node_optimizer(make(own), comm, **options)
        history = []
        for t in range(3):
            step(own, opt, comm, t)
            real = [p.detach().double().reshape(-1) for p in own.parameters() if not p.is_complex()]
            history.append(torch.cat([strip(own), *real]))
        return history

    histories = phalanx.run_local(3, train)
    assert all(torch.equal(a, b) for own in histories for a, b in zip(own, histories[0]))
    if not options.get("double_buffering"):
        wanted = phalanx.run_local(1, train)[0]
        one = copy.deepcopy(model)
        opt = make(one)
        for t in range(3):
            plain_step(one, opt, None, t)
        torch.testing.assert_close(wanted[-1][: one.waves.numel() * 2], strip(one), rtol=1e-4, atol=1e-5)
        for mine, other in zip(histories[0], wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_channels_last_keeps_its_layout():
    torch.manual_seed(4)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 2)
    ).double()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(30, 3, 8, 8).double().to(memory_format=torch.channels_last)

    def step(model, opt, comm, t):
        opt.zero_grad()
        (model(shard(comm, x)) ** 2).mean().backward()
        opt.step()
        assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)

    close(together(3, step, model=model, **EAGER), alone(step, model=model))


# ---- gradients that do not come, or come in another order -------------------------------------------------------------------


class Branching(torch.nn.Module):
    """Rank-dependent control flow: which layers are used, and in which order."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(20, 20) for _ in range(4))
        self.out = torch.nn.Linear(20, 3)

    def forward(self, x, order=(0, 1, 2, 3)):
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return self.out(x)


def branching_step(orders):
    """Rank r uses orders[r]; one process does all of them."""

    def step(model, opt, comm, t):
        opt.zero_grad()
        for r, order in enumerate(orders):
            if comm is None or comm.rank == r:
                loss = ((model(X[t].chunk(len(orders))[r], order) - Y[t].chunk(len(orders))[r]) ** 2).mean()
                (loss if comm is not None else loss / len(orders)).backward()
        opt.step()

    return step


@unwarned
@pytest.mark.parametrize(
    "orders",
    [
        [(0, 1, 2, 3), (3, 2, 1, 0)],
        [(0, 1, 2, 3), (2, 3, 0, 1), (1, 3, 0, 2)],
        [(0, 1), (2, 3), (0, 3)],
        [(), (0, 1, 2, 3), (2,)],
        [(0, 0, 1, 1), (1, 2, 3, 1)],
    ],
)
def test_gradients_in_different_orders_or_not_at_all(orders):
    torch.manual_seed(5)
    model, step = Branching().double(), branching_step(orders)
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    for options in (EAGER, {"bucket_bytes": 5000}):
        close(together(len(orders), step, model=model, make=make, **options), alone(step, model=model, make=make))


def test_branches_that_change_from_step_to_step():
    torch.manual_seed(5)
    model = Branching().double()
    table = [[(0, 1), (2, 3)], [(3, 1, 0), (0, 2)], [(1,), (1,)], [(2, 0), (3,)], [(0, 1, 2, 3), (3, 2, 1, 0)]]
    steps = [branching_step(orders) for orders in table]
    step = lambda model, opt, comm, t: steps[t](model, opt, comm, t)  # noqa: E731
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = together(2, step, model=model, make=make, steps=5, **EAGER)
    close(history, alone(step, model=model, make=make, steps=5))


@unwarned
def test_freezing_while_some_ranks_have_sent_more_than_others():
    torch.manual_seed(5)
    model = Branching().double()
    branch = branching_step([(0, 1, 2, 3), (1,), (0, 3)])

    def step(model, opt, comm, t):
        model.layers[2].requires_grad_(t != 2)
        if t == 3 and comm is not None:
            opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2).double())]})
        branch(model, opt, comm, t)

    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    close(together(3, step, model=model, make=make, steps=5, **EAGER), alone(step, model=model, make=make, steps=5))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_gradient_with_a_graph_on_one_rank():
    """Rank 0 keeps graphs: its gradients have the value of the mean, too, and a step applies the exact one."""

    def train(comm):
        a, b = (torch.nn.Parameter(torch.ones(3)) for _ in "ab")
        opt = create_multi_node_optimizer(torch.optim.SGD([a, b], lr=1.0), comm, **{**EAGER, "bucket_bytes": 1})
        for t in range(3):
            opt.zero_grad()
            (((a**2).sum() + (b**2).sum()) * (1 + comm.rank)).backward(create_graph=t == 2 and comm.rank == 0)
        return torch.cat([a.grad, b.grad])

    for rank, grad in enumerate(phalanx.run_local(2, train, timeout=10)):
        assert torch.equal(grad.detach(), torch.full((6,), 3.0))
        assert grad.requires_grad == (rank == 0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_that_nobody_uses_are_told_once_by_name(set_to_none):
    model = torch.nn.ModuleDict({"used": copy.deepcopy(SMALL), "spare": torch.nn.Linear(2, 2).double()})

    def step(model, opt, comm, t):
        opt.zero_grad(set_to_none=set_to_none)
        loss_of(model["used"], comm, t).backward()
        opt.step()
        assert torch.equal(model["spare"].weight.grad, torch.zeros(2, 2).double())

    make = lambda model: torch.optim.SGD(model.named_parameters(), lr=0.1)  # noqa: E731
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = together(2, step, model=model, make=make, **EAGER)
    texts = sorted(str(w.message) for w in told)
    assert len(texts) == 2  # once per rank
    for rank, text in enumerate(texts):
        assert re.match(rf"rank {rank}: no gradient for 2 parameter\(s\), spare.weight, spare.bias;", text)
    assert torch.equal(history[-1][-6:], flat(model)[-6:])  # zeros, and without decay and momentum nothing moves


def test_parameters_that_some_ranks_do_not_use_count_as_zeros_there():
    """Closed form: rank r > 0 contributes r, rank 0 nothing: the mean is (n - 1) / 2."""

    def train(comm):
        a, b = (torch.nn.Parameter(torch.zeros(3)) for _ in "ab")
        opt = create_multi_node_optimizer(torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=1.0), comm, **EAGER)
        for _ in range(3):
            opt.zero_grad()
            (a.sum() + (b.sum() * comm.rank if comm.rank else 0)).backward()
            opt.step()
        return a.detach(), b.detach()

    for n in (2, 5):
        with pytest.warns(
            UserWarning, match=r"rank 0: no gradient for 1 parameter\(s\), param_groups\[1\]\['params'\]\[0\] \(3,\)"
        ):
            results = phalanx.run_local(n, train)
        for a, b in results:
            assert torch.equal(a, torch.full((3,), -3.0))
            assert torch.equal(b, torch.full((3,), -3 * (n - 1) / 2))


@unwarned
@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("when", [{0}, {1}, {2, 3}])
def test_a_rank_that_skips_backward(which, when):
    def step(model, opt, comm, t):
        opt.zero_grad()
        for r in range(3):
            if (comm is None or comm.rank == r) and not (r == which and t in when):
                loss = ((model(X[t].chunk(3)[r]) - Y[t].chunk(3)[r]) ** 2).mean()
                (loss if comm is not None else loss / 3).backward()
        opt.step()

    close(together(3, step, **EAGER), alone(step))


@unwarned
def test_steps_without_any_gradient():
    """All gradients are zero: without momentum and decay nothing changes, nobody hangs. The same gradient twice counts twice."""

    def step(model, opt, comm, t):
        opt.zero_grad()
        if t == 1:
            loss_of(model, comm, t).backward()
            opt.step()
        opt.step()

    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    history = together(3, step, make=make, **EAGER)
    wanted = alone(step, make=make)
    for mine, other in zip(history, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)
    assert torch.equal(history[0], flat(SMALL))
    assert not torch.equal(history[1], history[0])
    assert torch.equal(history[1], history[3])


def test_a_sparse_embedding():
    torch.manual_seed(6)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Flatten(), torch.nn.Linear(32, 2)).double()
    words = torch.randint(0, 50, (4, 30, 4))

    def step(model, opt, comm, t):
        opt.zero_grad(set_to_none=t % 2 == 0)
        (model(shard(comm, words[t])) ** 2).mean().backward()
        opt.step()

    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.5)  # noqa: E731
    close(together(3, step, model=model, make=make, **EAGER), alone(step, model=model, make=make))


# ---- unusual backwards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    def step(model, opt, comm, t):
        opt.zero_grad()
        x = shard(comm, X[t]).clone().requires_grad_()
        middle = lambda x: model[2](model[1](model[0](x)))  # noqa: E731
        x = checkpoint(middle, x, use_reentrant=reentrant) + checkpoint(middle, x * 0.5, use_reentrant=reentrant)
        ((model[4](model[3](x)) - shard(comm, Y[t])) ** 2).mean().backward()
        opt.step()

    close(together(3, step, **EAGER), alone(step))


def penalised_backward(model, comm, t):
    """A penalty on the squares of p.grad itself, which has a graph."""
    loss_of(model, comm, t).backward(create_graph=True)
    sum((p.grad**2).sum() for p in model.parameters()).backward()


def penalised_loss(model, comm, t):
    """The usual form: a penalty on gradients that autograd.grad gives."""
    loss = loss_of(model, comm, t)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum((g**2).sum() for g in grads)).backward()


def penalised_after_backward(model, comm, t):
    loss_of(model, comm, t).backward()
    grads = torch.autograd.grad(loss_of(model, comm, t), list(model.parameters()), create_graph=True)
    sum((g**2).sum() for g in grads).backward()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("backward", [penalised_backward, penalised_loss, penalised_after_backward])
@pytest.mark.parametrize("from_start", [True, False])
def test_double_backward(backward, from_start):
    """The gradient of a sum of squares is not linear in the batch: the oracle is the mean of the shards' own gradients.

    But where p.grad itself is squared, which is the mean when backward() returns: there it is one process with the whole batch.
    """

    def step(model, opt, comm, t):
        opt.zero_grad()
        run = backward if from_start or t % 2 else lambda model, comm, t: loss_of(model, comm, t).backward()
        if comm is not None or backward is penalised_backward:
            run(model, comm, t)
        else:
            total = [torch.zeros_like(p) for p in model.parameters()]
            for rank in range(3):
                model.zero_grad()
                run(model, Place(rank, 3), t)
                for own, p in zip(total, model.parameters()):
                    own += p.grad.detach() / 3
            for own, p in zip(total, model.parameters()):
                p.grad = own
        opt.step()

    close(together(3, step, **EAGER), alone(step))


class Place:
    """As much of a communicator as `shard` needs."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def test_torch_compile():
    def step(model, opt, comm, t):
        opt.zero_grad()
        loss_of(compiled(model), comm, t).backward()
        opt.step()

    made = {}

    def compiled(model):
        # aot_eager: the graphs, hooks and autograd functions of torch.compile without its minutes of C++
        return made.setdefault(id(model), torch.compile(model, backend="aot_eager"))

    close(together(1, step, **EAGER), alone(plain_step))  # two ranks: in tests/world, dynamo is not for threads


# ---- dropped or changed ------------------------------------------------------------------------------------------------


@unwarned
def test_gradients_dropped_by_one_rank_alone_are_an_error():
    """The mean has them. No rank drifts away in silence: its next message meets none."""

    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, **EAGER)
        plain_step(own, opt, comm, 0)
        try:
            for t in (1, 2):
                opt.zero_grad()
                loss_of(own, comm, t).backward()
                if comm.rank == 1:
                    opt.zero_grad()
                opt.step()
        except phalanx.CommunicationError as error:
            return str(error)
        return "nothing"

    assert all("gradients of step" in words for words in phalanx.run_local(3, train, timeout=3))


def double(p):
    p.grad.mul_(2)


CHANGES = {
    "in place": double,
    "replaced": lambda p: setattr(p, "grad", p.grad * 2),
    "dropped": lambda p: setattr(p, "grad", None),
    "moved": lambda p: setattr(p.grad, "data", p.grad.data * 2),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_gradient_that_is_changed_while_it_is_under_way(how):
    """By a hook of the user's that comes after ours, on the first group that leaves. It is never applied half."""

    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(torch.optim.SGD(own.named_parameters(), lr=0.1), comm, **EAGER)
        plain_step(own, opt, comm, 0)
        own[4].weight.register_post_accumulate_grad_hook(CHANGES[how])
        own[4].bias.register_post_accumulate_grad_hook(CHANGES[how])
        opt.zero_grad()
        with pytest.raises(RuntimeError, match=r"the gradient of 4\.\w+ was changed while it was in flight"):
            loss_of(own, comm, 1).backward()

    phalanx.run_local(2, train, timeout=10)


@pytest.mark.parametrize("how", ["in place", "replaced", "moved"])
def test_hooks_that_change_gradients_before_they_leave(how):
    """Registered on the first layer, whose group leaves last: they are as good as in one process, which they hook as well."""

    def step(model, opt, comm, t):
        if t == 1:
            model[0].weight.register_post_accumulate_grad_hook(CHANGES[how])
        plain_step(model, opt, comm, t)

    close(together(3, step, **EAGER), alone(step))


@pytest.mark.parametrize("layer", [0, 4])
def test_the_gradients_of_one_layer_dropped_on_all_ranks(layer):
    """As DINO does with its last layer, in the first epoch. Zeros, where one process has None: so no momentum here."""

    def step(model, opt, comm, t):
        opt.zero_grad()
        loss_of(model, comm, t).backward()
        if t != 2:
            model[layer].zero_grad()
        opt.step()

    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = together(3, step, make=make, **EAGER)
    close(history, alone(step, make=make))


# ---- anything, in any order --------------------------------------------------------------------------------------------------

LOUD, QUIET = ["backward", "backward", "graph"], ["quiet", "grad", "nothing"]


@unwarned
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("seed", [*range(times(8, seldom=3)), 38, 50, 60, 154])  # the last ones found errors
def test_random_training(seed):
    """Each rank goes its own ways; the oracle is the mean of what each has alone, in plain torch.

    In a step every rank has the same number of backwards outside no_sync(), or none.
    """
    plan = random.Random(seed)
    n = plan.choice([2, 3, 4])
    torch.manual_seed(seed)
    model = Branching().double()
    throw = [plan.random() < 0.2 for _ in range(8)]  # all do the same in these steps, then zero, then begin
    zero = [plan.choice(["opt, to None", "opt, to zeros"]) for _ in range(8)]
    loud = [plan.randint(0, 2) for _ in range(8)]
    doings = [
        [
            [
                (action, plan.sample(range(4), plan.randint(0, 4)), plan.randrange(8))
                for action in [
                    *(plan.choice(QUIET) for _ in range(plan.randint(0, 2))),
                    *(plan.choice(LOUD) for _ in range(plan.choice([0, loud[t], loud[t]]))),
                ]
            ]
            for t in range(8)
        ]
        for _ in range(n)
    ]
    options = {"bucket_bytes": plan.choice([1, 4000, 10_000]), "sync": AllReduce(overlap=plan.choice([True, True, None]))}

    def act(model, opt, action, order, t):
        loss = lambda: ((model(X[t][:10], order) - Y[t][:10]) ** 2).mean()  # noqa: E731
        if action == "quiet":
            with no_sync(opt):
                loss().backward()
        elif action == "graph":
            loss().backward(create_graph=True)
        elif action == "grad":
            torch.autograd.grad(loss(), [*model.out.parameters()])
        elif action == "backward":
            loss().backward()

    def train(comm):
        own, twin = copy.deepcopy(model), copy.deepcopy(model)
        opt = create_multi_node_optimizer(torch.optim.SGD(own.parameters(), lr=0.1), comm, **options)
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        results = []
        for t in range(8):
            for m, o in ((own, opt), (twin, plain)):
                o.zero_grad()
                if throw[t]:
                    act(m, o, "backward", range(4), 0)
                    ZEROS[zero[t]](m, o)
                for action, order, at in doings[comm.rank][t]:
                    act(m, o, action, order, at)
            opt.synchronize()
            mine = torch.cat(
                [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.detach().view(-1) for p in twin.parameters()]
            )
            wanted = torch.stack(comm.allgather(mine)).mean(0)
            results.append(torch.cat([p.grad.detach().view(-1) for p in own.parameters()]))
            torch.testing.assert_close(results[-1], wanted, rtol=1e-9, atol=1e-12)
            opt.step()
            sums = comm.allgather(flat(own))
            assert all(torch.equal(other, sums[0]) for other in sums)
            with torch.no_grad():
                for p, q in zip(own.parameters(), twin.parameters()):
                    q.copy_(p)
        return results

    histories = phalanx.run_local(n, train, timeout=10)
    for own in histories:
        for a, b in zip(own, histories[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)  # a graph's value is the mean up to rounding
