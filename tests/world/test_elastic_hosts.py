"""Jobs of several agents, as on several hosts: every agent starts with the same command, and any of them may die."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.long import only_long
from tests.world.test_elastic import PROGRAM, Job, check_exact, epochs_of

DEADLINE = 90.0

pytestmark = pytest.mark.usefixtures("warm_python")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Hosts(Job):
    """Agents that meet on the loopback device. `process` is the first of them, which holds the meeting point."""

    def __init__(
        self,
        directory: Path,
        hosts: int,
        ranks: int,
        *options: str,
        wait: float = 30.0,
        replace: int = 0,
        by_hand: bool = False,
        script: tuple[str, ...] = (),
        quorum: str = "majority",
        apart: bool = False,
    ) -> None:
        """`by_hand`: the command line says where they meet; otherwise the variables of a launcher do. `script`: what they run.

        `apart`: the first agent is one more, and only holds the meeting point.
        """
        self.directory, self.dead = directory, set[int]()
        self.follow = _follow(directory)
        self.log = directory / "log"
        training = (str(PROGRAM), str(directory), "epochs=100000", "pause=0.01", f"stop_file={directory / 'stop'}", *options)
        self.script = script or training
        port = free_port()
        self._command = ["run", "--wait", str(wait), "--ranks", str(ranks), "--replace", str(replace), "--quorum", quorum]
        self.env = os.environ | {"OMP_NUM_THREADS": "1", "PHALANX_SECRET": secrets.token_hex(16)}
        if by_hand:
            self._command += ["--hosts", str(hosts), "--meet", f"127.0.0.1:{port}"]
        else:
            self.env |= {"WORLD_SIZE": str(hosts + apart), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if apart:
            self._command += ["--hosts", str(hosts)]
        self._apart = apart
        self.agents: list[subprocess.Popen[bytes]] = []
        for number in range(hosts + apart):
            self.start(number)
            if by_hand and number == 0:
                time.sleep(0.5)  # so that the first one opens the meeting point
        self.process = self.agents[0]

    def start(self, number: int, **env: str) -> subprocess.Popen[bytes]:
        without = ["--ranks", "0"] if self._apart and number == 0 else []
        command = [sys.executable, "-m", "phalanx", *self._command, *without, *self.script]
        launcher = {} if "--meet" in command else {"RANK": str(number)}
        with self.log.open("ab") as log:
            agent = subprocess.Popen(command, stdout=log, stderr=log, env=self.env | launcher | env)
        self.agents.append(agent)
        return agent

    def members_of(self, agent: subprocess.Popen[bytes]) -> set[int]:
        return {member for member, pid in self.pids.items() if _parent(pid) == agent.pid}

    def lose(self, agent: subprocess.Popen[bytes]) -> set[int]:
        """The whole host is gone: the agent and all its ranks at once. Returns its members."""
        members = self.members_of(agent)
        pids = [agent.pid, *(self.pids[member] for member in members)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        agent.wait()
        self.dead |= members
        return members

    def steps_by(self, members: set[int], after: float) -> None:
        """Until these members alone have made a step together."""
        self.until(
            lambda: any(
                row["kind"] == "step" and row["at"] > after and set(row["contributors"]) == members for row in self.follow.look()
            )
        )

    def finish(self) -> list[int]:
        """Let the job come to its end; the exit codes of all agents that are left."""
        left = [agent for agent in self.agents if agent.poll() is None]
        (self.directory / "stop").touch()
        return [agent.wait(DEADLINE) for agent in left]


def _follow(directory: Path):
    from elastic_kills import Follow

    return Follow(directory)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


@pytest.fixture
def hosts(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(*arguments, **options) -> Hosts:
            job = Hosts(tmp_path, *arguments, **options)
            stack.callback(end, job)
            return job

        yield start


def end(job: Hosts) -> None:
    for agent in job.agents:
        if agent.poll() is None:
            agent.terminate()
    for agent in job.agents:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(35)
        agent.kill()
        agent.wait()
    for pid in job.pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_ranks_of_any_host_die_and_are_replaced(hosts):
    job = hosts(2, 2, replace=1, by_hand=True)
    job.until(lambda: len(job.pids) == 4)
    job.wait_for_step(4, 3)
    assert job.members_of(job.agents[0]) == {0, 1}
    for victim in (0, 3):  # one rank of each host, rank 0 first
        job.signal(victim)
        job.until(lambda: len(job.pids) == 4)
    at = time.time()
    job.steps_by(set(job.pids), at)
    assert job.finish() == [0, 0], job.words
    assert job.words.count("was killed by signal 9") == 2
    check_exact(job, epochs_of(job))


def test_a_host_dies_and_another_one_takes_its_place(hosts):
    job = hosts(2, 2)
    job.until(lambda: len(job.pids) == 4)
    job.wait_for_step(4, 3)
    lost = job.lose(job.agents[1])
    assert len(lost) == 2
    at = time.time()
    survivors = set(job.pids)
    job.steps_by(survivors, at)
    job.until(lambda: "which gave no sign of life" in job.words)
    job.start(1)  # the same command
    job.until(lambda: len(job.pids) == 4)
    job.steps_by(set(job.pids), time.time())
    assert job.finish() == [0, 0], job.words
    check_exact(job, epochs_of(job))


def test_a_minority_with_the_meeting_point_waits_for_more(hosts):
    """Two of three hosts fall silent at once. The third pauses, and trains again when one more has come."""
    job = hosts(3, 1)
    job.until(lambda: len(job.pids) == 3)
    job.wait_for_step(3, 3)
    for agent in job.agents[1:]:
        job.lose(agent)
    job.until(lambda: "training pauses until 1 more have come" in job.words)
    job.until(lambda: "1 rank after" in job.words or "; 1 rank" in job.words)
    time.sleep(0.5)  # it may finish the step that was under way
    last = max(row["step"] for row in job.follow.look() if row["kind"] == "step")
    time.sleep(1.0)
    assert max(row["step"] for row in job.follow.look() if row["kind"] == "step") == last, job.words
    job.start(1)  # the same command
    job.until(lambda: len(job.pids) == 2)
    job.steps_by(set(job.pids), time.time())
    assert "training continues, with 2 ranks" in job.words
    assert job.finish() == [0, 0], job.words
    check_exact(job, epochs_of(job))


@pytest.mark.parametrize(("quorum", "code"), [("majority", 74), ("none", 0)])
def test_what_happens_when_the_majority_does_not_come_back(hosts, quorum, code):
    job = hosts(3, 1, wait=1.0, quorum=quorum)
    job.until(lambda: len(job.pids) == 3)
    job.wait_for_step(3, 3)
    for agent in job.agents[1:]:
        job.lose(agent)
    if code:
        assert job.process.wait(DEADLINE) == code, job.words
        assert "too few ranks have come back within 1 s" in job.words
        assert "--quorum none" in job.words
    else:
        job.steps_by(set(job.pids), time.time())
        assert job.finish() == [code], job.words
        assert "pauses" not in job.words


@pytest.mark.parametrize(("wait", "code"), [(30.0, 0), (1.0, 74)], ids=["they come back", "they do not"])
def test_all_hosts_but_the_meeting_point_are_lost(hosts, wait, code):
    job = hosts(2, 1, wait=wait, apart=True)
    job.until(lambda: len(job.pids) == 2)
    job.wait_for_step(2, 3)
    lost = {member: job.pids[member] for agent in job.agents[1:] for member in job.members_of(agent)}
    for agent in job.agents[1:]:
        job.lose(agent)
    job.until(lambda: "no rank is left: " in job.words)
    if code:
        assert job.process.wait(DEADLINE) == code, job.words
        assert "0 of 2 hosts have come within 1 s" in job.words
    else:
        at = time.time()
        job.dead.clear()  # the new ranks may have numbers of lost ones
        for number in (1, 2):
            job.start(number)
        # at step 0: this script has no checkpoint
        job.until(lambda: sum(row["kind"] == "step" and row["at"] > at and row["step"] == 2 for row in job.follow.look()) == 2)
        started = {row["pid"] for row in job.follow.look() if row["kind"] == "start" and row["at"] > at}
        assert len(started) == 2
        assert not started & set(lost.values())
        assert job.finish() == [0, 0, 0], job.words


def test_without_the_meeting_point_all_stop(hosts):
    job = hosts(2, 1, wait=1.0)
    job.until(lambda: len(job.pids) == 2)
    job.wait_for_step(2, 3)
    job.lose(job.agents[0])
    assert job.agents[1].wait(DEADLINE) == 69, job.words
    assert "CommunicationError" in job.words
    assert "the agent that holds its meeting point was lost" in job.words
    last = max(row["at"] for row in job.follow.look())
    assert last < time.time() - 0.5, "the other host must not train alone"


def test_when_the_meeting_point_comes_back_the_others_begin_again(hosts):
    job = hosts(2, 1)
    job.until(lambda: len(job.pids) == 2)
    job.wait_for_step(2, 3)
    job.lose(job.agents[0])
    job.process = job.start(0)
    job.until(lambda: "returns to" in job.words)
    at = time.time()
    # at step 0: this script has no checkpoint
    job.until(lambda: sum(row["kind"] == "step" and row["at"] > at and row["step"] == 2 for row in job.follow.look()) == 2)
    assert job.finish() == [0, 0], job.words


def test_signals(hosts):
    job = hosts(2, 1)
    job.until(lambda: len(job.pids) == 2)
    job.wait_for_step(2, 3)
    follower = job.agents[1]
    mine = job.members_of(follower)
    follower.terminate()
    assert follower.wait(DEADLINE) == 143, job.words
    job.dead |= mine
    job.steps_by(set(job.pids), time.time())  # the other host continues
    replacement = job.start(1)
    job.until(lambda: len(job.pids) == 2)
    job.steps_by(set(job.pids), time.time())
    job.process.terminate()  # it holds the meeting point: its signal is for all
    assert [job.process.wait(DEADLINE), replacement.wait(DEADLINE)] == [143, 143], job.words


def test_another_secret_is_refused(hosts):
    job = hosts(2, 1)
    stranger = job.start(1, PHALANX_SECRET=secrets.token_hex(16))
    assert stranger.wait(DEADLINE) == 2, job.words
    assert "is no job with this PHALANX_SECRET" in job.words
    job.until(lambda: len(job.pids) == 2)
    job.wait_for_step(2, 3)
    assert job.finish() == [0, 0], job.words


@only_long
def test_a_run_that_lost_its_meeting_point_continues_from_its_checkpoint(hosts, tmp_path):
    out = tmp_path / "run"
    settings = [word for pair in ("comm.elastic=true", "epochs=12", "data.workers=0") for word in ("--set", pair)]
    job = hosts(2, 1, script=("-m", "phalanx", "train", "digits", *settings, "--out", str(out), "--resume"))

    def rows(kind: str) -> list[dict]:
        path = out / "metrics.jsonl"
        lines = path.read_text().split("\n") if path.exists() else []
        return [row for row in (json.loads(line) for line in lines if line.endswith("}")) if row.get("kind") == kind]

    job.until(lambda: any(re.fullmatch(r"step-\d+", path.name) for path in out.glob("checkpoints/*")))
    children = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _parent(int(p.name)) == job.agents[0].pid]
    for pid in (job.agents[0].pid, *children):
        os.kill(pid, signal.SIGKILL)
    job.agents[0].wait()
    job.process = job.start(0)
    assert [job.process.wait(DEADLINE), job.agents[1].wait(DEADLINE)] == [0, 0], job.words
    assert "returns to" in job.words
    assert len(rows("end")) == 1, job.words
    assert rows("start")[-1]["step"] > 0, "it continues, and does not begin again"
