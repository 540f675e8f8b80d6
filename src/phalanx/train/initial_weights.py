"""Start a run from given weights instead of random ones: `--set init=PATH`.

PATH is a state dict in a `.safetensors` or a `torch.save` file, a directory of `torch.distributed.checkpoint`, or a run of
Phalanx or one of its checkpoints. Nothing in it is executed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from phalanx.train.checkpoint.dcp import unwrapped
from phalanx.train.checkpoint.dcp_read import is_dcp, read_dcp
from phalanx.train.checkpoint.differences import differences, some
from phalanx.train.checkpoint.entries import SavedEntry
from phalanx.train.checkpoint.errors import CheckpointError, DamagedError
from phalanx.train.checkpoint.places import find_checkpoints
from phalanx.train.checkpoint.read import read
from phalanx.train.setting_text import ConfigError

ENTRY = "model"


def check_init(path: str) -> None:
    """Raise ConfigError if the weights are missing, before any rank starts and before data are opened."""
    try:
        _reader(Path(path))
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"init={path}: {error}") from None


def load_initial_weights(model: nn.Module, path: str) -> None:
    """Fill all parameters and buffers of `model`. CheckpointError lists what does not fit; nothing is changed then."""
    weights = unwrapped(read_weights(Path(path)), model.state_dict())
    if found := differences("model", model, SavedEntry("module", weights)):
        raise CheckpointError(f"init={path} holds the weights of another model; the differences:{some(found)}")
    model.load_state_dict(weights)


def read_weights(path: Path) -> dict[str, Any]:
    """Read the state dict in `path`, which may be the entry `model` of a larger one."""
    try:
        value = _reader(path)(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if isinstance(value, dict) and isinstance(value.get(ENTRY), dict):
        value = value[ENTRY]
    if not isinstance(value, dict) or not any(isinstance(own, torch.Tensor) for own in value.values()):
        raise CheckpointError(f"{path} holds no state dict of a model, neither as a whole nor as its entry {ENTRY!r}")
    return value


def _reader(path: Path) -> Callable[[Path], Any]:
    if path.is_file():
        return _read_safetensors if path.suffix == ".safetensors" else _read_torch
    if not path.is_dir():
        raise CheckpointError("there is no such file or directory")
    if is_dcp(path):
        return read_dcp
    find_checkpoints(path)  # raises if there are none
    return _read_own


def _read_safetensors(path: Path) -> Any:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DamagedError(path, str(error)) from None


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  what torch raises for nonsense is not documented
        reason = str(error).strip().split("\n")[0][:200]
        raise DamagedError(path, f"not a torch.save file with only tensors and plain data: {reason}") from None


def _read_own(path: Path) -> Any:
    directory, places = find_checkpoints(path)
    damages = []
    for place in places:
        try:
            return {name: entry.value for name, entry in read(directory, place, [ENTRY]).saved.items()}
        except DamagedError as error:  # noqa: PERF203  the one before it may be intact
            damages.append(str(error))
    raise CheckpointError(f"every checkpoint in {directory} is damaged:{some(damages)}")
