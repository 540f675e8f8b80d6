"""A docstring in Google's convention as a value, and as Markdown."""

from __future__ import annotations

import doctest
import inspect
import re
import textwrap
from dataclasses import dataclass

SECTIONS = ("Args", "Returns", "Raises", "Yields", "Example")


@dataclass(frozen=True)
class Docstring:
    """The text before the first section, and the text of each section without its indentation."""

    text: str
    sections: dict[str, str]

    @property
    def summary(self) -> str:
        """The first line."""
        return self.text.partition("\n")[0]

    @property
    def examples(self) -> list[doctest.Example]:
        """The doctests of the `Example:` section."""
        return doctest.DocTestParser().get_examples(self.sections.get("Example", ""))


def parse(raw: str | None) -> Docstring:
    """Cut a docstring into its sections."""
    heads = "|".join(SECTIONS)
    text, *rest = re.split(rf"^({heads}):$", inspect.cleandoc(raw or ""), flags=re.MULTILINE)
    sections = {name: textwrap.dedent(body).strip("\n") for name, body in zip(rest[::2], rest[1::2])}
    return Docstring(text.strip(), sections)


def to_markdown(doc: Docstring) -> list[str]:
    """The docstring as paragraphs, lists and a block of code."""
    blocks = [escaped(doc.text)] if doc.text else []
    for name, body in doc.sections.items():
        if name == "Example":
            blocks += [f"**{name}**", f"```pycon\n{body}\n```"]
        elif name in ("Args", "Raises"):
            blocks += [f"**{'Arguments' if name == 'Args' else name}**", "\n".join(_items(body))]
        else:
            blocks.append(f"**{name}**: {_joined(body)}")
    return blocks


def _items(body: str) -> list[str]:
    """`name: text` entries, whose further lines are indented, as a list."""
    entries = re.split(r"^(?=\S)", body, flags=re.MULTILINE)[1:]
    parts = [entry.partition(":") for entry in entries]
    return [f"- `{name}`: {_joined(text)}" for name, _, text in parts]


def _joined(text: str) -> str:
    return escaped(" ".join(text.split()))


def escaped(text: str) -> str:
    """Prose in which `2**k` is a power and not the beginning of bold; spans and indented lines of code stay as they are."""
    lines = []
    for line in text.split("\n"):
        spans = line.split("`")
        spans[::2] = [span.replace("*", "\\*") for span in spans[::2]]
        lines.append(line if line.startswith("    ") else "`".join(spans))
    return "\n".join(lines)
