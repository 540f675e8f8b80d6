"""N ranks equal one process with the whole batch, step by step, whatever the algorithm and the options; ranks agree bitwise."""

import copy

import pytest
import torch
from tests.optim.oracle import (
    MODEL,
    SAMPLES,
    SMALL,
    WORLDS,
    AllReduce,
    X,
    Y,
    agree,
    alone,
    close,
    create_multi_node_optimizer,
    flat,
    loss_of,
    no_sync,
    plain_step,
    shard,
    synchronize,
    together,
)

import phalanx


def algorithms(n):
    made = {"ring": phalanx.ring(n), "tree": phalanx.tree(n), "halving_doubling": phalanx.halving_doubling(n)}
    rows = next((r for r in (2, 3, 5, 1) if n % r == 0), 1)
    return made | {"torus": phalanx.torus(rows, n // rows), "hierarchical": phalanx.hierarchical(rows, n // rows)}


@pytest.mark.parametrize("name", ["ring", "torus", "hierarchical", "halving_doubling", "tree"])
@pytest.mark.parametrize("n", WORLDS)
def test_every_algorithm_on_every_world(n, name):
    history = together(n, plain_step, model=MODEL, steps=3, algorithm=algorithms(n)[name], bucket_bytes=100_000)
    close(history, alone(plain_step, model=MODEL, steps=3))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_adamw(n):
    close(together(n, plain_step, make=adamw), alone(plain_step, make=adamw), rtol=1e-6)


def lbfgs(line_search):
    return lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=line_search)


def closure_step(model, opt, comm, t):
    def closure():
        opt.zero_grad()
        loss = loss_of(model, comm, t)
        loss.backward()
        return loss

    loss = opt.step(closure)
    assert comm is None or len(set(comm.allgather_obj(float(loss)))) == 1


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_lbfgs_decides_by_the_mean_loss(n, line_search):
    history = together(n, closure_step, make=lbfgs(line_search))
    close(history, alone(closure_step, make=lbfgs(line_search)), rtol=1e-5, atol=1e-7)


def test_the_loss_of_a_closure_is_averaged_and_keeps_its_type():
    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(torch.optim.SGD(own.parameters(), lr=0.1), comm)
        told = []
        for kind in (float, torch.tensor, lambda _: None):

            def closure(kind=kind):
                loss_of(own, comm, 0).backward()
                return kind(float(comm.rank))

            told.append(opt.step(closure))
        return told

    for told in phalanx.run_local(4, train):
        assert told[0] == 1.5
        assert torch.equal(told[1], torch.tensor(1.5))
        assert told[2] is None


# ---- options ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False, None])
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 1 << 30, None])
def test_group_sizes_and_overlap(bucket_bytes, overlap):
    history = together(3, plain_step, steps=4, sync=AllReduce(overlap=overlap), bucket_bytes=bucket_bytes)
    close(history, alone(plain_step))


@pytest.mark.parametrize("growing", [1, 2, 100])
def test_growing_groups(growing):
    close(together(4, plain_step, sync=AllReduce(growing=growing)), alone(plain_step))


def test_overlap_is_chosen_by_trying_and_stays_right():
    step = lambda model, opt, comm, t: plain_step(model, opt, comm, t % 8)  # noqa: E731
    history = together(2, step, steps=14, bucket_bytes=500)
    close(history, alone(step, steps=14))


@pytest.mark.parametrize(("wire", "rtol"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("double_buffering", [False, True])
def test_a_16_bit_wire(wire, rtol, double_buffering):
    exact = together(4, plain_step, double_buffering=double_buffering)
    history = together(4, plain_step, wire=wire, double_buffering=double_buffering, bucket_bytes=1000)
    for t in range(1 if double_buffering else 0, 4):
        assert not torch.equal(history[t], exact[t])  # it was compressed
        torch.testing.assert_close(history[t], exact[t], rtol=rtol, atol=rtol)


def test_a_16_bit_wire_divides_before_it_adds():
    """Each gradient fits into fp16, their sum does not."""

    def train(comm):
        p = torch.nn.Parameter(torch.zeros(5))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=1.0), comm, wire=torch.float16)
        (p.sum() * 60_000).backward()
        opt.step()
        return p.detach()

    for p in phalanx.run_local(8, train):
        assert torch.equal(p, torch.full((5,), -60_000.0))


# ---- weighted means ---------------------------------------------------------------------------------------------------------


def uneven(comm):
    """Rank r has about r * 2 / n of the samples, rank 0 none."""
    cuts = [SAMPLES * r * r // (comm.size * comm.size) for r in range(comm.size + 1)]
    cuts[1] = 0 if comm.size > 1 else cuts[1]
    return slice(cuts[comm.rank], cuts[comm.rank + 1])


def uneven_step(model, opt, comm, t):
    own = slice(None) if comm is None else uneven(comm)
    opt.zero_grad()
    if comm is not None:
        opt.weight = len(X[t][own])
    ((model(X[t][own]) - Y[t][own]) ** 2).mean().backward()  # NaN where there are no samples
    opt.step()


@pytest.mark.filterwarnings("ignore:.*no gradient")
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 500}, {"wire": torch.float16}])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_uneven_and_empty_batches_count_by_their_samples(n, options):
    tolerance = {"rtol": 5e-3, "atol": 5e-3} if "wire" in options else {}
    history = together(n, uneven_step, sync=AllReduce(weighted=True, overlap=True), **options)
    close(history, alone(uneven_step), **tolerance)


