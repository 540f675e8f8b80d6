"""The same schedules for people who stay with DDP.

model = DistributedDataParallel(model)
model.register_comm_hook(comm, phalanx.ddp_hook)
"""

# no `from __future__ import annotations` here: DDP looks at the annotations of a hook, and wants them to be types
import threading
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.communicator import Communicator


def ddp_hook(comm: Communicator, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one of DDP's buckets over the ranks of `comm`, which has the same ranks as DDP's process group."""
    future: Any = torch.futures.Future()
    pending = comm.all_reduce_async(bucket.buffer(), op="mean")

    def arrive() -> None:
        try:
            future.set_result(pending.wait())
        except Exception as error:  # noqa: BLE001  DDP raises it in the training thread
            future.set_exception(error)

    # somebody has to wait: a Pending whose group hangs finds out, and says why, only in `wait`
    threading.Thread(target=arrive, name="phalanx-ddp-bucket", daemon=True).start()
    return future
