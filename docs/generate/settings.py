"""The reference of the settings of `phalanx train --set`, from the configuration's dataclasses."""

from __future__ import annotations

from phalanx.train.config import Setting, describe_settings

GENERATED = "<!-- Generated from the source by `make docs`. Change the configuration in src/phalanx/train, not this page. -->"
INTRODUCTION = """
A recipe is a Python file with one `config = RunConfig(...)`. These are all its settings. Change a value by its path:

```
phalanx train cifar10 --set epochs=5 --set optimizer.momentum=0.95
phalanx train cifar10 --show        # print the resolved recipe and train nothing
```

Defaults are those of `RunConfig`. A recipe may have others.
""".strip()


def page() -> str:
    """One table for the run, and one for each part of it."""
    found = describe_settings()
    parts = list(dict.fromkeys(setting.name.rpartition(".")[0] for setting in found))
    blocks = ["# Settings", GENERATED, INTRODUCTION]
    for part in parts:
        mine = [setting for setting in found if setting.name.rpartition(".")[0] == part]
        blocks += [
            f"## {part or 'The run'}",
            "\n".join(["| Setting | Type | Default | |", "| --- | --- | --- | --- |", *map(_row, mine)]),
        ]
    return "\n\n".join(blocks) + "\n"


def _row(setting: Setting) -> str:
    cells = [f"`{setting.name}`", f"`{setting.type}`", f"`{setting.default}`" if setting.default else "", setting.sentence]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