def test_weight_zero_hides_even_nan():
    def step(model, opt, comm, t):
        opt.zero_grad()
        if comm is not None:
            opt.weight = 0 if comm.rank == 2 else 60
        own = None if comm is None else Half(comm.rank % 2)
        loss = loss_of(model, own, t)
        (loss * float("nan") if comm is not None and comm.rank == 2 else loss).backward()
        opt.step()

    close(together(3, step, sync=AllReduce(weighted=True)), alone(step))


class Half:
    """As much of a communicator of two as `shard` needs."""

    size = 2

    def __init__(self, rank):
        self.rank = rank


def test_the_unweighted_mean_of_uneven_batches_is_another():
    def step(model, opt, comm, t):
        own = slice(None) if comm is None else slice(0, 20) if comm.rank == 0 else slice(20, SAMPLES)
        opt.zero_grad()
        ((model(X[t][own]) - Y[t][own]) ** 2).mean().backward()
        opt.step()

    with pytest.raises(AssertionError):
        close(together(2, step), alone(step))


def test_weights_do_not_overflow_a_16_bit_wire():
    """Gradient * samples is far beyond 65504."""

    def train(comm):
        p = torch.nn.Parameter(torch.zeros(3))
        half = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
        sync = AllReduce(weighted=True)
        opt = create_multi_node_optimizer(torch.optim.SGD([p, half], lr=1.0), comm, wire=torch.float16, sync=sync)
        for step in range(3):
            opt.zero_grad()
            opt.weight = 1000 * (comm.rank + 1) * (step + 1)
            ((p.sum() + half.sum()) * 4096).backward()
            opt.step()
        return torch.cat([p.detach(), half.detach().float()])

    for p in phalanx.run_local(4, train):
        torch.testing.assert_close(p, torch.full((6,), -3 * 4096.0), rtol=2e-3, atol=0)


def test_a_weight_comes_before_backward_is_finite_and_needs_the_option():
    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(
            torch.optim.SGD(own.parameters(), lr=0.1), comm, sync=AllReduce(weighted=True, overlap=True), bucket_bytes=1
        )
        plain_step(own, opt, comm, 0)
        for wrong in (-1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=r"opt\.weight="):
                opt.weight = wrong
        opt.zero_grad()
        loss_of(own, comm, 1).backward()
        with pytest.raises(RuntimeError, match="before backward"):
            opt.weight = 3
        opt.step()
        unweighted = create_multi_node_optimizer(torch.optim.SGD(own.parameters(), lr=0.1), comm)
        with pytest.raises(ValueError, match="weighted=True"):
            unweighted.weight = 3

    phalanx.run_local(2, train)


# ---- double buffering -------------------------------------------------------------------------------------------------------


def delayed_alone(steps):
    """Step t applies the gradient of step t - 1, taken at the parameters of t - 1; the first applies nothing."""
    model = copy.deepcopy(SMALL)
    opt, history, previous = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01), [], None
    for t in range(steps):
        fresh = torch.autograd.grad(loss_of(model, None, t), list(model.parameters()))
        if previous is not None:
            for p, g in zip(model.parameters(), previous):
                p.grad = g
            opt.step()
        previous = fresh
        history.append(flat(model))
    return history


@pytest.mark.parametrize("n", WORLDS)
def test_double_buffering_applies_the_mean_of_the_step_before(n):
    history = together(n, plain_step, steps=5, double_buffering=True, bucket_bytes=700)
    wanted = delayed_alone(5)
    close(history[1:], wanted[1:])
    assert torch.equal(history[0], flat(SMALL))
    with pytest.raises(AssertionError):  # the control: the undelayed ones differ
        close(history[1:], alone(plain_step, steps=5)[1:])


def test_double_buffering_with_weights():
    def step(model, opt, comm, t):
        if comm is not None:
            opt.weight = 10.0 * (t + 1)
        plain_step(model, opt, comm, t)

    history = together(3, step, steps=5, double_buffering=True, sync=AllReduce(weighted=True))
    close(history[1:], delayed_alone(5)[1:])


def test_double_buffering_refuses_a_closure():
    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(torch.optim.SGD(own.parameters(), lr=0.1), comm, double_buffering=True)
        with pytest.raises(ValueError, match="double_buffering"):
            opt.step(lambda: 0.0)

    phalanx.run_local(2, train)


# ---- dtypes -----------------------------------------------------------------------------------------------------------------


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float32]


