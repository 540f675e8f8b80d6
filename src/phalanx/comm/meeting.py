"""Rank 0 describes its job in the store. Every rank checks that it is its own job, claims its rank, and waits for the others.

The ranks of a job share a secret and sign what they write to the store with it (signed.py). A rank gets the secret from

    the environment     PHALANX_SECRET, set by `phalanx train --ranks N` or exported by you
    a note              of rank 0, named after the job's token, if all ranks are on one host
    nowhere             on several hosts without PHALANX_SECRET; the keys are then as open as torch's own

A rank that can expect a signature accepts nothing without one.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from phalanx.comm.addresses import is_loopback
from phalanx.comm.launch import Launch, exported_secret
from phalanx.comm.notes import is_token, read, secret_path, sweep, write
from phalanx.comm.signed import SIGNATURE, SignedStore, Signer, peek
from phalanx.comm.store import Store

FIRST_LOOK, LOOK = 0.005, 0.05  # seconds between two polls, at first and later
STRANGE = 3.0  # seconds that rank 0 has to repair a description that a stranger overwrote; it may not have a core for one
LONGEST = 4096  # maximum bytes of a job's description
REMEDY = "another job meets there: choose another MASTER_PORT"


class WrongJobError(RuntimeError):
    """The store at the meeting point is not the store of this job."""


class Job(NamedTuple):
    """A job as rank 0 describes it."""

    world: int
    name: str  # the launcher's name for it
    token: str  # random, new for every meeting

    def to_json(self) -> str:
        return json.dumps({"world": self.world, "job": self.name, "token": self.token})

    @staticmethod
    def parse(text: bytes) -> Job | None:
        """Parse a description. Return None if it is invalid."""
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            data = json.loads(text[:LONGEST])
            world, name, token = data["world"], data["job"], data["token"]
            if isinstance(world, int) and isinstance(name, str) and isinstance(token, str) and is_token(token):
                return Job(world, name, token)
        return None


class Meeting(NamedTuple):
    """What a rank needs to meet its job: the job's token and signer, the meeting's keys, and what this rank writes there."""

    token: str
    signer: Signer | None
    keys: Store
    announcements: dict[str, str]

    def announce(self) -> None:
        """Write what is missing. Called repeatedly, because a stranger may have overwritten it."""
        for key, text in self.announcements.items():
            if not self.keys.check([key]):
                self.keys.set(key, text)


def keys_of(base: Any, prefix: str, signer: Signer | None, seconds: float) -> Any:
    """Return the keys under `prefix`, signed if the job has a secret."""
    return SignedStore(base, prefix, signer, seconds) if signer else dist.PrefixStore(prefix, base)


# ---- recognising the job -------------------------------------------------------------------------------------------------------


def open_job(base: Any, prefix: str, launch: Launch, deadline: float, until_met: contextlib.ExitStack) -> Meeting:
    """Describe the job, on rank 0. `until_met` removes what only the meeting needs."""
    token = secrets.token_hex(8)
    secret = exported_secret()
    if secret is None and _shares_a_host(launch):
        secret = secrets.token_hex(32)
        sweep()
        path = secret_path(token)
        write(path, secret)
        until_met.callback(path.unlink, missing_ok=True)
    signer = Signer(secret, token) if secret else None
    description = Job(launch.world, launch.job, token).to_json()
    return Meeting(token, signer, keys_of(base, prefix, signer, _left(deadline)), {"job": description})


def find_job(base: Any, prefix: str, launch: Launch, deadline: float) -> Meeting:
    """Wait, on the other ranks, until rank 0 has described the job. Raise WrongJobError if it is another job."""
    where = f"{launch.address}:{launch.port}" if launch.address else "this host"
    store = dist.PrefixStore(prefix, base)
    look, strange_since = FIRST_LOOK, 0.0
    while True:
        found = peek(store, "job")
        recognised = _recognise(found, f"{prefix}/job", launch) if found is not None else None
        if recognised is not None:
            job, signer = recognised
            if (misfit := _misfit(job, launch, where)) is not None:
                raise WrongJobError(misfit)
            return Meeting(job.token, signer, keys_of(base, prefix, signer, _left(deadline)), {})
        now = time.monotonic()
        if found is not None:
            strange_since = strange_since or now
            if now - strange_since > STRANGE or now > deadline:
                raise WrongJobError(_stranger(found, launch, where))
        elif now > deadline:
            raise RuntimeError("found a store, but rank 0 did not arrive")
        time.sleep(look)
        look = min(1.5 * look, LOOK)


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _shares_a_host(launch: Launch) -> bool:
    """Whether all ranks are on this host, so that they can read a note."""
    return launch.one_host or launch.address is None or is_loopback(launch.address)


def _recognise(found: bytes, key: str, launch: Launch) -> tuple[Job, Signer | None] | None:
    """Return the job of rank 0 and its signer, or None if the signature is wrong, or missing where one is expected."""
    secret = exported_secret()
    if secret is None and not _shares_a_host(launch):
        job = Job.parse(found)
        return None if job is None else (job, None)
    job = Job.parse(found[SIGNATURE + 1 :])
    if job is not None and (secret := secret or read(secret_path(job.token))) is not None:
        signer = Signer(secret, job.token)
        return (job, signer) if signer.recognises(key, found) else None
    return None


def _misfit(job: Job, launch: Launch, where: str) -> str | None:
    if job.world != launch.world:
        return f"the job at {where} has {job.world} ranks, this one has {launch.world}: {REMEDY}"
    if job.name != launch.job:
        return f"the job at {where} is {job.name!r}, this one is {launch.job!r}: {REMEDY}"
    return None


def _stranger(found: bytes, launch: Launch, where: str) -> str:
    """Explain why a description is not from our rank 0. Anyone may have written it."""
    job = Job.parse(found[SIGNATURE + 1 :]) or Job.parse(found)
    if job is not None and (misfit := _misfit(job, launch, where)) is not None:
        return misfit
    if exported_secret() is not None:
        return f"the job at {where} has another PHALANX_SECRET than this rank: export the same on all ranks, or {REMEDY}"
    if not _shares_a_host(launch):
        return f"the job at {where} signs with a PHALANX_SECRET that this rank does not have: export it on all ranks, or {REMEDY}"
    return (
        f"the rank 0 at {where} is not of this job: {REMEDY} (or this rank was started twice; or ranks of one host do not share "
        "their temporary folder: set TMPDIR, or export PHALANX_SECRET)"
    )


# ---- this rank, and the others -------------------------------------------------------------------------------------------------


def claim(keys: Store, rank: int, where: str) -> None:
    """Claim this rank. Raise WrongJobError if another process has claimed it."""
    me = secrets.token_hex(8)
    if keys.compare_set(f"rank/{rank}", "", me).decode() != me:
        raise WrongJobError(
            f"another process is rank {rank} of the job at {where}: another job meets there (choose another MASTER_PORT), "
            "or this rank was started twice"
        )


def wait_for_all(meeting: Meeting, launch: Launch, deadline: float, farewell: float) -> list[int]:
    """Return the ranks that did not arrive by the deadline. The first rank to reach its deadline writes them down for the others.

    Rank 0 counts, and the others poll its result: a store.wait that times out prints warnings, and waiting for n keys on n ranks
    is O(n * n).
    """
    keys = meeting.keys
    everybody = [f"here/{rank}" for rank in range(launch.world)]
    meeting.announcements[everybody[launch.rank]] = ""
    look = FIRST_LOOK
    try:
        while True:
            meeting.announce()
            if launch.rank == 0 and keys.check(everybody):
                keys.set("met", "")
                return []
            if launch.rank != 0 and keys.check(["met"]):
                return []
            if keys.check(["absent"]):
                return [int(rank) for rank in keys.get("absent").decode().split()]
            if time.monotonic() > deadline - farewell:
                missing = [rank for rank in range(launch.world) if not keys.check([everybody[rank]])]
                keys.set("absent", " ".join(map(str, missing)))
                time.sleep(
                    farewell if launch.rank == 0 else 0.0
                )  # the store ends with this process, so give the others time to read it
                return missing
            time.sleep(look)
            look = min(1.5 * look, LOOK)
    except RuntimeError:  # the store is gone
        return [0]
