"""Lars against its definition, written out in NumPy and float64; and that it is a torch optimizer like any other."""

import copy
import io
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.host_reads import HostReads
from tests.long import times
from tests.optim.lars_oracle import Oracle

import phalanx
from phalanx.native import core
from phalanx.optim.lars import MLPERF

SHAPES = [(4, 3), (4,), (2, 3, 3, 3), (1,), (5, 7), ()]
SKIPS = [None, lambda p: False, lambda p: p.ndim == 2]


def tensors(seed, shapes=SHAPES, dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype) for shape in shapes]


def parameters(seed=0, **options):
    return [torch.nn.Parameter(x) for x in tensors(seed, **options)]


def give(params, gradients):
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()


def close(params, weights, rtol=2e-5, atol=1e-6):
    for p, w in zip(params, weights, strict=True):
        np.testing.assert_allclose(p.detach().double().numpy(), w, rtol=rtol, atol=atol)


options = st.fixed_dictionaries(
    {
        "lr": st.floats(0.01, 20.0),
        "momentum": st.sampled_from([0.0, 0.9, 0.96]),
        "weight_decay": st.sampled_from([0.0, 5e-5, 0.1]),
        "trust_coefficient": st.sampled_from([0.001, 0.02]),
        "eps": st.sampled_from([0.0, 1e-9, 1e-3]),
        "nesterov": st.booleans(),
        "lr_in_momentum": st.booleans(),
    }
).filter(lambda o: o["momentum"] or not o["nesterov"])


WAYS = ("native", "torch", "foreach")  # that a step may go on the CPU


@contextmanager
def way(name):
    """Whatever steps inside goes this way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_NATIVE", "1" if name == "native" else "0")
        yield


@settings(max_examples=times(60, seldom=24), deadline=None)
@given(options, st.sampled_from([torch.float32, torch.float64]), st.sampled_from(WAYS), st.integers(0, 2), st.integers(0, 99))
def test_equals_its_definition(options, dtype, name, which, seed):
    with way(name):
        equals_its_definition(options, dtype, True if name == "foreach" else None, which, seed)


def equals_its_definition(options, dtype, foreach, which, seed):
    skip = {} if SKIPS[which] is None else {"skip": SKIPS[which]}
    params = parameters(seed, dtype=dtype)
    oracle = Oracle(params, **skip)
    opt = phalanx.Lars(params, **options, **skip, foreach=foreach)
    for t in range(4):
        rate = options["lr"] * (1 + t)  # a rate that changes tells what is in the velocity
        opt.param_groups[0]["lr"] = rate
        gradients = tensors(1000 * seed + t, dtype=dtype, scale=0.1)
        give(params, gradients)
        opt.step()
        oracle.step(gradients, **{**options, "lr": rate})
        for p, g in zip(params, gradients, strict=True):
            assert torch.equal(p.grad, g)  # it is only read
    close(params, oracle.w, **({"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-4}))


needs_core = pytest.mark.skipif(bool(core.UNAVAILABLE), reason=core.UNAVAILABLE or "available")


def after_some_steps(count, nesterov=False, kernels=None):
    """A parameter of `count` elements after three steps, and what the definition says."""
    if kernels is not None and not core._native.choose_kernels(kernels):
        pytest.skip(f"this processor has no {kernels}")
    params = parameters(shapes=[(1, count)])
    oracle = Oracle(params)
    opt = phalanx.Lars(params, lr=3.0, weight_decay=0.01, trust_coefficient=0.02, nesterov=nesterov)
    for t in range(3):
        gradients = tensors(t, shapes=[(1, count)])
        give(params, gradients)
        opt.step()
        oracle.step(gradients, lr=3.0, weight_decay=0.01, trust_coefficient=0.02, nesterov=nesterov)
    return params[0].detach(), oracle.w[0]


@needs_core
@pytest.mark.parametrize("nesterov", [False, True])
def test_all_processors_compute_the_same_bits(nesterov):
    """Around a register, around both halves of a run, and a long one."""
    best = core._native.kernels()
    try:
        for count in (1, 3, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 100, 1023, 40_001):
            wanted, definition = after_some_steps(count, nesterov, "portable")
            close([wanted], [definition])
            for kernels in ("avx2", "avx512"):
                assert torch.equal(after_some_steps(count, nesterov, kernels)[0], wanted), (kernels, count)
    finally:
        core._native.choose_kernels(best)


@needs_core
def test_the_native_core_and_torch_compute_the_same():
    """To a few roundings of float32; a control that the two are two ways."""
    counts = (40, 5000, 300_000)
    native, plain = ([], [])
    for found, name in ((native, "native"), (plain, "torch")):
        with way(name):
            found.extend(after_some_steps(count)[0] for count in counts)
    for mine, his in zip(native, plain, strict=True):
        torch.testing.assert_close(mine, his, rtol=2e-6, atol=2e-7)
    assert not all(torch.equal(mine, his) for mine, his in zip(native, plain, strict=True))


@pytest.mark.parametrize("name", WAYS[:2])
@pytest.mark.parametrize("size", [1e-25, 1e21])
def test_norms_of_float32_neither_vanish_nor_overflow(name, size):
    """The squares do, in float32: the ratio would be 1, or 0."""
    p = torch.nn.Parameter(torch.ones(20, 20))
    p.grad = torch.full((20, 20), size)
    with way(name):
        phalanx.Lars([p], lr=10.0, eps=0.0).step()
    torch.testing.assert_close(p.detach(), torch.full((20, 20), 1 - 10 * 0.001))


@pytest.mark.parametrize("name", WAYS)
def test_backward_after_the_step_is_told_that_it_is_too_late(name):
    layer = torch.nn.Linear(3, 3)
    loss = (layer(layer(torch.ones(2, 3))) ** 2).sum()
    with way(name):
        opt = phalanx.Lars(layer.parameters(), lr=0.1, foreach=True if name == "foreach" else None)
        loss.backward(retain_graph=True)
        opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def reference_step(w, mom, g, lr, beta, m=0.9, eeta=0.001, epsilon=1e-7):
    """MLPerf's TensorFlow reference, as it is written there: the velocity has the other sign."""
    w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(g)
    trust = eeta * w_norm / (g_norm + beta * w_norm + epsilon) if w_norm > 0 and g_norm > 0 else 1.0
    mom = m * mom - lr * trust * (g + beta * w)
    return w + mom, mom


