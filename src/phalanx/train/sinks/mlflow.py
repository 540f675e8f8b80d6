"""The rows of a run in MLflow: `mlflow=URI`, a server (https://...), a database (sqlite:///mlflow.db), or a directory (file:DIR).

The experiment has the name of the recipe, the run that of its directory, and the settings are its parameters.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

from phalanx.train.config import paths
from phalanx.train.sinks.scalars import scalars
from phalanx.train.sinks.sink import Row, RunFacts
from phalanx.train.sinks.tracking import recall, remember

AT_ONCE = 100  # parameters in one call: the limit of MLflow's servers
LONGEST = 500  # characters of a parameter; every version of MLflow accepts that many
STATUS = {"epochs": "FINISHED", "target": "FINISHED", "stopped": "KILLED"}


class MLflow:
    """One run of an experiment. A resumed run continues under the same id."""

    name = "mlflow"

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._client: Any = None
        self._run = ""
        self._status = "FAILED"  # until a row reports how the run ended

    def begin(self, facts: RunFacts) -> None:
        # since 3.14, MLflow rejects directories unless this is set; the user asked for one
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self._uri)
        known = recall(facts, self.name)
        if known is not None:
            client.update_run(known, status="RUNNING")
            self._run = known
            return
        name = facts.config.name
        experiment = client.get_experiment_by_name(name)
        where = client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._run = client.create_run(where, run_name=name if facts.out is None else facts.out.name).info.run_id
        remember(facts, self.name, self._run)
        self._describe(facts)

    def _describe(self, facts: RunFacts) -> None:
        from mlflow.entities import Param, RunTag

        values = {"ranks": facts.ranks} | dict(paths(facts.config))
        params = [Param(path, str(value)[:LONGEST]) for path, value in values.items()]
        for first in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._run, params=params[first : first + AT_ONCE])
        versions = facts.environment.get("versions", {})
        self._client.log_batch(self._run, tags=[RunTag(f"version.{name}", str(value)) for name, value in versions.items()])

    def write(self, row: Row) -> None:
        from mlflow.entities import Metric

        if row["kind"] == "end":
            self._status = STATUS.get(row["why"], "FINISHED")
            return
        now = int(time.time() * 1000)
        values = {name: value for name, value in scalars(row).items() if math.isfinite(value)}  # its protocol is JSON
        if values:
            self._client.log_batch(self._run, metrics=[Metric(name, value, now, row["step"]) for name, value in values.items()])

    def close(self) -> None:
        if self._run:
            self._client.set_terminated(self._run, status=self._status)
