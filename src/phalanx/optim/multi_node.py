"""The multi-node optimizer: any torch optimizer, whose `step` first replaces the gradients by their mean over the ranks.

    opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)

The step itself is in `averaged_step.py`; here is what a script sees of it.

ChainerMN's idea and name. Differences: the first step already updates, gradients are sent while backward still runs, and every
attribute is forwarded by name. What is not written here does not exist.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.averager import Averager
from phalanx.grad.drift import Difference
from phalanx.grad.gossip.packet import average_together
from phalanx.grad.pace import SlowRank
from phalanx.grad.record import StepRecord
from phalanx.grad.reducer import TransferTime
from phalanx.grad.sparse import wants_sparse
from phalanx.grad.unfinished import Unfinished
from phalanx.grad.wires import Wire
from phalanx.optim.averaged_step import AveragedStep
from phalanx.optim.one_pass import why_not
from phalanx.optim.wrapped import WrappedOptimizer

if TYPE_CHECKING:
    from phalanx.grad.elastic import ElasticAverager


class MultiNodeOptimizer(WrappedOptimizer):
    """Made by `create_multi_node_optimizer`. A torch optimizer for schedulers, scalers and checkpoints."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        sync: AllReduce,
        double_buffering: bool,
        wire: Wire | None,
        bucket_bytes: int | None,
    ) -> None:
        super().__init__(optimizer, comm)
        self.sync = sync
        self._options = double_buffering, wire, bucket_bytes
        self._averager = self._make_averager()
        self._step = AveragedStep(optimizer, comm, sync, self._averager)

    def _make_averager(self) -> Averager:
        delayed, wire, bucket_bytes = self._options
        if self.comm.elastic:
            from phalanx.grad.elastic_delayed import elastic_averager  # few scripts are elastic

            return elastic_averager(
                *self.parameters(), self.following, self.sync, wire=wire, bucket_bytes=bucket_bytes, delayed=delayed
            )
        return Averager(
            *self.parameters(),
            self.comm,
            self.sync,
            wire=wire,
            bucket_bytes=bucket_bytes,
            delayed=delayed,
            in_backward=not self.sync.fused or self.comm.size == 1 or bool(why_not(self.optimizer, self.comm)),
            sparse=wants_sparse(self.optimizer),
        )

    # ---- the step ----------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, then update. A `closure` may be called several times. Its gradients are averaged.

        Its loss is averaged, too. So if the optimizer decides by the loss, all ranks decide the same.
        """
        if self._averager.delayed and getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                "a GradScaler uses the current scale, but double_buffering gives gradients of the previous step: use one of them"
            )
        if not self.comm.elastic:
            return self._step.take(closure)
        from phalanx.optim.shared_state import elastic_step

        if closure is None:
            self._step.synchronize()  # which may find that the membership has changed
        with elastic_step(self):
            return self._step.take(closure)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by a GradScaler: with double buffering it hands its scale to `step`, which has to refuse it."""
        return self._averager.delayed

    @property
    def one_replica(self) -> bool:
        """Whether parameters and moments exist once for all ranks of the host, as they do after a fused step."""
        return self._step.fused is not None and self._step.fused.has_one_replica

    def synchronize(self) -> None:
        """Make every gradient the mean over the ranks, which it is after any `backward()` outside `no_sync()`. All ranks call it.

        Needed only after backwards inside `no_sync()`, with `AllReduce(fused=True)`, and with double buffering.
        """
        self._step.synchronize()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only accumulates. The next one outside communicates the sum."""
        with self._averager.pause():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self._averager.drop()
        self.optimizer.zero_grad(set_to_none)

    @property
    def weight(self) -> float:
        """Samples in this rank's batch, for `AllReduce(weighted=True)`; set it before backward."""
        return self._averager.weight

    @weight.setter
    def weight(self, samples: float) -> None:
        if not self.sync.weighted:
            raise ValueError("opt.weight has an effect only with sync=phalanx.AllReduce(weighted=True)")
        if not 0 <= samples < math.inf:
            raise ValueError(f"opt.weight={samples}: a number of samples, 0 or more")
        self._averager.weight = samples

    # ---- ranks that die and join ---------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """What a rank that joins gets beside the state of the inner optimizer. For Phalanx itself."""
        return self._elastic_averager.state()

    def load_own_state(self, state: dict[str, Any]) -> None:
        """On a rank that joins. For Phalanx itself."""
        self._elastic_averager.load(state)

    @property
    def _elastic_averager(self) -> ElasticAverager:
        from phalanx.grad.elastic import ElasticAverager

        assert isinstance(self._averager, ElasticAverager)
        return self._averager

    # ---- as gossip has them, so that a script differs in one argument ------------------------------------------------------

    @torch.no_grad()
    def average_(self) -> None:
        """Make followed statistics the mean over the ranks; all else is equal already. All ranks call it."""
        if self._statistics:
            average_together(self._statistics, self.comm)

    @property
    def steps(self) -> int:
        """How many steps this optimizer has made, on all ranks."""
        return self._averager.steps

    def spread(self) -> float:
        """How far the replicas are apart: always 0."""
        return 0.0

    @property
    def slow_ranks(self) -> tuple[SlowRank, ...]:
        """The ranks that were found to slow the others down, with `elastic=True`: rank, cause and factor."""
        return getattr(self._averager, "slow_ranks", ())

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Where the ranks were found to differ: step, ranks, tensors, and whether they were healed."""
        return self._averager.differences

    def report(self) -> list[StepRecord]:
        """What every step spent on communication; needs `AllReduce(record=True)`."""
        if not self.sync.record:
            raise ValueError("nothing was recorded: create the optimizer with sync=phalanx.AllReduce(record=True)")
        return list(self._averager.records)

    @property
    def last_record(self) -> StepRecord | None:
        """What the last step spent on communication; None unless `AllReduce(record=True)`."""
        return self._averager.records[-1] if self._averager.records else None

    @property
    def last_transfers(self) -> list[TransferTime]:
        """The groups of gradients that arrived in the last step: when each was sent, when it arrived, and its bytes."""
        return list(self._averager.transfers)

    # ---- the inner optimizer's ---------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, readable without Phalanx."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        if self._step.fused is not None:
            self._step.fused.take_state()

    @property
    def communication(self) -> Unfinished:
        """What a step needs from the previous one, such as the pending means of double buffering, as `state_dict()`.

        A checkpoint with it and the optimizer's own state continues bit for bit.
        """
        return self._averager.unfinished

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """All ranks call it. The groups of gradients are learned anew in the next step."""
        self.optimizer.add_param_group(param_group)
        self._step.watch_changes()

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeOptimizer:
        """On the same communicator, with copies of the parameters and of the inner optimizer's state. All ranks make it."""
        twin = MultiNodeOptimizer(copy.deepcopy(self.optimizer, memo), self.comm, self.sync, *self._options)
        twin._statistics = copy.deepcopy(self._statistics, memo)
        memo[id(self)] = twin
        return twin

    def __repr__(self) -> str:
        return f"MultiNodeOptimizer({self.optimizer!r}, {self.comm!r}, {self.sync!r})"
