"""`torch.cuda`, as far as the product uses it: (name, replacement) for `simulated` to put in place.

The current device and the current streams belong to a thread, as in CUDA: a new thread is on device 0 and on default streams.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.simulated_cuda import device as queues
from tests.simulated_cuda.conductor import me
from tests.simulated_cuda.device import Device, Marker
from tests.simulated_cuda.simulation import current_stream as queue_of_thread
from tests.simulated_cuda.simulation import process, simulation


def _device(device: Any) -> Device:
    if device is None:
        return process().device()
    if isinstance(device, int):
        return process().device(device)
    device = torch.device(device)
    return process().device(device.index)


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timing = enable_timing
        self._marker: Marker | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._marker = (stream or current_stream()).queue.record()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).queue.wait(self._marker)

    def query(self) -> bool:
        marker = self._marker
        if marker is None:
            return True
        process().device().touch()  # any call initialises the current device of the thread, wherever the event is
        if not marker.done:
            simulation().step()  # a host that polls sees progress
            simulation().conductor.maybe_yield()
        if marker.done:
            process().saw(marker)
        return marker.done

    def synchronize(self) -> None:
        if self._marker is not None:
            process().synced("Event.synchronize", [self._marker])

    def elapsed_time(self, end: Event) -> float:
        if not (self._timing and end._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._marker is None or end._marker is None or not (self._marker.done and end._marker.done):
            raise RuntimeError("CUDA error: device not ready")
        return (end._marker.time - self._marker.time) * 1e3


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, *, queue: queues.Stream | None = None) -> None:
        if queue is None:
            owner = _device(device)
            owner.touch()
            queue = queues.Stream(owner, "side")
        self.queue = queue

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.queue.device.index)

    @property
    def device_index(self) -> int:
        return self.queue.device.index

    @property
    def cuda_stream(self) -> int:
        return 0 if self.queue is self.queue.device.default else self.queue.id

    @property
    def stream_id(self) -> int:
        return self.queue.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return hash(self.queue.id)

    def __repr__(self) -> str:
        return f"<{self.queue}>"

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        process().synced("Stream.synchronize", [self.queue.record()])

    def __enter__(self) -> Stream:
        self._context = use_stream(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def current_stream(device: Any = None) -> Stream:
    return Stream(queue=queue_of_thread(_device(device)))


def default_stream(device: Any = None) -> Stream:
    return Stream(queue=_device(device).default)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        me().__dict__.setdefault("streams", {})[stream.queue.device] = stream.queue
        set_device(stream.queue.device.index)


class use_stream:  # noqa: N801  torch.cuda.stream
    """`with torch.cuda.stream(s)`: also the device of `s` is current inside, as in torch."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before = process().current, current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            device, stream = self._before
            set_stream(stream)
            if device != process().current:
                set_device(device)  # which makes a context there, where there was none


def set_device(device: Any) -> None:
    found = _device(device)
    found.touch()  # since CUDA 12, cudaSetDevice makes the context
    me().device = found.index  # type: ignore[union-attr]


class use_device:  # noqa: N801  torch.cuda.device
    """`with torch.cuda.device(1)`."""

    def __init__(self, device: Any) -> None:
        self._wanted = _device(device).index if device is not None and device != -1 else None

    def __enter__(self) -> None:
        self._before = process().current
        if self._wanted is not None:
            set_device(self._wanted)

    def __exit__(self, *error: Any) -> None:
        me().device = self._before  # type: ignore[union-attr]


def synchronize(device: Any = None) -> None:
    found = _device(device)
    found.touch()
    process().synced("synchronize", found.markers())


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.tensor(_device(device).random, dtype=torch.int64).view(torch.uint8)


def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    _device(device).random[:] = state.clone().view(torch.int64).tolist()


def manual_seed(seed: int) -> None:
    _device(None).random[:] = [int(seed) & 0x7FFF_FFFF_FFFF_FFFF, 0]


def manual_seed_all(seed: int) -> None:
    """`torch.manual_seed` calls it, too."""
    if me() is None:
        return
    process().seed = int(seed) & 0x7FFF_FFFF_FFFF_FFFF
    for device in process().devices.values():
        device.random[:] = [process().seed, 0]


def sleep(cycles: int) -> None:
    """torch.cuda._sleep: a kernel that takes time."""
    stream = queue_of_thread(_device(None))
    clock = simulation().conductor
    stream.launch("sleep", lambda: setattr(clock, "now", clock.now + cycles * 1e-9), [])


def get_device_name(device: Any = None) -> str:
    return "Simulated GPU"


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return 64 << 30, 80 << 30


NAMES: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "device_count": lambda: simulation().gpus,
    "current_device": lambda: process().current,
    "set_device": set_device,
    "device": use_device,
    "Stream": Stream,
    "Event": Event,
    "stream": use_stream,
    "set_stream": set_stream,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "synchronize": synchronize,
    "get_rng_state": get_rng_state,
    "set_rng_state": set_rng_state,
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed_all,
    "_sleep": sleep,
    "get_device_name": get_device_name,
    "mem_get_info": mem_get_info,
    "is_current_stream_capturing": lambda: False,
    "is_bf16_supported": lambda *a, **k: True,
    "get_device_capability": lambda device=None: (9, 0),
    "nvtx": None,
}
del NAMES["nvtx"]
