"""A strategy for `pytorch_lightning.Trainer` that trains with the multi-node optimizer, gossip included.

trainer = pl.Trainer(strategy=PhalanxStrategy(sync=phalanx.Gossip()), devices=4, accelerator="cpu")
"""

from __future__ import annotations

from phalanx.integrations.strategy import MultiNodeReplicas

try:
    from pytorch_lightning.strategies import DDPStrategy
except ImportError as error:
    raise ImportError(
        "phalanx.integrations.pytorch_lightning needs the package pytorch_lightning: pip install pytorch-lightning. "
        "If you have lightning, import phalanx.integrations.lightning"
    ) from error


class PhalanxStrategy(MultiNodeReplicas, DDPStrategy):
    """Like `phalanx.integrations.lightning.PhalanxStrategy`, for the package pytorch_lightning."""
