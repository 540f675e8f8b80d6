"""Local ranks without a launcher's command line: this process becomes the agent of torch's elastic launcher.

As `torchrun --standalone`, but a rank that fails ends with its own words and exit code instead of the agent's traceback.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

AGENT = "PHALANX_AGENT"  # the process of the agent, for its ranks
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1  # of prctl(2)


def start_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run `python ARGUMENTS` as `count` ranks of this host and wait for them; the exit code of the first one that failed, or 0.

    SIGTERM and SIGINT go on to the ranks, which have half a minute to end; the exit code is then 128 + the signal.
    """
    os.environ[AGENT] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks that share a machine fight for its cores
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the ranks speak for themselves
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        max_restarts=0,
        signals_to_handle=",".join(number.name for number in HANDLED),
    )
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as asked:
        return 128 + asked.sigval
    except KeyboardInterrupt:  # before the agent has taken over the signals
        return 128 + signal.SIGINT
    finally:  # the agent leaves its own behind
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def end_with_agent() -> None:
    """On a rank of `start_ranks`: get a SIGTERM when the agent dies, whatever of. Nobody would know of the ranks any more."""
    agent = os.environ.get(AGENT)
    if agent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(agent):  # it has died before this
            os.kill(os.getpid(), signal.SIGTERM)
