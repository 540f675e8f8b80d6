"""The whole: simulated processes on simulated hosts, their device queues, and the seed that decides what runs when."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from tests.simulated_cuda.conductor import Conductor, DeadlockError, me
from tests.simulated_cuda.device import Device, Marker, Stream
from tests.simulated_cuda.order import Clock, Stack, merge, show, stack


class Sync(NamedTuple):
    """The host waited for a device."""

    what: str
    stack: Stack

    def __str__(self) -> str:
        return f"  {self.what}\n{show(self.stack)}"


class Process:
    """One process: its devices, what it knows, and how often it waited for a device."""

    def __init__(self, simulation: Simulation, rank: int, host: int, local: int) -> None:
        self.simulation, self.rank, self.host, self.local = simulation, rank, host, local
        self.devices: dict[int, Device] = {}
        self.contexts: set[int] = set()
        self.clock: Clock = {}  # what the host has seen to be over
        self.seen = 0  # how often it has seen something
        self.syncs: list[Sync] = []
        self.own: dict[str, Any] = {}  # what the tool keeps per process: module globals of the product, process groups
        self.alive = True
        self.seed = 0  # of devices that it has not used yet
        self.generator = torch.get_rng_state()  # of the host, while other processes run

    def __repr__(self) -> str:
        return f"rank {self.rank}"

    def device(self, index: int | None = None) -> Device:
        """By index, else the calling thread's current one."""
        if index is None:
            index = self.current
        if index not in self.devices:
            if not 0 <= index < self.simulation.gpus:
                raise RuntimeError(f"CUDA error: invalid device ordinal (device={index}, this host has {self.simulation.gpus})")
            self.devices[index] = Device(self, index)
        return self.devices[index]

    @property
    def current(self) -> int:
        """The calling thread's current device: 0 in a new thread, whatever other threads have set."""
        return getattr(me(), "device", 0)

    def synced(self, what: str, markers: list[Marker]) -> None:
        """Count a wait of the host for its device, and wait."""
        self.syncs.append(Sync(what, stack(2)))
        self.await_markers(what, markers)

    def await_markers(self, what: str, markers: list[Marker], seconds: float | None = None) -> bool:
        """Wait without counting."""
        done = lambda: all(marker.done for marker in markers)  # noqa: E731
        over = self.simulation.conductor.wait(done, seconds, what, on_device=True)
        if over:
            for marker in markers:
                self.saw(marker)
        return over

    def saw(self, marker: Marker) -> None:
        """The host knows that this is over: what it enqueues from now on comes later."""
        merge(self.clock, marker.clock)
        self.seen += 1


def _switch(old: Process, new: Process) -> None:
    """Every process has its own generator of random numbers; torch has one for all threads."""
    old.generator = torch.get_rng_state()
    torch.set_rng_state(new.generator)


class Simulation:
    """One run. `gpus` per host; `seed` decides every order."""

    def __init__(self, *, hosts: int, gpus: int, seed: int, one_nccl_kernel: bool) -> None:
        self.hosts, self.gpus, self.seed, self.one_nccl_kernel = hosts, gpus, seed, one_nccl_kernel
        self.conductor = Conductor(seed, self.step, self.report, _switch)
        self.random = self.conductor.random
        self._lazy = self.random.choice((0.0, 0.05, 0.3, 0.9))  # how often the device moves when something is queued
        self._speed: dict[int, float] = {}  # by stream: some are always behind in this run
        self.ids = itertools.count(1)  # of streams
        self.errors: list[BaseException] = []
        self.trace: list[tuple[str, str]] = []  # what ran, in order: stream and kernel
        self.processes: list[Process] = []
        self.pinned: dict[int, torch.Tensor] = {}  # host memory, by address
        self.own: dict[str, Any] = {}
        self.over = False
        self._busy: dict[int, Stream] = {}  # with something queued
        self._running = False

    def process(self, rank: int, host: int = 0, local: int = 0) -> Process:
        made = Process(self, rank, host, local)
        self.processes.append(made)
        return made

    def complain(self, error: BaseException) -> None:
        """An error of the program under test, raised at the end: code in between may swallow exceptions."""
        if len(self.errors) < 20:
            self.errors.append(error)

    # ---- the device side -------------------------------------------------------------------------------------------------------

    def pushed(self, stream: Stream) -> None:
        """Something was queued: the device may move, and another host thread may run."""
        self._busy[stream.id] = stream
        if self._running:
            return
        while self.random.random() < self._lazy and self.step():
            pass
        self.conductor.maybe_yield()

    def step(self) -> bool:
        """Run some work of one stream whose head is ready; returns whether there was any."""
        ready = [stream for stream in self._busy.values() if stream.queue[0].ready()]
        if not ready:
            return False
        stream = ready[0] if len(ready) == 1 else self.random.choices(ready, [self._speed_of(s) for s in ready])[0]
        self._running = True
        try:
            for _ in range(self.random.choice((1, 1, 2, 5))):
                entry = stream.queue[0]
                if not entry.ready():
                    break
                self.conductor.now += 2e-6
                self.trace.append((stream.label, entry.name))
                try:
                    over = entry.finish()
                except Exception as error:  # noqa: BLE001  a device-side assert: the program hears of it later
                    self.complain(error)
                    over = True
                if not over:
                    break  # it has begun, and stays the head until its peers are there
                stream.queue.popleft()
                if not stream.queue:
                    del self._busy[stream.id]
                    break
        finally:
            self._running = False
        return True

    def drain(self) -> None:
        """Run what is queued; what cannot run although no rank was disturbed is an error."""
        while self.step():
            pass
        stuck = [s for s in self._busy.values() if s.device.process.alive and not s.device.process.own.get("disturbed")]
        if stuck and all(own.alive for own in self.processes):
            self.complain(DeadlockError(f"the program ended, but kernels wait for ever\n{self.report()}"))
        self._busy.clear()

    def popped(self, stream: Stream) -> None:
        """The head of another stream is over, too: the members of a collective end together."""
        stream.queue.popleft()
        if not stream.queue:
            del self._busy[stream.id]

    def _speed_of(self, stream: Stream) -> float:
        if stream.id not in self._speed:
            self._speed[stream.id] = self.random.choice((0.01, 1.0, 1.0, 50.0))
        return self._speed[stream.id]

    def report(self) -> str:
        """What every stream waits for."""
        return "\n".join(f"  {s}: {s.queue[0].name} waits for {s.queue[0].waits_for()}" for s in self._busy.values())


_current: list[Simulation] = []


def simulation() -> Simulation:
    """The one that runs."""
    return _current[-1]


def process() -> Process:
    """That of the calling thread."""
    thread = me()
    if thread is None:
        raise RuntimeError("this thread belongs to no simulated process: start it with threading.Thread inside of the product")
    return thread.process


def current_stream(device: Device) -> Stream:
    """Of the calling thread."""
    streams: dict[Any, Stream] = me().__dict__.setdefault("streams", {})
    return streams.get(device, device.default)


def device_for(wanted: Any) -> Device | None:
    """The simulated device that a `device=` argument names; None for the host and others."""
    if wanted is None:
        return None
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return process().device(wanted)
    wanted = torch.device(wanted)
    return process().device(wanted.index) if wanted.type == "cuda" else None
