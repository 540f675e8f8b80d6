"""Low-rank gradients: against the paper's text, against torch's own hook, and in training."""

import copy
import math
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.long import often
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.comm.compound import Turn
from phalanx.grad.wires.carrier import carrier_of, rows_of
from phalanx.grad.wires.low_rank import matrix_of

ROWS, COLUMNS, RANK = 24, 36, 3
SHAPES = {range(ROWS * COLUMNS): ROWS, range(ROWS * COLUMNS, ROWS * COLUMNS + 10): 1}
LENGTH = ROWS * COLUMNS + 10


def gradients(rank, step):
    own = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(LENGTH, generator=own)


def as_in_the_paper(ranks, steps, start=0):
    """Algorithms 1 and 2 of Vogels et al., one matrix, in float64."""
    q = torch.randn(COLUMNS, RANK, generator=torch.Generator().manual_seed(0)).double()
    errors = [torch.zeros(ROWS, COLUMNS, dtype=torch.float64) for _ in range(ranks)]
    for step in range(steps):
        m = [gradients(rank, step)[: ROWS * COLUMNS].double().view(ROWS, COLUMNS) + errors[rank] for rank in range(ranks)]
        if step < start:
            yield sum(m) / ranks
            continue
        p = torch.linalg.qr(sum(own @ q for own in m) / ranks)[0]
        q = sum(own.T @ p for own in m) / ranks
        result = p @ q.T
        errors = [own - result for own in m]
        yield result


@pytest.mark.parametrize("shape", [(2, 1), (3, 3), (4, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("start", [0, 2])
def test_it_computes_what_the_paper_says(shape, start):
    ranks, hosts = shape

    def run(comm):
        carrier = carrier_of(phalanx.PowerSGD(rank=RANK, start=start), comm, torch.empty(LENGTH), shapes=SHAPES)
        found = []
        for step in range(6):
            x = gradients(comm.rank, step)
            carrier.leave(x, "mean", label=f"step {step}").wait()
            assert bool(carrier.arrive(x))
            found.append(x)
        return found

    every = phalanx.run_local(ranks, run, hosts=hosts)
    for step, wanted in enumerate(as_in_the_paper(ranks, 6, start)):
        assert all(torch.equal(own[step], every[0][step]) for own in every)
        found = every[0][step]
        assert torch.allclose(found[: ROWS * COLUMNS].double(), wanted.flatten(), atol=1e-4)
        vectors = sum(gradients(rank, step)[ROWS * COLUMNS :] for rank in range(ranks)) / ranks
        assert torch.allclose(found[ROWS * COLUMNS :], vectors, atol=1e-6)


def test_it_computes_what_the_hook_of_torch_computes():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(COLUMNS, ROWS), nn.Linear(COLUMNS, ROWS)
    theirs.load_state_dict(ours.state_dict())
    inputs = torch.randn(8, 16, COLUMNS)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(theirs)
        state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)
        begin = copy.deepcopy(state.rng).randint(1_000_000_000)
        model.register_comm_hook(state, powerSGD_hook)
        wanted = []
        for x in inputs:
            model.zero_grad()
            model(x).square().sum().backward()
            wanted.append([p.grad.clone() for p in theirs.parameters()])
    finally:
        dist.destroy_process_group()
    with torch.random.fork_rng():
        torch.manual_seed(begin)
        first = torch.randn(1, COLUMNS, RANK)[0]

    def run(comm):
        model = copy.deepcopy(ours)
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        opt = phalanx.create_multi_node_optimizer(sgd, comm, wire=phalanx.PowerSGD(rank=RANK, start=2))
        kept = opt.communication.state_dict()
        name = next(iter(opt.parameters()[1]))
        opt.communication.load_state_dict(kept | {"wires": {name: {"q": first}}})
        found = []
        for x in inputs:
            opt.zero_grad()
            model(x).square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters()])
            opt.step()
        return found

    for own in phalanx.run_local(2, run):
        for step, (found, theirs_) in enumerate(zip(own, wanted)):
            for mine, their in zip(found, theirs_):
                assert torch.allclose(mine, their, rtol=1e-3, atol=1e-3 * float(their.abs().max())), step


