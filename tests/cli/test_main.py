"""The command itself: help, version, exit codes."""

import subprocess
import sys

import pytest

import phalanx
from phalanx.cli.main import main


def run(*args):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=120)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"phalanx {phalanx.__version__}\n"


@pytest.mark.parametrize("verb", ["show", "verify"])
def test_every_verb_has_help_with_examples(verb, capsys):
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert f"phalanx {verb} torus:" in out
    assert main(["--help"]) == 0
    assert verb in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["show"], ["verify"], ["verify", "ring:2", "ring:3"], ["show", "ring:2", "--fast"]]
)
def test_wrong_usage_exits_with_2(argv, capsys):
    assert main(argv) == 2
    assert "usage: phalanx" in capsys.readouterr().err


def test_the_command_alone_prints_help(capsys):
    assert main([]) == 2
    err = capsys.readouterr().err
    assert "verbs:" in err
    assert "phalanx VERB --help" in err


def test_module_and_exit_code_without_traceback():
    done = run("-m", "phalanx", "verify", "star:4")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_torch_is_not_imported():
    code = "import sys; from phalanx.cli.main import main; main(['verify', 'ring:4']); sys.exit('torch' in sys.modules)"
    assert run("-c", code).returncode == 0


def test_a_reader_that_leaves_early_is_no_traceback():
    command = [sys.executable, "-m", "phalanx", "show", "ring:300", "--lower", "--text"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
