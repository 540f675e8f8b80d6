"""The lab: what was asked is what the ranks find, and however it ends nothing is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from benchmarks import lab as lab_module
from benchmarks.lab import NETNS, Bridge, Lab, LabError, Switch, measure, quantity

from phalanx.schedule import sent, torus

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="the switch is compiled with gcc")

DEADLINE = 60.0
LONG = ["sleep", "600"]


# ---- the value --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("1gbit", lab_module.UNITS, 1e9),
        ("2.5mbit", lab_module.UNITS, 2.5e6),
        ("0ms", lab_module.SECONDS, 0.0),
        ("250us", lab_module.SECONDS, 250e-6),
    ],
)
def test_quantities(text, units, value):
    assert quantity(text, units) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "1", "gbit", "1 gbit", "-1gbit", "1gbyte", "1ms"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match="a number and one of bit"):
        Lab(hosts=2, ranks_per_host=1, rate=text)


@pytest.mark.parametrize("wrong", [{"hosts": 0}, {"hosts": 101}, {"ranks_per_host": 0}, {"rate": "10kbit"}, {"delay": "2s"}])
def test_impossible_labs_are_refused(wrong):
    with pytest.raises(ValueError):
        Lab(**{"hosts": 2, "ranks_per_host": 2, **wrong})


def test_ranks_are_told_what_torchrun_would_tell():
    lab = Lab(hosts=3, ranks_per_host=2)
    told = [lab.environment(rank, port=5) for rank in range(lab.world)]
    assert [(t["RANK"], t["WORLD_SIZE"], t["LOCAL_RANK"]) for t in told] == [(str(r), "6", str(r % 2)) for r in range(6)]
    assert {(t["MASTER_ADDR"], t["MASTER_PORT"], t["OMP_NUM_THREADS"]) for t in told} == {("10.77.0.1", "5", "1")}


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="only root"), Lab(2, 1).up():
        pass


def test_a_bridge_has_no_delay():
    with pytest.raises(LabError, match="needs the switch"):
        Bridge(Lab(2, 1, delay="1ms"), [], "")


# ---- what the ranks find ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[pytest.param(Switch, marks=needs_gcc), Bridge])
def wire(request):
    return request.param


@needs_root
def test_every_rank_is_on_its_host(wire):
    program = "echo $RANK $LOCAL_RANK $(ip -br -4 address show eth0 | awk '{print $3}')"
    with Lab(hosts=3, ranks_per_host=2).up(wire) as net:
        outputs = net.run(["sh", "-c", program], deadline=DEADLINE)
    assert [output.split() for output in outputs] == [[str(r), str(r % 2), f"10.77.0.{r // 2 + 1}/24"] for r in range(6)]


@needs_root
def test_rate_and_delay_are_those_that_were_asked(wire):
    """The switch and the probe share the machine with other tests: one clean measurement of several is enough."""
    delay = "2ms" if wire is Switch else "0ms"
    rows = []
    for _ in range(5):
        row = measure("200mbit", delay, wire, seconds=0.3)
        rows.append((row["mbit"], row["rtt_min_ms"], row["rtt_median_ms"]))
        mbit, shortest, median = rows[-1]
        asked = 2e3 * quantity(delay, lab_module.SECONDS)
        if 180 <= mbit <= 200 and asked <= shortest <= asked + 0.5 and median <= asked + 1.5:
            return
    pytest.fail(f"Mbit/s, shortest and median round trip in ms, asked 200, {asked}: {rows}")


@needs_root
@needs_gcc
def test_two_senders_share_the_port_of_one_receiver():
    """Incast: 2 x 200 Mbit/s into one port of 200 takes twice as long as one, and each gets its half."""
    program = textwrap.dedent("""
        import os, socket, threading, time
        rank, meeting, size = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 4_000_000
        if rank == 0:
            def drain(line):
                left = size
                while left:
                    left -= len(line.recv(1 << 16))
                print(f"{time.monotonic() - begun} ", end="", flush=True)  # in one piece: two threads write
            with socket.create_server(meeting) as door:
                lines = [door.accept()[0] for _ in range(2)]
                threads = [threading.Thread(target=drain, args=[line]) for line in lines]
                begun = time.monotonic()
                for line in lines:
                    line.sendall(b"!")
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        else:
            while True:
                try:
                    line = socket.create_connection(meeting)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)
            line.recv(1)
            line.sendall(bytes(size))
    """)
    with Lab(hosts=3, ranks_per_host=1, rate="200mbit").up() as net:
        first, last = sorted(map(float, net.run([sys.executable, "-c", program], deadline=DEADLINE)[0].split()))
    alone = 4_000_000 * 8 / 200e6
    assert last >= 2 * alone * 0.95  # two at full rate would be a switch without limits
    assert first >= alone * 1.4  # and one after the other would be unfair


@needs_root
@needs_gcc
@pytest.mark.usefixtures("warm_python")
def test_a_communicator_sees_hosts_and_counters_agree_with_its_schedule():
    size, repeat = 8 << 20, 4
    program = f"""
