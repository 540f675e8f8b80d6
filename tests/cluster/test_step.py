"""A whole step: groups, overlap, gossip, chance, failures, and a training made of steps."""

from math import inf

import numpy as np
import pytest
import torch
from tests.cluster.closed_forms import ring_seconds

from phalanx.cluster import (
    MODELS,
    PLAIN,
    PRESETS,
    Cluster,
    Compute,
    Link,
    StepPlan,
    compile_schedule,
    from_one,
    from_two,
    make_groups,
    predict_step,
    uniform,
)
from phalanx.cluster.candidates import algorithms
from phalanx.cluster.chance import Failures, Noise, best_interval, goodput, spread
from phalanx.cluster.hosts_differ import typical_slowness
from phalanx.cluster.training import EPOCHS_TO_ACCURACY, Prices, epochs_for, whole_training
from phalanx.schedule import Move, Schedule, Step, gossip, ring

RESNET = MODELS["resnet50"]
A, RATE = 5e-6, 12.5e9
CLUSTER = uniform(8, latency=A, bandwidth=RATE)
RING = compile_schedule(ring(8), CLUSTER, PLAIN)
COMPUTE = Compute(per_sample=1e-3, fixed=2e-3, optimizer=1e-3)


def test_the_shapes_are_those_of_the_models():
    from phalanx.nn.models import resnet18, resnet50

    with torch.device("meta"):  # shapes without numbers
        for name, make in (("resnet18", resnet18), ("resnet50", resnet50)):
            assert [t.elements for t in MODELS[name].tensors] == [p.numel() for p in make().parameters()]
    assert MODELS["vgg16"].elements == 138_357_544
    assert all(sum(t.work for t in model.tensors) == pytest.approx(1) for model in MODELS.values())


@pytest.mark.parametrize("limit", [1e5, 1e6, 25e6, 1e9])
def test_groups_hold_all_gradients_and_are_ready_in_order(limit):
    groups = make_groups(RESNET, limit)
    assert sum(group.elements for group in groups) == RESNET.elements
    ready = [group.ready for group in groups]
    assert ready == sorted(ready)
    assert ready[-1] == 1.0
    assert all(4 * group.elements <= max(limit, 4 * 2048 * 1000 + 4000 + 9.5e6) for group in groups)


def test_without_overlap_a_step_is_the_sum_of_its_parts():
    step = predict_step(RING, RESNET, COMPUTE, 32, StepPlan(sync="after backward"))
    assert step.seconds == pytest.approx(34e-3 + 1e-3 + ring_seconds(8, 4 * RESNET.elements, A, 1 / RATE), rel=1e-9)
    assert step.exposed == pytest.approx(ring_seconds(8, 4 * RESNET.elements, A, 1 / RATE), rel=1e-9)


def test_overlap_hides_all_but_the_last_group_behind_a_slow_device():
    slow = Compute(per_sample=1.0)
    last = make_groups(RESNET, 25e6)[-1]
    step = predict_step(RING, RESNET, slow, 32, StepPlan(group_bytes=25e6))
    assert step.seconds == pytest.approx(32 + ring_seconds(8, 4 * last.elements, A, 1 / RATE), rel=1e-9)
    assert step.limit == "compute"


def test_a_fast_device_waits_for_all_bytes():
    fast = Compute(per_sample=1e-9)
    groups = make_groups(RESNET, 25e6)
    step = predict_step(RING, RESNET, fast, 1, StepPlan(group_bytes=25e6))
    assert step.seconds == pytest.approx(sum(ring_seconds(8, 4 * g.elements, A, 1 / RATE) for g in groups), rel=1e-5)
    assert step.limit == "communication"


def test_half_of_the_wire_takes_half_of_the_time_where_bytes_decide():
    fast = Compute(per_sample=1e-9)
    full, half = (predict_step(RING, RESNET, fast, 1, StepPlan(group_bytes=64e6, wire=wire)).seconds for wire in (4, 2))
    assert half == pytest.approx(full / 2, rel=0.02)


