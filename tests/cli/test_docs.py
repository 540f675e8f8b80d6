"""The documentation is true: what commands print, Python that runs, links that lead somewhere, pictures that are up to date."""

from __future__ import annotations

import os
import re
import runpy
import textwrap
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN = sorted(DOCS.glob("*.md"))
PAGES = [page for page in SHOWN if not page.is_symlink()]  # the others are files of the root that the site shows, too
# pages whose Python blocks run one after the other, in one namespace and a world of one
RUN_THROUGH = ["tutorial.md", "faq.md"]


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def console_blocks(text: str) -> list[tuple[str, str]]:
    """The arguments of every `phalanx` in a ```console fence, and what it prints."""
    return re.findall(r"^```console\n\$ phalanx (.*?)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[str]:
    """The code of all ```python fences, also of those in lists."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in found]


# ---- schedules.md ------------------------------------------------------------------------------------------------------------

CONSOLE = console_blocks(read("schedules.md"))
ELSEWHERE = "verify torus:64x64"  # takes seconds, and runs in test_verify.py anyway
HERE = [block for block in CONSOLE if block[0] != ELSEWHERE]
PYTHON = python_blocks(read("schedules.md"))


def without_seconds(text):
    return re.sub(r"; \d+\.\d\d s\n", "; s\n", text)


def test_there_is_something_to_check():
    assert len(CONSOLE) >= 5
    assert len(PYTHON) >= 3


@pytest.mark.parametrize(("command", "printed"), HERE, ids=[command for command, _ in HERE])
def test_the_pictures_are_true(command, printed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(command.split()) == 0
    assert without_seconds(capsys.readouterr().out) == without_seconds(printed)


@pytest.mark.parametrize("code", PYTHON)
def test_the_python_runs(code):
    exec(compile(code, "schedules.md", "exec"), {})


# ---- messages that pages explain ---------------------------------------------------------------------------------------------


def messages():
    """What launching.md explains, each message as the longest part that no number or name interrupts."""
    section = read("launching.md").partition("## What goes wrong")[2].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| ")]
    for message in (quoted for cell in cells for quoted in cell.split("`")[1::2]):
        longest = max(re.split(r"\d+|\.\.\.|host0:?", message), key=len).strip(" :,")
        if len(longest.split()) > 1:
            yield longest


def test_the_messages_that_a_page_explains_exist():
    sources = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "src" / "phalanx").rglob("*.py"))]
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    explained = list(messages())
    assert len(explained) > 8
    assert [words for words in explained if words not in joined] == []


# ---- the other pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", RUN_THROUGH)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(read(page))
    assert len(blocks) >= 6
    names: dict = {}
    for number, code in enumerate(blocks):
        exec(compile(code, f"{page}, block {number}", "exec"), names)
    names["comm"].close()


@pytest.mark.usefixtures("warm_python")
def test_the_network_of_the_tutorial_trains_and_resumes_on_two_ranks(tmp_path, monkeypatch, capfd):
    """As a reader would: the block is my_net.py, the commands are those below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (code,) = [block for block in python_blocks(read("tutorial.md")) if "config = RunConfig(" in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    (tmp_path / "my_net.py").write_text(code)
    train = ["train", "my_net.py", "--ranks", "2", "--out", "run"]
    for command in (train, [*train, "--resume"], ["report", "run"], ["export", "run", "model.pt"]):
        assert f"phalanx {' '.join(command)}" in read("tutorial.md")
    assert main([*train, "--set", "target=0.5"]) == 0  # ends early, so that there is something left to resume
    assert "target reached: test accuracy" in capfd.readouterr().out
    assert main([*train, "--resume"]) == 0
    out = capfd.readouterr().out
    assert "resumed after step" in out
    found = re.search(r"done: test accuracy (\d\.\d+) after 8 epochs, 248 steps", out)
    assert found, out
    assert float(found[1]) > 0.95
    assert main(["report", "run"]) == 0
    assert "my_net:make_model" in (tmp_path / "run" / "report.html").read_text()
    assert main(["export", "run", "model.pt"]) == 0
    weights = torch.load("model.pt", weights_only=True)
    assert weights["first.weight"].shape == (64, 2)


def anchors(page: Path) -> set[str]:
    """Of all headings, as the site and GitHub make them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert page.parent != DOCS or DOCS in Path(os.path.normpath(target)).parents, f"{page.name}: {link} is outside the site"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}: the headings are {sorted(anchors(target))}"


def test_the_way_through_the_code_leads_to_files_that_exist():
    way = (
        (ROOT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .partition("## The way through the code")[2]
        .partition("## Rooms")[0]
    )
    place, named = ROOT, []
    for line in re.findall(r"^    (.*)$", way, re.MULTILINE):
        if found := re.match(r"((?:src|csrc|tests)[\w/]*/)(?= )", line):
            place = ROOT / found[1]
        named += [place / name for name in re.findall(r"(?<![\w/.*])([a-z_]+\.(?:py|cpp)|[a-z]+/)(?= |,|:|;|$)", line[24:])]
    steps = re.findall(r"`([a-z]+/[a-z_]+)`", way)
    named += [ROOT / "src" / "phalanx" / f"{step}.py" for step in steps]
    assert len(named) > 40
    assert [path for path in named if not path.exists()] == []


def test_every_page_is_in_the_navigation_once():
    listed = re.findall(r"\"([\w-]+\.md)\"", (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    assert sorted(listed) == [page.name for page in SHOWN]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda path: path.name)
def test_public_names_that_are_mentioned_exist(page):
    """`phalanx.name` in prose or code; the modules inside the package aside."""
    for name in set(re.findall(r"(?<![\w-])phalanx\.([A-Za-z_]\w*)", page.read_text(encoding="utf-8"))):
        assert hasattr(phalanx, name) or (ROOT / "src" / "phalanx" / name).is_dir(), f"{page.name}: phalanx.{name}"


def test_the_pictures_are_those_of_the_programs(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "images"))
    programs = sorted((DOCS / "images").glob("draw*.py"))
    drawn = {name: svg for program in programs for name, svg in runpy.run_path(str(program))["pictures"]().items()}
    assert set(drawn) == {path.stem for path in (DOCS / "images").glob("*.svg")}
    for name, svg in drawn.items():
        assert svg == (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8"), (
            f"{name}.svg: run the programs in docs/images"
        )


@pytest.mark.parametrize("picture", sorted((DOCS / "images").glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_has_a_card_behind_it(picture):
    """A picture in a page does not know whether the page is dark: its ink needs a ground of its own."""
    assert re.search(r'rx="10" fill="(#fbfbfd|var\(--card\))"', picture.read_text(encoding="utf-8"))


def test_no_page_asks_for_the_network():
    """Pictures and styles are our own; links to papers are for people."""
    for page in PAGES:
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(script|img|link)\b", page.read_text(encoding="utf-8")), page.name
    assert "http" not in (DOCS / "site.css").read_text(encoding="utf-8")
    assert os.path.getsize(DOCS / "images" / "torus.svg") < 100_000


def test_the_readme_takes_five_minutes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1000
    results = text.partition("## Results")[2].partition("\n## ")[0]
    assert results.count("\n- ") <= 8
    assert results.count("![") == 1
    assert "**Status:**" in text.partition("\n## ")[0]
