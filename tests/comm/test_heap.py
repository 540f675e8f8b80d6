"""Freed memory stays with the process: told to the C library, unless the user has told it something else."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("warm_python")

PROGRAM = """
import ctypes, resource, sys
from phalanx.comm.heap import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
SIZE, COUNT = 16 << 20, 6  # gradients, freed together: more than glibc keeps by itself

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        blocks = [libc.malloc(ctypes.c_size_t(SIZE)) for _ in range(COUNT)]
        for block in blocks:
            libc.memset(ctypes.c_void_p(block), 1, ctypes.c_size_t(SIZE))
        for block in reversed(blocks):
            libc.free(ctypes.c_void_p(block))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if "keep" in sys.argv:
    print(keep_freed_memory())
faults()
print(faults())
"""


def run(*argv, **env):
    command = [sys.executable, "-c", PROGRAM, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env | {"OMP_NUM_THREADS": "1"})
    return done.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other habits")
def test_memory_that_was_freed_is_not_faulted_in_again():
    (without,) = run()
    said, kept = run("keep")
    assert said == "True"
    assert int(without) > 10_000  # the control
    assert int(kept) < 200


def test_who_has_set_the_allocator_keeps_it():
    assert run("keep", MALLOC_TRIM_THRESHOLD_="1000000")[0] == "False"
