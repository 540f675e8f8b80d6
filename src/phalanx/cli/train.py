"""`phalanx train`: train a recipe on the ranks that a launcher started or, without one, on local ranks started here."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.early_signals import ending_at_once
from phalanx.cli.numbers import at_least_one, whole
from phalanx.cli.recipes import load, recipe_names
from phalanx.cli.terminal import forgive_output, tell
from phalanx.cli.train_directory import RUNS, agree_on_directory, prepare_directory
from phalanx.cli.usage import UsageError, check_environment
from phalanx.comm.launch import MEETING, Launch, LaunchError, discover
from phalanx.comm.settings import AGENT
from phalanx.comm.start import end_with_agent, start_ranks
from phalanx.schedule import ScheduleError
from phalanx.schedule.names import InputError, is_file
from phalanx.train.rows import write_json

if TYPE_CHECKING:  # torch takes seconds to import, and `phalanx --help` does not need it
    from phalanx.train.config import RunConfig
    from phalanx.train.planned import PlannedRun

TOO_EARLY = "stopped: training had not begun"

EXAMPLES = """examples:
  phalanx train                                          digits, on as many ranks as cores
  phalanx train cifar10 --set data.source=cifar10:DIR --set epochs=5
  phalanx train gpt-tiny                                 a small GPT on text that comes with Phalanx
  phalanx train my_recipe.py                             your own recipe
  phalanx train --set model=my_nets:make_model --set model.args.width=64 --set optimizer=adamw --set rate.peak=0.001
  phalanx train --ranks 4 --set comm.elastic=true --replace 10      ranks that die are replaced, and the others continue
  phalanx train --settings                               every name that --set takes, and what it means
  torchrun --nproc-per-node 8 -m phalanx train imagenet-resnet50
"""


def add_to(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "train",
        help="train a recipe",
        description="Train a recipe. Starts the ranks on this host, or uses those that torchrun, mpirun or srun started.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", default="digits", help=f"a file, or {', '.join(recipe_names())}")
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=at_least_one,
        help="processes to start here (default: as many as cores, or the most below that number that divide the batch)",
    )
    parser.add_argument(
        "--replace",
        metavar="K",
        type=whole(0),
        help="with comm.elastic=true: start at most K new ranks for those that die (default: 0)",
    )
    parser.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        dest="settings",
        help="change a setting of the recipe; may be repeated",
    )
    parser.add_argument(
        "--plan", metavar="FILE", type=Path, help="communicate as `phalanx plan --json FILE` found best; --set overrides it"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help=f"directory for records and checkpoints (default: a new one in {RUNS}/)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out, or start one if there is none (without --out: the newest run of this recipe)",
    )
    parser.add_argument("--show", action="store_true", help="print the recipe with all its settings, and train nothing")
    parser.add_argument(
        "--settings", action="store_true", dest="list_settings", help="print what every setting means, and train nothing"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train on the ranks of a launcher; without one, check the configuration and start local ranks."""
    if args.list_settings:
        return list_settings()
    try:
        launch = discover()
    except LaunchError as error:
        raise UsageError(str(error)) from None
    with ending_at_once(TOO_EARLY if launch.how == "alone" else None):  # a line from each rank would bury the launcher's
        return prepare_and_train(args, launch)


