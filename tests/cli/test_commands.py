"""Command lines in README, docs and examples: the parsers of torchrun and phalanx take them, and hosts that must meet can."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from phalanx.cli.main import VERBS

ROOT = Path(__file__).parents[2]
FILES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    # reference-cli.md is made of the parsers themselves; links lead to files of other folders
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "reference-cli.md" and not path.is_symlink()),
    *sorted(path for path in (ROOT / "examples").rglob("*") if path.is_file() and "__pycache__" not in path.parts),
    *sorted((ROOT / "src" / "phalanx" / "cli").glob("*.py")),
]


def commands(text: str) -> list[str]:
    """Every `torchrun --options ... script ...`, without what a comment or a second column says after it."""
    joined = re.sub(r"\\+\n\s*", "", text)
    found = re.findall(r"\btorchrun (-[^`\"\n#]*)", joined)
    whole = [own for own in found if re.search(r"\s(-m\s|FILE|\S+\.py)", own) and "..." not in own]
    return [re.split(r"\s{3,}", own.strip())[0] for own in whole]


def meets(command: str) -> bool:
    """Whether the hosts of this command find each other: by a rendezvous, or because each is told its number and the first."""
    args = get_args_parser().parse_args(shlex.split(command))
    if args.standalone or int(str(args.nnodes).split(":")[-1]) == 1:
        return True
    if args.rdzv_backend != "static":
        return bool(args.rdzv_endpoint)
    return "--node-rank" in command and "--master-addr" in command


COMMANDS = [pytest.param(own, id=f"{path.relative_to(ROOT)}: {own}") for path in FILES for own in commands(path.read_text())]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_hosts_of_a_torchrun_command_meet(command: str) -> None:
    assert meets(command)


def test_the_judge_can_say_no() -> None:
    assert len(COMMANDS) >= 10
    assert sum("--nnodes" in str(own.values[0]) for own in COMMANDS) >= 4
    assert not meets("--nnodes 8 --nproc-per-node 4 --rdzv-endpoint host0:29400 train.py")
    assert not meets("--nnodes 2 --rdzv-backend c10d train.py")
    assert not meets("--nnodes 2 --master-addr host0 train.py")
    assert meets("--nnodes 2 --node-rank 1 --master-addr host0 --master-port 1 train.py")


# ---- phalanx -------------------------------------------------------------------------------------------------------------------


def own_commands(text: str) -> list[str]:
    """Every `phalanx VERB ...` of a line of code or in backticks, without what comes after it."""
    joined = re.sub(r"\\+\n\s*", "", text)
    verbs = "|".join(path for verb in VERBS for path in [verb.__name__.rpartition(".")[2].replace("_", "-")])
    found = re.findall(rf"(?:^(?:    |\$ )+|^|`|\s-m(?: --)? )phalanx ((?:{verbs})\b[^`\n#|>]*)", joined, re.MULTILINE)
    whole = [re.split(r"\s{3,}", own.strip())[0] for own in found if "..." not in own]
    return [own for own in whole if " " in own and "--help" not in own]  # a verb alone is its name


def parse(command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="phalanx", exit_on_error=False)
    verbs = parser.add_subparsers(required=True)
    for verb in VERBS:
        verb.add_to(verbs)
    return parser.parse_args(shlex.split(command))


OWN = [
    pytest.param(own, id=f"{path.relative_to(ROOT)}: {own}")
    for path in FILES
    if path.suffix in (".md", ".sh", ".sbatch", ".yaml")
    for own in own_commands(path.read_text())
]


@pytest.mark.parametrize("command", OWN)
def test_a_phalanx_command_is_one(command: str) -> None:
    parse(command)


def test_the_other_judge_can_say_no() -> None:
    assert len(OWN) >= 20
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parse("train --epochs 3")
