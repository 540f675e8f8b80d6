"""Learning-rate rules: published numbers, end points and continuity, composition, and what they do to an optimizer."""

import copy
import math
import pickle
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from phalanx import lr

RULES = [
    lr.constant(4, 0.3),
    lr.warmup(5),
    lr.warmup(5, start=0.1),
    lr.exponential_warmup(5, start=0.01),
    lr.step(30, 60, 80),
    lr.linear(90, end=0.01),
    lr.polynomial(90, power=2.2, end=0.0025),
    lr.cosine(90),
    lr.natan(90, turn=50),
    lr.natan(90, turn=50, decay=5, final=0.001),
    lr.elu_ramp(),
    lr.slow_start(),
    0.1 * (lr.warmup(5) >> lr.cosine(85)),
    lr.warmup(5) * lr.step(30, 60, 80),
]


# ---- published numbers -------------------------------------------------------------------------------------------------------

STEPS = 15  # per epoch, at a batch of 86,016
FUJITSU = 13.0 * (lr.warmup(36) >> lr.polynomial(780 / STEPS, power=2.2, end=0.0025))


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.0), (270, 6.5), (540, 13.0), (541, 12.9635), (930, 2.8548), (1319, 0.032506), (1320, 0.0325), (1350, 0.0325)],
)
def test_fujitsus_open_division_run(step, rate):
    """base 13, linear warm-up over 540 steps, power 2.2 over 780, end 0.0025 of the base, 1350 steps in all."""
    assert FUJITSU(step / STEPS) == pytest.approx(rate, rel=2e-4)


def test_mlperf_reference_at_32k():
    """31.2 after 25 epochs, then a square down to 1e-4; effective 0.001 * 31.2, where Fujitsu has 0.0025 * 13."""
    rule = 31.2 * (lr.warmup(25) >> lr.polynomial(65, power=2, end=1e-4 / 31.2))
    assert [rule(e) for e in (0, 12.5, 25, 90)] == pytest.approx([0, 15.6, 31.2, 1e-4])
    assert rule(25 + 65 / 2) == pytest.approx(31.2 / 4, rel=1e-4)


def test_slow_start_at_32k():
    """40 epochs at half of 12.8 = 0.1 * 32768 / 256, then 30, 15 and 5 epochs."""
    rule = lr.linear_scaling(32768) * lr.slow_start()
    expected = {0: 6.4, 39.99: 6.4, 40: 0.96, 69.9: 0.96, 70: 0.128, 84.9: 0.128, 85: 0.0128, 90: 0.0128}
    assert [rule(e) for e in expected] == pytest.approx(list(expected.values()))
    assert rule.epochs == 90


def test_share_of_sgd_in_the_rmsprop_warmup():
    ramp = lr.elu_ramp(center=10, period=5)
    assert ramp(10) == 0.5
    assert ramp(12.5) == ramp(90) == 1.0
    assert ramp(11.25) == 0.75
    assert ramp(5) == pytest.approx(0.5 * math.exp(-2))


def test_goyal_with_linear_scaling():
    peak = lr.linear_scaling(8192, rate=0.1, reference=256)
    assert peak == pytest.approx(3.2)
    rule = peak * lr.warmup(5, start=0.1 / peak) * lr.step(30, 60, 80)
    assert [rule(e) for e in (0, 5, 29.9, 30, 60, 80)] == pytest.approx([0.1, 3.2, 3.2, 0.32, 0.032, 0.0032])


def test_fujitsus_natan_in_their_words():
    """decay_natan of their code: x doubles after the turn, the final ratio stretches what comes after it."""

    def theirs(current, decay, turn, total, final):
        def base(df):
            df = df * 2 if df > 0 else df
            return 0.5 - math.atan(df / decay + df * df * df / 1000.0) / math.pi

        ratio = base(current - turn)
        if final >= 0 and current >= turn:
            ratio = 0.5 - (0.5 - ratio) * (0.5 - final) / (0.5 - base(total - turn))
        return ratio

    for final in (-1, 0.0, 0.01):
        rule = lr.natan(90, turn=50, decay=3.0, final=None if final < 0 else final)
        for epoch in (0, 10, 49, 50, 51, 70, 90):
            assert rule(epoch) == pytest.approx(theirs(epoch, 3.0, 50, 90, final), abs=1e-15)
    assert lr.natan(90, turn=50, final=0.01)(90) == pytest.approx(0.01)


# ---- values ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "first", "last"),
    [
        (lr.warmup(5, start=0.2), 0.2, 1),
        (lr.exponential_warmup(5, start=0.01), 0.01, 1),
        (lr.linear(7, end=0.25), 1, 0.25),
        (lr.polynomial(7, power=3, end=0.1), 1, 0.1),
        (lr.cosine(7, end=0.1), 1, 0.1),
    ],
)
def test_end_points_and_clamping(rule, first, last):
    assert rule(-3) == rule(0) == pytest.approx(first)
    assert rule(rule.epochs) == rule(1e9) == pytest.approx(last)


