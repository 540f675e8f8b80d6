"""The reference of the command line, from the parser that `phalanx` uses."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from phalanx.cli.main import build_parser

GENERATED = "<!-- Generated from the source by `make docs`. Change the parser in src/phalanx/cli, not this page. -->"


def page() -> str:
    """Every verb with its arguments, options and examples."""
    parser = build_parser()
    blocks = ["# Command line", GENERATED, parser.description or "", _prose(parser.epilog)]
    rows = [f"| [`{verb.prog}`](#{_anchor(verb.prog)}) | {_cell(said)} |" for verb, said in _verbs(parser)]
    blocks += ["\n".join(["| Command | |", "| --- | --- |", *rows])]
    for verb, _ in _verbs(parser):
        blocks += _verb(verb)
    return "\n\n".join(block for block in blocks if block) + "\n"


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """The parsers below `parser`, depth first, each with the line that lists it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, below in action.choices.items():
                yield below, said.get(name, "")
                yield from _verbs(below)


def _verb(parser: argparse.ArgumentParser) -> list[str]:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)]
    usage = " ".join([parser.prog, *map(_usage, actions)])
    if any(isinstance(action, argparse._SubParsersAction) for action in parser._actions):
        usage = f"{parser.prog} {{{','.join(below.prog.rpartition(' ')[2] for below, _ in _verbs(parser))}}} ..."
    blocks = [f"## {parser.prog}", f"```\n{usage}\n```", _prose(parser.description)]
    if actions:
        blocks.append("\n".join(["| Argument | |", "| --- | --- |", *map(_row, actions)]))
    examples = _examples(parser.epilog)
    if parser.prog.count(" ") > 1:  # the epilog of the verb above
        examples = [line for line in examples if parser.prog in line]
    if examples:
        blocks += ["**Examples**", "```\n" + "\n".join(examples) + "\n```"]
    elif parser.epilog:
        blocks.append(_prose(parser.epilog))
    return blocks


def _usage(action: argparse.Action) -> str:
    if not action.option_strings:
        name = str(action.metavar or action.dest)
        return f"[{name}]" if action.nargs in ("?", "*") else f"{name} ..." if action.nargs == "+" else name
    word = " ".join([action.option_strings[-1], _value(action)]).strip()
    return word if action.required else f"[{word}]"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    name = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    name = " ".join(name) if isinstance(name, tuple) else str(name)
    return f"{name} ..." if action.nargs in ("+", "*") else name


def _row(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    said = (action.help or "") % {**vars(action), "prog": "phalanx"}
    label = f"{name} {_value(action)}".strip() if action.option_strings else name
    return f"| `{_cell(label)}` | {_cell(said)} |"


def _examples(epilog: str | None) -> list[str]:
    """The lines below `examples:`."""
    found = re.match(r"examples?:\n(.*)", epilog or "", re.DOTALL | re.IGNORECASE)
    return [line.removeprefix("  ") for line in found[1].rstrip().split("\n")] if found else []


def _prose(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|").replace("<", "&lt;")


def _anchor(prog: str) -> str:
    return prog.replace(" ", "-")
