"""Freed memory stays with the process: told to the C library, unless the user has told it something else."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from phalanx.grad.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        del_me = [torch.ones(4 << 20) for _ in range(6)]  # 16 MiB each, as gradients are made and freed
        del del_me
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
if "keep" in sys.argv:
    print(keep_freed_memory())
faults()
print(faults())
"""


def run(*argv, **env):
    command = [sys.executable, "-c", PROGRAM, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env | {"OMP_NUM_THREADS": "1"})
    return done.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other habits")
def test_memory_that_was_freed_is_not_faulted_in_again():
    (without,) = run()
    said, kept = run("keep")
    assert said == "True"
    assert int(without) > 10_000  # the control
    assert int(kept) < 1_000


def test_who_has_set_the_allocator_keeps_it():
    assert run("keep", MALLOC_TRIM_THRESHOLD_="1000000")[0] == "False"
