"""The name "phalanx" in torch.distributed.

torch calls `register` by itself when you import it: `pyproject.toml` names it in torch's group of entry points, `torch.backends`.
So it must be quick, and it must not fail. All that a group needs is imported when you make one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from phalanx.schedule import Schedule

NAME = "phalanx"


@dataclass(frozen=True, slots=True)
class Options:
    """What `init_process_group("phalanx", pg_options=...)` and `new_group` take.

    Attributes:
        algorithm: The schedule of all-reduces, such as `phalanx.torus(2, 4)`. The default is the best for the hosts found.
    """

    algorithm: Schedule | None = None


def register() -> None:
    """Make the backend known to torch.distributed. Idempotent; torch calls it by itself where Phalanx is installed."""
    if dist.is_available() and not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(group: Any, options: Any) -> Any:
    """What torch calls on every rank of a new group."""
    from phalanx.backend.create import create

    return create(group, options)