import json, phalanx, torch
with phalanx.create_communicator(timeout=30) as comm:
    x = torch.ones({size // 4})
    for _ in range({repeat}):
        comm.all_reduce(x, op="mean")
    assert bool((x == 1).all())
    print(json.dumps([comm.inter_size, comm.intra_size, comm.inter_rank, comm.intra_rank, comm.schedule.name]))
"""
    with Lab(hosts=2, ranks_per_host=2).up() as net:
        before = net.bytes_sent()
        outputs = net.run([sys.executable, "-c", program], deadline=DEADLINE)
        counted = [after - start for start, after in zip(before, net.bytes_sent())]
    assert [json.loads(output) for output in outputs] == [[2, 2, rank // 2, rank % 2, "torus(2x2)"] for rank in range(4)]
    by_rank = sent(torus(2, 2), lambda source, target: source // 2 != target // 2)
    predicted = [float(sum(by_rank[2 * host : 2 * host + 2])) * size * repeat for host in range(2)]
    assert counted == pytest.approx(predicted, rel=0.03)


@needs_root
def test_a_rank_that_fails_is_named_with_its_words(wire):
    program = "echo before; [ $RANK != 1 ] || { echo the reason >&2; exit 3; }"
    with Lab(2, 1).up(wire) as net, pytest.raises(LabError, match=r"rank 1 \(host 1\) ended with 3\nbefore\nthe reason"):
        net.run(["sh", "-c", program], deadline=DEADLINE)


@needs_root
def test_a_deadline_ends_ranks_that_do_not(wire):
    begun = time.monotonic()
    with Lab(2, 1).up(wire) as net, pytest.raises(LabError, match=r"rank 0 .* and 1 more did not end within 0.2 s"):
        net.run(LONG, deadline=0.2)
    assert time.monotonic() - begun < 20


@needs_root
@needs_gcc
def test_a_dead_switch_is_noticed():
    with Lab(2, 1).up() as net:
        ranks = net.start(LONG)
        net.wire.process.kill()
        with pytest.raises(LabError, match="the switch ended with -9"):
            net.wait(ranks, deadline=DEADLINE)


# ---- nothing is left --------------------------------------------------------------------------------------------------------


def left_by(pid):
    """Namespaces, and processes that carry their names (switch, guard) or live in them."""
    names = [path.name for path in NETNS.glob(f"phalanx-{pid}-*")]
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(f"phalanx-{pid}-" in word for word in words):
            processes.append(words)
    return names, processes


def interfaces():
    return sorted(os.listdir("/sys/class/net"))


def inhabitants(names):
    return lab_module.processes_in({lab_module.identity(NETNS / name) for name in names} - {None})


def sleepers(names):
    """Ranks that have come in and become what they shall be."""
    return sum(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in inhabitants(names))


NOTHING = ([], [])


@needs_root
def test_teardown_leaves_nothing(wire):
    before = interfaces()
    with Lab(hosts=3, ranks_per_host=1).up(wire) as net:
        net.start(["sh", "-c", "setsid sleep 600 & exec sleep 600"])
        names, processes = left_by(os.getpid())
        assert set(net.spaces) <= set(names)
        assert processes  # the detector detects
        until = time.monotonic() + 20
        while sleepers(names) < 6 and time.monotonic() < until:
            time.sleep(0.02)
        assert len(inside := inhabitants(names)) == 6
        assert interfaces() == before  # nothing of it is outside either
    assert left_by(os.getpid()) == NOTHING
    assert interfaces() == before
    assert not any(alive(pid) for pid in inside)


@needs_root
def test_an_exception_leaves_nothing(wire):
    def fail():
        with Lab(2, 1).up(wire) as net:
            net.start(LONG)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert left_by(os.getpid()) == NOTHING


def alive(pid):
    return lab_module.start_time(pid) is not None


@pytest.fixture
def owner():
    """A process that holds a lab with sleeping ranks."""
    program = """
import sys, time
from benchmarks.lab import Lab
with Lab(hosts=2, ranks_per_host=1).up() as net:
    ranks = net.start(["sleep", "600"])
    print("up", flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline() == "up\n"
    until = time.monotonic() + 20
    while sleepers(left_by(process.pid)[0]) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    yield process
    process.kill()
    process.communicate()


def wait_for_nothing(pid, seconds=20.0):
    until = time.monotonic() + seconds
    while left_by(pid) != NOTHING and time.monotonic() < until:
        time.sleep(0.02)
    assert left_by(pid) == NOTHING


@needs_root
@needs_gcc
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_the_end_of_the_owner_ends_the_lab(owner, blow):
    names, _ = left_by(owner.pid)
    inside = inhabitants(names)
    assert (len(names), len(inside)) == (2, 2)
    os.kill(owner.pid, blow)
    owner.wait(timeout=20)
    wait_for_nothing(owner.pid)
    assert not any(alive(pid) for pid in inside)


@needs_root
@needs_gcc
def test_what_owner_and_guard_left_is_swept_by_the_next_lab(owner):
    names, _ = left_by(owner.pid)
    inside = inhabitants(names)
    guard = next(pid for pid in map(int, children(owner.pid)) if b"--guard" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(guard, signal.SIGKILL)
    os.kill(owner.pid, signal.SIGKILL)
    time.sleep(0.2)  # not reaped: a zombie is dead as well
    assert sorted(left_by(owner.pid)[0]) == sorted(names)  # a negative control: nobody has cleaned up
    assert all(alive(pid) for pid in inside)
    with Lab(2, 1).up():
        assert left_by(owner.pid)[0] == []
    wait_for_nothing(owner.pid)
    assert not any(alive(pid) for pid in inside)


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@needs_root
@needs_gcc
def test_a_sweep_spares_the_living(owner):
    before = left_by(owner.pid)
    lab_module.sweep()
    assert left_by(owner.pid) == before
    assert before != NOTHING