def test_steps_of_one_gradient_end_at_its_best_approximation():
    """Without errors in between, warm starts are subspace iteration."""
    m = gradients(0, 0)[: ROWS * COLUMNS].view(ROWS, COLUMNS)
    u, s, v = torch.linalg.svd(m)
    m = u[:, :ROWS] @ torch.diag(s * 0.5 ** torch.arange(ROWS)) @ v[:ROWS]
    u, s, v = torch.linalg.svd(m)
    best = u[:, :RANK] @ torch.diag(s[:RANK]) @ v[:RANK]

    def run(comm):
        shapes = {range(ROWS * COLUMNS): ROWS}
        carrier = carrier_of(phalanx.PowerSGD(rank=RANK), comm, torch.empty(ROWS * COLUMNS), shapes=shapes)
        place = range(ROWS * COLUMNS)
        for _ in range(30):
            x = m.flatten().clone()
            carrier.leave(x, "mean", label="").wait()
            carrier.load(place, {"error": torch.zeros(ROWS * COLUMNS)})
        return x.view(ROWS, COLUMNS)

    assert float((phalanx.run_local(2, run)[0] - best).norm()) < 1e-3 * float(best.norm())


def test_an_exchange_that_fails_leaves_the_directions_of_the_one_before(monkeypatch):
    sums = threading.local()
    add_up = Turn.add_up

    def breaks(turn, x):
        sums.count = getattr(sums, "count", 0) + 1
        if sums.count == 6:
            raise ValueError("the second sum of the third exchange")
        add_up(turn, x)

    def run(comm):
        carrier = carrier_of(phalanx.PowerSGD(rank=RANK), comm, torch.empty(LENGTH), shapes=SHAPES)
        place, states, found = next(iter(SHAPES)), [], []
        for step in range(5):
            x = gradients(comm.rank, step)
            if step == 2:
                x[0] = math.nan
                with pytest.raises(ValueError, match="third"):
                    carrier.leave(x, "mean", label=f"{step}").wait()
            else:
                carrier.leave(x, "mean", label=f"{step}").wait()
            found.append(x)
            states.append(carrier.state(place))
        return states, found

    monkeypatch.setattr(Turn, "add_up", breaks)
    for states, found in phalanx.run_local(2, run):
        assert torch.equal(states[2]["q"], states[1]["q"])
        assert all(bool(torch.isfinite(state["error"]).all()) for state in states)
        assert all(bool(torch.isfinite(found[step]).all()) for step in (3, 4))


def test_zeros_stay_zeros_and_directions_come_back_after_them():
    def run(comm):
        carrier = carrier_of(phalanx.PowerSGD(rank=RANK), comm, torch.empty(LENGTH), shapes=SHAPES)
        ends = []
        for step in range(4):
            x = gradients(comm.rank, step) if step == 3 else torch.zeros(LENGTH)
            carrier.leave(x, "mean", label=f"{step}").wait()
            ends.append(float(x[: ROWS * COLUMNS].abs().max()))
        return ends

    for *zeros, last in phalanx.run_local(2, run):
        assert zeros == [0.0, 0.0, 0.0]
        assert last > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [5, ROWS * COLUMNS + 3], ids=["matrix", "vector"])
def test_what_is_not_finite_is_seen_on_all_ranks_and_forgotten(bad, at):
    def run(comm):
        carrier = carrier_of(phalanx.PowerSGD(rank=RANK), comm, torch.empty(LENGTH), shapes=SHAPES)
        finite = []
        for step in range(4):
            x = gradients(comm.rank, step)
            if step == 1 and comm.rank == 1:
                x[at] = bad
            carrier.leave(x, "mean", label=f"{step}").wait()
            finite.append((bool(carrier.arrive(x)), bool(x.isfinite().all())))
        return finite

    assert phalanx.run_local(3, run) == [[(True, True), (False, False), (True, True), (True, True)]] * 3


