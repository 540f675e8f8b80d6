"""What people and broken programs put where a word, a number, a path or a file is wanted."""

import json
import random

LONG = "9" * 400  # a number that no float holds
WORDS = (
    "", " ", "x", "-1", "0", "1.5", "nan", "inf", "-inf", "1e400", "1e-300", "1e300", LONG, "9" * 5000, "0x10", "1_000", "٣",
    "\x1b[31mred", "a\nb", "\udcff", "é\u202eb", "a" * 300, "/", ".", "..", "/dev/null/x", "nowhere/x",
    "torus:2x", "ring:" + LONG, "1@", "@", "1@x",
)  # fmt: skip
PATHS = ("", ".", "/", "..", "/dev/null/x", "nowhere/x", "a" * 300, "\udcff/x", "\x1b]0;title\x07", "a\nb/x")

DEEP = "[" * 100_000
BINARY = (b"", b"\n", b"\xff\xfe\x00", b"\x00" * 100, b"\x7fELF\x02", b"null", b"[]", b"{}", b'"text"', b"3", b"NaN", b"{", b"[1")

LEAVES = (
    None, True, -1, 0, 1.5, 1e308, -1e308, 1e-320, "x", "", "\x1b[31m\n", "\ud800", "<meta http-equiv=refresh content=0>",
    [], {}, [[]], [None],
    "RAW:Infinity", "RAW:-Infinity", "RAW:NaN", f"RAW:{LONG}", f"RAW:-{LONG}", f"RAW:0.{LONG}", "RAW:1e999",
    "RAW:" + "[" * 500 + "]" * 500,
)  # fmt: skip


def mutants(content, seed, most=60):
    """Texts that differ from `content` (JSON, JSON lines, or lines of words) in one place each; always the same for a seed."""
    chance = random.Random(seed)
    made = []
    try:
        rows = [json.loads(content)]
    except ValueError:
        try:
            rows = [json.loads(line) for line in content.splitlines()]
        except ValueError:
            rows = []
    for number, row in enumerate(rows):
        for path in places(row):
            for leaf in LEAVES:
                lines = [json.dumps(other) for other in rows]
                lines[number] = raw(json.dumps(replaced(row, path, leaf), ensure_ascii=False))
                made.append("\n".join(lines) + "\n")
            made.append("\n".join([*lines[:number], raw(json.dumps(replaced(row, path, ...))), *lines[number + 1 :]]) + "\n")
    if not rows:
        words = content.split(" ")
        odd = ("", "x", "-1", "1" + LONG, '"\x1b[31m"', '"\\u001b[31m\\n"', '"\\ud800"', "1/0", "0:9:0", "[" * 2000)
        these = range(min(len(words), 20))
        made += [" ".join([*words[:place], leaf, *words[place + 1 :]]) for place in these for leaf in odd]
        made += [content.replace("\n", end, 3) for end in ("\r", "\n\n", "\x00", "\u2028")]
    chance.shuffle(made)
    return made[:most]


def places(value, at=()):
    """The path of every value inside of a value, lists by their first two."""
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*at, key))


def replaced(value, path, leaf):
    """`value` with another one at `path`; `...` takes it away."""
    if not path:
        return None if leaf is ... else leaf
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    if leaf is ... and not rest:
        del copy[key]
    else:
        copy[key] = replaced(value[key], rest, leaf)
    return copy


def raw(text):
    """What `json.dumps` does not write: the words behind RAW: without their quotes."""
    head, *others = text.split('"RAW:')
    return head + "".join(part.replace('"', "", 1) for part in others)
