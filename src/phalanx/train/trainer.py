"""Train a run from its configuration.

    result = train(config, out=Path("runs/digits"))

`assemble` builds everything that a run needs before its first step. loop.py trains.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from phalanx.comm.communicator import Communicator
from phalanx.data.scatter import length_of
from phalanx.train.check import check, open_sources
from phalanx.train.checkpoint import Checkpointer
from phalanx.train.checkpoint.lock import one_job
from phalanx.train.communicator import check_communicator, create_communicator_for
from phalanx.train.config import RunConfig, identity, plain
from phalanx.train.log import Log
from phalanx.train.loop import Trainer, not_saved
from phalanx.train.model import seed_rank
from phalanx.train.result import Result
from phalanx.train.sigterm import StopSignals
from phalanx.train.trace import Tracer

__all__ = ["Result", "Trainer", "assemble", "train"]


def train(
    config: RunConfig,
    comm: Communicator | None = None,
    *,
    out: Path | None = None,
    resume: bool = False,
    show: bool = True,
    resume_command: str = "",
    signals: StopSignals | None = None,
) -> Result:
    """Train as `config` describes, on the ranks of a communicator. All ranks call it.

    Args:
        config: What to train, and how.
        comm: The ranks. Without it, `train` creates a communicator with `comm.algorithm` and `comm.timeout` of `config`.
        out: Directory for records and checkpoints; without it, nothing is kept.
        resume: Continue from the newest checkpoint in `out`.
        show: Print progress on rank 0.
        resume_command: The command that continues the run, printed when the run is asked to stop.
        signals: Requests to stop that the caller listens for. Without it, `train` listens from its first step on.

    Returns:
        How the run ended; the same on all ranks.

    Raises:
        ConfigError: If parts of the configuration do not fit together, or `comm` is not what the configuration asks for.
        DirectoryInUseError: If another job writes in `out`.
    """
    with ExitStack() as stack:
        if comm is None:
            comm = stack.enter_context(create_communicator_for(config.comm))
        if out is not None and not comm.is_new:
            stack.enter_context(one_job(out, comm))
        log = stack.enter_context(Log(config, comm, out, resume=resume, show=show))
        log.introduce()
        trainer = assemble(config, comm, log)
        trainer.resume_command = resume_command
        stack.callback(trainer.continuity.close)
        stack.enter_context(trainer.loader)
        stack.enter_context(trainer.test)
        if out is None:
            return trainer.run(None, resume=False, signals=signals)
        checkpoints = Checkpointer(
            out / "checkpoints",
            comm,
            keep=config.keep,
            config=identity(plain(config)),
            failed=lambda error: log.warn(not_saved(error)),
        )
        return trainer.run(stack.enter_context(checkpoints), resume=resume, signals=signals)


def assemble(config: RunConfig, comm: Communicator, log: Log) -> Trainer:
    """Build everything that a run needs. ConfigError if the parts do not fit together."""
    check_communicator(config.comm, comm)
    device = device_of_this_rank()
    source, held_out = open_sources(config)
    facts = check(config, comm.size, source, held_out)
    task = config.find_task(device)
    loader, test = config.data.loaders(
        source,
        held_out,
        comm,
        plan=config.plan,
        micro_batch=config.micro_batch,
        seed=config.seed,
        channels_last=config.model.channels_last,
        on_change=config.comm.on_change,
    )
    model = config.model.build(facts, seed=config.seed).to(device)
    model = config.model.batchnorm.install(model, comm)
    units = task.units(task.unpack(config.data.example(source))[1])
    samples = length_of(source), length_of(held_out)
    log.opened(samples=samples, units=units, parameters=sum(p.numel() for p in model.parameters()))
    drops = any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
    if drops or config.model.is_own:  # otherwise keep the generators equal, which makes checkpoints smaller
        seed_rank((config.seed + 1 + comm.rank) % 2**32)  # so that ranks drop different neurons
    optimizer = config.comm.wrap(config.optimizer.build(model), comm, weighted=config.uneven)
    if optimizer.replicas_differ:
        optimizer.follow(model)
    return Trainer(
        config=config,
        comm=comm,
        model=model,
        forward=torch.compile(model) if config.model.compile else model,
        optimizer=optimizer,
        course=config.course,
        loader=loader,
        test=test,
        device=device,
        scaler=torch.amp.GradScaler(device.type, enabled=config.model.precision == "float16"),
        task=task,
        log=log,
        tracer=Tracer(config, comm, log.out),
    )


def device_of_this_rank() -> torch.device:
    """The GPU that creating the communicator made current, if any. Its index differs from the local rank if a launcher shows
    each rank one GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