def prepare_and_train(args: argparse.Namespace, launch: Launch) -> int:
    """Check everything possible before ranks start, then start them, or run as one of them."""
    from phalanx.train.checkpoint import DirectoryInUseError
    from phalanx.train.config import ConfigError
    from phalanx.train.planned import read_plan

    try:
        check_environment()
        if args.plan and not is_file(args.plan):
            raise UsageError(f"--plan {args.plan}: there is no such file")
        plan = read_plan(args.plan) if args.plan else None
        config = resolve(args.recipe, args.settings, plan.settings if plan else None)
        if args.show:
            return show(config)
        if args.replace is not None and not config.comm.elastic:
            raise UsageError(f"--replace {args.replace} is for ranks that may die: --set comm.elastic=true")
        if MEETING in os.environ:
            if args.out is None:
                raise UsageError("ranks that join later have to find the run: name its directory with --out DIR")
            return train_here(args, config, args.out, plan)
        if launch.how != "alone":
            if args.ranks not in (None, launch.world):
                raise UsageError(f"--ranks {args.ranks}, but {launch.how} started {launch.world}: leave --ranks out")
            return train_here(args, config, args.out, plan)
        ranks = args.ranks if args.ranks is not None else default_ranks(config, len(os.sched_getaffinity(0)))
        if plan:
            plan.check(config, ranks)
        check_everything(config, ranks)
        out = prepare_directory(args.out, config, resume=args.resume)
        if ranks == 1:
            return train_here(args, config, out, plan)
    except DirectoryInUseError as error:
        tell(error)
        return 1
    except (ConfigError, InputError, ScheduleError) as error:
        if launch.rank != 0:  # rank 0 prints it for all ranks
            return 2
        raise UsageError(str(error)) from None
    resume = ["--resume"] if args.resume else []
    planned = ["--plan", str(args.plan)] if args.plan else []
    settings = [word for setting in args.settings for word in ("--set", setting)]
    command = ["train", args.recipe, "--ranks", str(ranks), "--out", str(out), *resume, *planned, *settings]
    if config.comm.elastic:
        from phalanx.comm.elastic.supervisor import Supervisor

        code = Supervisor(ranks, ["-m", "phalanx", *command], args.replace or 0, announces=False).run()
        if 0 < code <= 128 or code == 128 + signal.SIGKILL:  # not after a request to stop: rank 0 prints the same then
            tell(f"to continue from the last checkpoint: {resuming_command(args, out, ranks)}")
        return code
    again = resuming_command(args, out, ranks)
    # the report shows this command, so it must work as typed
    return start_ranks(ranks, ["-m", "phalanx", *command], held=True, too_early=f"phalanx: {TOO_EARLY}\nto start again: {again}")


def resolve(recipe: str, settings: list[str], planned: dict[str, str] | None = None) -> RunConfig:
    """Build the configuration of a recipe, changed by a plan and then by `--set`."""
    from phalanx.train.config import override

    texts = dict(planned or {})
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: give PATH=VALUE, such as --set epochs=5")
        texts[path.strip()] = text.strip()
    found = load(recipe)
    config = override(found, texts)
    if (
        "rate.warmup" not in texts and 0 < config.epochs <= config.rate.warmup
    ):  # a shorter run warms up for the same fraction of its epochs
        config = replace(config, rate=replace(config.rate, warmup=config.rate.warmup * config.epochs / found.epochs))
    if "batch" in texts and config.stages and config.batch != config.stages[-1].batch:
        raise UsageError(
            f"batch={config.batch} has no effect because the recipe has stages: set stages, or remove them with --set stages="
        )
    return config


def check_everything(config: RunConfig, ranks: int) -> None:
    """Raise for errors that would occur on the ranks: one line here is better than one from each rank."""
    from phalanx.grad.gossip.partners import check_topology
    from phalanx.train.check import check, open_sources
    from phalanx.train.communicator import find_algorithm

    find_algorithm(config.comm, ranks)
    if config.comm.sync == "gossip" and config.comm.gossip.level != "host":
        try:
            check_topology(config.comm.gossip, ranks, "ranks")  # all on this host
        except ValueError as error:
            raise UsageError(str(error)) from None
    check(config, ranks, *open_sources(config))


def default_ranks(config: RunConfig, cores: int) -> int:
    """The number of cores, or the largest number below that divides the batches."""

    def fits(ranks: int) -> bool:
        try:
            return all(stage.split(ranks, config.micro_batch) for stage in config.plan.stages)
        except ValueError:
            return False

    return next((ranks for ranks in range(cores, 0, -1) if fits(ranks)), 1)


