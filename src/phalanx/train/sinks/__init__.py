"""Where the rows of a run go besides `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow, and MLPerf's log.

A sink gets the same rows as the file, on rank 0 only. It begins with the facts of the run, writes rows, and is closed. If it
fails, you get one warning, and training continues without it. Servers are called from a thread, so a slow one delays no step.

    sink.py          what a sink is; scalars.py: the numbers of a row, by name
    tensorboard.py, wandb.py, mlflow.py, mlperf.py: one sink each
    several.py       all sinks of a run, each of which may fail; later.py: a sink in its own thread
"""

from phalanx.train.sinks.several import Sinks, check_sinks, open_sinks
from phalanx.train.sinks.sink import RunFacts, Sink

__all__ = ["RunFacts", "Sink", "Sinks", "check_sinks", "open_sinks"]
