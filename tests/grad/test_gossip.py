"""Gossip as values and among threads: what one exchange does to all replicas, against sums that can be written down."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.optim.oracle import SMALL, flat, loss_of, plain_step, sgd

import phalanx
from phalanx import Gossip, ReplicaError, create_multi_node_optimizer
from phalanx.grad.gossip import mixing
from phalanx.grad.gossip.membership import Membership
from phalanx.grad.gossip.mixing import alike, drift, drift_widened, shares
from phalanx.grad.gossip.packet import Packet, lay_out
from phalanx.grad.gossip.partners import partners
from phalanx.grad.gossip.spread import SAMPLE, spread
from phalanx.schedule import gossip_period

PATIENT = 60.0  # seconds: on a busy machine no exchange is given up
COHERENT = {"overlap": False, "patience": PATIENT}
TOPOLOGIES = ("dissemination", "hypercube", "exact")


# ---- partners ----------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(0, 50), st.sampled_from(TOPOLOGIES), st.booleans(), st.integers(0, 3))
def test_all_ranks_agree_on_who_sends_to_whom(n, step, topology, rotate, seed):
    sync = Gossip(topology=topology, rotate=rotate, seed=seed)
    nodes = [3 * i + 1 for i in range(n)]  # of more nodes, these are left
    found = {node: partners(node, nodes, step, sync) for node in nodes}
    for node, who in found.items():
        if who.dest is None:
            assert who.source is None
        else:
            assert found[who.dest].source == node
            assert found[who.source].dest == node
            assert node not in (who.dest, who.source)


@given(st.integers(2, 64), st.integers(0, 40), st.sampled_from(TOPOLOGIES))
def test_the_mixing_matrix_is_doubly_stochastic(n, step, topology):
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for rank in range(n):
        who = partners(rank, range(n), step, Gossip(topology=topology))
        matrix[rank, rank] += 1 - who.weight
        matrix[rank, rank if who.source is None else who.source] += who.weight
    torch.testing.assert_close(matrix.sum(0), torch.ones(n, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(1), torch.ones(n, dtype=torch.float64))
    assert topology == "exact" or set(matrix.flatten().tolist()) <= {0.0, 0.5, 1.0}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_rotation_makes_every_pair_meet_and_without_it_few_do(topology):
    def met(rotate, steps=400):
        sync = Gossip(topology=topology, rotate=rotate)
        return {(rank, partners(rank, range(16), step, sync).dest) for step in range(steps) for rank in range(16)}

    assert met(rotate=True) == {(a, b) for a in range(16) for b in range(16) if a != b}
    assert len(met(rotate=False)) == 16 * 4


# ---- the membership of who is left -------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 100)), max_size=6), st.randoms())
def test_obituaries_may_come_in_any_order_and_twice(strikes, random):
    gone = [Membership.of(8).mark_dead(node, step) for node, step in strikes]
    forwards = backwards = Membership.of(8)
    for membership in gone:
        forwards = forwards.merge(membership.leaves)
    random.shuffle(gone)
    for membership in [*gone, *gone]:
        backwards = backwards.merge(membership.leaves)
    assert forwards == backwards
    assert set(forwards.gone) == {node for node, _ in strikes}


def test_a_gone_seat_takes_part_until_everybody_can_know():
    membership = Membership.of(8).mark_dead(3, 10)
    last = next(step for step in itertools.count(10) if 3 not in membership.nodes(step))
    assert last - 10 >= 2 * gossip_period(8)
    assert 3 in membership.nodes(last - 1)
    assert membership.nodes(last + 100) == [0, 1, 2, 4, 5, 6, 7]


EXACT = Gossip(topology="exact")
CASES = [(n, sync) for n in (4, 8, 16, 32) for sync in (Gossip(), Gossip(seed=5))]
CASES += [(n, sync) for n in (3, 4, 5, 6, 7, 9, 16, 17, 23) for sync in (EXACT, replace(EXACT, rotate=False))]


@pytest.mark.parametrize(("n", "sync"), CASES)
def test_news_of_a_death_reach_all_survivors_before_it_counts(n, sync):
    """By values: whoever would send to or receive from the dead rank gets nothing, all others hear what their source knows."""
    for dead in range(0, n, max(1, n // 2 - 1)) if n > 9 else range(n):
        rolls = {rank: Membership.of(n, sync.topology) for rank in range(n) if rank != dead}
        for step in range(8 * gossip_period(n, sync.topology)):
            pairs = {rank: partners(rank, rolls[rank].nodes(step), step, sync) for rank in rolls}
            said = dict(rolls)
            for rank, who in pairs.items():
                if dead in (who.source, who.dest):
                    rolls[rank] = rolls[rank].mark_dead(dead, step)
                if who.source is not None and who.source != dead:
                    assert pairs[who.source].dest == rank, "survivors disagree on partners"
                    rolls[rank] = rolls[rank].merge(said[who.source].leaves)
        assert {membership.gone for membership in rolls.values()} == {(dead,)}
        assert len(set(rolls.values())) == 1


# ---- the message -------------------------------------------------------------------------------------------------------------

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=8),
    st.sampled_from([None, torch.bfloat16]),
    st.integers(1, 3),
)
def test_a_message_holds_every_tensor_without_gaps(kinds, wire, parts):
    tensors = [(torch.arange(math.prod(shape)) % 100 + i).view(shape).to(dtype) for i, (shape, dtype) in enumerate(kinds)]
    layout = lay_out(tensors, wire, parts=parts)
    packet = Packet(layout, torch.device("cpu"))
    packet.pack(tensors)
    held = sum(view.numel() * view.element_size() for view in packet.views)
    assert held <= layout.nbytes < held + 8 * parts
    assert layout.nbytes % (8 * parts) == 0
    back = [torch.empty_like(x) for x in tensors]
    packet.unpack(back)
    for x, y in zip(tensors, back, strict=True):
        assert torch.equal(x, y)  # small whole numbers survive 16 bits


def test_channels_last_is_packed_as_it_lies_and_strangers_as_rows():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = torch.randn(4, 6)[:, ::2]
    packet = Packet(lay_out([x, y], None), torch.device("cpu"))
    packet.pack([x, y])
    assert packet.views[0].stride() == x.stride()
    assert packet.views[1].is_contiguous()
    assert torch.equal(packet.views[0], x)
    assert torch.equal(packet.views[1], y)


@pytest.mark.parametrize("wire", [None, torch.float16, torch.bfloat16])
def test_drift_keeps_the_mean_of_all_and_what_happened_meanwhile(wire):
    torch.manual_seed(0)
    sent = [torch.randn(1000) for _ in range(6)]
    moved = [x + 0.01 * torch.randn(1000) for x in sent]
    messages = [x if wire is None else x.to(wire) for x in sent]
    now = [x.clone() for x in moved]
    for rank in range(6):
        who = partners(rank, range(6), 1, Gossip())
        drift([now[rank]], [messages[rank]], [messages[who.source].clone()])
    torch.testing.assert_close(sum(x.double() for x in now), sum(x.double() for x in moved), rtol=0, atol=3e-6)
    assert not torch.equal(now[0], moved[0])
    # negative control: what the published rule does to the mean of the updates, it halves them
    published = [0.5 * moved[r] + 0.5 * sent[partners(r, range(6), 1, Gossip()).source] for r in range(6)]
    change, wanted = (sum(xs) - sum(sent) for xs in (published, moved))
    torch.testing.assert_close(change, wanted / 2, rtol=1e-3, atol=1e-5)


def test_multi_tensor_operations_get_tensors_of_one_kind():
    """With two dtypes in a list torch launches a kernel per tensor, and some versions copy wrongly on GPUs."""
    dtypes = [torch.float32, torch.float64, torch.float32, torch.bfloat16]
    xs = [torch.full((2,), i, dtype=dtype) for i, dtype in enumerate(dtypes)]
    ys = [x.to(torch.bfloat16) for x in xs]
    parts = list(alike(xs, ys))
    assert sorted(int(x[0]) for part, _ in parts for x in part) == [0, 1, 2, 3]
    for part, others in parts:
        assert len({x.dtype for x in part}) == len({y.dtype for y in others}) == 1
        assert all(torch.equal(x.to(y.dtype), y) for x, y in zip(part, others, strict=True))
    assert [len(part) for part, _ in parts] == [2, 1, 1]


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("room", [1, 40, 1 << 20])
def test_many_tensors_at_once_drift_as_one_by_one(wire, room, monkeypatch):
    """What a GPU computes, on the CPU: bit by bit the same, however many are widened at a time."""
    monkeypatch.setattr(mixing, "WIDENED", room)
    g = torch.Generator().manual_seed(0)
    xs = [torch.randn(size, generator=g) for size in (3, 17, 1, 64, 5)]
    sent, received = ([torch.randn(x.shape, generator=g).to(wire) for x in xs] for _ in range(2))
    one_by_one = [x.clone() for x in xs]
    drift(one_by_one, sent, [r.clone() for r in received])
    drift_widened(xs, sent, received)
    assert all(torch.equal(a, b) for a, b in zip(xs, one_by_one, strict=True))


def test_halves_are_the_same_on_both_sides():
    torch.manual_seed(1)
    a, b = torch.randn(10_000), torch.randn(10_000)
    here, there = a.clone(), b.clone()
    shares([here], [b])
    shares([there], [a])
    assert torch.equal(here, there)


# ---- pure exchanges: an optimizer whose step does nothing --------------------------------------------------------------------


def exchanged(n, steps, start, *, hosts=1, **options):
    """The parameters of every rank after each of so many steps with learning rate 0, from start(rank)."""

    def run(comm):
        p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        opt = create_multi_node_optimizer(
            torch.optim.SGD([p], lr=0.0), comm, sync=Gossip(**{"patience": PATIENT, **options}), wire=None
        )
        p.grad = torch.zeros_like(p)
        opt.synchronize()  # replicas are compared here
        p.data.copy_(start(comm.rank))
        history = []
        for _ in range(steps):
            p.grad = torch.zeros_like(p)
            opt.step()
            history.append(p.detach().clone())
        return history

    return list(zip(*phalanx.run_local(n, run, hosts=hosts, timeout=30), strict=True))


def whole(rank):
    return torch.tensor([float(rank + 1), float(rank * rank), 1000.0 * (rank % 3)], dtype=torch.float64)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("n", [2, 4, 16])
def test_log2_p_exchanges_on_a_power_of_two_are_exactly_the_mean(n, topology):
    steps = gossip_period(n)
    history = exchanged(n, steps, whole, topology=topology, overlap=False)
    mean = sum(whole(rank) for rank in range(n)) / n
    assert all(torch.equal(x, mean) for x in history[-1])
    if steps > 1:
        assert not all(torch.equal(x, history[-2][0]) for x in history[-2])


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("n", [8, 32, 64])
def test_by_values_too(n, topology):
    """What the optimizer does to tensors of 64 ranks, without 64 ranks."""
    xs = [whole(rank) for rank in range(n)]
    for step in range(gossip_period(n)):
        before = [x.clone() for x in xs]
        for rank, x in enumerate(xs):
            shares([x], [before[partners(rank, range(n), step, Gossip(topology=topology)).source]])
    assert all(torch.equal(x, sum(map(whole, range(n))) / n) for x in xs)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8])
def test_one_period_of_exact_is_the_mean_of_any_number_of_ranks(n):
    steps = gossip_period(n, "exact")
    mean = sum(whole(rank) for rank in range(n)) / n
    for overlap in (False, True):
        history = exchanged(n, steps + overlap, whole, topology="exact", overlap=overlap)
        for x in history[-1]:
            torch.testing.assert_close(x, mean, rtol=1e-12, atol=1e-9)
        assert n == 2 or not all(torch.allclose(x, mean) for x in history[-2])
    # negative control: after as many rounds of dissemination the mean is not exact, unless n is a power of two
    history = exchanged(n, steps, whole, overlap=False)
    assert all(torch.allclose(x, mean, rtol=1e-9) for x in history[-1]) == (n & (n - 1) == 0)


@pytest.mark.parametrize("n", [2, 3, 5, 6])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_mean_stays_and_the_spread_contracts(n, overlap):
    history = exchanged(n, 5 * gossip_period(n), whole, overlap=overlap)
    mean = sum(whole(rank) for rank in range(n)) / n

    def distance(xs):
        return math.sqrt(sum(float(((x - mean) ** 2).sum()) for x in xs))

    for xs in history:
        torch.testing.assert_close(sum(xs) / n, mean, rtol=1e-12, atol=0)
    assert all(after <= before * (1 + 1e-12) for before, after in itertools.pairwise(map(distance, history)))
    assert distance(history[-1]) < 0.05 * distance(map(whole, range(n)))


def test_hosts_gossip_as_one_and_ranks_carry_their_shares():
    """4 hosts of 2 ranks are 4 nodes: after 2 exchanges all equal, from replicas that are equal within a host."""
    start = lambda rank: whole(rank // 2)  # noqa: E731
    history = exchanged(8, 2, start, hosts=4, overlap=False)
    mean = sum(whole(host) for host in range(4)) / 4
    assert all(torch.equal(x, mean) for x in history[-1])
    ranks = exchanged(8, 2, start, hosts=4, overlap=False, level="rank")
    assert not all(torch.equal(x, mean) for x in ranks[-1])  # on request each rank for itself: that takes 3
    three = exchanged(6, 3, start, hosts=3, overlap=False, topology="exact")  # 3 hosts: pairs with weights 1/2, 2/3 and 1/2
    for x in three[-1]:
        torch.testing.assert_close(x, sum(whole(host) for host in range(3)) / 3, rtol=1e-12, atol=1e-9)


# ---- training ----------------------------------------------------------------------------------------------------------------


def trained(n, steps=6, *, hosts=1, step=plain_step, make=sgd, model=SMALL, wire=None, **options):
    """The parameters of every rank after each step."""

    def run(comm):
        own = copy.deepcopy(model)
        sync = Gossip(**{"patience": PATIENT, **options})
        opt = create_multi_node_optimizer(make(own), comm, sync=sync, wire=wire)
        history = []
        for t in range(steps):
            step(own, opt, comm, t)
            history.append(flat(own))
        return history

    return phalanx.run_local(n, run, hosts=hosts, timeout=30)


def by_hand(n, steps, *, overlap, sync):
    """Momentum and parameters of all ranks in one process, by the rules of docs/gossip.md."""
    models = [copy.deepcopy(SMALL) for _ in range(n)]
    opts = [sgd(model) for model in models]

    class Place:
        size = n

    def tensors(i):
        params = list(models[i].parameters())
        return [p.detach() for p in params] + [opts[i].state[p]["momentum_buffer"] for p in params]

    sent = None
    for t in range(steps):
        for i in range(n):
            place = Place()
            place.rank = i
            plain_step(models[i], opts[i], place, t)
        before = [[x.clone() for x in tensors(i)] for i in range(n)]
        if not overlap:
            for i in range(n):
                who = partners(i, range(n), t, sync)
                for x, mine, theirs in zip(tensors(i), before[i], before[i if who.source is None else who.source], strict=True):
                    x.copy_(mine * (1 - who.weight) + theirs * who.weight)
            continue
        if sent is not None:
            for i in range(n):
                who = partners(i, range(n), t - 1, sync)
                for x, mine, theirs in zip(tensors(i), sent[i], sent[i if who.source is None else who.source], strict=True):
                    x.add_((theirs - mine) * who.weight)
        sent = [[x.clone() for x in tensors(i)] for i in range(n)]
    return [flat(model) for model in models]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("n", "topology"), [(2, "dissemination"), (3, "dissemination"), (8, "dissemination"), (3, "exact"), (5, "exact")]
)
def test_weights_and_momentum_are_mixed_as_documented(n, topology, overlap):
    found = trained(n, overlap=overlap, topology=topology)
    for mine, wanted in zip(found, by_hand(n, 6, overlap=overlap, sync=Gossip(topology=topology)), strict=True):
        torch.testing.assert_close(mine[-1], wanted, rtol=1e-10, atol=1e-12)


def test_a_pair_leaves_the_step_equal_when_coherent_and_not_when_overlapped():
    equal = [torch.equal(a[-1], b[-1]) for a, b in itertools.pairwise(trained(2, overlap=False))]
    assert equal == [True]
    a, b = trained(2, overlap=True)
    assert not torch.equal(a[-1], b[-1])


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_mixed_as_documented(overlap):
    """Plain SGD, so that the parameters are the sum of what was applied."""
    n, lr = 3, 0.1

    def step(own, opt, comm, t):
        opt.zero_grad()
        loss_of(own, comm, t).backward()
        raw.setdefault(comm.rank, []).append(torch.cat([p.grad.reshape(-1).clone() for p in own.parameters()]))
        opt.step()

    raw = {}
    found = trained(n, step=step, make=lambda m: torch.optim.SGD(m.parameters(), lr=lr), exchange="gradients", overlap=overlap)
    sync = Gossip()
    for rank in range(n):
        x = flat(SMALL)
        for t in range(6):
            late = t - 1 if overlap else t
            own = raw[rank][t]
            theirs = raw[partners(rank, range(n), late, sync).source][late] if late >= 0 else own
            x = x - lr * (own + theirs) / 2
            torch.testing.assert_close(found[rank][t], x, rtol=1e-9, atol=1e-11)


def test_hosts_train_as_so_many_ranks_with_their_samples():
    hosts = trained(8, hosts=4)
    ranks = trained(4)
    for rank in range(8):
        torch.testing.assert_close(hosts[rank][-1], ranks[rank // 2][-1], rtol=1e-9, atol=1e-11)
        assert torch.equal(hosts[rank][-1], hosts[rank ^ 1][-1])


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
def test_a_16_bit_wire_stays_close(wire):
    for exact, short in zip(trained(4), trained(4, wire=wire), strict=True):
        torch.testing.assert_close(short[-1], exact[-1], rtol=0.05, atol=0.02)
        assert not torch.equal(short[-1], exact[-1])


def test_average_every_makes_replicas_equal_then_and_only_then():
    history = list(zip(*trained(4, 6, average_every=3), strict=True))
    assert [all(torch.equal(x, xs[0]) for x in xs) for xs in history] == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
        lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.9),
        lambda m: phalanx.Lars(m.parameters(), lr=0.1),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    ],
)
def test_any_optimizer_is_wrapped_and_its_state_is_averaged(make):
    def run(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(make(own), comm, sync=Gossip(patience=PATIENT))
        for t in range(6):
            plain_step(own, opt, comm, t)
        opt.average_()
        state = [x for p in own.parameters() for _, x in sorted(opt.state.get(p, {}).items()) if torch.is_tensor(x) and x.dim()]
        return [flat(own), *(x.double() for x in state)]

    results = phalanx.run_local(3, run, timeout=30)
    for own in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(own, results[0], strict=True))
    assert all(torch.isfinite(x).all() for x in results[0])


def test_spread_is_the_consensus_distance():
    def run(comm):
        small = [torch.full((10,), 2.0 + comm.rank)]
        large = [torch.arange(3.0 * SAMPLE).view(3, -1) % 7 + comm.rank, torch.ones(5)]
        return spread(small, comm), spread(large, comm), spread([torch.ones(7)] * 2, comm), spread([], comm)

    for small, large, equal, nothing in phalanx.run_local(4, run, timeout=30):
        assert small == pytest.approx(math.sqrt(1.25) / 3.5, rel=1e-12)
        assert large == pytest.approx(math.sqrt(1.25 / ((torch.arange(7.0) + 1.5) ** 2).mean()), rel=0.01)
        assert (equal, nothing) == (0.0, 0.0)


# ---- torch's tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "stop", "topology"), [(4, 3, "dissemination"), (3, 2, "exact"), (3, 3, "exact")])
def test_resuming_is_exact_in_the_middle_of_a_period(n, stop, topology):
    sync = Gossip(topology=topology, seed=3, patience=PATIENT)

    def run(comm, *, stop):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, sync=sync)
        for t in range(7):
            if t == stop:
                saved = copy.deepcopy((own.state_dict(), opt.state_dict(), opt.communication.state_dict()))
                own = copy.deepcopy(SMALL)
                opt = create_multi_node_optimizer(sgd(own), comm, sync=sync)
                own.load_state_dict(saved[0])
                opt.load_state_dict(saved[1])
                opt.communication.load_state_dict(saved[2])
            plain_step(own, opt, comm, t)
        return flat(own)

    through = phalanx.run_local(n, lambda comm: run(comm, stop=None), timeout=30)
    resumed = phalanx.run_local(n, lambda comm: run(comm, stop=stop), timeout=30)
    assert all(torch.equal(a, b) for a, b in zip(through, resumed, strict=True))


def test_a_gradient_that_overflows_on_one_rank_stops_nobody():
    def run(comm):
        p = torch.nn.Parameter(torch.ones(4))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=0.1, momentum=0.9), comm, sync=Gossip(**COHERENT))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        seen = []
        for t in range(4):
            opt.zero_grad()
            bad = math.inf if t == 0 and comm.rank == 1 else 1.0
            scaler.scale((p * bad).sum()).backward()
            scaler.step(opt)
            scaler.update()
            seen.append(p.detach().clone())
        return seen, scaler.get_scale()

    (a, full), (b, halved) = phalanx.run_local(2, run, timeout=30)
    assert (full, halved) == (8.0, 4.0)
    assert torch.equal(a[0], torch.full((4,), 0.95))  # rank 0 moved by 0.1, rank 1 not at all
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert torch.isfinite(a[-1]).all()


def test_clipping_closures_accumulation_and_new_groups():
    def run(comm):
        own, head = copy.deepcopy(SMALL), torch.nn.Linear(3, 3).double()
        phalanx.bcast_parameters(head, comm)
        opt = create_multi_node_optimizer(sgd(own), comm, sync=Gossip(patience=PATIENT))
        for t in range(6):
            if t == 3:
                opt.add_param_group({"params": list(head.parameters()), "param_names": ["w", "b"]})
            opt.zero_grad()
            with opt.no_sync():
                loss_of(own, comm, t).backward()
            loss_of(torch.nn.Sequential(own, head) if t >= 3 else own, comm, t).backward()
            opt.synchronize()
            torch.nn.utils.clip_grad_norm_(own.parameters(), 0.5)
            opt.step()
        losses = []

        def closure():
            opt.zero_grad()
            loss = loss_of(own, comm, 0)
            loss.backward()
            losses.append(float(loss.detach()))
            return loss

        opt.step(closure)
        assert len(losses) == 1
        opt.average_()
        return flat(own)

    with pytest.warns(UserWarning, match="no gradient for 2 parameter"):  # those of `head`, in the closure
        results = phalanx.run_local(3, run, timeout=30)
    assert all(torch.equal(x, results[0]) for x in results)


def test_batch_norm_statistics_follow():
    def run(comm):
        net = torch.nn.Sequential(torch.nn.BatchNorm1d(4))
        opt = create_multi_node_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), comm, sync=Gossip(**COHERENT))
        opt.follow(net)
        net(torch.full((8, 4), float(comm.rank)) + torch.arange(8.0)[:, None]).sum().backward()
        own = net[0].running_mean.clone()
        opt.step()
        return own, net[0].running_mean.clone(), net[0].num_batches_tracked.item()

    (own_0, mean_0, count), (own_1, mean_1, _) = phalanx.run_local(2, run, timeout=30)
    assert not torch.equal(own_0, own_1)
    assert torch.equal(mean_0, mean_1)
    torch.testing.assert_close(mean_0, (own_0 + own_1) / 2)
    assert count == 1


# ---- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"topology": "ring"}, ValueError, "topology='ring'"),
        ({"exchange": "updates"}, ValueError, "exchange='updates'"),
        ({"level": "rack"}, ValueError, "level='rack'"),
        ({"average_every": 0}, ValueError, "average_every=0"),
        ({"average_every": True}, ValueError, "average_every=True"),
        ({"rotate": 1}, TypeError, "rotate=1"),
        ({"seed": 1.5}, TypeError, "seed=1.5"),
        ({"patience": 0}, ValueError, "patience=0"),
    ],
)
def test_wrong_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        Gossip(**options)


def test_what_does_not_go_together_is_refused():
    def run(comm):
        p = torch.nn.Parameter(torch.ones(2))
        sgd_ = torch.optim.SGD([p], lr=0.1)
        with pytest.raises(ValueError, match="double_buffering is for AllReduce"):
            create_multi_node_optimizer(sgd_, comm, sync=Gossip(), double_buffering=True)
        with pytest.raises(ValueError, match="3 ranks: use topology='dissemination'"):
            create_multi_node_optimizer(sgd_, comm, sync=Gossip(topology="hypercube"))
        with pytest.raises(ValueError, match="bucket_bytes"):
            create_multi_node_optimizer(sgd_, comm, sync=Gossip(), bucket_bytes=100)
        opt = create_multi_node_optimizer(sgd_, comm, sync=Gossip(exchange="gradients"))
        with pytest.raises(ValueError, match="exchange='weights'"):
            opt.step(lambda: None)
        with pytest.raises(TypeError, match="already"):
            create_multi_node_optimizer(opt, comm)

    phalanx.run_local(3, run, timeout=30)


def test_replicas_that_start_different_raise_and_may_differ_later():
    def run(comm):
        p = torch.nn.Parameter(torch.full((2,), float(comm.rank)))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=0.1), comm, sync=Gossip())
        p.grad = torch.ones(2)
        with pytest.raises(ReplicaError, match="rank 1 from rank 0"):
            opt.step()

    phalanx.run_local(2, run, timeout=30)
    a, b = trained(2)
    assert not torch.equal(a[-1], b[-1])
