"""Every verb of a communicator against exact answers: dtypes, sizes, layouts, devices."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.verdict import CommunicationError
from phalanx.schedule import Schedule, halving_doubling, ring, torus, tree
from phalanx.selftest.cases import DTYPES, LARGE, SMALL, Case, difference, guard_is_lost, layouts
from phalanx.selftest.result import Check, Result, failed, passed
from phalanx.selftest.runner import REPORT_IT, Trial

MOST_BYTES = 256 << 20  # limit of what a rank receives in one call: 1 Mi elements from each of 2,048 ranks are too many
SHORT = 0.3  # seconds; a check with less may skip all large tensors
MOST_VERIFIED = 64  # ranks of a schedule that is verified here

Answers = Iterator[tuple[str, Any, torch.Tensor, float]]  # description, result, answer, tolerance


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb and the tensors that it takes. `receives` is the number of ranks whose tensors one rank gets; 0: all of them."""

    answers: Callable[[Communicator, Case], Answers]
    receives: int = 1
    dtypes: tuple[torch.dtype, ...] = DTYPES
    strided: bool = True


def checks() -> list[Check]:
    """A check per verb."""
    verbs = {
        "all_reduce": Verb(_all_reduce),
        "all_reduce_async": Verb(_all_reduce_async),
        "reduce_scatter": Verb(_reduce_scatter),
        "run": Verb(_run, dtypes=tuple(dtype for dtype in DTYPES if dtype is not torch.bool), strided=False),
        "bcast": Verb(_bcast),
        "gather": Verb(_gather, receives=0),
        "allgather": Verb(_allgather, receives=0),
        "scatter": Verb(_scatter, receives=0),
        "alltoall": Verb(_alltoall, receives=0),
        "send and recv": Verb(_send_recv),
        "split": Verb(_split, dtypes=(torch.float32,), strided=False),
    }
    made = [Check("correctness", name, functools.partial(_try_verb, verb)) for name, verb in verbs.items()]
    return [*made, Check("correctness", "barrier", _barrier), Check("correctness", "objects", _objects)]


def _try_verb(verb: Verb, trial: Trial) -> Result:
    """All small cases first, then the large ones, the most common dtypes first, as long as there is time."""
    comm = trial.comm
    wrong: list[str] = []
    tried: dict[int, int] = {}  # dtypes, by the size of their largest tensor
    count = 0
    for sizes in (SMALL, (LARGE,)):
        tried[max(sizes)] = 0
        for dtype in verb.dtypes:
            if max(sizes) * dtype.itemsize * (verb.receives or comm.size) > MOST_BYTES:
                break
            free = tried[max(sizes)] == 0 and (sizes is SMALL or trial.seconds > SHORT)  # the first dtype is always tried
            if not free and not trial.has_time():
                break
            tried[max(sizes)] += 1
            for case in _cases(trial, verb, dtype, sizes):
                count += _try_case(verb, comm, case, wrong)
    figures = {"dtypes": tried[max(SMALL)], "large_dtypes": tried[LARGE], "answers": count, "wrong": len(wrong)}
    if wrong:
        more = f" ({len(wrong)} of {count} answers are wrong)" if len(wrong) > 1 else ""
        return failed(wrong[0] + more, REPORT_IT, **figures)
    small, large = (_covered(many, verb) for many in tried.values())
    return passed(f"{count} answers exact: {small} of 1 and 17 elements, {large} of 1 Mi + 3", **figures)


def _covered(many: int, verb: Verb) -> str:
    if many == 0:
        return "none"
    if len(verb.dtypes) == 1:
        return "float32"
    return "all dtypes" if many == len(verb.dtypes) else f"{many} of {len(verb.dtypes)} dtypes"


def _cases(trial: Trial, verb: Verb, dtype: torch.dtype, sizes: tuple[int, ...]) -> Iterator[Case]:
    for device in trial.devices:
        for layout in layouts(device):
            if verb.strided or layout != "strided":
                yield from (Case(trial.comm.size, dtype, numel, layout, device) for numel in sizes)


