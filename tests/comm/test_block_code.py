"""8-bit codes of blocks: how far a number may be off, what is not finite, and the same bits with and without the native core."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

from phalanx.comm.block_code import BlockCode, Coder
from phalanx.native import codes, core

SIZES = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000)
KINDS = [BlockCode(16), BlockCode(64, stochastic=True), BlockCode(256), BlockCode(256, stochastic=True)]


def numbers(count, seed, spread=3.0):
    own = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=own) * 10 ** (spread * torch.randn(count, generator=own))


def there_and_back(x, code, error=None, key=0, at=0, factor=1.0):
    coder, out = Coder(code, error, key=key, factor=factor), torch.zeros(code.nbytes(x.numel()), dtype=torch.uint8)
    coder.encode(x, out, at)
    back = torch.full_like(x, 7.0)
    coder.decode(out, back)
    return back


def largest(x, block):
    """Of the block of each number."""
    padded = torch.zeros(-(-x.numel() // block) * block)
    padded[: x.numel()] = x.abs()
    return padded.view(-1, block).amax(1).repeat_interleave(block)[: x.numel()]


@pytest.mark.parametrize("code", KINDS, ids=str)
@settings(max_examples=times(200, seldom=25), deadline=None)
@given(st.integers(1, 700), st.integers(0, 10**6))
def test_a_number_is_off_by_half_a_step_or_with_chance_by_less_than_one(code, count, seed):
    x = numbers(count, seed)
    off = (there_and_back(x, code, key=seed) - x).abs()
    step = largest(x, code.block) / 127
    assert bool((off <= step * ((1 if code.stochastic else 0.5) + 1e-5)).all())
    assert bool((off[x == largest(x, code.block)] <= step[x == largest(x, code.block)] * 1e-5).all())  # the largest is kept


@pytest.mark.parametrize("count", SIZES)
def test_bytes_are_those_that_the_size_of_a_code_says(count):
    code = BlockCode(64)
    assert code.nbytes(count) == 4 * -(-count // 64) + -(-count // 4) * 4
    assert abs(code.nbytes(64 * count) - 4 * 64 * count * code.ratio) < 1e-9
    assert BlockCode(64).ratio == Fraction(17, 64) < Fraction(27, 100)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 17, 99])
def test_what_is_not_finite_comes_back_as_nan_and_takes_its_block_along_and_no_other(bad, at):
    x, error = torch.ones(100), torch.full((100,), 0.25)
    x[at] = bad
    back = there_and_back(x, BlockCode(16), error)
    first = at // 16 * 16
    block = slice(first, min(first + 16, 100))
    assert bool(back[block].isnan().all())
    assert bool((error[block] == 0.25).all()), "the error of what was not sent stays"
    rest = torch.ones(100, dtype=torch.bool)
    rest[block] = False
    assert bool(back[rest].isfinite().all())
    assert bool(error[rest].isfinite().all())


def test_zeros_and_numbers_too_small_travel_as_zeros_and_very_large_ones_arrive():
    error = torch.zeros(32)
    x = torch.cat([torch.full((16,), 1e-35), torch.zeros(16)])
    assert bool((there_and_back(x, BlockCode(16), error) == 0).all())
    assert torch.equal(error, x)  # nothing is lost, only late
    x = torch.tensor([3.4e38, -3.4e38, 1e38, 0.0] * 4)
    assert bool(((there_and_back(x, BlockCode(16)) - x).abs() <= 3.4e38 / 253).all())


def test_stochastic_rounding_is_right_in_the_mean_and_the_same_again():
    x = torch.full((20_000,), 0.3)
    x[::16] = 127.0  # steps of 1: 0.3 is 0 or 1
    code = BlockCode(16, stochastic=True)
    back = there_and_back(x, code, key=1)
    small = back[x != 127.0]
    assert set(small.tolist()) == {0.0, 1.0}
    assert abs(float(small.mean()) - 0.3) < 5 * (0.3 * 0.7 / len(small)) ** 0.5
    assert torch.equal(back, there_and_back(x, code, key=1))
    assert not torch.equal(back, there_and_back(x, code, key=2))
    parts = [there_and_back(part, code, key=1, at=i * 10_000) for i, part in enumerate(x.split(10_000))]
    assert torch.equal(back, torch.cat(parts)), "what a number becomes depends on its place, not on how the buffer is cut"


@pytest.mark.parametrize("code", KINDS, ids=str)
def test_with_error_feedback_nothing_is_lost(code):
    """What has arrived after any number of rounds is what was sent, but for one error."""
    error, arrived, sent = torch.zeros(300), torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for turn in range(40):
        x = numbers(300, turn, spread=0.5)
        arrived += there_and_back(x, code, error, key=turn)
        sent += x
        assert torch.allclose(arrived + error, sent, atol=1e-3)
    lost = torch.zeros(300, dtype=torch.float64)
    for _ in range(40):
        x = torch.full((300,), 0.3)
        x[0] = 127.0
        lost += there_and_back(x, BlockCode(1024))
    assert float(lost[1]) == 0.0  # without it: numbers below half a step never arrive


def test_codes_are_added_in_order_and_times_the_factor_only_when_decoded():
    code, xs = BlockCode(32), [numbers(100, seed, spread=1.0) for seed in range(4)]
    coder, outs = Coder(code, factor=0.25), []
    for x in xs[1:]:
        outs.append(torch.zeros(code.nbytes(100), dtype=torch.uint8))
        coder.encode(x, outs[-1], 0)
    total, wanted = xs[0].clone(), xs[0].clone()
    coder.add(outs, total)
    for x in xs[1:]:
        wanted = wanted + there_and_back(x, code)
    assert torch.equal(total, wanted)
    back = torch.empty(100)
    coder.decode(outs[0], back)
    assert torch.allclose(back, there_and_back(xs[1], code) / 4, rtol=1e-6)


@pytest.mark.skipif(not core.is_native(), reason="no native core")
@pytest.mark.parametrize("kernels", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("code", KINDS, ids=str)
def test_the_core_and_torch_have_the_same_bits(code, kernels, monkeypatch):
    before = core._native.kernels()
    if not core._native.choose_kernels(kernels):
        pytest.skip(f"this processor has no {kernels}")
    try:
        for count in SIZES:
            for feedback in (False, True):
                results = []
                for native in (True, False):
                    monkeypatch.setattr(core, "is_native", lambda native=native: native)
                    error = numbers(count, 5, spread=0.5) if feedback else None
                    x, start = numbers(count, count), numbers(count, 3)
                    if count > 20:
                        x[3], x[20] = float("nan"), -0.0
                    out = torch.zeros(code.nbytes(count), dtype=torch.uint8)
                    coder = Coder(code, error, key=count, factor=0.125)
                    coder.encode(x, out, 0 if feedback else 4_294_967_290)  # places may pass 2**32
                    coder.add([out, out], start)
                    back = torch.empty(count)
                    coder.decode(out, back)
                    results.append([out[: 4 * -(-count // code.block) + count], error, start, back])
                for ours, theirs in zip(*results):
                    assert ours is None or torch.equal(ours.nan_to_num(nan=1e30), theirs.nan_to_num(nan=1e30))
    finally:
        core._native.choose_kernels(before)


@pytest.mark.parametrize("block", [0, 8, 24, 1 << 17, 16.0, True])
def test_a_block_is_a_multiple_of_sixteen(block):
    with pytest.raises(ValueError, match="a multiple of 16"):
        BlockCode(block)


def test_an_empty_tensor_has_no_code():
    assert BlockCode().nbytes(0) == 0
    codes.encode(torch.empty(0), None, torch.empty(0, dtype=torch.uint8), 256, None, 0)
    codes.decode(torch.empty(0, dtype=torch.uint8), torch.empty(0), 256, 1.0)
    codes.add([torch.empty(0, dtype=torch.uint8)], torch.empty(0), 256)
