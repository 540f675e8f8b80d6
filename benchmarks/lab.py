"""Hosts emulated on one machine: network namespaces joined by a network of limited bandwidth and latency. Needs root.

    python benchmarks/lab.py --hosts 4 --per-host 2 --rate 1gbit --delay 1ms -- python script.py
    python benchmarks/lab.py --check [--repeat 3] [--json FILE]        what was asked against what TCP measures

    lab = Lab(hosts=4, ranks_per_host=2, rate="1gbit", delay="1ms")
    with lab.up() as net:
        before = net.bytes_sent()                            # that left each host
        outputs = net.run([sys.executable, "script.py"], deadline=60)

Ranks find each other as under torchrun (RANK, WORLD_SIZE, MASTER_ADDR ...), hosts have the addresses 10.77.0.1 and up, which
exist inside the namespaces only. Ranks of one host reach each other over its loopback device, without limits.

The network is lab_switch.c, compiled at the first use. Without a compiler it is a bridge with token buckets, which has no delay.

Whatever ends the owner, its end ends the lab: a guard process waits for it, kills all that runs inside the namespaces and removes
them. If the guard was killed too, the next lab sweeps.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import platform
import re
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NETNS = Path("/run/netns")
PORT = 29500
HEADERS = 14 + 20 + 32  # bytes of a frame: Ethernet, IP, TCP with time stamps
GRACE = 5.0  # seconds that the other ranks get after one has failed: they may have more to say
FRAME_SECONDS = 0.5e-3  # the longest time that one frame may hold a port: what shares a slow port waits no longer
QUEUE_SECONDS = 5e-3  # that a connection may fill before a busy port
UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class LabError(RuntimeError):
    """The lab cannot be built here, or what ran in it failed."""


# ---- the value --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lab:
    """`hosts` with `ranks_per_host` each; every host has one port of `rate` each way, and `delay` lies between any two hosts."""

    hosts: int
    ranks_per_host: int
    rate: str = "1gbit"
    delay: str = "0ms"

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= 100 or self.ranks_per_host < 1:
            raise ValueError(f"{self}: 1 to 100 hosts of at least 1 rank")
        if self.bits_per_second < 1e6:
            raise ValueError(f"rate={self.rate!r}: at least 1mbit")
        if self.seconds > 1:
            raise ValueError(f"delay={self.delay!r}: at most 1s")

    @property
    def bits_per_second(self) -> float:
        return quantity(self.rate, UNITS)

    @property
    def seconds(self) -> float:
        return quantity(self.delay, SECONDS)

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def frame(self) -> int:
        """Bytes of the largest frame: 64 KiB, less on slow ports, never less than two packets."""
        return int(min(65536, max(3000, self.bits_per_second / 8 * FRAME_SECONDS)))

    @property
    def window(self) -> int:
        """Bytes of one connection that may be on their way: what the round trip holds, and a queue of QUEUE_SECONDS."""
        return int(max(65536, self.bits_per_second / 8 * (2 * self.seconds + QUEUE_SECONDS)))

    @property
    def bucket(self) -> str:
        """A port's rate as a token bucket of two frames, with a queue that no TCP window fills: nothing is dropped."""
        return f"root tbf rate {self.rate} burst {max(2 * self.frame, int(self.bits_per_second / 8e3))} limit 1000000000"

    def host(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun would tell this rank; gloo would otherwise ask for the host's name, which all hosts share."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(rank % self.ranks_per_host),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    @contextlib.contextmanager
    def up(self, wire: type[Switch] | type[Bridge] | None = None) -> Iterator[Net]:
        """Build it, yield it, remove it. `wire` is by default the switch or, without a compiler, the bridge."""
        need_root()
        if wire is None:
            wire = Bridge if shutil.which("gcc") is None and self.seconds == 0 else Switch
        sweep()
        prefix = f"{owner_name()}-{next(_serial)}-"
        spaces = [f"{prefix}{host}" for host in range(self.hosts)]
        guard = start_guard(prefix)
        try:
            for space in spaces:
                call("ip", "netns", "add", space)
            built = wire(self, spaces, prefix)
            try:
                for host, space in enumerate(spaces):
                    self._configure(host, space)
                yield Net(self, spaces, built)
            finally:
                built.close()
        finally:
            guard.stdin.close()  # type: ignore[union-attr]
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(timeout=20)
            remove(prefix)  # nothing is left of it, unless somebody killed the guard

    def _configure(self, host: int, space: str) -> None:
        batch = f"""
            link set lo up
            link set eth0 addrgenmode none gso_max_size {self.frame} txqueuelen 10000
            addr add {self.address(host)}/24 dev eth0
            link set eth0 up
        """
        call("ip", "-n", space, "-batch", "-", words=batch)
        # frames wait here, where TCP sees its own, and not in the device, where what is sent next is behind all that was sent
        call("tc", "-n", space, "qdisc", "add", "dev", "eth0", *self.bucket.split())
        # nothing is lost, so that only a full buffer ends the growth of a queue: the sender's, which waits for room without a
        # word on the wire. A receiver's small buffer would close its window, and gloo's messages then stall now and then
        settings = {
            "tcp_congestion_control": "reno",
            "tcp_wmem": f"4096 {2 * self.window} {2 * self.window}",
        }
        for name, value in settings.items():
            call("nsenter", f"--net={NETNS / space}", "--", "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")


def quantity(text: str, units: Mapping[str, float]) -> float:
    """`1gbit`, `0.5ms`: a number and a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if not found or found[2] not in units:
        raise ValueError(f"{text!r}: a number and one of {', '.join(units)}")
    return float(found[1]) * units[found[2]]


# ---- namespaces: made, found, removed ---------------------------------------------------------------------------------------

_serial = itertools.count()


def start_time(pid: int) -> str | None:
    """In clock ticks since boot, None if it does not live: with the id it names a process for ever."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def owner_name() -> str:
    """The beginning of all names that belong to this process."""
    return f"phalanx-{os.getpid()}-{start_time(os.getpid())}"


def sweep() -> None:
    """Remove what labs of dead processes left."""
    for path in NETNS.glob("phalanx-*"):
        found = re.match(r"phalanx-(\d+)-(\d+)-", path.name)
        if found and start_time(int(found[1])) != found[2]:
            remove(found[0])


def remove(prefix: str) -> None:
    """Remove the namespaces whose names begin with `prefix`, and kill what runs in them."""
    paths = list(NETNS.glob(f"{prefix}*"))
    with contextlib.ExitStack() as stack:
        # held open: the kernel gives the number of a namespace that has gone to the next one, whose processes are not ours
        held = []
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                held.append(stack.enter_context(path.open("rb")).fileno())
        inside = {identity(file) for file in held} - {None, identity("/proc/self/ns/net")}
        for path in paths:
            subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)
        # names first, then twice nobody: a rank may have been on its way in
        until, empty = time.monotonic() + 10, 0
        while inside and empty < 2 and time.monotonic() < until:
            found = processes_in(inside)
            empty = 0 if found else empty + 1
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def identity(file: int | str | Path) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def processes_in(spaces: set[tuple[int, int] | None]) -> list[int]:
    if not spaces:
        return []
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and identity(p / "ns" / "net") in spaces]


