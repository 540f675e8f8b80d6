"""The one part of the build that pyproject.toml cannot express: the native core, optional, for this interpreter.

Without a compiler the package installs all the same, and runs on torch.distributed alone; `phalanx.comm.transports.shm` says so.
"""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

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


class FreshBuild(build):
    """Nothing of an earlier build gets into a wheel: neither a core whose compiler has gone, nor a module that was deleted."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib) / "phalanx", ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    """Where the core cannot be built, one that an earlier build left is deleted: it would run beside sources it does not fit."""

    def build_extension(self, ext: Extension) -> None:
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().build_extension(ext)

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            old = (
                Path(self.get_finalized_command("build_py").get_package_dir("phalanx"))
                / Path(self.get_ext_filename(ext.name)).name
            )
            old.unlink(missing_ok=True)
        super().copy_extensions_to_source()


setup(ext_modules=[native] if sys.platform == "linux" else [], cmdclass={"build": FreshBuild, "build_ext": BuildNative})
