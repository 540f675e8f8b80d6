"""Local ranks: their environment, their exit codes, and signals that go on to them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.long import often
from tests.world.programs.herd import clean_environment

from phalanx.comm.start import start_ranks

DEADLINE = 40.0  # seconds
AGENT = "import sys; from phalanx.comm.start import start_ranks; sys.exit(start_ranks(2, ['-c', sys.argv[1]]))"
WAITING = """
import os, pathlib, signal, sys, time
from phalanx.comm.start import end_with_agent
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: sys.exit(pathlib.Path({out!r}, "end-" + os.environ["RANK"]).touch() or 5))
end_with_agent()
pathlib.Path({out!r}, "begin-" + os.environ["RANK"]).touch()
time.sleep(30)
"""


@pytest.fixture
def environment():
    """What the agent changes for its ranks is put back."""
    before = dict(os.environ)
    os.environ.pop("PHALANX_SECRET", None)  # an elastic world of one, in a test before, leaves its own
    yield
    os.environ.clear()
    os.environ.update(before)


def test_ranks_know_who_they_are(tmp_path, environment):
    words = "import os, pathlib; pathlib.Path(os.environ['OUT'], os.environ['RANK'] + ' of ' + os.environ['WORLD_SIZE']).touch()"
    os.environ["OUT"] = str(tmp_path)
    assert start_ranks(3, ["-c", words]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0 of 3", "1 of 3", "2 of 3"]


def test_ranks_of_one_job_have_a_secret_that_no_other_job_has(tmp_path, environment):
    words = (
        "import os, pathlib, sys; assert os.environ['PHALANX_SECRET'] not in pathlib.Path('/proc/self/cmdline').read_text(); "
        "pathlib.Path(os.environ['OUT'], os.environ['JOB'] + os.environ['RANK']).write_text(os.environ['PHALANX_SECRET'])"
    )
    os.environ["OUT"] = str(tmp_path)
    for job in ("a", "b"):
        os.environ["JOB"] = job
        assert start_ranks(2, ["-c", words]) == 0
    first, same, other, _ = (path.read_text() for path in sorted(tmp_path.iterdir()))
    assert first == same != other
    assert len(first) == 64
    assert "PHALANX_SECRET" not in os.environ


@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), 9)", 137), *often(("os._exit(2)", 2))])
def test_the_first_failure_is_the_result_and_nothing_is_said(environment, capfd, end, code):
    words = f"import os, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(30)"
    began = time.monotonic()
    assert start_ranks(2, ["-c", words]) == code
    assert time.monotonic() - began < 20, "the others end with it"
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("warm_python")
def test_ranks_meet_at_a_port_of_the_loopback_device_alone(tmp_path, environment):
    words = (
        "import os, pathlib, phalanx; comm = phalanx.create_communicator(timeout=20); total = comm.allgather_obj(comm.rank); "
        "port = os.environ['MASTER_PORT']; from pathlib import Path; "
        "rows = [line.split()[1] for name in ('tcp', 'tcp6') for line in Path('/proc/net/' + name).read_text().splitlines()[1:] "
        "if line.split()[3] == '0A']; "
        "pathlib.Path(os.environ['OUT'], str(comm.rank)).write_text("
        "str(total) + ' ' + ' '.join(a for a in rows if int(a.split(':')[1], 16) == int(port))); comm.close()"
    )
    os.environ["OUT"] = str(tmp_path)
    assert start_ranks(2, ["-c", words]) == 0
    assert (tmp_path / "1").read_text().startswith("[0, 1] 0100007F:")  # 127.0.0.1, and nothing else
    assert len((tmp_path / "1").read_text().split()) == 3


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_hear_of_the_end_of_their_agent(tmp_path, sent):
    """Asked to end, it asks them; killed, it cannot, and they hear of it all the same."""
    words = WAITING.format(out=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", AGENT, words], env=clean_environment()) as agent:
        try:
            _wait_for(tmp_path / "begin-0", tmp_path / "begin-1")
            agent.send_signal(sent)
            assert agent.wait(DEADLINE) == (-sent if sent == signal.SIGKILL else 128 + sent)
            _wait_for(tmp_path / "end-0", tmp_path / "end-1")
        finally:
            agent.kill()


def _wait_for(*paths: Path) -> None:
    end = time.monotonic() + DEADLINE
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end
        time.sleep(0.02)
