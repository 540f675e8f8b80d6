"""A strategy for `lightning.pytorch.Trainer` that trains with the multi-node optimizer, gossip included.

trainer = L.Trainer(strategy=PhalanxStrategy(sync=phalanx.Gossip()), devices=4, accelerator="cpu")
"""

from __future__ import annotations

from phalanx.integrations.strategy import MultiNodeReplicas

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError(
        "phalanx.integrations.lightning needs the package lightning: pip install lightning. "
        "If you have pytorch_lightning, import phalanx.integrations.pytorch_lightning"
    ) from error


class PhalanxStrategy(MultiNodeReplicas, DDPStrategy):
    """Lightning's DDPStrategy with a multi-node optimizer in place of DistributedDataParallel.

    Args:
        sync: How replicas stay together: `phalanx.AllReduce(...)`, the default, `Gossip`, `LocalSGD` or `DiLoCo`.
        double_buffering: As in `create_multi_node_optimizer`, and so are `wire` and `bucket_bytes`.
        wire: Send torch.float16, torch.bfloat16, `phalanx.Int8(...)` or `phalanx.PowerSGD(...)` instead of the gradients as
            they are.
        bucket_bytes: The size of a group of gradients that is sent together.
        algorithm: The schedule of all-reduces, as in `create_communicator`.
        process_group_backend: Of Lightning's own process group, for metrics and barriers: "gloo", "nccl" or "phalanx".
        timeout: Bounds every wait.
        start_method: How Lightning starts the ranks if no launcher has: "popen", "spawn", "fork" or "forkserver".
        accelerator: This and the next four are Lightning's own; the Trainer sets them.
        parallel_devices: See `accelerator`.
        cluster_environment: See `accelerator`.
        checkpoint_io: See `accelerator`.
        precision_plugin: See `accelerator`.

    Example:
        >>> from phalanx.integrations.lightning import PhalanxStrategy  # doctest: +SKIP
        >>> trainer = lightning.Trainer(strategy=PhalanxStrategy(sync=phalanx.Gossip()))  # doctest: +SKIP
    """
