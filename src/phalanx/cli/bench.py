"""`phalanx bench`: the parser of the verb, and what it prints. The benchmarks are in `phalanx.bench`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.bench.config import MODELS, OPTIMIZERS, AllReduceBench, Bench, GossipBench, TrainBench
from phalanx.bench.rank import measure
from phalanx.bench.ranks import RankError, run_ranks
from phalanx.bench.record import Record
from phalanx.bench.table import print_table, write_lines
from phalanx.cli.numbers import at_least_one, size, whole
from phalanx.cli.terminal import tell
from phalanx.cli.usage import UsageError, check_environment
from phalanx.comm.launch import LaunchError, discover
from phalanx.comm.verdict import CommunicationError
from phalanx.schedule import ScheduleError
from phalanx.schedule.names import FORMS, InputError

DEADLINE = 1800  # seconds
MAX_RANKS = 256  # processes started on one machine: a typo should not bring it down

EXAMPLES = """examples:
  phalanx bench allreduce                                   as many ranks as cores, at least 2
  phalanx bench allreduce --ranks 4 --algorithm ring:4 torus:2x2
  mpirun -n 2 phalanx bench allreduce --max 4M              also against the MPI that started it
  phalanx bench train --ranks 2 --json train.jsonl          ResNet-50 at 64 pixels, against DDP
  torchrun --nproc-per-node 2 -m -- phalanx bench train --model resnet_cifar20 --pixels 32
  phalanx bench train --model gpt --batch 16 --optimizer adamw    a step of the recipe gpt-tiny
  phalanx bench gossip --ranks 8 --size 16M --compute 200   GossipGraD against all-reduce, with emulated computation
"""


def add_to(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the command line."""
    style: Any = {"epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = verbs.add_parser(
        "bench",
        help="measure side by side with gloo, MPI and DDP",
        description="Measure contenders side by side: they take turns in one run. docs/bench.md explains the tables.",
        **style,
    )
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)

    allreduce = benches.add_parser(
        "allreduce",
        help="sums of several sizes, nccl-tests columns",
        description="All-reduce of float32 sums: Phalanx on its own memory and on any tensor, gloo, and MPI under mpirun.",
        **style,
    )
    allreduce.add_argument("--min", metavar="SIZE", type=size, default=4 << 10, help="smallest size in bytes (default 4K)")
    allreduce.add_argument(
        "--max",
        metavar="SIZE",
        type=size,
        default=64 << 20,
        help="largest size (default 64M); each size is four times the one before",
    )
    allreduce.add_argument(
        "--algorithm", metavar="NAME", nargs="+", action="extend", default=[], help=f"also measure these: {FORMS}"
    )
    _add_running(allreduce, repeat=11, unit="rounds")
    allreduce.set_defaults(
        run=lambda args: run(AllReduceBench(args.min, args.max, args.repeat, tuple(args.algorithm), args.pin), args),
    )

    gossip = benches.add_parser(
        "gossip",
        help="steps of GossipGraD, compared with all-reduce",
        description="Training steps that wait instead of computing: no communication, DDP, all-reduce, and GossipGraD.",
        **style,
    )
    gossip.add_argument("--size", metavar="SIZE", type=size, default=4 << 20, help="bytes of the parameters (default 4M)")
    gossip.add_argument(
        "--compute",
        metavar="MS",
        type=at_least_one,
        default=50,
        help="milliseconds that a step waits instead of computing (default 50)",
    )
    gossip.add_argument("--steps", metavar="N", type=at_least_one, default=8, help="steps in a row per contender (default 8)")
    _add_only(gossip, beside="no communication")
    _add_running(gossip, repeat=5, unit="blocks")
    gossip.set_defaults(
        run=lambda args: run(GossipBench(args.size, args.compute, args.steps, args.repeat, args.pin, tuple(args.only)), args)
    )

    train = benches.add_parser(
        "train",
        help="training steps, compared with DDP",
        description="Training steps: without communication, DDP, DDP with 16-bit compression, and Phalanx.",
        **style,
    )
    train.add_argument("--model", choices=MODELS, default=MODELS[0], help=f"default {MODELS[0]}")
    train.add_argument(
        "--pixels",
        metavar="N",
        type=at_least_one,
        default=64,
        help="height and width of an image, or characters of a text for gpt (default 64)",
    )
    train.add_argument("--batch", metavar="N", type=at_least_one, default=2, help="images or texts per rank (default 2)")
    train.add_argument("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0], help="sgd with momentum, or adamw (default sgd)")
    _add_only(train, beside="no communication and DDP")
    train.add_argument("--all", action="store_true", help="also list known contenders that are not installed")
    _add_running(train, repeat=9, unit="steps")
    train.set_defaults(
        run=lambda args: run(
            TrainBench(args.model, args.pixels, args.batch, args.repeat, args.all, args.pin, tuple(args.only), args.optimizer),
            args,
        )
    )


def _add_only(parser: argparse.ArgumentParser, *, beside: str) -> None:
    text = f"only this contender, next to {beside}; may be repeated (default: all)"
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help=text)


