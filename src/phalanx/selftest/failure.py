"""Kill one rank of a separate job: every other rank must name it in time. The first rank of each host starts a job."""

from __future__ import annotations

import json
import os
import select
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch

from phalanx.comm.launch import LISTENER
from phalanx.comm.start import Ranks
from phalanx.selftest.result import Check, Result, failed, passed, skipped
from phalanx.selftest.runner import REPORT_IT, Trial
from phalanx.selftest.victim import TIMEOUT, VICTIM

RANKS = 3
START = 8.0  # seconds for processes that import torch, at least
FOREIGN = (
    "TORCHELASTIC_", "GROUP_", "ROLE_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "MASTER_",
)  # fmt: skip


def checks() -> list[Check]:
    """Checks on CPUs and, if a rank sees two or more, on GPUs."""
    return [
        Check("failure", "killed rank on CPUs", _on_cpus, needs=START),
        Check("failure", "killed rank on GPUs", _on_gpus, needs=START, gpu=True),
    ]


def _on_cpus(trial: Trial) -> Result:
    return (
        _kill_a_rank(RANKS, "cpu", trial.seconds)
        if trial.comm.intra_rank == 0
        else passed("the first rank of the host checks it")
    )


def _on_gpus(trial: Trial) -> Result:
    ranks = min(RANKS, torch.cuda.device_count())
    if ranks < 2:
        return skipped("this rank sees one GPU, and a job needs two", "let every rank see all GPUs of its host")
    return (
        _kill_a_rank(ranks, "cuda", trial.seconds)
        if trial.comm.intra_rank == 0
        else passed("the first rank of the host checks it")
    )


def _kill_a_rank(ranks: int, device: str, seconds: float) -> Result:
    patience = max(START, seconds)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe, tempfile.TemporaryFile() as output:
        arguments = ["-m", "phalanx.selftest.victim", device, str(writing)]
        fds = {rank: [writing] for rank in range(ranks)}
        try:
            started = Ranks(
                ranks, arguments, env=clean_environment(os.environ, device), outputs=lambda rank: output, pass_fds=fds
            )
        finally:
            os.close(writing)
        try:
            reports = _collect(pipe.fileno(), ranks, patience)
        finally:
            started.kill()
        output.seek(0)
        said = " ".join(output.read().decode(errors="replace").split())[-400:]
    return judge(reports, ranks, patience, said)


def clean_environment(environ: Mapping[str, str], device: str) -> dict[str, str]:
    """The environment without the variables of this rank's launcher: the inner job has its own."""
    env = {key: value for key, value in environ.items() if not key.startswith(FOREIGN) and key != LISTENER}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return env | hidden


def _collect(pipe: int, ranks: int, patience: float) -> dict[int, dict[str, Any]]:
    """Collect the ranks' reports until all have arrived, no rank is left, or time is up."""
    reports: dict[int, dict[str, Any]] = {}
    end, rest = time.monotonic() + patience, b""
    while len(reports) < ranks and select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for report in map(json.loads, lines):
            reports[report["rank"]] = report
            if "killed" in report:
                end = time.monotonic() + 2 * TIMEOUT
    return reports


def judge(reports: Mapping[int, Mapping[str, Any]], ranks: int, patience: float, said: str = "") -> Result:
    """Whether all ranks but the victim named it, and how long the last one took."""
    words = f" (the job printed: {said})" if said else ""
    if VICTIM not in reports:
        return skipped(
            f"the job of {ranks} ranks did not start within {patience:.0f} s{words}", "run it again on an idle machine"
        )
    others = [rank for rank in range(ranks) if rank != VICTIM]
    silent = [rank for rank in others if rank not in reports]
    if silent:
        return failed(
            f"rank {VICTIM} was killed, and rank {silent[0]} did not notice within {2 * TIMEOUT:.0f} s{words}", REPORT_IT
        )
    for rank in others:
        if reports[rank]["missing"] != [VICTIM]:
            named = reports[rank]["missing"] or "no rank"
            return failed(f"rank {VICTIM} was killed, and rank {rank} named {named}: {reports[rank]['message']}", REPORT_IT)
    seconds = {rank: reports[rank]["at"] - reports[VICTIM]["killed"] for rank in others}
    slowest = max(seconds.values())
    if slowest > TIMEOUT:
        return failed(f"rank {VICTIM} was killed, and named after {slowest:.1f} s, later than {TIMEOUT:.0f} s", REPORT_IT)
    words = f"{' and '.join(f'rank {rank}' for rank in others)} named the killed rank {VICTIM} within {slowest:.1f} s"
    return passed(words, seconds={str(rank): own for rank, own in seconds.items()})