class Mixed(torch.nn.Module):
    """Layers of four dtypes, whose gradients alternate. Computed in float32: not every CPU has half-precision products."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6, dtype=dtype) for dtype in DTYPES)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(x @ layer.weight.float() + layer.bias.float())
        return x


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 64}, {"wire": torch.bfloat16}, {"double_buffering": True}])
def test_parameters_of_many_dtypes(options):
    torch.manual_seed(1)
    model = Mixed()
    x, y = torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 6)

    def step(model, opt, comm, t):
        opt.zero_grad()
        ((model(shard(comm, x)) - shard(comm, y)) ** 2).mean().backward()
        opt.step()

    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.5)  # noqa: E731
    history = together(3, step, model=model, make=make, sync=AllReduce(overlap=None), **options)
    if not options.get("double_buffering"):
        close(history, alone(step, model=model, make=make), rtol=0.02, atol=0.02)
    assert not torch.equal(history[0], history[-1])


def test_integer_gradients_are_averaged_exactly():
    """Closed form: rank r sends r + 1, the mean is (n + 1) / 2, in every dtype and without any rounding."""

    def train(comm):
        params = [torch.nn.Parameter(torch.zeros(k + 1, dtype=dtype)) for k, dtype in enumerate(DTYPES)]
        opt = create_multi_node_optimizer(torch.optim.SGD(params, lr=1.0), comm, bucket_bytes=8)
        for _ in range(2):
            opt.zero_grad()
            sum(p.sum().float() * 2 * (comm.rank + 1) for p in params).backward()
            opt.step()
        return params

    for n in (1, 2, 4, 8):  # fp16 divides by n first: exact for powers of two
        for params in phalanx.run_local(n, train):
            for p in params:
                assert torch.equal(p.detach(), torch.full_like(p, -2.0 * (n + 1)))


def test_the_first_step_updates():
    assert not torch.equal(together(2, plain_step, steps=1)[0], flat(SMALL))


# ---- accumulation and clipping ----------------------------------------------------------------------------------------------


def accumulating(quiet):
    def step(model, opt, comm, t):
        opt.zero_grad()
        for k in range(4):
            x, y = shard(comm, X[t]).chunk(4)[k], shard(comm, Y[t]).chunk(4)[k]
            with no_sync(opt) if quiet and k < 3 else torch.enable_grad():
                (((model(x) - y) ** 2).mean() / 4).backward()
        opt.step()

    return step


@pytest.mark.parametrize("quiet", [True, False], ids=["no_sync", "without"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [300, None])
def test_accumulation_equals_the_big_batch(quiet, overlap, bucket_bytes):
    history = together(3, accumulating(quiet), sync=AllReduce(overlap=overlap), bucket_bytes=bucket_bytes)
    close(history, alone(plain_step))


def test_accumulation_that_begins_after_the_groups_were_learned():
    """From step 2 on every rank has a second backward, and each leaves the mean of what was accumulated."""

    def step(model, opt, comm, t):
        if t < 2:
            return plain_step(model, opt, comm, t)
        opt.zero_grad()
        for x, y in zip(shard(comm, X[t]).chunk(2), shard(comm, Y[t]).chunk(2)):
            (((model(x) - y) ** 2).mean() / 2).backward()
            if comm is not None:
                grads = comm.allgather(torch.cat([p.grad.view(-1) for p in model.parameters()]))
                assert all(torch.equal(own, grads[0]) for own in grads)
        return opt.step()

    for n in (2, 3, 4):
        history = together(n, step, steps=6, sync=AllReduce(overlap=True), bucket_bytes=200)
        close(history, alone(plain_step, steps=6))


def test_everything_inside_no_sync_is_communicated_by_the_step():
    def step(model, opt, comm, t):
        opt.zero_grad()
        with no_sync(opt):
            loss_of(model, comm, t).backward()
        opt.step()

    close(together(3, step, sync=AllReduce(overlap=True), bucket_bytes=200), alone(plain_step))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("options", [{"sync": AllReduce(overlap=True)}, {"sync": AllReduce(overlap=False)}, {}])
def test_clipping_directly_after_backward(n, calls, options):
    def step(model, opt, comm, t):
        opt.zero_grad()
        loss_of(model, comm, t).backward()
        for _ in range(calls):  # no harm
            synchronize(opt)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05  # it does clip
        opt.step()

    close(together(n, step, bucket_bytes=500, **options), alone(step))


def test_a_backward_after_synchronize_is_averaged_too():
    def step(model, opt, comm, t):
        opt.zero_grad()
        loss_of(model, comm, t).backward()
        synchronize(opt)
        with no_sync(opt):
            loss_of(model, comm, (t + 1) % 8).backward()
        opt.step()

    close(together(3, step), alone(step))


def test_ranks_that_train_differently_are_noticed():
    """The control of the controls: `agree` can fail."""
    with pytest.raises(AssertionError, match="differ after step 1"):
        agree([[torch.zeros(2), torch.zeros(2)], [torch.zeros(2), torch.ones(2)]])
