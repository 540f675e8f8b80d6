"""Arguments of your functions as text: `--set model.args.width=64` gives a number, `=true` a boolean, `=[1,2]` a list.

    64  1e-3        numbers                 none            None
    true  false     booleans                [0.9, 0.95]     a list; lists may be nested
    relu            text                    "64"  'true'    text that looks like something else

`read_argument` and `write_argument` are inverse to each other. Records hold the values as JSON.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from phalanx.train.setting_text import LARGEST, ConfigError, shorten

WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "null": None}
NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
INFINITE = re.compile(r"[+-]?(inf|infinity|nan)", re.IGNORECASE)
DEPTH = 8  # of lists in lists
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # of an argument


def read_argument(text: str, path: str) -> Any:
    """Parse a text into a value. Errors begin with `path`."""
    try:
        value, rest = _value(text.strip(), 0)
    except ValueError as error:
        raise ConfigError(f"{path}={shorten(text)}: {error}") from None
    if rest.strip():
        raise ConfigError(f"{path}={shorten(text)}: {shorten(rest.strip())!r} follows the end of the value")
    return value


def write_argument(value: Any) -> str:
    """Write `value` as text that `read_argument` reads back."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(write_argument, value))}]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    bare = value and value.strip() == value and not re.search(r"[\[\],'\"\\]", value)
    return value if bare and not _special(value) else json.dumps(value)


def check_arguments(args: Any, path: str) -> None:
    """Raise ValueError unless `args` of a recipe are names with values that records can hold."""
    if not isinstance(args, dict):
        raise ValueError(f"{path} is a {type(args).__name__}: names and values, such as {{'width': 64}}")
    for name, value in args.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"{path}: {shorten(str(name))!r} is not an argument name")
        if not _is_plain(value):
            raise ValueError(
                f"{path}.{name}={shorten(repr(value))}: a finite number, a text, true, false, none, or a list of these"
            )


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, list | tuple):
        return depth < DEPTH and all(_is_plain(item, depth + 1) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool) or (isinstance(value, int) and abs(value) <= LARGEST)


def _special(text: str) -> bool:
    """Whether a text without quotes would be read as something else."""
    return text.lower() in WORDS or bool(NUMBER.fullmatch(text) or INFINITE.fullmatch(text))


def _value(text: str, depth: int) -> tuple[Any, str]:
    """Parse a value at the beginning of a text. Returns it and the rest."""
    if text.startswith("["):
        return _list(text[1:].lstrip(), depth + 1)
    if text[:1] in ("'", '"'):
        return _quoted(text)
    if not depth:  # a text on its own may contain commas and brackets
        return _plain(text), ""
    found = re.match(r"[^,\[\]]*", text)
    word = found[0] if found else ""
    return _plain(word.strip()), text[len(word) :]


def _list(text: str, depth: int) -> tuple[list[Any], str]:
    """Parse a list after its opening bracket. Returns it and the rest."""
    if depth > DEPTH:
        raise ValueError(f"at most {DEPTH} lists in each other")
    values: list[Any] = []
    while not text.startswith("]"):
        if not text:
            raise ValueError("a list ends with ]")
        value, rest = _value(text, depth)
        rest = rest.lstrip()
        if not rest.startswith((",", "]")):
            raise ValueError("values of a list are separated by commas, and a list ends with ]")
        if value == "" and not text.startswith(("'", '"')):
            raise ValueError("a value is missing between two commas")
        values.append(value)
        text = rest[1:].lstrip() if rest.startswith(",") else rest
    return values, text[1:]


def _quoted(text: str) -> tuple[str, str]:
    """Parse a quoted text. Returns it and the rest. Double quotes are JSON's; single quotes are literal."""
    if text[0] == "'":
        inside, end, rest = text[1:].partition("'")
        if not end:
            raise ValueError("the quote is not closed")
        return inside, rest
    try:
        value, at = json.JSONDecoder().raw_decode(text)
    except ValueError:
        raise ValueError("the quote is not closed, or holds a backslash that means nothing") from None
    return value, text[at:]


def _plain(word: str) -> Any:
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    if INFINITE.fullmatch(word):
        raise ValueError("a finite number; put quotes around it if it is a text")
    if not NUMBER.fullmatch(word):
        return word
    digits = word.replace("_", "")
    number: int | float = int(digits) if re.fullmatch(r"[+-]?\d{1,400}", digits, re.ASCII) else float(digits)
    if abs(number) > LARGEST if isinstance(number, int) else not math.isfinite(number):
        raise ValueError(f"a finite number, and a whole one of at most {LARGEST:,}")
    return number
