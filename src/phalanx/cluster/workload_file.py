"""Your own model as a file: its parameters in forward order, their shares of the work, and the speed of a device."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from phalanx.schedule.plain_json import loads, read_number, read_text, read_whole

from .workload import Compute, Model, Tensor


def to_json(model: Model, compute: Compute) -> str:
    """`model`, and the device it was profiled on, as a file that a person can read."""
    content = {
        "name": model.name,
        "samples": model.samples,
        "compute": asdict(compute),
        "tensors": [[tensor.name, tensor.elements, tensor.work, tensor.rows] for tensor in model.tensors],
    }
    return json.dumps(content) + "\n"


def from_json(text: str) -> tuple[Model, Compute]:
    """What `to_json` wrote; ValueError for anything else, also for numbers that no model has."""
    try:
        content = loads(text)
        tensors = tuple(_tensor(*tensor) for tensor in content["tensors"])
        model = Model(read_text(content["name"], "name"), tensors, read_whole(content["samples"], "samples", 1, MAX_COUNT))
        compute = _compute(**content["compute"])
    except KeyError as error:
        raise ValueError(f"{NOT_A_MODEL}: it has no {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{NOT_A_MODEL}: {str(error)[:300]}") from None
    if not sum(tensor.work for tensor in tensors) > 0:
        raise ValueError(f"{NOT_A_MODEL}: its tensors have no work; their shares must add up to 1")
    return model, compute


NOT_A_MODEL = "this is not a model as phalanx.train.profile_model writes it"
MAX_COUNT = 1 << 50  # elements, or samples
MAX_SECONDS = 1e9


def _tensor(name: Any, elements: Any, work: Any, rows: Any = 1) -> Tensor:
    """Files of earlier versions have no rows."""
    return Tensor(
        read_text(name, "the name of a tensor"),
        read_whole(elements, "the elements of a tensor", 1, MAX_COUNT),
        float(read_number(work, "the work of a tensor", 0, MAX_COUNT)),
        0,
        read_whole(rows, "the rows of a tensor", 1, MAX_COUNT),
    )


def _compute(per_sample: Any, fixed: Any = 0.0, forward: Any = 1 / 3, optimizer: Any = 0.0, source: Any = "") -> Compute:
    if not read_number(per_sample, "per_sample", 0, MAX_SECONDS) + read_number(fixed, "fixed", 0, MAX_SECONDS) > 0:
        raise ValueError("per_sample and fixed are both 0: a step takes some time")
    return Compute(
        per_sample,
        fixed,
        read_number(forward, "forward", 0, 1),
        read_number(optimizer, "optimizer", 0, MAX_SECONDS),
        read_text(source, "source"),
    )
