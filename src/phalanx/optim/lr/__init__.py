"""Learning-rate rules: pure functions of progress, which is counted in epochs.

    rule = 31.2 * (lr.warmup(epochs=25) >> lr.polynomial(epochs=65, power=2, end=1e-4 / 31.2))
    lr.apply(optimizer, rule, progress=step / steps_per_epoch)

A rule is a frozen dataclass. `rule(progress)` is a number, and rules have no state, so a resumed run continues exactly. Rules
count epochs, not steps: a plan that changes the batch changes the steps per epoch, but not the rules.

    a >> b     a for its epochs, then b, which counts from its own start
    a * b      the product of both at the same progress: lr.warmup(5) * lr.step(30, 60, 80)
    0.1 * a    values of a rule are factors, 1 at the peak; multiply by a number to get rates

Before its start a rule has its first value, after its epochs the last one. `apply` drives any torch optimizer, and so does
`LambdaLR(optimizer, lambda step: rule(step / steps_per_epoch))`, with factors, if the optimizer has the peak rate.
"""

from phalanx.optim.lr.drive import apply, sample
from phalanx.optim.lr.rule import Chain, Product, Rule, Scaled
from phalanx.optim.lr.rules import (
    constant,
    cosine,
    elu_ramp,
    exponential_warmup,
    linear,
    natan,
    polynomial,
    slow_start,
    step,
    warmup,
)
from phalanx.optim.lr.scaling import linear_scaling, momentum_for, sqrt_scaling

__all__ = [
    "Chain",
    "Product",
    "Rule",
    "Scaled",
    "apply",
    "constant",
    "cosine",
    "elu_ramp",
    "exponential_warmup",
    "linear",
    "linear_scaling",
    "momentum_for",
    "natan",
    "polynomial",
    "sample",
    "slow_start",
    "sqrt_scaling",
    "step",
    "warmup",
]
