"""The native core under ThreadSanitizer and under AddressSanitizer with UBSan (stress.cpp), and mutants that must fail.

They compile the core twice and take a minute, so they run where PHALANX_TEST_SANITIZERS=1 asks for them, as CI does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    os.environ.get("PHALANX_TEST_SANITIZERS") != "1", reason="they take a minute: PHALANX_TEST_SANITIZERS=1 runs them"
)

ROOT = Path(__file__).parents[2]
CORE = sorted(path for path in (ROOT / "csrc").glob("*.cpp") if not path.name.startswith(("module", "python")))
SOURCES = [*CORE, Path(__file__).with_name("stress.cpp")]
FLAGS = ["-std=c++17", "-O1", "-g", "-fwrapv", "-ffp-contract=off", "-pthread", "-w", f"-I{ROOT / 'csrc'}"]
SANITIZERS = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
DEADLINE = 120.0


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=DEADLINE, check=False, env=env)


class Compiler:
    """Objects per sanitizer, made once; `link` makes a program of them, with one source replaced if asked to."""

    def __init__(self, directory: Path, sanitizer: str) -> None:
        self.directory, self.flags = directory, [*FLAGS, *SANITIZERS[sanitizer]]
        found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if found is None:
            pytest.skip("no C++ compiler")
        self.command = found
        probe = directory / "probe.cpp"
        probe.write_text("int main() { return 0; }\n")
        built = run(found, *self.flags, probe, "-o", directory / "probe")
        if built.returncode or run(directory / "probe").returncode:
            pytest.skip(f"the {sanitizer} sanitizer does not work here: {built.stderr.strip()[:200]}")
        with ThreadPoolExecutor(2) as pool:
            self.objects = dict(zip(SOURCES, pool.map(self.compile, SOURCES)))

    def compile(self, source: Path) -> Path:
        made = self.directory / f"{source.stem}.o"
        built = run(self.command, *self.flags, "-c", source, "-o", made)
        assert built.returncode == 0, built.stderr
        return made

    def link(self, name: str, instead: dict[Path, Path] | None = None) -> Path:
        program = self.directory / name
        changed = {source: self.compile(other) for source, other in (instead or {}).items()}
        objects = (self.objects | changed).values()
        built = run(self.command, *self.flags, *objects, "-o", program)
        assert built.returncode == 0, built.stderr
        return program


@pytest.fixture(scope="module")
def threaded(tmp_path_factory) -> Compiler:
    return Compiler(tmp_path_factory.mktemp("tsan"), "thread")


@pytest.fixture(scope="module")
def addressed(tmp_path_factory) -> Compiler:
    return Compiler(tmp_path_factory.mktemp("asan"), "address")


def test_threads_have_no_races(threaded):
    program = threaded.link("stress")
    for ranks, operations, seed in ((2, 400, 1), (3, 400, 2), (5, 200, 3)):
        ended = run(program, "threads", str(ranks), str(operations), str(seed))
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr[:5000]


@pytest.mark.parametrize(
    ("source", "text", "instead", "found"),
    [
        ("team.cpp", "memory_order_acq_rel", "memory_order_relaxed", "data race"),
        ("stage.cpp", "(stage_steps_ + steps)", "(stage_steps_ + steps + 1)", "data race"),  # into a third that others still read
        ("update.cpp", "tensor.found != used[t]", "false", "wrong parameter"),  # LARS by a norm that is no longer true
    ],
    ids=["without_ordering", "a_third_too_early", "an_old_norm"],
)
def test_a_mutant_is_caught(threaded, source, text, instead, found):
    original = ROOT / "csrc" / source
    mutant = threaded.directory / f"mutant_{source}"
    assert text in original.read_text()
    mutant.write_text(original.read_text().replace(text, instead))
    ended = run(threaded.link("mutant", {original: mutant}), "threads", "3", "1000", "1")
    assert found in ended.stderr


def test_processes_touch_only_their_memory(addressed):
    program = addressed.link("stress")
    for ranks, operations, seed in ((1, 200, 1), (2, 400, 2), (4, 400, 3)):  # odd seeds: names in /dev/shm
        ended = run(program, "processes", str(ranks), str(operations), str(seed))
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr[:5000]
