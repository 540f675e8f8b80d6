"""Synchronised batch norm against one process with the whole batch; statistics averaged over ranks. Ranks are threads here."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.host_reads import HostReads
from torch import nn

import phalanx
from phalanx.nn.batchnorm import use_last_batch_

CHANNELS = 3
KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
OPTIONS = [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.7, "eps": 0.1}]


def batches(sizes, dims, *, steps=2, dtype=torch.float64):
    """Per step and rank an input, and the gradient that its output gets."""
    g = torch.Generator().manual_seed(sum(sizes) + dims)
    draw = lambda n: (torch.randn(n, CHANNELS, *[2, 3, 2][: dims - 2], generator=g) * 2 + 5).to(dtype)  # noqa: E731
    return [[(draw(n), draw(n)) for n in sizes] for _ in range(steps)]


def norm(dims, options, dtype=torch.float64):
    made = KINDS[dims](CHANNELS, **options).to(dtype)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.arange(1, CHANNELS + 1) / 2)
    return made


def run(layer, inputs, *, train=True):
    """Outputs and input gradients of every step; then parameter gradients and state."""
    layer.train(train)
    seen = []
    for x, dy in inputs:
        x = x.clone().requires_grad_()
        y = layer(x)
        y.backward(dy)
        seen += [y.detach(), x.grad]
    return seen, [p.grad for p in layer.parameters()], {name: x.clone() for name, x in layer.state_dict().items()}


def joined(steps):
    return [tuple(torch.cat(parts) for parts in zip(*ranks, strict=True)) for ranks in steps]


def alone(layer, steps):
    return run(copy.deepcopy(layer), joined(steps))


def together(layer, steps, convert):
    def rank(comm):
        own = convert(copy.deepcopy(layer), comm)
        return run(own, [ranks[comm.rank] for ranks in steps])

    return phalanx.run_local(len(steps[0]), rank, timeout=20)


def differences(layer, steps, convert):
    """How far ranks are from one process: in outputs, gradients of inputs, of parameters, and state."""
    whole, gradients, state = alone(layer, steps)
    ranks = together(layer, steps, convert)
    far = lambda a, b: float((a - b).abs().max()) if a.numel() else 0.0  # noqa: E731
    seen = [torch.cat(parts) for parts in zip(*(rank[0] for rank in ranks), strict=True)]
    yield max(map(far, seen, whole))
    yield max(
        (far(sum(parts), g) for parts, g in zip(zip(*(rank[1] for rank in ranks), strict=True), gradients, strict=True)),
        default=0,
    )
    assert all(rank[2].keys() == state.keys() for rank in ranks)
    yield max((far(rank[2][name].double(), x.double()) for rank in ranks for name, x in state.items()), default=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dims", [2, 4])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 5, 2), (3, 0, 2, 1)], ids=str)
def test_equals_one_process_with_the_whole_batch(sizes, dims, options):
    assert max(differences(norm(dims, options), batches(sizes, dims), phalanx.convert_batchnorm)) < 1e-12


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 1), st.sampled_from([2, 3, 4, 5]))
def test_so_it_does_for_any_batches(sizes, dims):
    assert max(differences(norm(dims, {}), batches(tuple(sizes), dims), phalanx.convert_batchnorm)) < 1e-12


def test_plain_batch_norm_does_not():
    found = list(differences(norm(4, {}), batches((4, 4), 4), lambda layer, comm: layer))
    assert min(found) > 1e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.2), (torch.float16, 0.03)])
def test_other_dtypes(dtype, tolerance):
    steps = batches((3, 5), 4, steps=1, dtype=dtype)
    reference = norm(4, {}, torch.float32)
    exact = [[(x.float(), dy.float()) for x, dy in ranks] for ranks in steps]
    whole, _, _ = alone(reference, exact)
    for parameters in (torch.float32, dtype):  # as under autocast, and as model.to(dtype) has it
        ranks = together(copy.deepcopy(reference).to(parameters), steps, phalanx.convert_batchnorm)
        for parts, wanted in zip(zip(*(rank[0] for rank in ranks), strict=True), whole, strict=True):
            found = torch.cat(parts)
            assert found.dtype is dtype
            torch.testing.assert_close(found.float(), wanted, rtol=0, atol=tolerance)


def test_means_far_from_zero_keep_their_variance():
    """The difference of two sums of squares in float32 would have no digit left."""
    x = torch.randn(8, CHANNELS, generator=torch.Generator().manual_seed(0)) * 0.01 + 100
    steps = [[(part, torch.zeros_like(part)) for part in x.split(4)]]
    found = together(norm(2, {"affine": False}, torch.float32), steps, phalanx.convert_batchnorm)
    y = torch.cat([rank[0][0] for rank in found]).double()
    torch.testing.assert_close(
        y, (x.double() - x.double().mean(0)) / (x.double().var(0, correction=0) + 1e-5).sqrt(), rtol=0, atol=2e-3
    )


def test_evaluation_sends_nothing_and_equals_torch():
    layer = norm(4, {})
    layer.running_mean.fill_(4)
    steps = batches((2, 3), 4)

    def rank(comm):
        own = phalanx.convert_batchnorm(copy.deepcopy(layer), comm).eval()
        if comm.rank == 0:  # the other one would be missing
            return run(own, [ranks[0] for ranks in steps], train=False)
        return None

    found, wanted = (
        phalanx.run_local(2, rank, timeout=20)[0],
        run(copy.deepcopy(layer), [ranks[0] for ranks in steps], train=False),
    )
    assert all(torch.equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))


def test_groups_of_ranks():
    steps = batches((2, 3, 1, 4, 2), 4)
    found = together(norm(4, {}), steps, lambda layer, comm: phalanx.convert_batchnorm(layer, comm, group=2))
    for first, last in ((0, 2), (2, 4), (4, 5)):
        whole, _, _ = alone(norm(4, {}), [ranks[first:last] for ranks in steps])
        for parts, wanted in zip(zip(*(rank[0] for rank in found[first:last]), strict=True), whole, strict=True):
            torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-12, atol=1e-12)


def test_one_value_in_all_is_refused_by_all():
    def rank(comm):
        layer = phalanx.MultiNodeBatchNorm(CHANNELS, comm)
        with pytest.raises(ValueError, match="more than 1 value per channel over all ranks"):
            layer(torch.ones(1 if comm.rank == 1 else 0, CHANNELS))

    phalanx.run_local(3, rank, timeout=20)


def test_all_ranks_empty_changes_nothing():
    def rank(comm):
        layer = phalanx.MultiNodeBatchNorm(CHANNELS, comm)
        y = layer(torch.empty(0, CHANNELS, requires_grad=True))
        y.sum().backward()
        return y.shape, layer.running_mean.tolist(), layer.running_var.tolist()

    assert phalanx.run_local(2, rank, timeout=20) == [((0, CHANNELS), [0.0] * CHANNELS, [1.0] * CHANNELS)] * 2


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_is_read_from_the_device(options):
    """One read per layer would let the queue of a GPU run empty in every layer."""

    def rank(comm):
        layer = phalanx.convert_batchnorm(norm(4, options), comm)
        x = torch.randn(4, CHANNELS, 2, 2, dtype=torch.float64, requires_grad=True)
        with HostReads() as reads:
            layer(x).sum().backward()
        return reads.seen

    assert phalanx.run_local(2, rank, timeout=20) == [[], []]


# ---- models ------------------------------------------------------------------------------------------------------------------


def model():
    torch.manual_seed(0)
    shared = nn.BatchNorm2d(4)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), shared, nn.ReLU(), nn.Conv2d(4, 4, 1), shared, nn.Flatten(), nn.Linear(4 * 16, 2)
    ).double()


def test_training_equals_one_process():
    x = torch.randn(3, 12, 3, 6, 6, dtype=torch.float64)
    drawn = model()  # once: threads that draw at the same time share one stream of random numbers

    def train(comm=None):
        own = copy.deepcopy(drawn)
        opt = torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)
        if comm is not None:
            own = phalanx.convert_batchnorm(own, comm)
            assert own[1] is own[4]  # one module used twice stays one
            opt = phalanx.create_multi_node_optimizer(opt, comm)
        for t in range(3):
            part = x[t] if comm is None else x[t].chunk(comm.size)[comm.rank]
            opt.zero_grad()
            own(part).square().mean().backward()
            opt.step()
        return {name: value.clone() for name, value in own.state_dict().items()}

    alone = train()
    for found in phalanx.run_local(3, train, timeout=20):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-11)


def test_conversion_keeps_tensors_modes_and_state_dicts():
    comm = phalanx.create_communicator()
    net = phalanx.models.resnet_cifar(8).eval()
    before, names = dict(net.named_parameters()), list(net.state_dict())
    assert phalanx.convert_batchnorm(net, comm) is net
    assert all(p is before[name] for name, p in net.named_parameters())
    assert list(net.state_dict()) == names
    norms = [m for m in net.modules() if isinstance(m, phalanx.MultiNodeBatchNorm)]
    assert len(norms) == 7
    assert not any(m.training for m in norms)
    assert not any(type(m) is nn.BatchNorm2d for m in net.modules())
    phalanx.models.resnet_cifar(8).load_state_dict(net.state_dict())
    twin = copy.deepcopy(net)  # an average of the weights, say: its communicator is the same
    assert next(m for m in twin.modules() if isinstance(m, phalanx.MultiNodeBatchNorm)).comm is comm
    assert type(phalanx.convert_batchnorm(nn.BatchNorm1d(3), comm)) is phalanx.MultiNodeBatchNorm


def test_what_cannot_be_converted_is_named():
    class Odd(nn.BatchNorm2d):
        pass

    with pytest.raises(TypeError, match="0 is a Odd"):
        phalanx.convert_batchnorm(nn.Sequential(Odd(3)), phalanx.create_communicator())
    with pytest.raises(ValueError, match="group=2"):
        phalanx.convert_batchnorm(model(), phalanx.create_communicator(), group=2)
    with pytest.raises(ValueError, match=r"expected \(N, 3, \.\.\.\)"):
        phalanx.MultiNodeBatchNorm(3, phalanx.create_communicator())(torch.ones(2, 4))


# ---- running statistics --------------------------------------------------------------------------------------------------------


def statistics(comm, *, last):
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm1d(2, momentum=0.5)).double()
    if last:
        use_last_batch_(net)
    for t in range(3):
        net(torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * comm.rank + t)) + comm.rank)
    before = {name: x.clone() for name, x in net.named_buffers()}
    phalanx.average_batchnorm_(net, comm)
    return before, {name: x.clone() for name, x in net.named_buffers()}, net


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_running_statistics_become_their_mean(n):
    found = phalanx.run_local(n, lambda comm: statistics(comm, last=False)[:2], timeout=20)
    for name in found[0][0]:
        mean = torch.stack([before[name].double() for before, _ in found]).mean(0)
        for _, after in found:
            torch.testing.assert_close(after[name].double(), mean, rtol=1e-12, atol=1e-12)
            assert torch.equal(after[name], found[0][1][name])
            assert after[name].dtype is found[0][0][name].dtype
    if n > 1:
        assert not torch.equal(found[0][0]["0.running_mean"], found[0][1]["0.running_mean"])


def test_last_batch_statistics():
    """No moving average: the mean over the ranks of what the last batch had."""
    for _, after, _ in phalanx.run_local(2, lambda comm: statistics(comm, last=True), timeout=20):
        last = [torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * r + 2)) + r for r in range(2)]
        torch.testing.assert_close(after["0.running_mean"], torch.stack([x.mean(0) for x in last]).mean(0))
        torch.testing.assert_close(after["0.running_var"], torch.stack([x.var(0) for x in last]).mean(0))


def test_models_without_statistics_send_nothing():
    def rank(comm):
        if comm.rank == 0:
            phalanx.average_batchnorm_(nn.Linear(2, 2), comm)

    phalanx.run_local(2, rank, timeout=20)


def test_one_message_for_all_layers():
    def rank(comm):
        calls, inner = [], comm.all_reduce
        comm.all_reduce = lambda x, op="sum": calls.append(op) or inner(x, op)
        phalanx.average_batchnorm_(phalanx.models.resnet_cifar(8), comm)
        layer = phalanx.MultiNodeBatchNorm(2, comm)
        layer(torch.randn(4, 2, requires_grad=True)).sum().backward()
        return calls

    assert phalanx.run_local(2, rank, timeout=20) == [["mean", "sum", "sum"]] * 2
