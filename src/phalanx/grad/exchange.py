"""The exchange of one backward: groups of gradients are sent in index order, and come back as means.

Autograd may deliver a gradient in several pieces (reentrant checkpointing). If a piece arrives after its group was sent, the rank
raises a flag. It is sent with the last group, which is therefore always sent at the end of backward. Then all ranks send
all groups again, and from the next backward on they send that group at the end, too. So every rank sends every group equally
often, and no rank has to ask the others. `flags.py` lists all flags.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.streams import Writers
from phalanx.grad.arena import Arena
from phalanx.grad.finite import Finite
from phalanx.grad.flags import Flags, Said
from phalanx.grad.reducer import Group, GroupReducer
from phalanx.grad.untouched import Untouched


class Exchange:
    """The groups that all ranks have agreed on, and which of them were sent."""

    def __init__(self, comm: Communicator, reducer: GroupReducer, untouched: Untouched, *, at_the_end: bool) -> None:
        self._comm, self._reducer, self._untouched = comm, reducer, untouched
        self._at_the_end = at_the_end  # send nothing early, and copy all gradients into the arena in one call
        self.groups: list[Group] = []
        self._whole: Group | None = None  # all groups as one, if sending them together is faster
        self._home: dict[int, Group] = {}  # the group of a parameter, by the id of the parameter
        self._complete: set[torch.nn.Parameter] = set()  # parameters whose gradients are complete, in this backward
        self._next = 0  # the group to send next
        self._again = False  # on this rank a gradient came after its group was sent
        self._flags = Flags(comm, beside=False)
        self.finite = Finite([])
        self._writers = Writers()

    def start_with(self, groups: list[Group]) -> None:
        """Use these groups, which all ranks have agreed on in this order."""
        self.groups = groups
        self._whole = self._as_one()
        rounded = any(group.wire is not None and not group.wire.keeps_flags for group in groups)
        self._flags = Flags(self._comm, beside=rounded or any(group.flat.is_cuda for group in groups))
        self.finite = self._reducer.finite = Finite(groups)
        self._home = {id(p): group for group in groups for p in group.params}
        self._complete.clear()
        self._next, self._again = 0, False

    def _as_one(self) -> Group | None:
        """Reduce the whole arena in one call: twenty waits for the slower rank, one per group, cost a tenth of a step."""
        if len(self.arenas) != 1 or not self._comm.shares_memory:
            return None
        if any(group.wire is not None or group.travels is not group.flat for group in self.groups):
            return None
        [arena] = self.arenas
        return Group(arena, arena.flat, [p for group in self.groups for p in group.params], arena.flat, None, early=False)

    def group_of(self, key: int) -> Group | None:
        """The group of a parameter, by the id of the parameter."""
        return self._home.get(key)

    @property
    def arenas(self) -> list[Arena]:
        """The arenas that hold the gradients of all groups."""
        return list(dict.fromkeys(group.arena for group in self.groups))

    @property
    def begun(self) -> bool:
        """Whether any group was sent."""
        return any(group.left is not None for group in self.groups)

    @property
    def early_bytes(self) -> int:
        """The bytes that were sent so far."""
        return sum(group.flat.nbytes for group in self.groups if group.left is not None)

    # ---- during backward ---------------------------------------------------------------------------------------------------

    def before(self, key: int) -> None:
        """Autograd is about to accumulate into a gradient: wait first if its group is in flight."""
        group = self._home.get(key)
        if group is not None and group.left is not None and group.pending is not None:
            self._arrive(group)

    def take(self, p: torch.nn.Parameter, *, accumulates: bool) -> bool:
        """Take over the gradient of `p`, which is complete or only `accumulates`. Return whether a group may be sent now."""
        group = self._home.get(id(p))
        if group is None:
            return False
        if not self._at_the_end:
            group.arena.take(p)
            self._writers.note(p, group)
        if not accumulates:
            self._untouched.note(p)
        if self._at_the_end:
            return False
        if group.left is not None:  # too late: from now on this group is sent at the end of backward
            self._again = group.surprised = True
        elif p.grad is not None and p.grad.requires_grad:  # it has a graph: send its group at the end of backward
            group.missing += p in self._complete
            self._complete.discard(p)
        elif not accumulates and p not in self._complete:
            self._complete.add(p)
            group.missing -= 1
            return True
        return False

    def leave_in_order(self, label: str) -> None:
        """Send complete groups in index order. The order of the hooks may differ between ranks."""
        while self._next < len(self.groups) - 1:  # the last one is sent at the end, because it carries the flags
            group = self.groups[self._next]
            if group.missing > 0 or not group.early:
                return
            self._writers.wait(group)
            group.arena.take_all(group.params)  # a hook of the user may have replaced a gradient
            for p in group.params:
                self._untouched.note(p)
            self._reducer.leave(group, label)
            group.left_early = True
            self._next += 1

    # ---- at its end --------------------------------------------------------------------------------------------------------

    def complete(self, label: str, *, at_step: bool, at_once: bool) -> Said:
        """Send the remaining groups and wait for all. `at_once`: no rank sends groups during backward."""
        if not self.groups:
            return Said()
        if at_once and self._whole is not None:
            return self._complete_at_once(self._whole, label, at_step=at_step)
        last = self.groups[-1]
        for group in self.groups[:-1]:
            if group.left is None:
                group.arena.take_all(group.params)
                self._reducer.leave(group, label)
        last.arena.take_all(last.params)
        flags = self._flags.send(label, again=self._again, at_step=at_step, ill=self._is_ill(last))
        self._reducer.leave(last, label, flags=flags)
        for group in self.groups:
            if group.pending is not None:
                self._arrive(group)
        said = self._flags.receive(last.travels)
        if said.again:
            self._send_again(label)
        self._reducer.weights.settle()
        return said

    def _complete_at_once(self, whole: Group, label: str, *, at_step: bool) -> Said:
        whole.arena.take_all(whole.params)
        flags = self._flags.send(label, again=False, at_step=at_step, ill=self._is_ill(self.groups[-1]))
        self._reducer.average(whole, label, flags=flags)
        for group in self.groups:
            group.left = whole.left
        self._reducer.weights.settle()
        return self._flags.receive(whole.flat)

    def _is_ill(self, last: Group) -> bool:
        """Whether this rank has NaN or inf in a sample of its own gradients."""
        return self._reducer.weights.counts and self.finite.look(last)

    def _arrive(self, group: Group) -> None:
        """Wait for a group. Raise if the user changed its gradients in flight: the change is lost, or half applied."""
        self._reducer.arrive(group)
        if group.left_early:
            self._untouched.check(group.params, "while it was in flight to the other ranks", may_be_dropped=False)

    def _send_again(self, label: str) -> None:
        self._agree_on_late_groups()
        for group in self.groups[:-1]:
            group.arena.take_all(group.params)
            group.overflowed = False  # only the second exchange counts
            self._reducer.leave(group, f"{label}, again")
        self._reducer.arrive_all(self.groups)

    def _agree_on_late_groups(self) -> None:
        """Agree on the groups that are sent at the end of backward from now on, because a gradient came too late on some rank."""
        told = self._comm.allgather_obj([group.surprised for group in self.groups])
        for group, surprised in zip(self.groups, zip(*told)):
            group.early, group.surprised = group.early and not any(surprised), False

    def check_untouched(self, when: str) -> None:
        """Raise if the user changed a gradient after it was complete and before it was sent."""
        for group in self.groups:
            self._untouched.check(group.params, when, may_be_dropped=not group.left_early)

    def forget_what_is_at_home(self) -> None:
        """Allow changes again to gradients that were not sent."""
        self._untouched.forget(keep=[p for group in self.groups if group.left is not None for p in group.params])

    def finish(self) -> None:
        """Prepare for the next backward. No group is in flight."""
        self._again, self._next = False, 0
        self._untouched.forget()
        self._complete.clear()
        self._writers.forget()
        for group in self.groups:
            group.missing, group.left, group.left_early = len(group.params), None, False


def overflowed(groups: Sequence[Group]) -> set[int]:
    """The ids of the parameters whose means are not finite after a compressing wire. Each is returned once."""
    over = {id(p) for group in groups if group.overflowed for p in group.params}
    for group in groups:
        group.overflowed = False
    return over
