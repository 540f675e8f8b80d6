"""A reader follows a gradient from backward() to the updated weight in few files: the list in CONTRIBUTING.md."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES, LINES = 10, 1500  # at most
ROUNDED = 100  # the text gives a round number of lines


def listed() -> tuple[list[Path], int]:
    """The files of the path in reading order, and the number of lines that the text claims."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split("### The path of one gradient\n")[1].split("\n#")[0]
    names = re.findall(r"^\d+\. `([^`]+)`", section, flags=re.MULTILINE)
    [claimed] = re.findall(r"about ([\d,]+) lines", section)
    return [ROOT / "src" / "phalanx" / name for name in names], int(claimed.replace(",", ""))


def test_a_gradient_is_followed_in_few_files_and_lines():
    files, claimed = listed()
    assert files[0].name == "hooks.py", "the list begins where autograd calls"
    assert len(set(files)) == len(files) <= FILES
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert lines <= LINES
    assert abs(lines - claimed) <= ROUNDED, f"CONTRIBUTING.md says about {claimed:,} lines, but the files have {lines:,}"
