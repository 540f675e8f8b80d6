"""LabelSmoothingLoss against torch's own, and where torch's has NaN or overflows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times
from torch.nn import CrossEntropyLoss

import phalanx


def both(mine, theirs, logits, target):
    """Values and gradients of both losses."""
    results = []
    for loss in (mine, theirs):
        x = logits.clone().requires_grad_()
        value = loss(x, target)
        (gradient,) = torch.autograd.grad(value.sum(), x)
        results.append((value.detach(), gradient))
    return results


@settings(max_examples=times(80, seldom=32), deadline=None)
@given(
    smoothing=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    extra=st.sampled_from([(), (3,), (2, 2)]),
    weighted=st.booleans(),
    ignored=st.booleans(),
    soft=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    seed=st.integers(0, 999),
)
def test_equals_torch(smoothing, extra, weighted, ignored, soft, reduction, seed):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 4, *extra, generator=g, dtype=torch.float64)
    options = {"weight": torch.rand(4, generator=g, dtype=torch.float64) + 0.1 if weighted else None, "reduction": reduction}
    if soft:
        target = torch.rand(6, 4, *extra, generator=g, dtype=torch.float64).softmax(1)
    else:
        target = torch.randint(0, 4, (6, *extra), generator=g)
        if ignored:
            options["ignore_index"] = 2  # a class like any other, or 255, or -100
        target.view(-1)[0] = 1  # at least one counts
    mine, theirs = both(
        phalanx.LabelSmoothingLoss(smoothing, **options), CrossEntropyLoss(label_smoothing=smoothing, **options), logits, target
    )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_nothing_at_all_teaches_nothing():
    for target in (torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)):
        logits = torch.zeros(0, 4, requires_grad=True)
        loss = phalanx.LabelSmoothingLoss(0.1)(logits, target)
        loss.backward()
        assert loss == 0
        assert logits.grad is not None


def test_is_the_formula():
    logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
    label = torch.tensor([0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3], dtype=torch.float64)
    loss = phalanx.LabelSmoothingLoss(0.1)(logits, torch.tensor([0]))
    torch.testing.assert_close(loss, -(label * logits.log_softmax(1)).sum())


def test_fujitsus_smoothing_is_ours_with_another_number():
    logits, classes = torch.randn(1, 5, dtype=torch.float64), 5
    theirs = torch.full((1, 5), 0.1 / (classes - 1), dtype=torch.float64)
    theirs[0, 3] = 0.9
    loss = phalanx.LabelSmoothingLoss(0.1 * classes / (classes - 1))(logits, torch.tensor([3]))
    torch.testing.assert_close(loss, -(theirs * logits.log_softmax(1)).sum())


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 3.0])])
def test_a_batch_that_is_all_ignored_teaches_nothing(weight):
    logits, target = torch.randn(4, 3), torch.full((4,), -100)
    (value, gradient), (theirs, _) = both(
        phalanx.LabelSmoothingLoss(0.1, weight=weight), CrossEntropyLoss(label_smoothing=0.1, weight=weight), logits, target
    )
    assert value == 0
    assert not gradient.any()
    assert theirs.isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_summed_in_thirty_two(dtype):
    logits = torch.zeros(40_000, 10, dtype=dtype)
    target = torch.zeros(40_000, dtype=torch.int64)
    (value, gradient), _ = both(*[phalanx.LabelSmoothingLoss(0.1, reduction="sum")] * 2, logits, target)
    assert value.dtype is torch.float32
    assert float(value) == pytest.approx(40_000 * torch.tensor(10.0).log().item(), rel=1e-4)  # more than fp16 can hold
    assert gradient.dtype is dtype
    soft = torch.full((2, 10), 0.1, dtype=torch.float64)
    assert phalanx.LabelSmoothingLoss()(logits[:2], soft).dtype is torch.float32


@pytest.mark.parametrize("wrong", [{"smoothing": 1.5}, {"smoothing": -0.1}, {"reduction": "batchmean"}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        phalanx.LabelSmoothingLoss(**wrong)


def test_weights_are_part_of_the_module():
    loss = phalanx.LabelSmoothingLoss(weight=torch.ones(3))
    assert list(loss.state_dict()) == ["weight"]
    assert "smoothing=0.1" in repr(loss)