def show(config: RunConfig) -> int:
    """Print every setting with its value, as `--set` takes it."""
    from phalanx.train.config import texts

    for path, text in texts(config):
        print(f"{path}={text}")
    return 0


def list_settings() -> int:
    """Print the reference: every setting, its type, its default and its meaning."""
    from phalanx.train.config import describe_settings

    for setting in describe_settings():
        default = f", default {setting.default or 'empty'}" if setting.default is not None else ""
        print(f"{setting.name} ({setting.type}{default})\n    {setting.sentence}")
    return 0


def train_here(args: argparse.Namespace, config: RunConfig, out: Path | None, plan: PlannedRun | None) -> int:
    """Run one rank, or the only one. Returns 1 if the run failed with an expected error."""
    import torch

    from phalanx.cli.train_gap import tell_gap
    from phalanx.comm.verdict import CommunicationError
    from phalanx.data import BadSample, SampleError, SourceError
    from phalanx.train.checkpoint import CheckpointError, DirectoryInUseError
    from phalanx.train.checkpoint.lock import one_job
    from phalanx.train.communicator import create_communicator_for, find_algorithm
    from phalanx.train.config import ConfigError
    from phalanx.train.planned import FILE
    from phalanx.train.sigterm import StopSignals
    from phalanx.train.trainer import train

    launch = discover()
    elastic = MEETING in os.environ
    if launch.how != "alone" and not elastic:  # a single rank has no agent, whatever the environment says
        end_with_agent()
    if plan and not elastic:
        plan.check(config, launch.world)
    if "OMP_NUM_THREADS" not in os.environ and launch.world > 1:
        torch.set_num_threads(1)
    if not elastic:
        find_algorithm(config.comm, launch.world)
    try:
        comm = create_communicator_for(config.comm)
    except (CommunicationError, LaunchError) as error:  # other ranks did not arrive, or another process has the port
        tell(error)
        return 1
    signals = StopSignals("stopping before the first step; Ctrl-C again ends at once", speaks=comm.rank == 0 and not comm.is_new)
    try:
        with signals, comm:
            if not comm.is_new:
                wanted = out
                out = comm.as_one(lambda: agree_on_directory(wanted, config, comm, resume=args.resume))
            assert out is not None
            again = resuming_command(args, out, args.ranks if comm.elastic else comm.size)
            # lock here as train() does, because the plan is one of the records
            with nullcontext() if comm.is_new else one_job(out, comm):
                if plan and comm.rank == 0 and not comm.is_new:
                    write_json(out / FILE, plan.content)
                result = train(config, comm, out=out, resume=args.resume, resume_command=again, signals=signals)
        if plan and launch.rank == 0:
            tell_gap(out, plan)
        forgive_output()
        return 128 + result.signal if result.why == "stopped" else 0
    except CommunicationError:
        if not signals.heard:
            raise
        return 128 + signals.heard  # a rank that did not handle signals yet has exited; the signal was for all of them
    except ConfigError:
        raise
    except DirectoryInUseError as error:
        if launch.rank == 0:  # raised on all ranks
            tell(error)
        return 1
    except (SourceError, SampleError, BadSample, CheckpointError) as error:
        tell(f"rank {launch.rank}: {error}")
        return 1


def resuming_command(args: argparse.Namespace, out: Path, ranks: int | None) -> str:
    """The command line that continues this run, without the launcher's own part."""
    started_here = ranks is not None and (AGENT in os.environ or discover().how == "alone")
    words = ["phalanx", "train", args.recipe, *(["--ranks", str(ranks)] if started_here else []), "--resume", "--out", str(out)]
    words += ["--replace", str(args.replace)] if args.replace is not None else []
    words += ["--plan", str(args.plan)] if args.plan else []
    return shlex.join([*words, *(word for setting in args.settings for word in ("--set", setting))])