def _try_case(verb: Verb, comm: Communicator, case: Case, wrong: list[str]) -> int:
    """Append errors to `wrong`, and return the number of answers. After an error the other cases are still tried."""
    count = 0
    try:
        with case.stream():
            for what, got, want, tolerance in verb.answers(comm, case):
                count += 1
                if found := difference(got, want, tolerance):
                    wrong.append(f"{what} of {case}: {found}")
                elif guard_is_lost(got):
                    wrong.append(f"{what} of {case}: memory between the elements was written to")
    except CommunicationError:
        raise
    except Exception as error:  # noqa: BLE001  what a verb raises for a tensor that it promises to take is a wrong answer
        wrong.append(f"{case}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        count += 1
    return count


# ---- the verbs ---------------------------------------------------------------------------------------------------------------


def _all_reduce(comm: Communicator, case: Case) -> Answers:
    for op in case.ops():
        yield f"all_reduce {op}", comm.all_reduce(case.tensor(comm.rank), op), case.reduced(op), case.tolerance(op)


def _all_reduce_async(comm: Communicator, case: Case) -> Answers:
    """Several in flight at once."""
    pendings = [(op, comm.all_reduce_async(case.tensor(comm.rank), op)) for op in case.ops()]
    for op, pending in reversed(pendings):
        yield f"all_reduce_async {op}", pending.wait(), case.reduced(op), case.tolerance(op)


def _reduce_scatter(comm: Communicator, case: Case) -> Answers:
    more = -case.numel % comm.size
    part = (case.numel + more) // comm.size
    for op in case.ops():
        whole = case.reduced(op, more)
        mine = whole[comm.rank * part :][:part]
        yield f"reduce_scatter {op}", comm.reduce_scatter(case.tensor(comm.rank, more), op), mine, case.tolerance(op)


def _run(comm: Communicator, case: Case) -> Answers:
    """Run schedules as given."""
    for schedule in _schedules(comm):
        yield schedule.name, comm.run(schedule, case.tensor(comm.rank)), case.reduced("sum"), 0.0


@functools.lru_cache(maxsize=4)
def _of_size(size: int) -> tuple[Schedule, ...]:
    """Schedules of all kinds, cached, because a communicator verifies each one once."""
    if size > MOST_VERIFIED:
        return ()
    width = next((width for width in range(int(size**0.5), 1, -1) if size % width == 0), 1)
    more = [halving_doubling(size)] if size & (size - 1) == 0 else []
    return (ring(size), tree(size), *([torus(size // width, width)] if width > 1 else []), *more)


def _schedules(comm: Communicator) -> tuple[Schedule, ...]:
    return _of_size(comm.size) or (comm.schedule,)


def _bcast(comm: Communicator, case: Case) -> Answers:
    for root in {0, comm.size - 1}:
        x = case.tensor(root) if comm.rank == root else None
        yield f"bcast from {root}", comm.bcast(x, root), case.dense(root), 0.0
        x = case.tensor(root) if comm.rank == root else case.lay_out(torch.zeros_like(case.dense(root)))
        yield f"bcast from {root} into a tensor", comm.bcast(x, root), case.dense(root), 0.0


def _gather(comm: Communicator, case: Case) -> Answers:
    found = comm.gather(case.tensor(comm.rank, comm.rank))
    if comm.rank == 0:
        for sender in range(comm.size):
            yield "gather", found[sender] if found else None, case.dense(sender, sender), 0.0


def _allgather(comm: Communicator, case: Case) -> Answers:
    found = comm.allgather(case.tensor(comm.rank, comm.rank))
    for sender in range(comm.size):
        yield "allgather", found[sender], case.dense(sender, sender), 0.0


def _scatter(comm: Communicator, case: Case) -> Answers:
    xs = [case.tensor(rank, rank) for rank in range(comm.size)] if comm.rank == 0 else None
    yield "scatter", comm.scatter(xs), case.dense(comm.rank, comm.rank), 0.0


def _alltoall(comm: Communicator, case: Case) -> Answers:
    found = comm.alltoall([case.tensor(comm.rank, dest) for dest in range(comm.size)])
    for sender in range(comm.size):
        yield "alltoall", found[sender], case.dense(sender, comm.rank), 0.0


def _send_recv(comm: Communicator, case: Case) -> Answers:
    """Send around a ring. `send` returns when the other side receives, so every second rank receives first."""
    if comm.size == 1:
        return
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank % 2 == 0:
        comm.send(case.tensor(comm.rank), right, tag=5)
    got = comm.recv(left, tag=5)
    if comm.rank % 2:
        comm.send(case.tensor(comm.rank), right, tag=5)
    yield "recv", got, case.dense(left), 0.0


def _split(comm: Communicator, case: Case) -> Answers:
    """Split off every second rank, in reverse order."""
    mine = range(comm.rank % 2, comm.size, 2)
    with comm.split(comm.rank % 2, key=-comm.rank) as half:
        place = list(reversed(mine)).index(comm.rank)
        yield "split", torch.tensor([half.rank, half.size]), torch.tensor([place, len(mine)]), 0.0
        total = torch.stack([case.dense(rank) for rank in mine]).sum(0)
        yield "all_reduce of a split", half.all_reduce(case.tensor(comm.rank)), total, 0.0
        root = mine[-1]
        yield "bcast of a split", half.bcast(case.tensor(root) if comm.rank == root else None), case.dense(root), 0.0


# ---- verbs without tensors -----------------------------------------------------------------------------------------------------


def _barrier(trial: Trial) -> Result:
    """Check that no rank leaves before the last arrives. Ranks of a host share a clock."""
    comm, chance, early = trial.comm, random.Random(trial.comm.rank), 0
    for _ in range(5):
        time.sleep(chance.random() * 0.01)
        came = time.monotonic()
        comm.barrier()
        left = time.monotonic()
        moments = [(c, e) for host, c, e in comm.allgather_obj((comm.inter_rank, came, left)) if host == comm.inter_rank]
        early += min(e for _, e in moments) < max(c for c, _ in moments)
    if early:
        return failed(f"in {early} of 5 barriers a rank left before another had come", REPORT_IT)
    return passed("5 barriers, no rank left before the last had come")


def _objects(trial: Trial) -> Result:
    """Check the verbs that end in _obj."""
    comm = trial.comm
    rank, size = comm.rank, comm.size
    every: list[Any] = [
        {"rank": r, "words": ["a", None, True, 1.5, b"\0"], "nested": ((r, -r), {r: "x" * r})} for r in range(size)
    ]
    found = {
        "bcast_obj": (comm.bcast_obj(every[rank] if rank == size - 1 else None, root=size - 1), every[size - 1]),
        "gather_obj": (comm.gather_obj(every[rank]), every if rank == 0 else None),
        "allgather_obj": (comm.allgather_obj(every[rank]), every),
        "scatter_obj": (comm.scatter_obj(every if rank == 0 else None), every[rank]),
        "allreduce_obj": (comm.allreduce_obj([rank]), list(range(size))),
        "allreduce_obj max": (comm.allreduce_obj(rank, "max"), size - 1),
    }
    if size > 1:
        if rank % 2 == 0:
            comm.send_obj(every[rank], (rank + 1) % size)
        got = comm.recv_obj((rank - 1) % size)
        if rank % 2:
            comm.send_obj(every[rank], (rank + 1) % size)
        found["recv_obj"] = (got, every[(rank - 1) % size])
    wrong = [verb for verb, (got, want) in found.items() if got != want]
    if wrong:
        return failed(f"{', '.join(wrong)}: another object than was sent", REPORT_IT)
    return passed(f"{len(found)} verbs exact")