@pytest.mark.parametrize("native", ["1", "0"])
def test_what_has_not_arrived_is_in_the_errors(native, monkeypatch):
    """Over steps with zeros, with a column that is always zero, and with NaN, which counts for nothing."""
    monkeypatch.setenv("PHALANX_NATIVE", native)
    place, dead = range(ROWS * COLUMNS), 11

    def run(comm):
        carrier = carrier_of(phalanx.PowerSGD(rank=RANK), comm, torch.empty(LENGTH), shapes=SHAPES)
        sent = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
        arrived, owed = sent.clone(), []
        for step in range(9):
            x = torch.zeros(LENGTH) if step in (1, 4, 5) else gradients(comm.rank, step)
            matrix = x[: len(place)].view(ROWS, COLUMNS)
            matrix[:, dead] = 0
            own = matrix.double()
            if step == 3 and comm.rank == 1:
                x[7] = float("nan")
            if step == 6:  # what a checkpoint would hold
                kept = carrier.state(place)
                carrier = carrier_of(phalanx.PowerSGD(rank=RANK, seed=5), comm, torch.empty(LENGTH), shapes=SHAPES)
                carrier.load(place, kept)
            carrier.leave(x, "mean", label=f"{step}").wait()
            if bool(carrier.arrive(x)):
                sent += own
                arrived += matrix.double()
            owed.append(carrier.state(place)["error"].double().view(ROWS, COLUMNS))
        return sent, arrived, owed

    every = phalanx.run_local(3, run)
    mean = sum(sent for sent, _, _ in every) / 3
    for _, arrived, owed in every:
        assert torch.allclose(arrived + sum(own[-1] for _, _, own in every) / 3, mean, atol=1e-4)
        assert torch.allclose(owed[3], owed[2], atol=1e-5)  # NaN leaves them as they were
        assert float(owed[-1].abs().max()) > 0.1
        assert float(owed[-1][:, dead].abs().max()) < 1e-6


@pytest.mark.parametrize("at", [1, 2], ids=["first sum", "second sum"])
@pytest.mark.parametrize("then", ["save", "continue"])
def test_an_exchange_that_fails_leaves_errors_that_can_be_saved(at, then, monkeypatch):
    """They are those before it and the gradient that did not leave. Numbers are large: P and Q that do not fit would show."""
    place, real, calls = range(ROWS * COLUMNS), Turn.add_up, threading.local()

    def add_up(turn, x):  # in the thread of a rank
        calls.left = getattr(calls, "left", 2 * 3 + at) - 1
        if calls.left == 0:
            raise ValueError("the exchange fails here")
        real(turn, x)

    monkeypatch.setattr(Turn, "add_up", add_up)

    def run(comm):
        def gradient(step):
            return 1000 * gradients(comm.rank, step)

        carrier = carrier_of(phalanx.PowerSGD(rank=RANK), comm, torch.empty(LENGTH), shapes=SHAPES)
        for step in range(3):
            carrier.leave(gradient(step), "mean", label=f"{step}").wait()
        owed = carrier.state(place)["error"] + gradient(3)[: len(place)]
        with pytest.raises(ValueError, match="fails here"):
            carrier.leave(gradient(3), "mean", label="3").wait()
        kept = carrier.state(place)
        assert torch.allclose(kept["error"], owed, atol=0.1)
        if then == "save":
            carrier = carrier_of(phalanx.PowerSGD(rank=RANK), comm, torch.empty(LENGTH), shapes=SHAPES)
            carrier.load(place, kept)
        x = gradient(4)
        owed += x[: len(place)]
        carrier.leave(x, "mean", label="4").wait()
        return owed, x[: len(place)], carrier.state(place)["error"]

    found = phalanx.run_local(2, run)
    owed, left = (sum(own[i] for own in found) / 2 for i in (0, 2))
    assert all(torch.allclose(arrived + left, owed, atol=0.5) for _, arrived, _ in found)


def test_what_is_short_already_travels_as_it_is():
    assert matrix_of(range(100 * 100), 100, 4) is not None
    assert matrix_of(range(100), 1, 4) is None
    assert matrix_of(range(16 * 16), 16, 4) is None  # 128 of 256 numbers: no half
    assert matrix_of(range(17 * 17), 17, 4) is not None
    assert matrix_of(range(0), 1, 4) is None