def test_double_buffering_takes_the_longer_of_both():
    for per_sample, longer in ((1.0, 32 + 0.0), (1e-9, ring_seconds(8, 4 * RESNET.elements, A, 1 / RATE))):
        step = predict_step(RING, RESNET, Compute(per_sample), 32, StepPlan(sync="double buffering"))
        assert step.seconds == pytest.approx(longer, rel=1e-6)


def test_gossip_sends_weights_and_momentum_to_one_partner_whatever_the_number_of_ranks():
    for n in (4, 64):
        cluster = uniform(n, latency=A, bandwidth=RATE)
        program = compile_schedule(gossip(n, 0), cluster, PLAIN)
        step = predict_step(program, RESNET, Compute(1e-9), 1, StepPlan(sync="gossip"))
        assert step.seconds == pytest.approx(A + 2 * 4 * RESNET.elements / RATE, rel=1e-9)


def test_slow_input_decides():
    step = predict_step(RING, RESNET, COMPUTE, 32, StepPlan(input=5.0))
    assert (step.seconds, step.limit) == (5.0, "input")


def test_ranks_that_share_a_port_have_sent_at_the_same_time():
    """Rounds between hosts, 1 s of each port for each of two ranks at once, take turns with rounds inside: 2 s and 0.5 s."""
    pairs = [[(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    cluster = Cluster("pairs", 2, 2, Link(0.0, 1e18), Link(0.0, 8.0 * RESNET.elements), shared="rank")
    rounds = []
    for some in pairs:
        moves = tuple(Move(*way, range(1), reduce=True) for a, b in some for way in ((a, b), (b, a)))
        rounds.append(compile_schedule(Schedule("pairs", 4, 1, (Step(moves),), goal="mixing"), cluster, PLAIN))
    step = predict_step(rounds[0], RESNET, Compute(0.5), 1, StepPlan(sync="gossip"), rounds=rounds[1:])
    assert step.seconds == pytest.approx((2.0 + 0.5) / 2)


def test_gossip_has_no_use_for_what_a_fast_round_leaves():
    """Rounds of a moment and of 1 s, beside 0.6 s of computing: every other step takes 1 s."""
    fast, slow = (compile_schedule(gossip(4, 0), uniform(4, latency=0, bandwidth=r), PLAIN) for r in (1e18, 8 * RESNET.elements))
    step = predict_step(fast, RESNET, Compute(0.6), 1, StepPlan(sync="gossip"), rounds=[slow])
    assert step.seconds == pytest.approx((0.6 + 1.0) / 2)


def test_gossip_of_ranks_that_share_a_host_is_judged_by_several_rotations():
    rounds = {}
    for per_host in (1, 2):
        cluster = Cluster("hosts", 8 // per_host, per_host, Link(1e-6, 1e11), Link(1e-6, 1e10))
        rounds[per_host] = next(found.rounds for found in algorithms(cluster, ("gossip",)))
    assert rounds == {1: 3, 2: 36}


GOSSIP = [compile_schedule(gossip(8, number), CLUSTER, PLAIN) for number in range(3)]


def test_a_host_that_is_always_slow_slows_all_with_gossip_too():
    """Nobody can be more than a step ahead of a partner, and within a period everybody has met everybody's partners."""
    slowness = np.ones(8)
    slowness[3] = 3.0
    together = predict_step(RING, RESNET, Compute(1.0), 1, StepPlan(), slowness=slowness).seconds
    apart = predict_step(GOSSIP[0], RESNET, Compute(1.0), 1, StepPlan(sync="gossip"), slowness=slowness, rounds=GOSSIP[1:])
    assert together >= 3.0
    assert apart.seconds == pytest.approx(3.0)


def test_gossip_waits_less_for_ranks_that_are_slow_by_chance():
    noise, compute = Noise(stragglers=0.05, slower=3.0), Compute(1.0)
    together = spread(RING, RESNET, compute, 1, StepPlan(), noise, samples=200).mean
    apart = spread(GOSSIP[0], RESNET, compute, 1, StepPlan(sync="gossip"), noise, rounds=GOSSIP[1:], samples=200).mean
    assert together == pytest.approx(1 + 2 * (1 - 0.95**8), rel=0.1)  # one of eight is enough
    assert 1 + 2 * 0.05 < apart < 0.9 * together  # its own bad luck, and that of few others


def test_expected_order_statistics_of_hosts():
    one = typical_slowness(PRESETS["dgx-1"], 0.02)
    np.testing.assert_allclose(one, 1.0)
    many = typical_slowness(PRESETS["dgx-1"].with_ranks(8 * 128), 0.02)
    assert many.mean() == pytest.approx(1.0)
    assert many.max() == pytest.approx(1 + 0.02 * 2.6, abs=0.001)  # the expected maximum of 128 normal numbers is 2.6 sigma


def test_devices_from_rates():
    compute = from_two((100, 1000.0), (200, 1200.0))
    assert compute.seconds(100) == pytest.approx(0.1)
    assert compute.seconds(200) == pytest.approx(200 / 1200)
    assert from_one(RESNET, 208, 1400).seconds(208) == pytest.approx(208 / 1400)
    with pytest.raises(ValueError, match="two different batches"):
        from_two((100, 1.0), (100, 2.0))
    with pytest.raises(ValueError, match="cannot be a line"):
        from_two((100, 100.0), (200, 400.0))


def test_jitter_widens_the_distribution_and_none_does_not():
    still = spread(RING, RESNET, COMPUTE, 32, StepPlan(), Noise(), samples=5)
    assert still.p50 == pytest.approx(still.p99)
    noisy = spread(RING, RESNET, COMPUTE, 32, StepPlan(), Noise(jitter=0.05), samples=50)
    assert still.p50 < noisy.p50 < noisy.p99
    assert noisy == spread(RING, RESNET, COMPUTE, 32, StepPlan(), Noise(jitter=0.05), samples=50)


def test_goodput_is_best_near_the_interval_of_young_and_daly():
    failures = Failures(mtbf=1e6, checkpoint=30, restart=120)
    best = best_interval(failures, 10)
    assert best == pytest.approx((2 * 30 * 1e5) ** 0.5)
    at_best = goodput(failures, 10, best)
    assert 0.9 < at_best < 1
    assert goodput(failures, 10, best / 4) < at_best
    assert goodput(failures, 10, best * 4) < at_best
    assert goodput(Failures(inf, 30, 120), 10, 270) == pytest.approx(0.9)


def test_goodput_equals_a_simulation_of_failures():
    rng = np.random.default_rng(0)
    mean, checkpoint, restart, interval = 5000.0, 30.0, 120.0, 600.0
    clock, done = 0.0, 0
    while done < 20000:
        failure = rng.exponential(mean)
        if failure >= interval + checkpoint:  # failures have no memory, so each attempt may draw anew
            clock, done = clock + interval + checkpoint, done + 1
            continue
        clock += failure
        while (again := rng.exponential(mean)) < restart:  # a restart may fail as well
            clock += again
        clock += restart
    predicted = goodput(Failures(mean, checkpoint, restart), 1, interval)
    assert predicted == pytest.approx(done * interval / clock, rel=0.01)


def test_epochs_are_the_published_ones_and_lie_between():
    for batch, epochs in EPOCHS_TO_ACCURACY:
        assert epochs_for(batch)[0] == pytest.approx(epochs)
    assert 42 < epochs_for(10000)[0] < 45.4
    assert "largest published" in epochs_for(100_000)[1]


def test_cost_and_energy_follow_from_hours():
    training = whole_training(0.36, 1000, 100_000, devices=10, hosts=2, epochs=100, prices=Prices(2.0, 500.0))
    assert training.steps == 10_000
    assert training.hours == pytest.approx(1.0)
    assert (training.cost, training.kwh) == (pytest.approx(20.0), pytest.approx(5.0))
    broken = whole_training(0.36, 1000, 100_000, devices=10, hosts=2, epochs=100, failures=Failures(36000, 30, 300))
    assert broken.hours > training.hours
    assert broken.checkpoint_every == pytest.approx((2 * 30 * 18000) ** 0.5)


def test_a_short_training_needs_no_checkpoint():
    short = whole_training(0.36, 1000, 1000, devices=10, hosts=2, epochs=100, failures=Failures(36000, 30, 300))
    assert short.checkpoint_every is None
    assert short.goodput == pytest.approx(1 - 300 / 18000, abs=0.002)  # what restarts take, and hardly any work lost
