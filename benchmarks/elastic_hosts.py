"""An elastic job on hosts that are network namespaces, and cuts in the network between them. Needs root.

with Lab(hosts=4, ranks_per_host=1).up(Bridge) as net, fleet(net, directory) as job:
    cuts = Cuts(net)
    cuts.cut([(3, 0), (3, 1), (3, 2)])     # what host 3 sends does not arrive, and nobody is told
    cuts.heal()
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_kills import Follow, print_stacks
from lab import NETNS, Net, call

PROGRAM = Path(__file__).parent / "elastic_training.py"
MEET = 29400
Way = tuple[int, int]  # from host, to host


class Cuts:
    """Packets from one host to another vanish in a queue without an exit: as if a switch had lost them."""

    def __init__(self, net: Net) -> None:
        self._net, self._cut = net, set[Way]()
        for space in net.spaces:
            call("tc", "-n", space, "qdisc", "replace", "dev", "eth0", "root", "handle", "1:", "htb", "default", "1")
            for number in ("1:1", "1:2"):
                rate = ["rate", net.lab.rate, "burst", "256k"]
                call("tc", "-n", space, "class", "add", "dev", "eth0", "parent", "1:", "classid", number, "htb", *rate)
            call("tc", "-n", space, "qdisc", "add", "dev", "eth0", "parent", "1:2", "handle", "2:", "blackhole")

    def cut(self, ways: Iterable[Way]) -> None:
        for way in ways:
            if way not in self._cut:
                self._cut.add(way)
                source, dest = way
                match = ["u32", "match", "ip", "dst", f"{self._net.lab.address(dest)}/32", "flowid", "1:2"]
                where = ["dev", "eth0", "parent", "1:", "protocol", "ip", "prio", str(dest + 1)]
                call("tc", "-n", self._net.spaces[source], "filter", "add", *where, *match)

    def heal(self) -> None:
        for source, dest in self._cut:
            where = ["dev", "eth0", "parent", "1:", "prio", str(dest + 1)]
            call("tc", "-n", self._net.spaces[source], "filter", "del", *where)
        self._cut.clear()

    def link(self, host: int, state: str) -> None:
        """`up` or `down`."""
        call("ip", "-n", self._net.spaces[host], "link", "set", "eth0", state)


def between(one: Sequence[int], other: Sequence[int]) -> list[Way]:
    """Both ways between two sets of hosts."""
    return [(a, b) for a in one for b in other] + [(b, a) for a in one for b in other]


@dataclass
class Fleet:
    """The agents of a job, one per host. The meeting point is on host 0."""

    net: Net
    directory: Path
    ranks: int = 1
    replace: int = 100000
    options: Sequence[str] = ()
    program: Path = PROGRAM
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.follow, self._dead = Follow(self.directory), set[int]()
        self.log = self.directory / "log"
        self._secret = secrets.token_hex(16)
        for host in range(self.net.lab.hosts):
            self.start(host)

    def start(self, host: int) -> None:
        lab = self.net.lab
        command = [sys.executable, "-m", "phalanx", "run", "--hosts", str(lab.hosts), "--meet", f"{lab.address(0)}:{MEET}"]
        command += ["--ranks", str(self.ranks), "--replace", str(self.replace), str(self.program), str(self.directory)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PHALANX_SECRET": self._secret}
        with self.log.open("ab") as log:
            self.agents[host] = subprocess.Popen(
                ["nsenter", f"--net={NETNS / self.net.spaces[host]}", "--", *command, *self.options],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def words(self) -> str:
        return self.log.read_text(errors="replace")

    def host_of(self, pid: int) -> int | None:
        """The host on which a process runs; None if it is over."""
        with contextlib.suppress(OSError):
            inode = os.stat(f"/proc/{pid}/ns/net").st_ino
            for host, space in enumerate(self.net.spaces):
                if os.stat(NETNS / space).st_ino == inode:
                    return host
        return None

    def living(self) -> dict[int, int]:
        """The members whose processes live, and their hosts."""
        self.follow.look()
        starts = {row["member"]: row["pid"] for row in self.follow.starts if row["member"] not in self._dead}
        found = {member: self.host_of(pid) for member, pid in starts.items()}
        self._dead |= {member for member, host in found.items() if host is None}
        return {member: host for member, host in found.items() if host is not None}

    def explain(self) -> str:
        """What is known of a job that does not continue: exit codes of agents, the end of each record, stacks, the log."""
        codes = {host: agent.poll() for host, agent in self.agents.items()}
        living = self.living()
        pids = {row["member"]: row["pid"] for row in self.follow.starts}
        print_stacks(pids[member] for member in living)
        last = {row["member"]: row for row in self.follow.look()}
        ends = "\n".join(f"member {member} on host {host}: {last.get(member)}" for member, host in living.items())
        return f"{self.words[-20000:]}\nagents ended: {codes}\n{ends}"

    def stop(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in self.agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(10)
            agent.kill()
            agent.wait()


@contextlib.contextmanager
def fleet(net: Net, directory: Path, *options: str, ranks: int = 1) -> Iterator[Fleet]:
    job = Fleet(net, directory, ranks=ranks, options=options)
    try:
        yield job
    finally:
        job.stop()