def test_exponential_warmup_grows_by_equal_factors():
    rule = lr.exponential_warmup(4, start=0.0001)
    assert [rule(e) for e in range(5)] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1])


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_rule_is_a_value(rule):
    assert eval(repr(rule), dict(vars(lr))) == rule  # noqa: S307  its text makes it again
    assert hash(copy.deepcopy(rule)) == hash(rule)
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert [rule(e) for e in (3, 1, 2)] == [rule(3), rule(1), rule(2)]  # nothing is counted
    with pytest.raises(AttributeError):
        setattr(rule, fields(rule)[0].name, 3)


@given(st.lists(st.sampled_from(RULES[:4] + RULES[5:10]), min_size=2, max_size=4), st.floats(0, 1))
def test_a_chain_is_its_parts_one_after_another(rules, share):
    chain = rules[0]
    for rule in rules[1:]:
        chain = chain >> rule
    begin = 0.0
    for rule in rules:
        inside = share * rule.epochs * 0.999
        assert chain(begin + inside) == pytest.approx(rule(inside), rel=1e-6, abs=1e-9)
        begin += rule.epochs
    assert chain.epochs == pytest.approx(begin)
    assert chain(begin + 1) == rules[-1](math.inf)


@given(st.sampled_from(RULES), st.sampled_from(RULES), st.floats(0, 100))
def test_products_are_products(a, b, progress):
    assert (a * b)(progress) == pytest.approx(a(progress) * b(progress))
    assert (3 * a)(progress) == (a * 3)(progress) == 3 * a(progress)


def test_scaling_rules():
    assert lr.linear_scaling(81920, rate=0.1, reference=256) == 32
    assert lr.sqrt_scaling(1024, rate=0.1, reference=256) == pytest.approx(0.2)
    # twice the batch at the same rate halves the noise: 1 - m halves with it
    assert lr.momentum_for(2048, momentum=0.9, reference=1024) == pytest.approx(0.95)
    assert lr.momentum_for(2048, momentum=0.9, reference=1024, rate_factor=2) == pytest.approx(0.9)
    with pytest.raises(ValueError, match=r"change the rate by 0\.05"):
        lr.momentum_for(51.2, momentum=0.9, reference=1024)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lr.warmup(0), r"warmup\(epochs=0.*more than 0"),
        (lambda: lr.step(60, 30), "ascending"),
        (lambda: lr.step(30) >> lr.cosine(5), r"step\(30, factor=0.1\) has no end"),
        (lambda: lr.exponential_warmup(5, start=0), "use start=0.01"),
        (lambda: lr.polynomial(5, power=0), "power=0"),
        (lambda: lr.natan(90, turn=90), "turn"),
        (lambda: lr.sample(lr.step(30)), "without end"),
    ],
)
def test_impossible_rules_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# ---- optimizers --------------------------------------------------------------------------------------------------------------


def parameter():
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    return p


def test_apply_sets_all_groups():
    opt = torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()], "lr_scale": 0.1}], lr=7.0)
    tensor_rate = torch.optim.SGD([parameter()], lr=torch.tensor(7.0))
    held = tensor_rate.param_groups[0]["lr"]
    for each in (opt, tensor_rate):
        assert lr.apply(each, 2.0 * lr.linear(10), 5) == 1.0
    assert [group["lr"] for group in opt.param_groups] == [1.0, pytest.approx(0.1)]
    assert float(held) == 1.0


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, phalanx.Lars])
def test_lambda_lr_takes_a_rule(make):
    opt = make([parameter()], lr=4.0)
    rule = lr.warmup(2) >> lr.linear(2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: rule(t / 10))
    for t in range(45):
        assert opt.param_groups[0]["lr"] == pytest.approx(4.0 * rule(t / 10))
        opt.step()
        scheduler.step()


def test_momentum_correction_makes_lars_velocities_those_of_the_new_rate():
    """Where the velocity is kept without the rate nothing has to be corrected: with the correction both go the same way."""
    ps = [parameter() for _ in range(3)]
    inside, outside, uncorrected = (
        phalanx.Lars([p], lr=1.0, weight_decay=0.1, lr_in_momentum=held) for p, held in zip(ps, (True, False, True), strict=True)
    )
    for t in range(6):
        rule = lr.warmup(5, start=0.1)
        lr.apply(inside, rule, t, correct_momentum=True)
        lr.apply(outside, rule, t)
        lr.apply(uncorrected, rule, t)
        for opt in (inside, outside, uncorrected):
            opt.step()
    torch.testing.assert_close(ps[0], ps[1])
    assert not torch.allclose(ps[0], ps[2], rtol=1e-6, atol=0)


def test_samples_for_a_plot():
    rule = lr.warmup(2) >> lr.linear(2)
    assert lr.sample(rule, points=5) == [(0, 0), (1, 0.5), (2, 1), (3, 0.5), (4, 0)]
    assert lr.sample(lr.step(1), epochs=2, points=3) == [(0, 1), (1, 0.1), (2, 0.1)]