def start_guard(prefix: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", __file__, "--guard", prefix, str(os.getpid())]
    # a session of its own: ctrl-C in the terminal is for the owner alone
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def stand_guard(prefix: str, owner: int) -> None:
    """Wait until the owner closes our standard input or is gone, then remove. A forked child may hold the other end: ask both."""
    with contextlib.suppress(ProcessLookupError):
        select.select([sys.stdin, os.pidfd_open(owner)], [], [])
    remove(prefix)


def need_root() -> None:
    if os.geteuid() != 0:
        raise LabError("the lab makes network namespaces, which only root may: run it with sudo")
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        raise LabError(f"the lab needs {' and '.join(missing)} (iproute2, util-linux)")


def call(*command: str, words: str = "") -> None:
    done = subprocess.run(command, input=words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)} {words.split()}: {done.stderr.strip()}")


# ---- the two networks -------------------------------------------------------------------------------------------------------


class Switch:
    """lab_switch.c, one process for all hosts: rate, delay, back-pressure, no loss."""

    def __init__(self, lab: Lab, spaces: Sequence[str], prefix: str) -> None:
        paths = [str(NETNS / space) for space in spaces]
        numbers = [f"{lab.bits_per_second:.0f}", f"{lab.seconds * 1e9:.0f}", str(os.getpid())]
        self.process = subprocess.Popen(
            [compiled_switch(), *numbers, *paths],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        if self.process.stdout.readline() != "ready\n":  # type: ignore[union-attr]
            raise LabError(self.process.communicate()[1].strip())

    def check(self) -> None:
        if self.process.poll() is not None:
            raise LabError(f"the switch ended with {self.process.returncode}: {self.process.stderr.read()}")  # type: ignore[union-attr]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Bridge:
    """veth pairs, a bridge in a namespace of its own and token buckets: what the kernel has, and no delay."""

    def __init__(self, lab: Lab, spaces: Sequence[str], prefix: str) -> None:
        if lab.seconds:
            raise LabError(f"delay={lab.delay!r} needs the switch, and that needs gcc")
        middle = f"{prefix}bridge"
        call("ip", "netns", "add", middle)
        links, buckets = ["link add hub type bridge", "link set hub up"], []
        for host, space in enumerate(spaces):
            links += [
                f"link add port{host} gso_max_size {lab.frame} type veth peer name eth0 netns {space}",
                f"link set port{host} master hub up",
            ]
            buckets.append(f"qdisc add dev port{host} {lab.bucket}")
        call("ip", "-n", middle, "-batch", "-", words="\n".join(links))
        call("tc", "-n", middle, "-batch", "-", words="\n".join(buckets))

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass  # all of it goes with the namespaces


WIRES: dict[str | None, type[Switch] | type[Bridge]] = {"switch": Switch, "bridge": Bridge}


def compiled_switch() -> str:
    """The path of the program, compiled once per version of its source, where only this user writes."""
    source = Path(__file__).with_name("lab_switch.c")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"
    program = cache / f"lab_switch-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        if shutil.which("gcc") is None:
            raise LabError("no gcc: without a compiler only delay='0ms' works")
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = program.with_suffix(f".{os.getpid()}")
        call("gcc", "-O2", "-o", str(fresh), str(source))
        fresh.rename(program)  # whoever else compiles now makes the same
    return str(program)


# ---- what runs in it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """A process of the lab; its words are in files, which stay readable whatever happens to it."""

    rank: int
    host: int
    process: subprocess.Popen[bytes]
    out: Any
    err: Any

    def output(self) -> str:
        return read_back(self.out)

    def errors(self) -> str:
        return read_back(self.err)


def read_back(file: Any) -> str:
    if file is None:
        return ""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


@dataclass
class Net:
    """A lab that is up."""

    lab: Lab
    spaces: Sequence[str]
    wire: Switch | Bridge
    _ports: Iterator[int] = field(default_factory=lambda: itertools.count(PORT))

    def run(self, command: Sequence[str], *, deadline: float, env: Mapping[str, str] | None = None) -> list[str]:
        """Standard output of every rank, in rank order; LabError if one fails or `deadline` seconds pass."""
        ranks = self.start(command, env=env)
        self.wait(ranks, deadline=deadline)
        return [rank.output() for rank in ranks]

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, keep: bool = True) -> list[Rank]:
        """Start `command` on every rank; without `keep` their words go where ours go."""
        port, ranks = next(self._ports), []
        for rank in range(self.lab.world):
            host = self.lab.host(rank)
            # not `ip netns exec`, which mounts a new /sys and hides the cgroups
            inside = ["nsenter", f"--net={NETNS / self.spaces[host]}", "--", *command]
            out, err = (tempfile.TemporaryFile(), tempfile.TemporaryFile()) if keep else (None, None)  # noqa: SIM115  they live on
            # addresses have no names here, and c10d would warn of that at every connection
            environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **self.lab.environment(rank, port), **(env or {})}
            process = subprocess.Popen(
                inside, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
            ranks.append(Rank(rank, host, process, out, err))
        return ranks

    def wait(self, ranks: Sequence[Rank], *, deadline: float) -> None:
        """Until all have ended well."""
        until, failed = time.monotonic() + deadline, None
        try:
            while any(r.process.poll() is None for r in ranks) and time.monotonic() < until:
                self.wire.check()
                if failed is None and (failed := next((r for r in ranks if r.process.returncode), None)):
                    until = min(until, time.monotonic() + GRACE)
                time.sleep(0.005)
            late = [r for r in ranks if r.process.poll() is None]
        finally:
            for rank in ranks:
                if rank.process.poll() is None:
                    os.killpg(rank.process.pid, signal.SIGKILL)
                    rank.process.wait()
        failed = failed or next((r for r in ranks if r.process.returncode and r not in late), None)
        if failed:
            raise LabError(self._story(failed, f"ended with {failed.process.returncode}"))
        if late:
            raise LabError(self._story(late[0], f"and {len(late) - 1} more did not end within {deadline} s"))

    def _story(self, rank: Rank, what: str) -> str:
        return f"{self.lab}: rank {rank.rank} (host {rank.host}) {what}\n{rank.output()[-2000:]}{rank.errors()[-4000:]}"

    def bytes_sent(self) -> list[int]:
        """By host, the bytes that have left it since the lab came up, as its interface counts them: headers once per frame."""
        return self._sent(8)

    def frames_sent(self) -> list[int]:
        """By host, the frames that have left it, acknowledgements included; each has HEADERS bytes besides its payload."""
        return self._sent(9)

    def _sent(self, column: int) -> list[int]:
        counts = []
        for space in self.spaces:
            command = ["nsenter", f"--net={NETNS / space}", "cat", "/proc/net/dev"]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            line = next(line for line in text.splitlines() if line.strip().startswith("eth0:"))
            counts.append(int(line.partition(":")[2].split()[column]))
        return counts


# ---- the check: what was asked against what TCP measures ----------------------------------------------------------------------

SETTINGS = (
    ("100mbit", "0ms"), ("1gbit", "0ms"), ("1gbit", "1ms"), ("1gbit", "5ms"), ("1gbit", "20ms"), ("10gbit", "0ms"),
)  # fmt: skip
PINGS = 200
WARM = 0.25  # of the stream: TCP finds its window
STREAM_SECONDS = 1.0


def probe(rate: float, seconds: float) -> dict[str, float] | None:
    """Rank 1 plays ping-pong with rank 0, then streams to it; rank 0 returns the row. Runs inside a lab of two hosts."""
    # the switch's own priority: the network is measured, not who else uses the cores
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    meeting = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    total = int(rate / 8 * seconds)
    if os.environ["RANK"] == "1":
        with connected(meeting) as line:
            for _ in range(PINGS):
                line.sendall(line.recv(1))
            words = memoryview(bytes(1 << 20))
            for place in range(0, total, len(words)):
                line.sendall(words[: total - place])
            line.recv(1)
        return None
    with socket.create_server(meeting) as door, door.accept()[0] as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trips = []
        for _ in range(PINGS):
            begun = time.perf_counter()
            line.sendall(b"?")
            line.recv(1)
            round_trips.append((time.perf_counter() - begun) * 1e3)
        block, marks = bytearray(1 << 20), [(0, 0.0)]
        while marks[-1][0] < total:
            size = line.recv_into(block)
            marks.append((marks[-1][0] + size, time.perf_counter()))
        line.sendall(b"!")
    warm = next(mark for mark in marks if mark[0] >= WARM * total)
    round_trips.sort()
    return {
        "rtt_min_ms": round_trips[0],
        "rtt_median_ms": statistics.median(round_trips),
        "rtt_p99_ms": round_trips[int(0.99 * PINGS)],
        "mbit": (marks[-1][0] - warm[0]) * 8 / (marks[-1][1] - warm[1]) / 1e6,
    }


def connected(meeting: tuple[str, int]) -> socket.socket:
    for _ in range(2000):  # 20 s: the other end may still be starting, on a busy machine
        with contextlib.suppress(ConnectionRefusedError):
            line = socket.create_connection(meeting)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return line
        time.sleep(0.01)
    raise LabError(f"nobody listens at {meeting}")


def measure(
    rate: str, delay: str, wire: type[Switch] | type[Bridge] = Switch, *, seconds: float = STREAM_SECONDS
) -> dict[str, Any]:
    """One row: round trips and the steady bandwidth of one TCP stream between two hosts."""
    lab = Lab(hosts=2, ranks_per_host=1, rate=rate, delay=delay)
    with lab.up(wire) as net:
        output = net.run([sys.executable, "-I", "-S", __file__, "--probe", str(seconds), "--rate", rate], deadline=60)[0]
    return {"wire": wire.__name__.lower(), "rate": rate, "delay": delay, **json.loads(output)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the repetitions of each setting."""
    lines = [
        "| network | rate asked | RTT asked | RTT min / median / p99 | one TCP stream | of the rate |",
        "|---|---|---|---|---|---|",
    ]
    settings = dict.fromkeys((row["wire"], row["rate"], row["delay"]) for row in rows)
    for wire, rate, delay in settings:
        same = [row for row in rows if (row["wire"], row["rate"], row["delay"]) == (wire, rate, delay)]
        middle = {
            key: statistics.median(row[key] for row in same) for key in ("rtt_min_ms", "rtt_median_ms", "rtt_p99_ms", "mbit")
        }
        trip = " / ".join(f"{middle[f'rtt_{kind}_ms']:.2f}" for kind in ("min", "median", "p99"))
        asked, part = 2e3 * quantity(delay, SECONDS), middle["mbit"] * 1e6 / quantity(rate, UNITS)
        lines.append(f"| {wire} | {rate} | {asked:g} ms | {trip} ms | {middle['mbit']:.0f} Mbit/s | {part:.3f} |")
    return "\n".join(lines)


def check(repeat: int, file: Path | None) -> None:
    settings = [(rate, delay, Switch) for rate, delay in SETTINGS] + [("1gbit", "0ms", Bridge)]
    rows = [measure(rate, delay, wire) for _ in range(repeat) for rate, delay, wire in settings]
    header = {
        "what": "the lab's network, one TCP stream between two hosts",
        "date": time.strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "repeat": repeat,
        "pings": PINGS,
        "stream_seconds": STREAM_SECONDS,
    }
    print(f"# {json.dumps(header)}\n{table(rows)}")
    if file:
        file.write_text("\n".join(json.dumps(row) for row in [header, *rows]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--per-host", type=int, default=2, help="ranks on each host")
    parser.add_argument("--rate", default="1gbit", help="of each host's port, each way")
    parser.add_argument("--delay", default="0ms", help="one way, between any two hosts")
    parser.add_argument("--wire", choices=WIRES, help="the network: by default the switch, the bridge where there is no compiler")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds")
    parser.add_argument("--check", action="store_true", help="measure round trips and bandwidth (also without a command)")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each setting of the check")
    parser.add_argument("--json", type=Path, help="write the rows of the check there")
    parser.add_argument("--probe", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--guard", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="after --: what every rank runs")
    args = parser.parse_args()
    if args.guard:
        stand_guard(args.guard[0], int(args.guard[1]))
    elif args.probe is not None:
        print(json.dumps(probe(quantity(args.rate, UNITS), args.probe)))
    else:
        try:
            if args.command and not args.check:
                lab = Lab(args.hosts, args.per_host, args.rate, args.delay)
                with lab.up(WIRES.get(args.wire)) as net:
                    net.wait(net.start(args.command, keep=False), deadline=args.deadline)
            else:
                check(args.repeat, args.json)
        except (LabError, ValueError) as error:
            print(f"lab: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
