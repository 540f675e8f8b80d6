"""Make text safe to print: text from a file must not move the cursor, rename the window or hide a line."""

from __future__ import annotations

import re

# C0 except tab and newline, DEL, C1; marks that reorder text or end a line; lone surrogates, which cannot be encoded
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE = re.compile("[\t\n]")


def printable(text: str) -> str:
    r"""Write out control characters, such as `\x1b`. Tabs and newlines stay."""
    return _CONTROLS.sub(_written_out, text)


def one_line(text: str) -> str:
    r"""Like `printable`, but also write out newlines and tabs, so that a name cannot add lines to a table or an error."""
    return _LINE.sub(_written_out, printable(text))


def _written_out(found: re.Match[str]) -> str:
    return repr(found.group())[1:-1]