def _add_running(parser: argparse.ArgumentParser, *, repeat: int, unit: str) -> None:
    parser.add_argument("--ranks", metavar="N", type=at_least_one, help="processes to start here if no launcher did")
    parser.add_argument(
        "--repeat", metavar="N", type=at_least_one, default=repeat, help=f"{unit} per contender (default {repeat})"
    )
    parser.add_argument("--pin", action="store_true", help="keep every rank, with its threads, on its own core")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the records to FILE, one per line")
    parser.add_argument(
        "--deadline",
        metavar="S",
        type=whole(1, 10**6),
        default=DEADLINE,
        help=f"seconds for ranks started here (default {DEADLINE})",
    )


def run(bench: Bench, args: argparse.Namespace) -> int:
    """Measure on the ranks that a launcher started, or on ranks started here; 1 if a rank failed or a result was wrong."""
    try:
        launch = discover()
    except LaunchError as error:
        raise UsageError(str(error)) from None
    launched = launch.how != "alone"
    ranks = launch.world if launched else args.ranks or max(2, len(os.sched_getaffinity(0)))
    try:
        check_environment()
        if launched and args.ranks not in (None, ranks):
            raise UsageError(f"--ranks {args.ranks}, but {launch.how} started {ranks}: leave --ranks out")
        if not 2 <= ranks <= MAX_RANKS and not launched:
            raise UsageError(f"--ranks {ranks}: give a number from 2 to {MAX_RANKS}")
        if ranks < 2:
            raise UsageError(f"{launch.how} started one rank: a comparison needs at least 2")
        bench.check(ranks)
    except (InputError, ScheduleError):
        if launch.rank != 0:  # rank 0 prints it for all ranks
            return 2
        raise
    with contextlib.ExitStack() as files:
        takers: list[Callable[[Record], None]] = []
        if launch.rank == 0:
            if args.json:
                takers.append(write_lines(files.enter_context(_opened(args.json))))
            takers.append(print_table())
        wrong = 0

        def take(record: Record) -> None:
            nonlocal wrong
            wrong += record.get("wrong") or 0
            for taker in takers:
                taker(record)

        if launched:
            try:
                for record in measure(bench, launch.how):
                    take(record)
            except CommunicationError as error:
                if error.operation != "create_communicator":
                    raise
                tell(error)
                return 1
        else:
            try:
                run_ranks(bench, ranks, args.deadline, take)
            except RankError as error:
                tell(error)
                for line in error.words:
                    print(f"  {line}", file=sys.stderr)
                return 1
    if wrong and launch.rank == 0:
        tell(f"{wrong} results were wrong")
    return 1 if wrong else 0


def _opened(path: Path) -> Any:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the records: {error}") from None
