"""A model of one's own as a file: its parameters in forward order, their shares of the work, and the speed of a device."""

from __future__ import annotations

import json
from dataclasses import asdict

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
    """What `to_json` wrote."""
    try:
        content = json.loads(text)
        tensors = tuple(Tensor(str(name), int(elements), float(work), 0) for name, elements, work in content["tensors"])
        model = Model(str(content["name"]), tensors, int(content["samples"]))
        compute = Compute(**content["compute"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"this is not a model as phalanx.train.profile_model writes it: {error}") from None
    if not tensors or min(tensor.elements for tensor in tensors) < 1 or min(tensor.work for tensor in tensors) < 0:
        raise ValueError(f"model {model.name}: every tensor has at least 1 element, and work of at least 0")
    return model, compute
