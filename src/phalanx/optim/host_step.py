"""When ranks of one host share a replica, and when not: agreed by all of them, in every step.

step 1        the usual one; torch makes the momentum
step 2        the ranks move into one memory, if nothing speaks against it on any of them
then          before each step all compare notes. All fit: each updates its part. One is unfit: the usual step, on all; they try
              again after twice as many steps as the last time
after a fork  they move to other memory first: the child keeps what it had when it was born
"""

from __future__ import annotations

import logging

import torch

from phalanx.comm.communicator import Communicator
from phalanx.optim.copy_on_write import HostMemory
from phalanx.optim.host_replica import (
    Fitness,
    HostReplica,
    fingerprint,
    immovable,
    lacks_momentum,
    moment_of,
    objection,
    options_print,
    params_of,
    places_of,
)

log = logging.getLogger("phalanx")

FIRST = 2  # the step of the first try
WORTH = 1 << 20  # bytes of parameters from which on it pays


class HostStep:
    """`optimizer.step` for ranks that share a host."""

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Communicator) -> None:
        self._optimizer, self._comm = optimizer, comm
        self._replica: HostReplica | None = None
        self._steps, self._next, self._pause = 0, FIRST, FIRST

    @property
    def shared(self) -> bool:
        """Whether the ranks have one replica now."""
        return self._replica is not None

    def step(self, *, alone: bool) -> None:
        """Called by all ranks, with mean gradients. `alone`: no other optimizer of ours has these parameters."""
        self._steps += 1
        if self._replica is None and self._steps >= self._next:
            self._move(alone=alone)
        if self._replica is not None:
            fitness = self._agree(self._replica)
            if fitness is Fitness.FORKED:
                self._move(alone=alone, equal=True)
            elif fitness is Fitness.UNFIT:
                self._leave("a rank wrote to its parameters, moved them, or changed its optimizer")
        if self._replica is not None:
            self._replica.step()
        else:
            self._optimizer.step()

    def _agree(self, replica: HostReplica) -> Fitness:
        """The worst of all ranks; unfit, too, where they are about to do different things."""
        print_ = options_print(self._optimizer)
        told = torch.tensor([replica.fitness(), print_, -print_])
        self._comm.all_reduce(told, op="max")  # also a barrier: all are in the step, and none reads parameters
        return Fitness(int(told[0])) if told[1] == -told[2] else Fitness.UNFIT

    def _leave(self, why: str) -> None:
        """Nothing is to be undone: what this rank sees is its own from the moment it writes to it."""
        self._replica = None
        self._next, self._pause = self._steps + self._pause, 2 * self._pause
        log.info("phalanx: every rank keeps a replica of its own: %s", why)

    def _move(self, *, alone: bool, equal: bool = False) -> None:
        """Into one memory, or, on all ranks alike, not. `equal`: the replicas are known to be."""
        self._replica = None
        optimizer, comm = self._optimizer, self._comm
        tensors = [x for x in [*params_of(optimizer), *(moment_of(optimizer, p) for p in params_of(optimizer))] if x is not None]
        why = self._speaks_against(tensors, alone=alone)
        told = comm.allgather_obj((why, 0 if equal or why else fingerprint(tensors)))
        why = next((own for own, _ in told if own), "" if len({own for _, own in told}) == 1 else "the replicas differ")
        memory = None
        if not why:
            memory, why = self._meet(places_of(tensors)[1])
        if memory is not None and not why:
            self._replica = HostReplica(optimizer, comm, memory)
            return
        self._leave(why)

    def _speaks_against(self, tensors: list[torch.Tensor], *, alone: bool) -> str:
        if not alone:
            return "another optimizer has the same parameters"
        if why := objection(self._optimizer):
            return why
        if sum(p.nbytes for p in params_of(self._optimizer)) < WORTH:
            return f"less than {WORTH} bytes are not worth it"
        if lacks_momentum(self._optimizer):
            return "some parameters have no momentum yet"
        return next((f"the optimizer has {why}" for why in map(immovable, tensors) if why), "")

    def _meet(self, nbytes: int) -> tuple[HostMemory | None, str]:
        """Memory for all, and why not."""
        comm, memory, why, path = self._comm, None, "", ""
        try:
            if comm.rank == 0:
                memory = HostMemory.create(nbytes)
                path = memory.path
        except OSError as error:
            why = str(error)
        path = comm.bcast_obj(path)
        try:
            if comm.rank != 0 and path:
                memory = HostMemory.open(path, nbytes)
        except OSError as error:
            why = str(error)
        if memory is not None:
            why = memory.objection(comm.rank)
        why = next((f"rank {rank}: {own}" for rank, own in enumerate(comm.allgather_obj(why)) if own), "")
        if memory is not None:
            memory.forget_path()
        return memory, why
