"""LARS as its definition has it, in NumPy and float64, one parameter at a time."""

import numpy as np


class Oracle:
    """Weights `w` and velocities `v`, moved by `step`."""

    def __init__(self, weights, *, skip=lambda w: w.ndim < 2):
        self.w = [w.detach().double().numpy().copy() for w in weights]
        self.v = [np.zeros_like(w) for w in self.w]
        self.skipped = [skip(w) for w in self.w]

    def step(
        self,
        gradients,
        lr,
        momentum=0.9,
        weight_decay=0.0,
        trust_coefficient=0.001,
        eps=1e-9,
        nesterov=False,
        lr_in_momentum=True,
    ):
        for i, g in enumerate(g.double().numpy() for g in gradients):
            w, d, ratio = self.w[i], g, 1.0
            if not self.skipped[i]:
                d = g + weight_decay * w
                size, slope = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
                if size and slope:
                    ratio = trust_coefficient * size / (slope + weight_decay * size + eps)
            inner, outer = (lr, 1.0) if lr_in_momentum else (1.0, lr)
            u = inner * ratio * d
            self.v[i] = momentum * self.v[i] + u
            self.w[i] = w - outer * (momentum * self.v[i] + u if nesterov else self.v[i])
