"""Checkpoints: complete or absent even if processes are killed, written in the background, verified before use.

    with phalanx.Checkpointer("run/checkpoints", comm) as checkpoints:
        step = checkpoints.load(model=model, optimizer=opt, rng=RandomState(), progress=progress) or 0
        ...
        checkpoints.save(step, model=model, optimizer=opt, rng=RandomState(), progress=progress)

On disk:

    step-000000120/
      manifest.json            step, world size, config, which rank owns what, and size and SHA-256 of all files
      rank-00000.json          the structure of every entry, as rank 0 saved it
      rank-00000.safetensors   its tensors
      rank-00003.json          what rank 3 had different from rank 0, if anything
      rank-00003.safetensors
    step-000000150.2/          a second checkpoint of step 150: checkpoints are never overwritten
    step-000000180.tmp-5f31/   being written, being deleted, or left behind by a process that was killed

How to read the files: checkpointer.py has the public class. To save, entries.py takes the state, tree.py encodes it, replicas.py
decides which rank writes what, and write.py writes in the background. To load, read.py reads and checks, and load.py fills.
dcp.py reads and writes the directories of `torch.distributed.checkpoint`.
"""

from phalanx.train.checkpoint.checkpointer import Checkpointer
from phalanx.train.checkpoint.errors import CheckpointError
from phalanx.train.checkpoint.lock import DirectoryInUseError
from phalanx.train.checkpoint.random_state import RandomState

__all__ = ["CheckpointError", "Checkpointer", "DirectoryInUseError", "RandomState"]