def test_mlperf_options_give_the_mlperf_reference():
    (p,) = parameters(shapes=[(8, 6)], dtype=torch.float64, scale=1e-5)  # so small that eps matters
    w, mom = p.detach().numpy().copy(), np.zeros((8, 6))
    plain = torch.nn.Parameter(p.detach().clone())
    opt, other = (phalanx.Lars([x], lr=31.2, weight_decay=2e-4, **more) for x, more in ((p, MLPERF), (plain, {})))
    for t in range(5):
        g = tensors(t, shapes=[(8, 6)], dtype=torch.float64, scale=1e-8)[0]
        p.grad, plain.grad = g.clone(), g.clone()
        opt.step()
        other.step()
        w, mom = reference_step(w, mom, g.numpy(), 31.2, 2e-4)
    close([p], [w], rtol=1e-10, atol=0)
    assert (p - plain).norm() > 0.1 * p.norm()  # the two variants are not the same


@pytest.mark.parametrize("foreach", [None, True])
def test_adapts_without_weight_decay(foreach):
    """timm's and others do nothing but SGD then, silently."""
    params = parameters()
    before = [p.detach().clone() for p in params]
    give(params, tensors(1, scale=1000.0))
    phalanx.Lars(params, lr=1.0, weight_decay=0.0, foreach=foreach).step()
    for p, w in zip(params, before, strict=True):
        if p.ndim > 1:
            torch.testing.assert_close((p - w).norm(), 0.001 * w.norm(), rtol=1e-3, atol=0)
        else:
            assert (p - w).norm() > 10  # a skipped one takes the gradient as it is


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize(("w", "g"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_zero_weights_or_gradients_have_ratio_one(w, g, foreach):
    p = torch.nn.Parameter(torch.full((3, 3), w))
    p.grad = torch.full((3, 3), g)
    phalanx.Lars([p], lr=0.5, weight_decay=0.1, foreach=foreach).step()
    torch.testing.assert_close(p.detach(), torch.full((3, 3), w - 0.5 * (g + 0.1 * w)))


@pytest.mark.parametrize("foreach", [None, True])
def test_memory_layouts_do_not_matter(foreach):
    plain = parameters(shapes=[(6, 4, 3, 3), (6, 4)])
    strided = [
        torch.nn.Parameter(plain[0].detach().to(memory_format=torch.channels_last)),
        torch.nn.Parameter(plain[1].detach().t().clone().t()),
    ]
    pairs = torch.stack([plain[1].detach(), torch.full((6, 4), 7.0)], dim=-1)
    every_second = torch.nn.Parameter(pairs[..., 0])
    assert not every_second.is_contiguous()
    sets = [plain, strided, [plain[0].detach().clone().requires_grad_(), every_second]]
    opts = [phalanx.Lars(each, lr=3.0, weight_decay=0.01, foreach=foreach) for each in sets]
    for t in range(3):
        gradients = tensors(t, shapes=[(6, 4, 3, 3), (6, 4)])
        for each, opt in zip(sets, opts, strict=True):
            give(each, gradients)  # contiguous, whatever the parameter is
            opt.step()
    for each in sets[1:]:
        for p, q in zip(plain, each, strict=True):
            torch.testing.assert_close(p, q)
    assert bool((pairs[..., 1] == 7).all())  # what lies between its elements


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_sixteen_bits_do_not_overflow(dtype):
    p = torch.nn.Parameter(torch.full((300, 300), 2.0, dtype=dtype))
    p.grad = torch.full((300, 300), 100.0, dtype=dtype)  # the sum of squares is 9e8
    phalanx.Lars([p], lr=10.0, momentum=0.0).step()
    torch.testing.assert_close(p.detach(), torch.full((300, 300), 2.0 - 10 * 0.001 * 2.0, dtype=dtype))


def test_groups_have_options_of_their_own():
    a, b, c = parameters(shapes=[(3, 3), (4, 4), (5, 5)], dtype=torch.float64)
    opt = phalanx.Lars(
        [{"params": [a]}, {"params": [b], "lr": 0.3, "momentum": 0.5, "nesterov": True}], lr=0.1, weight_decay=0.01
    )
    opt.add_param_group({"params": [c], "skip": lambda p: True})
    oracles = [Oracle([x], skip=lambda w, skip=skip: skip) for x, skip in ((a, False), (b, False), (c, True))]
    for t in range(3):
        for x, oracle, more in zip((a, b, c), oracles, ({}, {"lr": 0.3, "momentum": 0.5, "nesterov": True}, {}), strict=True):
            x.grad = tensors(t, shapes=[x.shape], dtype=torch.float64)[0]
            oracle.step([x.grad], **{"lr": 0.1, "weight_decay": 0.01, **more})
        opt.step()
    close([a, b, c], [oracle.w[0] for oracle in oracles], rtol=1e-10, atol=0)


def some_steps(opt, params, first, last):
    for t in range(first, last):
        give(params, tensors(t))
        opt.step()


@pytest.mark.parametrize("how", ["state_dict", "file", "deepcopy"])
def test_goes_on_bit_for_bit_from_its_state(how):
    params = parameters()
    opt = phalanx.Lars(params, lr=0.1, weight_decay=0.01, skip=lambda p: p.ndim == 2)
    some_steps(opt, params, 0, 3)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    if how == "deepcopy":
        copies, again = copy.deepcopy((params, opt))
    else:
        again = phalanx.Lars(copies, lr=9.0)  # even what is skipped is part of the state
        state = copy.deepcopy(opt.state_dict())  # torch loads tensors of the right dtype as they are, not as copies
        if how == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        again.load_state_dict(state)
    for each, own in ((opt, params), (again, copies)):
        some_steps(each, own, 3, 6)
    assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))
    again.add_param_group({"params": parameters(5, shapes=[(2, 2)])})


