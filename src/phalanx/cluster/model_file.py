"""A model of one's own as a file: its parameters in forward order, their shares of the work, and the speed of a device."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from phalanx.schedule.plain_json import brief, loads

from .workload import Compute, Model, Tensor


def to_json(model: Model, compute: Compute) -> str:
    """`model`, and the device it was profiled on, as a file that a person can read."""
    content = {
        "name": model.name,
        "samples": model.samples,
        "compute": asdict(compute),
        "tensors": [[tensor.name, tensor.elements, tensor.work] for tensor in model.tensors],
    }
    return json.dumps(content) + "\n"


def from_json(text: str) -> tuple[Model, Compute]:
    """What `to_json` wrote; ValueError for anything else, also for numbers that no model has."""
    try:
        content = loads(text)
        tensors = tuple(_tensor(name, elements, work) for name, elements, work in content["tensors"])
        model = Model(_text(content["name"], "name"), tensors, _number(content["samples"], "samples", int, 1, MAX_COUNT))
        compute = _compute(**content["compute"])
    except KeyError as error:
        raise ValueError(f"{NOT_A_MODEL}: it has no {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{NOT_A_MODEL}: {str(error)[:300]}") from None
    if not sum(tensor.work for tensor in tensors) > 0:
        raise ValueError(f"{NOT_A_MODEL}: its tensors have no work; their shares add up to 1")
    return model, compute


NOT_A_MODEL = "this is not a model as phalanx.train.profile_model writes it"
MAX_COUNT = 1 << 50  # elements, or samples
MAX_SECONDS = 1e9
MAX_TEXT = 1000  # characters


def _tensor(name: Any, elements: Any, work: Any) -> Tensor:
    count = _number(elements, "the elements of a tensor", int, 1, MAX_COUNT)
    return Tensor(
        _text(name, "the name of a tensor"), count, float(_number(work, "the work of a tensor", float, 0, MAX_COUNT)), 0
    )


def _compute(per_sample: Any, fixed: Any = 0.0, forward: Any = 1 / 3, optimizer: Any = 0.0, source: Any = "") -> Compute:
    seconds = {"per_sample": per_sample, "fixed": fixed, "optimizer": optimizer}
    for name, value in seconds.items():
        _number(value, name, float, 0, MAX_SECONDS)
    _number(forward, "forward", float, 0, 1)
    if not per_sample + fixed > 0:
        raise ValueError("per_sample and fixed are both 0: a step takes some time")
    return Compute(forward=forward, source=_text(source, "source"), **seconds)


def _number(value: Any, name: str, kind: type, least: float, most: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not least <= value <= most:
        raise ValueError(f"{name} is {brief(value)}; a {'whole ' if kind is int else ''}number from {least} to {most:g}")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(f"{name} is {brief(value)}; a text of at most {MAX_TEXT} characters")
    return value
