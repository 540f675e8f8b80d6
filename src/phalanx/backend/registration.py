"""Register the backend name "phalanx" with torch.distributed.

torch calls `register` on import, through the `torch.backends` entry point in `pyproject.toml`. So it must be quick and
must not fail. Everything that a group needs is imported when you create one.
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
    """Options for `init_process_group("phalanx", pg_options=...)` and `new_group`.

    Attributes:
        algorithm: The schedule of all-reduces, such as `phalanx.torus(2, 4)`. The default is chosen for the hosts found.
    """

    algorithm: Schedule | None = None


def register() -> None:
    """Register the backend with torch.distributed. Idempotent. torch calls it on import if Phalanx is installed."""
    if dist.is_available() and not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(group: Any, options: Any) -> Any:
    """Create the group. torch calls this on every rank."""
    from phalanx.backend.create import create

    return create(group, options)
