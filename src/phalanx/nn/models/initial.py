"""Initial weights, by one rule for all families of networks.

Convolutions: normal with variance 2 / fan-out (He et al., "Delving Deep into Rectifiers", arXiv 1502.01852), which keeps the
size of the *gradients* through the layers. Batch norms: the identity. The classifier: normal with standard deviation 0.01 and
bias 0 (Goyal et al., "Accurate, Large Minibatch SGD", arXiv 1706.02677, 5.1), so that all classes start nearly equal.
"""

from __future__ import annotations

from torch import nn


def initialize_(model: nn.Module) -> None:
    """Draw all weights of `model` anew from torch's generator, in the order of its modules."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
