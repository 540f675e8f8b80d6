"""A carrier of low-rank gradients: a matrix M is sent as two thin ones, P = M Q' and Q = P' M, with `rank` columns and rows.

Paper: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", arXiv
1905.13727: one step of subspace iteration per gradient, which starts with the Q of the previous step (warm start), and error
feedback.

Differences from the paper, and from torch's hook based on it: P is sent in one message with the vectors and small matrices that
are not compressed, and Q in a second one. Both are one operation of the issuing thread, so a group overlaps with backward.
Gradients may be weighted: the error that a rank keeps is its own M less an equal share of the result. A matrix that is not finite
leaves Q and the error unchanged. A row of Q that has become zero is replaced, because it would stay zero.

The error M - P Q is not computed until the next gradient is added to it. So one pass over memory does both, and multiplies by Q.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.compound import Turn
from phalanx.comm.pending import Pending
from phalanx.grad.wire import SumOp
from phalanx.grad.wires import PowerSGD
from phalanx.native import low_rank

SAVES = 2  # a matrix is compressed if that makes it less than 1 / SAVES as long, as in torch's hook
EPSILON = 1e-8  # added to the length of a column, so that columns of a zero gradient stay zero


@dataclass(frozen=True, slots=True)
class Matrix:
    """A gradient that is compressed: its place in the group and its shape."""

    place: range
    rows: int
    columns: int
    rank: int


class LowRank:
    """Carries one group of float32 gradients. `shapes` maps the place of each tensor to its rows; vectors have one."""

    keeps_flags = False

    def __init__(self, wire: PowerSGD, comm: Communicator, flat: torch.Tensor, shapes: Mapping[range, int]) -> None:
        self._wire, self._comm = wire, comm
        found = (matrix_of(place, rows, wire.rank) for place, rows in shapes.items())
        # matrices of one shape are adjacent, because they form one batch
        self._matrices = sorted((m for m in found if m is not None), key=lambda m: (m.rows, m.columns, m.place.start))
        taken = {m.place for m in self._matrices}
        self._plain = [place for place in sorted(shapes, key=lambda place: place.start) if place not in taken]
        self._p = flat.new_zeros(sum(m.rows * m.rank for m in self._matrices) + sum(map(len, self._plain)))
        self._q = flat.new_zeros(sum(m.columns * m.rank for m in self._matrices))
        self._m = torch.zeros_like(flat)  # what was compressed in the last exchange
        self._ms = self._matrices_in(self._m)
        self._ps = _cut(self._p, [(m.rows, m.rank) for m in self._matrices])
        self._qs = self._cut_q(self._q)
        self._places = {m.place: i for i, m in enumerate(self._matrices)}
        self._before = self._q.clone()  # the Q of the last exchange that ended
        self._fit = True  # whether M - P Q are the errors; in an exchange, and after one that failed, M are
        self._fresh = _random(self._qs, wire.seed)
        for q, fresh in zip(self._qs, self._fresh):
            q.copy_(fresh)
        self._turn = 0  # how often the group was sent
        self._finite = torch.ones((), dtype=torch.bool, device=flat.device)

    def leave(self, x: torch.Tensor, op: SumOp, *, label: str) -> Pending:
        self._turn += 1
        mean = op == "mean"
        compressed = self._turn > self._wire.start and bool(self._matrices)

        def work(turn: Turn) -> torch.Tensor:
            if compressed:
                self._finite = self._reduce(x.detach(), turn, mean=mean)
            else:
                turn.add_up(x.detach())
                self._finite = _share(x.detach(), self._comm.size if mean else 1)
            return x

        how = f"rank {self._wire.rank}" if compressed else "uncompressed"
        return self._comm.compound_async(f"powersgd({x.numel()}, {how}, {label})", work, x)

    def _reduce(self, flat: torch.Tensor, turn: Turn, *, mean: bool) -> torch.Tensor:
        """Sum or average over the ranks, in place. Return whether the whole result is finite."""
        self._recover()
        size, wanted = self._comm.size, self._matrices_in(flat)
        vectors = self._p[self._p.numel() - sum(map(len, self._plain)) :]
        added = self._finite_ones(wanted)
        self._before.copy_(self._q)
        self._fit = False
        for fine, own, m, p, q in zip(added, wanted, self._ms, self._ps, self._qs):
            low_rank.advance(own if fine else None, m, p, q)
            if not fine:
                p.fill_(float("nan"))  # on all ranks, after the sum
        for place, part in zip(self._plain, vectors.split([len(place) for place in self._plain])):
            part.copy_(flat[place.start : place.stop])
        turn.add_up(self._p)
        self._orthogonalise()
        for m, p, q in zip(self._ms, self._ps, self._qs):
            torch.mm(p.t(), m, out=q)
        turn.add_up(self._q)
        self._q.div_(size)
        # the same on all ranks, because it depends on what was received and not on what a rank sent
        sound = [bool(torch.isfinite(p.sum() + q.sum())) for p, q in zip(self._ps, self._qs)]
        for fine, mine, own, m, p, q in zip(sound, added, wanted, self._ms, self._ps, self._qs):
            if fine:
                low_rank.expand(p, q, own, 1.0 if mean else float(size))
            else:
                if mine:
                    m.sub_(own)  # the error as it was, but for rounding
                own.fill_(float("nan"))
                p.zero_()
        self._repair_directions(sound)
        self._fit = True
        finite = _share(vectors, size if mean else 1)
        for place, part in zip(self._plain, vectors.split([len(place) for place in self._plain])):
            flat[place.start : place.stop] = part
        return finite & all(sound)

    def _finite_ones(self, wanted: list[torch.Tensor]) -> list[bool]:
        """Return which gradients are finite. The others are not added to their errors."""
        found: list[bool] = torch.isfinite(torch.stack([own.sum() for own in wanted])).tolist()
        return found

    def _matrices_in(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[m.place.start : m.place.stop].view(m.rows, m.columns) for m in self._matrices]

    def _orthogonalise(self) -> None:
        """Make the columns of every P orthonormal, by Gram-Schmidt in float64 on all matrices of one shape at once."""
        for first, last in _runs([(m.rows, m.rank) for m in self._matrices]):
            batch = torch.stack(self._ps[first:last]).double()
            for column in range(batch.shape[2]):
                one = batch[:, :, column : column + 1]
                one /= one.norm(dim=1, keepdim=True) + EPSILON
                rest = batch[:, :, column + 1 :]
                rest -= (one * rest).sum(1, keepdim=True) * one
            for p, own in zip(self._ps[first:last], batch):
                p.copy_(own)

    def _recover(self) -> None:
        """After an exchange that failed: its Q may differ from rank to rank, or not be finite."""
        if not self._fit:
            self._p.zero_()
            self._q.copy_(self._before)
            self._fit = True

    def _repair_directions(self, sound: Sequence[bool]) -> None:
        """Restore the previous Q where the new one is not finite, and replace rows of zeros."""
        for fine, q, old in zip(sound, self._qs, self._cut_q(self._before)):
            if not fine:
                q.copy_(old)
        if bool((self._q == 0).any()):
            for p, q, fresh in zip(self._ps, self._qs, self._fresh):
                dead = q.abs().amax(1) == 0
                q.copy_(torch.where(dead[:, None], fresh, q))
                p.masked_fill_(dead, 0)  # the error is still M - P Q

    def arrive(self, x: torch.Tensor) -> torch.Tensor:
        return self._finite

    def state(self, place: range) -> dict[str, torch.Tensor]:
        kept = {"turn": torch.tensor(self._turn)}
        if (i := self._places.get(place)) is not None:
            self._recover()
            error, q = self._ms[i].clone(), self._qs[i]
            low_rank.advance(None, error, self._ps[i].clone(), q)
            kept |= {"error": error.flatten(), "q": q.t().clone()}
        return kept

    def load(self, place: range, state: dict[str, torch.Tensor]) -> None:
        if (i := self._places.get(place)) is not None:
            self._recover()
            m, p, q = self._ms[i], self._ps[i], self._qs[i]
            low_rank.advance(None, m, p, q)
            p.zero_()  # now the error is M
            if "error" in state and state["error"].numel() == len(place):
                m.copy_(state["error"].view(m.shape))
            if "q" in state and state["q"].shape == q.t().shape:
                q.copy_(state["q"].t())
        if "turn" in state:
            self._turn = int(state["turn"])

    def _cut_q(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return _cut(flat, [(m.rank, m.columns) for m in self._matrices])


def matrix_of(place: range, rows: int, rank: int) -> Matrix | None:
    """Return the tensor at `place` as a matrix of `rows`, or None if compression would save too little."""
    columns = len(place) // max(rows, 1)
    rank = min(rank, rows, columns)
    if rank == 0 or (rows + columns) * rank * SAVES >= rows * columns:
        return None
    return Matrix(place, rows, columns, rank)


def _share(x: torch.Tensor, size: int) -> torch.Tensor:
    """Divide in place. Return whether all of it is finite."""
    if size != 1:
        x.div_(size)
    return torch.isfinite(torch.stack(torch.aminmax(x))).all() if x.numel() else torch.ones((), dtype=torch.bool, device=x.device)


def _cut(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return views of matrices that follow each other at the start of `flat`."""
    found, at = [], 0
    for rows, columns in shapes:
        found.append(flat[at : at + rows * columns].view(rows, columns))
        at += rows * columns
    return found


def _random(like: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Return initial directions, the same on all ranks and devices."""
    own = torch.Generator().manual_seed(seed)
    return [torch.randn(q.t().shape, generator=own).t().to(q).contiguous() for q in like]


def _runs(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return where runs of equal shapes begin and end."""
    edges = [i for i in range(len(shapes)) if i == 0 or shapes[i] != shapes[i - 1]]
    return list(zip(edges, [*edges[1:], len(shapes)]))