def test_closures_are_called_with_gradients_enabled():
    (p,) = parameters(shapes=[(3, 3)])
    opt = phalanx.Lars([p], lr=0.1)

    def closure():
        opt.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    first = opt.step(closure)
    assert opt.step(closure) < first


def test_parameters_without_gradient_are_left_alone():
    a, b = parameters(shapes=[(3, 3), (3, 3)])
    before = b.detach().clone()
    a.grad = torch.ones(3, 3)
    opt = phalanx.Lars([a, b], lr=0.1, weight_decay=0.1)
    opt.step()
    assert torch.equal(b, before)
    assert b not in opt.state


def test_torch_schedulers_and_tensor_rates():
    params = parameters()
    twin = parameters()
    opt = phalanx.Lars(params, lr=1.0)
    other = phalanx.Lars(twin, lr=torch.tensor(1.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.5**t)
    for t in range(3):
        give(params, tensors(t))
        give(twin, tensors(t))
        opt.step()
        other.step()
        scheduler.step()
        other.param_groups[0]["lr"].fill_(0.5 ** (t + 1))
    assert all(torch.equal(p, q) for p, q in zip(params, twin, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rate", [2.0, torch.tensor(2.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("lr_in_momentum", [True, False])
def test_on_a_device_a_step_reads_nothing(lr_in_momentum, rate, momentum):
    """On a GPU all layers are updated by multi-tensor operations, here by foreach=True; a read would wait for the queue."""
    params, twins = parameters(), parameters()
    give(params, tensors(1))
    give(twins, tensors(1))
    options = {"momentum": momentum, "weight_decay": 0.1, "lr_in_momentum": lr_in_momentum}
    opt, other = phalanx.Lars(params, lr=rate, foreach=True, **options), phalanx.Lars(twins, lr=2.0, **options)
    opt.step()  # makes the state
    other.step()
    with HostReads() as reads:
        opt.step()
    other.step()
    assert reads.seen == []
    close(params, [p.detach().double().numpy() for p in twins])


def test_sparse_gradients_are_refused_with_the_remedy():
    table = torch.nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse=False"):
        phalanx.Lars(table.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": 0.1, "eps": -1e-9}, "eps"),
        ({"lr": 0.1, "momentum": 0.0, "nesterov": True}, "momentum is 0"),
    ],
)
def test_wrong_options_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        phalanx.Lars(parameters(), **wrong)


def test_many_ranks_train_as_one_process():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    x, y = torch.randn(4, 12, 6).double(), torch.randn(4, 12, 2).double()

    def train(comm=None):
        own = copy.deepcopy(model)
        opt = phalanx.Lars(own.parameters(), lr=5.0, weight_decay=1e-3)
        if comm is not None:
            opt = phalanx.create_multi_node_optimizer(opt, comm)
        for t in range(4):
            part = slice(None) if comm is None else slice(comm.rank, None, comm.size)
            opt.zero_grad()
            (own(x[t, part]) - y[t, part]).square().mean().backward()
            opt.step()
        return torch.cat([p.detach().reshape(-1) for p in own.parameters()])

    alone = train()
    for found in phalanx.run_local(3, train, timeout=20):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-12)
