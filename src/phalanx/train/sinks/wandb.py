"""The rows of a run in Weights & Biases: `wandb=PROJECT` or `wandb=ENTITY/PROJECT`; WANDB_MODE=offline needs no account."""

from __future__ import annotations

import os
import secrets
from typing import Any

from phalanx.train.config import plain
from phalanx.train.sinks.scalars import scalars
from phalanx.train.sinks.sink import Row, RunFacts
from phalanx.train.sinks.tracking import recall, remember


class WeightsAndBiases:
    """One run of a project. A resumed run continues under the same id."""

    name = "wandb"

    def __init__(self, project: str) -> None:
        self._entity, _, self._project = project.rpartition("/")
        self._run: Any = None
        self._ended = False

    def begin(self, facts: RunFacts) -> None:
        import wandb

        if os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled") and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("you are not logged in: run `wandb login`, or set WANDB_MODE=offline")
        known = recall(facts, self.name)
        run_id = known or secrets.token_hex(4)
        remember(facts, self.name, run_id)
        self._run = wandb.init(
            entity=self._entity or None,
            project=self._project,
            dir=None if facts.out is None else str(facts.out.absolute()),
            id=run_id,
            name=None if facts.out is None else facts.out.name,
            config={**plain(facts.config), "environment": facts.environment},
            resume="allow" if known else None,
            reinit="create_new",  # leave other runs of this process alone
            # its output would break the progress line, and it must not capture ours
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")  # allows repeated steps of a resumed run

    def write(self, row: Row) -> None:
        if row["kind"] == "end":
            self._ended = True
            self._run.summary.update({key: value for key, value in row.items() if key != "kind"})
        elif values := scalars(row):
            self._run.log({**values, "step": row["step"]})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if self._ended else 1)
