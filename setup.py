"""The one part of the build that pyproject.toml cannot express: the native core, optional, for this interpreter.

Without a compiler the package installs all the same, and runs on torch.distributed alone; `phalanx.comm.transports.shm` says so.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCES = sorted(path.as_posix() for path in Path("csrc").glob("*.cpp"))
HEADERS = sorted(path.as_posix() for pattern in ("*.hpp", "*.inl") for path in Path("csrc").glob(pattern))

FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",  # Python's own flags ask for debug symbols: ten times the size
    "-fvisibility=hidden",
    "-ffp-contract=off",  # the same bits on every processor: no fused multiply-add where the text has none
    "-fwrapv",  # sums of integers wrap, as torch's do
    "-Wall",
    "-Wno-psabi",  # wide vectors never leave a file
    "-Wno-maybe-uninitialized",  # gcc 12 mistrusts its own AVX-512 intrinsics
]

native = Extension(
    "phalanx._native",
    SOURCES,
    depends=HEADERS,  # rebuilt when they change
    language="c++",
    extra_compile_args=FLAGS,
    optional=True,
)

setup(ext_modules=[native] if sys.platform == "linux" else [])
