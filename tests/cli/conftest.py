"""For tests of wrong command lines."""

from tests.cli.nonsense import run_directory

__all__ = ["run_directory"]
