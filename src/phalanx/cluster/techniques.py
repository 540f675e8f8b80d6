"""A table of ways to save bytes between hosts: what each sends, how long a step takes, and what it does to accuracy.

A `Technique` is what you would set; `Priced` is what it would cost on a cluster. pricing.py turns the first into the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .evidence import Domain, Evidence, evidence_of, keeps

TIE = 0.01  # of the step: closer ones are equally fast, and the one that changes training less wins
Family = Literal["all-reduce", "int8", "powersgd", "local", "gossip"]


@dataclass(frozen=True, slots=True)
class Technique:
    """One way: `option` is what `create_multi_node_optimizer` takes, `kind` is the key of its evidence about accuracy."""

    name: str
    option: str
    kind: str
    family: Family
    wire: int = 4  # bytes per number that travels, before a code
    code: float = 1.0  # share of the wire's bytes that an encoded number has
    rank: int = 0  # columns of low-rank gradients
    every: int = 1  # steps from one exchange to the next
    fragments: int = 1
    travels: int = 0  # steps that a part may be in flight
    exact: bool = False  # gossip that reaches the exact mean


INT8 = 260 / 1024  # of float32: 256 numbers of a byte and one scale, phalanx.Int8()


def techniques(every: int, ranks: Sequence[int]) -> tuple[Technique, ...]:
    """What to compare, from the least to the most changed training. `every` is for local steps, `ranks` for PowerSGD."""
    parts, inner = min(4, every), f"every={every}"
    travels = max(1, min(5, every // parts))  # as phalanx.DiLoCo(overlap=True) has them
    streamed = f"{inner}, fragments={parts}, overlap=True"
    return (
        Technique("float32", "wire=None", "float32", "all-reduce"),
        Technique("float16", "wire=torch.float16", "float16", "all-reduce", wire=2),
        Technique("bfloat16", "wire=torch.bfloat16", "bfloat16", "all-reduce", wire=2),
        Technique("Int8", "wire=phalanx.Int8()", "int8", "int8", code=INT8),
        *(
            Technique(f"PowerSGD rank {rank}", f"wire=phalanx.PowerSGD(rank={rank})", "powersgd", "powersgd", rank=rank)
            for rank in ranks
        ),
        Technique(f"LocalSGD H={every}", f"sync=phalanx.LocalSGD({inner})", "local-sgd", "local", every=every),
        Technique(f"DiLoCo H={every}", f"sync=phalanx.DiLoCo({inner})", "diloco", "local", every=every),
        Technique(
            f"DiLoCo H={every} streamed",
            f"sync=phalanx.DiLoCo({streamed})",
            "diloco-streamed",
            "local",
            every=every,
            fragments=parts,
            travels=travels,
        ),
        Technique(
            f"DiLoCo H={every} bfloat16",
            f"sync=phalanx.DiLoCo({inner}, wire=torch.bfloat16)",
            "diloco-bfloat16",
            "local",
            wire=2,
            every=every,
        ),
        Technique(
            f"DiLoCo H={every} Int8",
            f"sync=phalanx.DiLoCo({inner}, wire=phalanx.Int8())",
            "diloco-int8",
            "local",
            code=INT8,
            every=every,
        ),
        Technique("gossip", "sync=phalanx.Gossip()", "gossip", "gossip"),
        Technique("gossip exact", 'sync=phalanx.Gossip(topology="exact")', "gossip-exact", "gossip", exact=True),
    )


@dataclass(frozen=True, slots=True)
class Priced:
    """A technique on a cluster: bytes that leave the busiest host per step, seconds of a step, and how it communicates.

    `seconds` is None if it has no price, and `how` says why.
    """

    technique: Technique
    nbytes: float | None
    seconds: float | None
    efficiency: float | None  # of all devices, each as fast as alone
    how: str

    def accuracy(self, domain: Domain | None, may_lose: float) -> str:
        """The effect on accuracy in a few words."""
        kind = self.technique.kind
        if kind == "float32":
            return "the reference"
        measured = [one.points for one in evidence_of(kind, domain) if one.points is not None]
        kept = keeps(kind, domain, may_lose)
        if measured:
            return f"{min(measured):+.2f} points" + ("" if kept else ", too much")
        if kept:
            return "kept, published"
        return f"not measured on {domain}" if evidence_of(kind) else "not measured"


@dataclass(frozen=True, slots=True)
class Advice:
    """The fastest that keeps accuracy, the evidence for that, and what would be faster if it kept accuracy, too."""

    best: Priced
    rests_on: tuple[Evidence, ...]
    faster: tuple[Priced, ...]


def recommend(rows: Iterable[Priced], domain: Domain | None, may_lose: float) -> Advice:
    """The fastest that loses at most `may_lose` points of accuracy. Of equally fast ones, the first in the table."""
    priced = [row for row in rows if row.seconds is not None]
    sound = [row for row in priced if keeps(row.technique.kind, domain, may_lose)]
    least = min(_seconds(row) for row in sound)
    best = next(row for row in sound if _seconds(row) <= (1 + TIE) * least)
    faster = sorted((row for row in priced if row not in sound and _seconds(row) * (1 + TIE) < _seconds(best)), key=_seconds)
    return Advice(best, evidence_of(best.technique.kind, domain), tuple(faster))


def _seconds(row: Priced) -> float:
    assert row.seconds is not None, "rows without a price are left out"
    return row.seconds


def as_records(rows: Iterable[Priced], advice: Advice, domain: Domain | None, may_lose: float) -> list[dict[str, Any]]:
    """The table as plain data."""
    return [
        {
            "name": row.technique.name,
            "option": row.technique.option,
            "bytes_between_hosts": row.nbytes,
            "step_s": row.seconds,
            "efficiency_device": row.efficiency,
            "how": row.how,
            "keeps_accuracy": keeps(row.technique.kind, domain, may_lose),
            "evidence": [{"points": one.points, "text": one.text()} for one in evidence_of(row.technique.kind)],
            "recommended": row is advice.best,
        }
        for row in rows
    ]
