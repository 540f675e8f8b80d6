"""The optimizer of the 15-minute paper against its formulas; at a share of 1 it is torch's momentum SGD."""

import numpy as np
import pytest
import torch

from phalanx import lr
from phalanx.optim.rmsprop_warmup import RmspropWarmup


def gradients(steps=6):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(5, 3, generator=g, dtype=torch.float64) for _ in range(steps)]


def test_follows_the_formulas_through_the_ramp():
    p = torch.nn.Parameter(torch.ones(5, 3, dtype=torch.float64))
    opt = RmspropWarmup([p], lr=0.5, weight_decay=0.1)
    w, m, v = np.ones((5, 3)), np.zeros((5, 3)), np.zeros((5, 3))
    for t, g in enumerate(gradients()):
        share = lr.apply(opt, lr.elu_ramp(center=3, period=2), t, option="sgd_share")
        p.grad = g.clone()
        opt.step()
        assert torch.equal(p.grad, g)
        g = g.numpy() + 0.1 * w
        m = 0.99 * m + 0.01 * g * g
        v = 0.9 * v - (share + (1 - share) * 3e-4 / 0.5 / (np.sqrt(m) + 1e-8)) * g
        w = w + 0.5 * v
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-10)
    assert share == 1
    assert opt.state[p].keys() == {"momentum_buffer"}


@pytest.mark.parametrize(("share", "same"), [(1.0, True), (0.5, False)])
def test_ends_as_momentum_sgd(share, same):
    p, q = (torch.nn.Parameter(torch.ones(5, 3, dtype=torch.float64)) for _ in range(2))
    opt = RmspropWarmup([p], lr=0.1, weight_decay=0.01, sgd_share=share)
    sgd = torch.optim.SGD([q], lr=0.1, momentum=0.9, weight_decay=0.01)
    for g in gradients():
        p.grad, q.grad = g.clone(), g.clone()
        opt.step()
        sgd.step()
    assert torch.allclose(p, q, rtol=1e-12, atol=0) == same


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="momentum=-1"):
        RmspropWarmup([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=-1)