@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last])
def test_a_row_of_a_filter_is_what_makes_one_channel(kind):
    assert rows_of(torch.empty(8, 3, 5, 5).to(memory_format=kind)) == 8
    assert rows_of(torch.empty(6)) == rows_of(torch.empty(())) == rows_of(torch.empty(0, 4)) == 1
    assert rows_of(torch.empty(4, 9).t()) == 4


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 30))


START = network()


def train(comm, wire, steps, *, folder=None, resume=False, **options):
    model = copy.deepcopy(START)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = phalanx.create_multi_node_optimizer(sgd, comm, wire=wire, bucket_bytes=6000, **options)
    first, losses = 0, []
    checkpoints = phalanx.Checkpointer(folder, comm) if folder is not None else None
    if resume:
        first = checkpoints.load(model=model, opt=sgd, communication=opt.communication)
    for step in range(first, steps):
        own = torch.Generator().manual_seed(1000 * comm.rank + step)
        x = torch.randn(16, 20, generator=own)
        opt.zero_grad()
        loss = (model(x) - torch.cat([x, x[:, :10]], 1)).square().mean()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    if checkpoints is not None and not resume:
        checkpoints.save(steps, model=model, opt=sgd, communication=opt.communication)
        checkpoints.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), losses


@pytest.mark.parametrize("shape", [(3, 1), *often((1, 1), (2, 2), (8, 4))], ids=str)
@pytest.mark.parametrize("options", [{}, {"double_buffering": True}, {"sync": phalanx.AllReduce(weighted=True)}], ids=str)
def test_ranks_stay_equal_and_learn(shape, options):
    found = phalanx.run_local(shape[0], lambda comm: train(comm, phalanx.PowerSGD(rank=2), 25, **options), hosts=shape[1])
    assert all(torch.equal(own, found[0][0]) for own, _ in found)
    assert found[0][1][-1] < 0.9 * found[0][1][0]


def test_a_checkpoint_continues_bit_for_bit_and_on_other_worlds_without_errors(tmp_path):
    wire = phalanx.PowerSGD(rank=2, start=3)
    whole = phalanx.run_local(3, lambda comm: train(comm, wire, 10))
    phalanx.run_local(3, lambda comm: train(comm, wire, 6, folder=tmp_path))
    again = phalanx.run_local(3, lambda comm: train(comm, wire, 10, folder=tmp_path, resume=True))
    assert torch.equal(again[0][0], whole[0][0])
    other = phalanx.run_local(2, lambda comm: train(comm, wire, 10, folder=tmp_path, resume=True))
    assert torch.equal(other[0][0], other[1][0])
    without = phalanx.run_local(3, lambda comm: train(comm, phalanx.PowerSGD(rank=2, start=3, seed=1), 10))
    assert not torch.equal(without[0][0], whole[0][0])  # negative control: other directions, another course


def test_new_parameters_keep_the_errors_of_the_old_ones():
    def run(comm):
        model = copy.deepcopy(START)
        wire = phalanx.PowerSGD(rank=1)
        opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, wire=wire)
        for step in range(2):
            opt.zero_grad()
            model(torch.randn(4, 20, generator=torch.Generator().manual_seed(comm.rank + 10 * step))).square().sum().backward()
            opt.step()
        before = opt.communication.state_dict()["wires"]
        more = nn.Parameter(torch.ones(3))
        opt.add_param_group({"params": [more]})
        opt.zero_grad()
        (more * 2.0).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt.synchronize()
        after = opt.communication.state_dict()["wires"]
        return before, after, torch.cat([p.grad.flatten() for p in model.parameters()])

    for before, after, delivered in phalanx.run_local(2, run):
        owed = {name for name, own in before.items() if "error" in own and float(own["error"].abs().max()) > 0}
        assert len(owed) == 2
        assert owed <= after.keys()
        assert float(delivered.abs().max()) > 0  # there was no gradient: what came was owed


@pytest.mark.parametrize("options", [{"rank": 0}, {"start": -1}, {"seed": -1}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        phalanx.PowerSGD(**options)
    with pytest.raises(TypeError, match="whole number"):
        phalanx.PowerSGD(**dict.fromkeys(options, 1.5))
