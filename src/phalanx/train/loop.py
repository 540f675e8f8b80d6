"""The training loop: one update after another, evaluations, checkpoints, and an end that all ranks agree on.

Events go to a `Log`, which writes and shows them. The numbers are means over all samples of all ranks, not rank 0's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from phalanx.comm.communicator import Communicator
from phalanx.data import Loader, Step
from phalanx.data.collate import map_tensors
from phalanx.nn.batchnorm import average_batchnorm_
from phalanx.optim.gossip_step import GossipOptimizer
from phalanx.optim.local_step import LocalOptimizer
from phalanx.optim.multi_node import MultiNodeOptimizer
from phalanx.train.checkpoint import Checkpointer, CheckpointError, RandomState
from phalanx.train.clock import StepEvents
from phalanx.train.config import RunConfig
from phalanx.train.continuity import Continuity
from phalanx.train.course import Course
from phalanx.train.evaluate import create_multi_node_evaluator
from phalanx.train.initial_weights import load_initial_weights
from phalanx.train.log import Log
from phalanx.train.result import Result, RunPosition
from phalanx.train.sigterm import StopRequest, StopSignals
from phalanx.train.stragglers import Times
from phalanx.train.task import Task
from phalanx.train.trace import Tracer

HEARD_WITHIN = 1.0  # seconds until all ranks have seen a SIGTERM; torchrun and Slurm kill after 30


@dataclass
class Trainer:
    """The parts of a run, built by `assemble`, and the training loop."""

    config: RunConfig
    comm: Communicator
    model: nn.Module
    forward: Callable[[torch.Tensor], Any]  # the model, compiled if asked
    optimizer: MultiNodeOptimizer | GossipOptimizer | LocalOptimizer
    course: Course
    loader: Loader
    test: Loader
    device: torch.device
    scaler: torch.amp.GradScaler
    task: Task
    log: Log
    tracer: Tracer
    position: RunPosition = field(default_factory=RunPosition)
    resume_command: str = ""  # shown if you stop the run
    continuity: Continuity = field(init=False)
    _events: StepEvents | None = field(default=None, init=False)  # of the last step, on a GPU

    def __post_init__(self) -> None:
        self.continuity = Continuity(self.comm, self.log.out)

    def run(self, checkpoints: Checkpointer | None, *, resume: bool, signals: StopSignals | None = None) -> Result:
        """Train to the end, with `resume` from the newest checkpoint on. `signals` may already hold a request to stop."""
        state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "communication": self.optimizer.communication,
            "loader": self.loader,
            "scaler": self.scaler,
            "position": self.position,
            "random": RandomState(),
        }

        def save(*, last: bool = False) -> None:
            if checkpoints is not None:
                self.position.seconds = self.log.seconds
                try:
                    checkpoints.save(self.position.step, **state)
                    while last and self.comm.elastic and checkpoints.lost(wait=True):  # no rank leaves before it is complete
                        checkpoints.save(self.position.step, **state)
                except CheckpointError as error:  # raised on all ranks, before anything is written
                    if last:
                        raise
                    self.log.warn(not_saved(error))

        joins = self.comm.is_new  # joins a running job and gets its state from the other ranks
        begun = checkpoints.load(**state) if checkpoints is not None and resume and not joins else None
        if begun is None and self.config.init is not None and not joins:
            load_initial_weights(self.model, self.config.init)
        if self.comm.elastic:
            parts = {name: state[name] for name in ("model", "loader", "scaler", "position")}
            self.continuity.share(self.optimizer, checkpoints, log=self.log, tracer=self.tracer, **parts)
        if not joins:
            self.log.begin(self.position.step, self.position.seconds)
        words = "stopping after this step"
        if checkpoints is not None:
            words = "stopping: this step is finished and saved first; Ctrl-C again ends at once, without saving"
            words += f"\nto continue: {self.resume_command}" if self.resume_command else ""
        with StopRequest(self.comm, words, signals) as stop:
            if not joins and not self.why_over() and stop.agreed():  # stopped while data were loaded: nothing new to save
                return self.finish("stopped", stop.signal)
            while not (why := self.why_over()):
                complete = self.train_epoch(stop, save, checkpoints)
                if complete and self.evaluation_is_due():
                    self.evaluate()
                over = self.why_over()
                stopped = not complete or (not over and stop.agreed())
                if stopped or over or self.position.epoch % self.config.checkpoint_every == 0:
                    save(last=bool(stopped or over))
                if stopped:
                    return self.finish("stopped", stop.signal)
        return self.finish(why)

    def why_over(self) -> str:
        """Why the run is over, or "" if it is not. The same on all ranks, because evaluations are."""
        if self.config.target is not None and self.task.reached(self.config.target, self.position.found):
            return "target"
        return "epochs" if self.position.epoch >= self.config.epochs else ""

    def train_epoch(self, stop: StopRequest, save: Callable[[], None], checkpoints: Checkpointer | None = None) -> bool:
        """Train to the end of the epoch. False if a rank was asked to stop. `save` makes checkpoints within the epoch."""
        self.model.train()
        self.log.begin_epoch(self.position.epoch)
        waiting = time.perf_counter()
        for step in self.loader.steps():
            steps = self.loader.steps_per_epoch(step.epoch)  # it may change in an elastic run
            self.tracer.begin_step(step.epoch, step.index, steps, number=self.position.step + 1, at=waiting)
            self.update(step, min(1.0, (step.index + 1) / steps), input_seconds=time.perf_counter() - waiting)
            self.position.step += 1
            if self.comm.elastic and self.loader.position.epoch > step.epoch:
                continue  # the epoch ends, unless samples of a rank that died in this step are repeated
            if step.index + 1 == steps and not self.comm.elastic:
                break  # evaluate first, then save
            self.continuity.follow(checkpoints, save)
            save_now = self.config.checkpoint_every_steps and self.position.step % self.config.checkpoint_every_steps == 0
            if save_now or self.position.step % self.config.log_every == 0:
                seconds = self.log.interval(complete=bool(save_now))
                if seconds is not None:
                    self.continuity.listen_every = max(1, int(HEARD_WITHIN / max(seconds, 1e-6)))
            if self.position.step % self.continuity.listen_every == 0 and stop.agreed():
                self.log.interval()
                return False
            if save_now:
                save()
            waiting = time.perf_counter()
        self.log.interval()
        self.position.epoch += 1
        return True

    def update(self, step: Step, done: float, *, input_seconds: float) -> None:
        """Update the weights from all micro-batches of `step`. `done` is the fraction of the epoch after it."""
        begun = time.perf_counter()
        events: StepEvents | None = None
        if self.device.type == "cuda":
            events = self._events = StepEvents(self.device, input_seconds, self._events)
        self.tracer.mark("input", begun)
        epoch = step.epoch + done
        rate = self.course.steer(self.optimizer, step.epoch, epoch)
        self.optimizer.zero_grad()
        if isinstance(self.optimizer, MultiNodeOptimizer) and self.optimizer.sync.weighted:
            self.optimizer.weight = step.samples
        loss = torch.zeros((), device=self.device)
        right = torch.zeros((), device=self.device)
        for number, batch in enumerate(step.micro):
            x, y = self.task.unpack(batch)
            if len(y) == 0:
                continue  # this rank has no samples and only receives gradients
            accumulating = number < len(step.micro) - 1
            with self.optimizer.no_sync() if accumulating else nullcontext():
                own_loss, own_right = self.backward(x, y, share=len(y) / step.samples, events=None if accumulating else events)
            loss += own_loss
            right += own_right
        ready = time.perf_counter()
        if events is not None:
            events.arrived()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if events is not None:
            events.ended()
        record = self.optimizer.last_record
        wait = record.wait if record else 0.0
        in_backward = (
            wait if record and begun <= record.begun < ready else 0.0
        )  # an all-reduce ends in backward, gossip in the step
        transfers = self.optimizer.last_transfers
        if not in_backward:
            self.tracer.mark("wait", ready + wait)
        self.tracer.mark("update")
        times = Times(input_seconds, ready - begun - in_backward, wait, time.perf_counter() - ready - (wait - in_backward))
        self.log.step(
            number=self.position.step + 1,
            epoch=epoch,
            samples=step.samples,
            batch=step.batch,
            loss=loss * step.samples,
            right=right,
            rate=rate,
            times=events or times,
            travelling=max(way.ended for way in transfers) - min(way.left for way in transfers) if transfers else 0.0,
            groups=len(transfers),
        )
        if isinstance(self.optimizer, MultiNodeOptimizer):
            self.log.noticed(self.optimizer.differences, self.optimizer.slow_ranks)
        try:
            self.tracer.end_step(transfers)
        except OSError as error:  # a full disk, on rank 0
            self.log.warn(f"no trace: {error.strerror or error}")

    def backward(self, x: Any, y: Any, *, share: float, events: StepEvents | None) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Add the gradient of a micro-batch, `share` of the step. Returns its part of the mean loss, and the correct samples."""
        x, y = self.on_device(x), self.on_device(y)
        with self.in_precision():
            outputs = self.forward(x)
            loss = self.task.loss(outputs, y)
        self.tracer.mark("forward")
        begun = time.perf_counter()
        scaled = self.scaler.scale(loss * share)
        if events is not None:
            events.watch(scaled)
        scaled.backward()
        record = self.optimizer.last_record
        if record and record.begun >= begun:  # backward ended with the exchange of gradients
            self.tracer.mark("backward", record.begun)
            self.tracer.mark("wait")
        else:
            self.tracer.mark("backward")
        return loss.detach() * share, self.task.correct(outputs, y) if self.task.correct else 0

    def on_device(self, data: Any) -> Any:
        """Move the tensors of a part of a batch to the network's device."""
        return map_tensors(lambda x: x.to(self.device, non_blocking=True), data)

    def in_precision(self) -> Any:
        """The context of a forward pass."""
        kind = self.config.model.autocast
        return torch.autocast(self.device.type, dtype=kind) if kind else nullcontext()

    # ---- evaluation ----------------------------------------------------------------------------------------------------------

    def evaluation_is_due(self) -> bool:
        return self.position.epoch % self.config.evaluate_every == 0 or self.position.epoch == self.config.epochs

    def evaluate(self) -> None:
        """Evaluate on the whole test set, each sample on one rank."""
        self.log.begin_evaluation(self.position.epoch)
        apart = {}
        if self.optimizer.replicas_differ:  # evaluate one model, the mean of all replicas
            apart["spread"] = self.optimizer.spread()
            self.optimizer.average_()
        average_batchnorm_(self.model, self.comm)
        self.model.eval()
        found = self.task.derive(create_multi_node_evaluator(self.score, self.comm)())
        self.model.train()
        self.position.found = found
        self.log.evaluation(self.position.step, self.position.epoch, found | apart)

    @torch.no_grad()
    def score(self) -> dict[str, tuple[float, int]]:
        """Sums and counts of this rank's part of the test set."""
        totals: dict[str, torch.Tensor] = {}
        self.test.rewind()
        for batch in self.test:
            x, y = self.task.unpack(batch)
            if len(y) == 0:
                continue
            x, y = self.on_device(x), self.on_device(y)
            with self.in_precision():
                outputs = self.forward(x)
            for name, pair in self.task.measure(outputs, y).items():
                own = torch.stack([self.as_number(value) for value in pair])
                totals[name] = own + totals[name] if name in totals else own
        read = torch.stack(list(totals.values())).tolist() if totals else []  # one synchronisation with a GPU
        return {name: (total, count) for name, (total, count) in zip(totals, read)}

    def as_number(self, value: torch.Tensor | float) -> torch.Tensor:
        """A sum or a count as an exact number on the network's device."""
        if isinstance(value, torch.Tensor):
            return value.detach().double()
        return torch.full((), value, dtype=torch.float64, device=self.device)

    def finish(self, why: str, signal: int = 0) -> Result:
        """Log the result and return it."""
        at = self.position
        result = Result(at.epoch, at.step, at.found, self.log.seconds, why, signal)
        self.log.end(result)
        return result


def not_saved(error: BaseException) -> str:
    """The warning for a failed save. Not an error: the disk may have room at the next save."""
    return f"no checkpoint: {error}; older checkpoints are kept, and training continues"
