"""Equal replicas at the start: the same seed on all ranks, or one broadcast.

Fujitsu (arXiv 1903.12650) initialises every process with the same seed and sends nothing: with thousands of ranks, broadcasting
the model takes seconds of a record that takes seventy. `seed_everything` before building the model does that if all ranks build
it in the same order. `init_parameters_` draws from (seed, name), independent of what was built or drawn before. `check_replicas`
compares one hash. If only one rank loads a model, use `bcast_parameters`.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# torch functions and methods that draw random numbers and take a generator, including torch.nn.init
DRAWING = {
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_", "sparse_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_",
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial",
}  # fmt: skip


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators. Models that you build afterwards are equal on all ranks.

    Args:
        seed: A whole number from 0 to 2**32 - 1.

    Raises:
        ValueError: If it is not.

    Example:
        >>> phalanx.seed_everything(0)
        >>> a = torch.rand(2)
        >>> phalanx.seed_everything(0)
        >>> torch.equal(a, torch.rand(2))
        True
    """
    if not hasattr(seed, "__index__") or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}: must be an int from 0 to 2**32 - 1, which all three generators take")
    seed = operator.index(seed)  # NumPy's integers, too: random.seed would hash them
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:  # torch loads it; this room does not import it
        numpy.random.seed(seed)


def bcast_parameters(model: torch.nn.Module, comm: Any, root: int = 0) -> None:
    """Give every rank the parameters and buffers of rank `root`, in one message per dtype and device. All ranks call it.

    Args:
        model: The model. It changes in place.
        comm: The communicator.
        root: The rank whose values all ranks get.

    Example:
        >>> def weight(comm):
        ...     model = torch.nn.Linear(1, 1)
        ...     torch.nn.init.constant_(model.weight, comm.rank)
        ...     phalanx.bcast_parameters(model, comm, root=1)
        ...     return model.weight.item()
        >>> phalanx.run_local(2, weight)
        [1.0, 1.0]
    """
    tensors = [*model.parameters(), *model.buffers()]
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for x in dict.fromkeys(tensors):
        kinds.setdefault((x.dtype, x.device), []).append(x)

    def spread() -> list[torch.Tensor]:
        flats = [torch.cat([x.detach().reshape(-1) for x in members]) for members in kinds.values()]
        return [comm.bcast(flat, root) for flat in flats]

    # as one: in an elastic job, values of two ranks must not mix if the root dies in between
    flats = comm.as_one(spread)
    with torch.no_grad():
        for members, flat in zip(kinds.values(), flats):
            for x, mine in zip(members, flat.split([x.numel() for x in members])):
                x.copy_(mine.view(x.shape))


def init_parameters_(
    model: torch.nn.Module,
    seed: int,
    *,
    initialize: Callable[[torch.nn.Module], Any] | None = None,
    zero_gamma: Callable[[str], bool] | None = None,
) -> None:
    """Draw every module's parameters anew, from generators seeded with (seed, name of the module).

    The result is the same on all ranks, independent of what was built or drawn before. Adding a layer changes no other layer.
    Torch's own generators are neither used nor changed.

    Args:
        model: The model. It changes in place.
        seed: The same on all ranks.
        initialize: Called with each module that owns parameters. The default calls its `reset_parameters()`.
        zero_gamma: Selects normalisations by name whose weight becomes 0, for example the last of each residual branch
            (Goyal et al., arXiv 1706.02677, 5.1).

    Raises:
        ValueError: If a module owns parameters, has no `reset_parameters()`, and you passed no `initialize`.

    Example:
        >>> a, b = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> phalanx.init_parameters_(a, seed=0); phalanx.init_parameters_(b, seed=0)
        >>> torch.equal(a.weight, b.weight)
        True
    """
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        draw = functools.partial(initialize, module) if initialize is not None else _reset_of(module)
        if draw is None:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) owns parameters and has no reset_parameters(): "
                "give it one, or pass initialize="
            )
        with _DrawFrom(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")), torch.no_grad():
            draw()
        if zero_gamma is not None and zero_gamma(name):
            with torch.no_grad():
                module.weight.zero_()


def _reset_of(module: torch.nn.Module) -> Any:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)  # MultiheadAttention's


class _DrawFrom(TorchFunctionMode):
    """Inside, this thread draws from separate generators, one per device, all with one seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name.endswith("_like") and name.startswith("rand"):
            raise ValueError(f"init_parameters_: {name} takes no generator: draw with torch.{name.removesuffix('_like')} instead")
        if name in DRAWING and kwargs.get("generator") is None:
            given = [x.device for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            kwargs["generator"] = self._on(given[0] if given else torch.device(kwargs.get("device") or "cpu"))
        return func(*args, **kwargs)

    def _on(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def digest(model: torch.nn.Module) -> str:
    """A hash of the names, shapes, dtypes and bits of all parameters and buffers."""
    found = hashlib.sha256()
    for name, x in sorted(model.state_dict().items()):
        if isinstance(x, torch.Tensor):
            found.update(f"{name} {x.dtype} {tuple(x.shape)};".encode())
            found.update(x.detach().cpu().contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_replicas(model: torch.nn.Module, comm: Any) -> None:
    """Raise on all ranks, naming the odd ones, unless parameters and buffers are bitwise equal. Sends one hash."""
    found = comm.allgather_obj(digest(model))
    usual = max(found, key=found.count)
    odd = [rank for rank, each in enumerate(found) if each != usual]
    if odd:
        raise RuntimeError(
            f"the model of rank(s) {', '.join(map(str, odd))} differs from the others': "
            "init_parameters_(model, seed) on all ranks, or bcast_parameters(model, comm)"
        )
