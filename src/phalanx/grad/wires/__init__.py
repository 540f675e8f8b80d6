"""Wires as values: how gradients are sent, for `create_multi_node_optimizer(wire=...)`. `carrier.py` implements them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from phalanx.comm.block_code import BlockCode
from phalanx.grad.wire import WIRES


@dataclass(frozen=True, slots=True)
class Int8:
    """Send gradients between hosts as 8-bit numbers in blocks with one scale each, for `create_multi_node_optimizer(wire=...)`.

    The ranks of a host first sum in full precision. Then each sends its part, encoded, to its peers on the other hosts, which add
    in float32, encode the sums and send them back. So a gradient is rounded twice for any number of ranks, and all ranks get the
    same bits. What a rank rounds away is added to its next gradient (error feedback). Only float32 gradients are encoded. A block
    with NaN or inf is decoded as NaN.

    Args:
        block: Numbers that share a scale, a multiple of 16. Each costs 8 bits, and each block 32 more.
        rounding: `"nearest"`, or `"stochastic"`: up or down at random, in proportion.
        error_feedback: Add what was rounded away to the next gradient.
        level: `"host"` encodes messages between hosts, so one host encodes nothing. `"rank"` encodes every message, and so
            do hosts with different numbers of ranks.
        seed: Seeds stochastic rounding. All ranks pass the same.

    Raises:
        ValueError: If an option is invalid.
        TypeError: If an option has the wrong type.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = phalanx.create_multi_node_optimizer(sgd, comm, wire=phalanx.Int8(block=128))
    """

    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    error_feedback: bool = True
    level: Literal["host", "rank"] = "host"
    seed: int = 0

    def __post_init__(self) -> None:
        BlockCode(self.block)
        for name, choices in (("rounding", ("nearest", "stochastic")), ("level", ("host", "rank"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"Int8({name}={getattr(self, name)!r}): one of {', '.join(map(repr, choices))}")
        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"Int8(error_feedback={self.error_feedback!r}): True or False")
        _check_whole("Int8", "seed", self.seed, least=0)

    @property
    def code(self) -> BlockCode:
        """The block code that encodes the numbers."""
        return BlockCode(self.block, self.rounding == "stochastic")


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Send each gradient matrix as two thin ones, of `rank` columns, for `create_multi_node_optimizer(wire=...)`.

    A gradient of n x m numbers is sent as (n + m) * rank numbers. This is an approximation: the rest is added to the rank's next
    gradient (error feedback), and each step refines the directions of the previous one (warm start). Vectors, and matrices that
    would not shrink to half, are sent uncompressed. Only float32 gradients are compressed. All messages are compressed, even
    within a host.

    Args:
        rank: Columns of the thin matrices. More are more exact, and take longer.
        start: Exchanges at the beginning that are not compressed, while gradients change fast.
        seed: Seeds the first directions. All ranks pass the same.

    Raises:
        ValueError: If an option is invalid.
        TypeError: If an option has the wrong type.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = phalanx.create_multi_node_optimizer(sgd, comm, wire=phalanx.PowerSGD(rank=4, start=100))
    """

    rank: int = 4
    start: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_whole("PowerSGD", "rank", self.rank, least=1)
        _check_whole("PowerSGD", "start", self.start, least=0)
        _check_whole("PowerSGD", "seed", self.seed, least=0)


Wire = torch.dtype | Int8 | PowerSGD


def check_any_wire(wire: Any) -> None:
    """Raise if `wire` is not a wire."""
    if wire is not None and wire not in WIRES and not isinstance(wire, Int8 | PowerSGD):
        raise TypeError(
            f"wire={wire!r}: torch.float16, torch.bfloat16, phalanx.Int8(...), phalanx.PowerSGD(...), or None to send gradients"
            " as they are"
        )


def remembers(wire: Wire | None) -> bool:
    """Whether the effect of a wire on a gradient depends on earlier gradients."""
    return isinstance(wire, Int8 | PowerSGD)


def _check_whole(kind: str, name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{kind}({name}={value!r}): a whole number")
    if value < least:
        raise ValueError(f"{kind}({name}={value}): at least {least}")
