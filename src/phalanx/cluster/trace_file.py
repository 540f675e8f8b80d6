"""A trace of torch.profiler (Kineto) as a workload: one step on one device shows when each gradient is ready.

Record a whole step, update included, with `record_shapes=True`, and export it with `export_chrome_trace`. On a GPU the time of a
step is that of its kernels, in the order in which the host launched them; on a CPU it is the time of the operations themselves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from math import prod
from typing import Any

from phalanx.schedule.plain_json import loads, read_number, read_whole

from .workload import Compute, Model, Tensor

GRADIENT = "torch::autograd::AccumulateGrad"
BACKWARD = "autograd::engine::evaluate_function"
UPDATE = "Optimizer.step"
NOT_A_TRACE = "this is not a trace of one training step as torch.profiler writes it"
MAX_ELEMENTS = 1 << 50
MAX_TIME = 1e15  # us

Event = dict[str, Any]


def is_trace(text: str) -> bool:
    """Whether a file looks like a trace, rather than a model."""
    return '"traceEvents"' in text[:4096] or '"traceEvents"' in text[-4096:] or '"schemaVersion"' in text[:4096]


def from_trace(text: str, batch: float) -> tuple[Model, Compute]:
    """The model and the device of a trace of one step with `batch` samples; ValueError for anything else."""
    content = loads(text)
    try:
        events = [event for event in content["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    except KeyError as error:
        raise ValueError(f"{NOT_A_TRACE}: it has no {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{NOT_A_TRACE}: {str(error)[:300]}") from None
    return from_events(events, batch)


def from_events(events: list[Event], batch: float) -> tuple[Model, Compute]:
    """The same from the events of a trace."""
    try:
        for event in events:
            read_number(event["ts"], "ts", 0, MAX_TIME)
            read_number(event["dur"], "dur", 0, MAX_TIME)
        return _step(_last_step(events), batch)
    except KeyError as error:
        raise ValueError(f"{NOT_A_TRACE}: it has no {error}") from None
    except (TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{NOT_A_TRACE}: {str(error)[:300]}") from None


def _last_step(events: list[Event]) -> list[Event]:
    """The events of the last whole step: after the second-to-last update."""
    ends = sorted(event["ts"] + event["dur"] for event in events if str(event["name"]).startswith(UPDATE))
    first = ends[-2] if len(ends) > 1 else 0.0
    kernels = {_correlation(e) for e in events if e.get("cat") == "cuda_runtime" and e["ts"] >= first}
    return [e for e in events if (_correlation(e) in kernels if e.get("cat") == "kernel" else e["ts"] >= first)]


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _step(events: list[Event], batch: float) -> tuple[Model, Compute]:
    gradients = sorted((e for e in events if e["name"] == GRADIENT), key=lambda e: float(e["ts"]))
    shapes = [event.get("args", {}).get("Input Dims") for event in gradients]
    if not gradients or not all(shapes):
        raise ValueError(f"{NOT_A_TRACE}: it has no gradients with their shapes; record backward, with record_shapes=True")
    clock = _clock(events)
    begun = [float(e["ts"]) for e in events if str(e["name"]).startswith(BACKWARD)]
    if not begun:
        raise ValueError(f"{NOT_A_TRACE}: backward does not begin in it")
    backward = min(begun)
    ready = [clock(float(e["ts"] + e["dur"])) for e in gradients]
    begin, turn, end = clock(0.0), clock(backward), ready[-1]
    updates = [e for e in events if str(e["name"]).startswith(UPDATE)]
    update = sum(clock(float(e["ts"] + e["dur"])) - clock(float(e["ts"])) for e in updates)
    if not begin < turn < end:
        raise ValueError(f"{NOT_A_TRACE}: forward and backward take no time in it")
    tensors = []
    for number, (shape, at, before) in enumerate(zip(shapes, ready, [turn, *ready])):
        elements = prod(read_whole(side, "a side of a gradient", 0, MAX_ELEMENTS) for side in shape[0])
        elements = read_whole(elements, "the elements of a gradient", 1, MAX_ELEMENTS)
        rows = shape[0][0] if len(shape[0]) > 1 else 1
        tensors.append(Tensor(f"gradient{number}", elements, (at - before) / (end - turn), 0, rows))
    step = (end - begin) / 1e6
    source = f"a trace of one step of {batch:g} samples, {step * 1e3:.3f} ms: the time is taken as proportional to the batch"
    model = Model("traced", tuple(reversed(tensors)), samples=1)
    return model, Compute(step / batch, forward=(turn - begin) / (end - begin), optimizer=update / 1e6, source=source)


def _clock(events: list[Event]) -> Callable[[float], float]:
    """From the host's time to the device's, both in us: the total time of kernels launched by then. On a CPU, the time itself."""
    seconds = {_correlation(e): float(e["dur"]) for e in events if e.get("cat") == "kernel"}
    calls = [e for e in events if _correlation(e) in seconds and e.get("cat") != "kernel"]
    launches = sorted((float(e["ts"]), seconds[_correlation(e)]) for e in calls)
    if not launches:
        first = min(float(e["ts"]) for e in events if e.get("cat") == "cpu_op")
        return lambda time: max(0.0, time - first)
    times, done = [time for time, _ in launches], [0.0, *accumulate(took for _, took in launches)]
    return lambda time: done[bisect_right(times, time)]
