"""Compressing for the wire: scaled first, rounded once, overflow seen."""

import pytest
import torch

from phalanx.grad.wire import BLOCK, carries, check_wire, pack, unpack


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("source", [torch.float32, torch.float64])
def test_what_is_packed_is_scaled_before_it_is_rounded(dtype, source):
    check_wire(dtype)
    flat = torch.tensor([1.0, -3.0, 60_000.0, 500_000.0, 1 / 3], dtype=source)
    wire = torch.empty(5, dtype=dtype)
    assert pack(flat.clone(), wire, 1 / 8) is wire
    assert torch.equal(wire, (flat / 8).to(dtype))
    assert bool(wire.isfinite().all())  # 500,000 alone would not be in float16
    out = torch.empty(5, dtype=source)
    assert unpack(wire, out)
    assert torch.equal(out, wire.to(source))


def test_what_is_not_finite_is_seen():
    for bad in (float("inf"), float("-inf"), float("nan")):
        flat = torch.zeros(3)
        assert not unpack(torch.tensor([1.0, bad, 2.0], dtype=torch.float16), flat)
        assert flat[2] == 2.0  # the rest is delivered
    wire = torch.empty(1, dtype=torch.float16)
    assert not unpack(pack(torch.tensor([1e6]), wire, 0.5), torch.zeros(1))


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 6])
def test_long_buffers_go_block_by_block_and_nothing_is_left_out(at):
    flat = torch.arange(2 * BLOCK + 7, dtype=torch.float32) % 251
    wanted, wire, back = flat / 4, torch.empty(len(flat), dtype=torch.bfloat16), torch.empty_like(flat)
    assert unpack(pack(flat, wire, 1 / 4), back)
    assert torch.equal(back, wanted.bfloat16().float())
    wire[at] = float("nan")
    assert not unpack(wire, back)


def test_only_what_is_wider_than_16_bits_is_compressed():
    gains = {dtype: carries(torch.zeros(1, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16, torch.complex64)}
    assert not any(gains.values())
    assert carries(torch.zeros(1))
    assert carries(torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("wrong", [torch.float32, torch.int8, "fp16", 16, True])
def test_what_is_no_wire(wrong):
    with pytest.raises(TypeError, match=r"torch\.bfloat16"):
        check_wire(wrong)
    check_wire(None)
