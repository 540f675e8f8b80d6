"""One rank of the job in which a rank is killed. failure.py starts it: `python -m phalanx.selftest.victim DEVICE PIPE`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

VICTIM = 1  # the rank that is killed
STEPS = 5  # all-reduces before that
TIMEOUT = 15.0  # seconds; the communicator's timeout, within which the others must name the victim


def _main(device: str, pipe: int) -> None:
    import torch

    from phalanx.comm.create import create_communicator
    from phalanx.comm.start import end_with_agent
    from phalanx.comm.verdict import CommunicationError

    end_with_agent()
    torch.set_num_threads(1)

    def report(**facts: object) -> None:
        os.write(pipe, json.dumps({"rank": comm.rank, **facts}).encode() + b"\n")  # one write, so lines of ranks do not mix

    comm = create_communicator(timeout=TIMEOUT)
    x = torch.zeros(1000, device=torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else "cpu")
    try:
        for step in range(1_000_000):
            if comm.rank == VICTIM and step == STEPS:
                report(killed=time.monotonic())
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(x)
            if device == "cuda":
                torch.cuda.synchronize()
            time.sleep(0.001)
    except CommunicationError as error:
        report(at=time.monotonic(), missing=list(error.missing), message=str(error)[:1000])


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
