"""`phalanx train`: a recipe, on ranks that a launcher started or, without one, on local ranks started through torch's."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.names import UsageError, find_schedule
from phalanx.comm.launch import LaunchError, discover
from phalanx.comm.start import AGENT, end_with_agent, start_ranks
from phalanx.schedule import Schedule, ScheduleError
from phalanx.schedule.plain_json import loads
from phalanx.train.rows import write_json

if TYPE_CHECKING:  # torch takes seconds to import, and `phalanx --help` has no use for it
    from phalanx.comm.communicator import Communicator
    from phalanx.train.config import RunConfig
    from phalanx.train.planned import PlannedRun

RECIPES = Path(__file__).parents[1] / "recipes"
RUNS = Path("runs")


def add_to(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "train",
        help="train a recipe",
        description="Train a recipe, on ranks that it starts on this host or, under torchrun, mpirun or srun, on theirs.",
        epilog="examples:  phalanx train   phalanx train cifar10 --set data.source=cifar10:DIR --set epochs=5   "
        "torchrun --nproc-per-node 8 -m phalanx train imagenet-resnet50",
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", default="digits", help=f"a file, or {', '.join(recipe_names())}")
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        help="processes to start here (default: as many as cores, if the batch can be divided so)",
    )
    parser.add_argument(
        "--set", metavar="PATH=VALUE", action="append", default=[], dest="settings", help="change the recipe; may be repeated"
    )
    parser.add_argument(
        "--plan", metavar="FILE", type=Path, help="communicate as `phalanx plan --json FILE` found best; --set has the last word"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help=f"for records and checkpoints (default: a new one in {RUNS}/)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out, or begin one if there is none (default: the newest of this recipe)",
    )
    parser.add_argument("--show", action="store_true", help="print the resolved recipe and train nothing")
    parser.set_defaults(run=run)


def recipe_names() -> list[str]:
    """The recipes that come with Phalanx."""
    return sorted(path.stem.replace("_", "-") for path in RECIPES.glob("[a-z]*.py"))


def run(args: argparse.Namespace) -> int:
    """Train on the ranks of a launcher; without one, check what can be checked and start some."""
    from phalanx.train.config import ConfigError
    from phalanx.train.lock import DirectoryInUseError
    from phalanx.train.planned import read_plan

    try:
        launch = discover()
    except LaunchError as error:
        raise UsageError(str(error)) from None
    try:
        plan = read_plan(args.plan) if args.plan else None
        config = resolve(args.recipe, args.settings, plan.settings if plan else None)
        if args.show:
            return show(config)
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
        print(f"phalanx: {error}", file=sys.stderr)
        return 1
    except (ConfigError, UsageError, ScheduleError) as error:
        if launch.rank != 0:  # one line for all of them
            return 2
        raise UsageError(str(error)) from None
    resume = ["--resume"] if args.resume else []
    planned = ["--plan", str(args.plan)] if args.plan else []
    settings = [word for setting in args.settings for word in ("--set", setting)]
    command = ["train", args.recipe, "--ranks", str(ranks), "--out", str(out), *resume, *planned, *settings]
    return start_ranks(ranks, ["-m", "phalanx", *command])  # the report shows it: it has to work when typed


def resolve(recipe: str, settings: list[str], planned: dict[str, str] | None = None) -> RunConfig:
    """The configuration of a recipe, with what a plan and then `--set` change."""
    from phalanx.train.config import override

    texts = dict(planned or {})
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: PATH=VALUE, such as --set epochs=5")
        texts[path.strip()] = text.strip()
    found = load(recipe)
    config = override(found, texts)
    if "rate.warmup" not in texts and 0 < config.epochs <= config.rate.warmup:  # a shorter run warms up for the same share of it
        config = replace(config, rate=replace(config.rate, warmup=config.rate.warmup * config.epochs / found.epochs))
    if "batch" in texts and config.stages and config.batch != config.stages[-1].batch:
        raise UsageError(f"batch={config.batch} has no effect where there are stages: set stages, or --set stages= for none")
    return config


def load(recipe: str) -> RunConfig:
    """The `config` of a recipe by its name or its file."""
    from phalanx.train.config import RunConfig

    named = RECIPES / f"{recipe.replace('-', '_')}.py"
    path = named if recipe in recipe_names() else Path(recipe)
    if not path.is_file():
        raise UsageError(f"{recipe!r} is neither a recipe nor a file; the recipes are {', '.join(recipe_names())}")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: a recipe is a Python file, with one `config = RunConfig(...)`")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # noqa: BLE001  whatever the user's file does wrong
        raise UsageError(f"{path}: {type(error).__name__}: {error}") from None
    config = getattr(module, "config", None)
    if not isinstance(config, RunConfig):
        raise UsageError(f"{path}: a recipe has one `config = RunConfig(...)`, this one has {type(config).__name__}")
    return config


def check_everything(config: RunConfig, ranks: int) -> None:
    """Raise for what would fail on the ranks: better one line here than one from each of them."""
    from phalanx.grad.partners import check_topology
    from phalanx.train.check import check, open_sources

    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: at least 1")
    find_algorithm(config, ranks)
    if config.comm.sync == "gossip" and config.comm.gossip.level != "host":
        try:
            check_topology(config.comm.gossip, ranks, "ranks")  # of this host, the only one
        except ValueError as error:
            raise UsageError(str(error)) from None
    check(config, ranks, *open_sources(config))


def default_ranks(config: RunConfig, cores: int) -> int:
    """As many as cores, or the most below that among which the batches can be divided."""

    def fits(ranks: int) -> bool:
        try:
            return all(stage.split(ranks, config.micro_batch) for stage in config.plan.stages)
        except ValueError:
            return False

    return next((ranks for ranks in range(cores, 0, -1) if fits(ranks)), 1)


def find_algorithm(config: RunConfig, ranks: int) -> Schedule | None:
    """The schedule that the configuration names."""
    if config.comm.algorithm is None:
        return None
    schedule = find_schedule(config.comm.algorithm)
    if schedule.world != ranks or schedule.goal != "sum":
        raise UsageError(f"comm.algorithm={config.comm.algorithm}: not an all-reduce of {ranks} ranks")
    return schedule


def prepare_directory(out: Path | None, config: RunConfig, *, resume: bool) -> Path:
    """Make the directory of a run, a new one by default; to resume, find the one that holds an earlier start of the same run.

    An `out` that holds no run yet gets one in either case: a job that is requeued has one command line for all its starts.
    DirectoryInUseError if another job has it.
    """
    from phalanx.train.config import plain
    from phalanx.train.lock import DirectoryLock
    from phalanx.train.manifest import find_places

    try:
        if out is None:
            out = newest_run(config.name) if resume else new_run(config.name)
        out.mkdir(parents=True, exist_ok=True)
        with DirectoryLock(out):
            if resume and (out / "config.json").exists():
                check_same_run(out, config)
                return out
            if (out / "checkpoints").is_dir() and find_places(out / "checkpoints"):
                raise UsageError(
                    f"{out} has checkpoints, but no config.json that says of which run: --out names another directory"
                    if resume
                    else f"{out} has checkpoints of an earlier run: --resume continues it, --out names another directory"
                )
            write_json(out / "config.json", plain(config))
    except OSError as error:
        raise UsageError(f"--out {out or RUNS}: {error.strerror or error}") from None
    return out


def new_run(name: str) -> Path:
    """Make the first directory of this name that does not exist yet: two jobs that start at the same time get one each."""
    RUNS.mkdir(parents=True, exist_ok=True)
    for path in numbered(name):
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers do not end")


def newest_run(name: str) -> Path:
    """The directory of this name that changed last."""
    taken = list(itertools.takewhile(Path.exists, numbered(name)))
    if not taken:
        raise UsageError(f"nothing to resume: there is no {RUNS / name}; with --out DIR a run begins where there is none")
    return max(taken, key=lambda path: path.stat().st_mtime)


def numbered(name: str) -> Iterator[Path]:
    """runs/NAME, runs/NAME-2, runs/NAME-3, ..."""
    return (RUNS / (f"{name}-{i}" if i > 1 else name) for i in itertools.count(1))


def check_same_run(out: Path, config: RunConfig) -> None:
    """Raise unless the run in `out` is one of this configuration."""
    from phalanx.train.config import identity, plain
    from phalanx.train.entries import compare_plain

    try:
        before = loads((out / "config.json").read_text(encoding="utf-8"))
        odd = compare_plain("config", identity(json.loads(json.dumps(plain(config)))), identity(before))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"nothing to resume in {out}: its config.json is not that of a run; --out names another directory"
        ) from None
    if odd:
        raise UsageError(f"{out} is another run, not to be resumed with other settings: {'; '.join(odd)}")


def show(config: RunConfig) -> int:
    """Print every setting with its value, as `--set` takes it."""
    from phalanx.train.config import paths

    for path, value in paths(config):
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        print(f"{path}={text}")
    return 0


def train_here(args: argparse.Namespace, config: RunConfig, out: Path | None, plan: PlannedRun | None) -> int:
    """Be one rank, or all of them; 1 if the run failed for a reason that has a name."""
    import torch

    from phalanx.comm.create import create_communicator
    from phalanx.data import BadSample, SampleError, SourceError
    from phalanx.train.config import ConfigError
    from phalanx.train.lock import DirectoryInUseError, one_job
    from phalanx.train.manifest import CheckpointError
    from phalanx.train.planned import FILE
    from phalanx.train.trainer import train

    end_with_agent()
    launch = discover()
    if plan:
        plan.check(config, launch.world)
    if "OMP_NUM_THREADS" not in os.environ and launch.world > 1:
        torch.set_num_threads(1)
    try:
        with create_communicator(find_algorithm(config, launch.world), timeout=config.comm.timeout) as comm:
            out = agree_on_directory(out, config, comm, resume=args.resume)
            with one_job(out, comm):  # as train() does: the plan is a record of the run, too
                if plan and comm.rank == 0:
                    write_json(out / FILE, plan.content)
                result = train(config, comm, out=out, resume=args.resume, goes_on_with=resuming_command(args, out, comm.size))
        return 128 + result.signal if result.why == "stopped" else 0
    except ConfigError:
        raise
    except DirectoryInUseError as error:
        if launch.rank == 0:  # all ranks have it
            print(f"phalanx: {error}", file=sys.stderr)
        return 1
    except (SourceError, SampleError, BadSample, CheckpointError) as error:
        print(f"phalanx: rank {launch.rank}: {error}", file=sys.stderr)
        return 1


def resuming_command(args: argparse.Namespace, out: Path, ranks: int) -> str:
    """The command line that continues this run; under a launcher what comes behind the launcher's own words."""
    started_here = AGENT in os.environ or discover().how == "alone"
    words = ["phalanx", "train", args.recipe, *(["--ranks", str(ranks)] if started_here else []), "--resume", "--out", str(out)]
    words += ["--plan", str(args.plan)] if args.plan else []
    return shlex.join([*words, *(word for setting in args.settings for word in ("--set", setting))])


def agree_on_directory(out: Path | None, config: RunConfig, comm: Communicator, *, resume: bool) -> Path:
    """Rank 0 prepares it: a second one would find it there already."""
    from phalanx.train.lock import DirectoryInUseError

    path, problem, in_use = "", "", ""
    if comm.rank == 0:
        try:
            path = str(prepare_directory(out, config, resume=resume))
        except UsageError as error:
            problem = str(error)
        except DirectoryInUseError as error:
            in_use = str(error)
    path, problem, in_use = comm.bcast_obj((path, problem, in_use))
    if problem:
        raise UsageError(problem)
    if in_use:
        raise DirectoryInUseError(in_use)
    return Path(path)
