"""Runs a schedule on a flat tensor: picks its form for the transport, pads for library calls, keeps scratch memory."""

from __future__ import annotations

import torch

from phalanx.comm.block_code import BlockCode, Coder
from phalanx.comm.operations import Operations
from phalanx.comm.run import Form, cut, execute
from phalanx.comm.transports.shared import can_share
from phalanx.schedule import Schedule, lower

KEEP = 64 << 20  # bytes of scratch kept between operations


class Runner:
    """Runs schedules for one communicator. `shared`: the ranks of every host share memory."""

    def __init__(self, operations: Operations, *, shared: bool) -> None:
        self._operations, self._shared = operations, shared
        self._forms: dict[tuple[int, torch.dtype, str], Form] = {}
        self._firsts: dict[tuple[int, int, int], torch.Tensor] = {}
        self._scratch: dict[tuple[torch.device, int], torch.Tensor] = {}  # bytes, used for all dtypes

    def run(
        self, schedule: Schedule, flat: torch.Tensor, op: str, tag: int, *, scatters: bool = False, coder: Coder | None = None
    ) -> None:
        """Run a schedule in place. Only the issuing thread calls it. `scatters`: the schedule is a reduce-scatter.

        A schedule that encodes uses `coder`, or without one blocks of the default size without error feedback.
        """
        form = self._form(schedule, flat, scatters=scatters)
        if form.cut and flat.numel() % schedule.chunks:
            # library calls need equal parts, Moves do not. Gradients never get here, because their arena is padded once
            length = -(-flat.numel() // schedule.chunks)
            padded = flat.new_zeros(length * schedule.chunks)
            # an element must stay in its chunk if its place matters; otherwise a single copy is enough
            parts = cut(0, flat.numel(), schedule.chunks) if form.placed else [(0, flat.numel())]
            pairs = [(flat[a:b], padded[i * length :][: b - a]) for i, (a, b) in enumerate(parts)]
            for mine, theirs in pairs:
                theirs.copy_(mine)
            self.run(schedule, padded, op, tag, scatters=scatters, coder=coder)
            for mine, theirs in pairs:
                mine.copy_(theirs)
            return
        operations = self._operations
        execute(
            form.parts,
            flat,
            form.cuts(flat),
            op=op,
            me=operations.members.rank,
            transport=operations.transport,
            ranks=operations.members.ranks,
            tag=tag,
            scratch=self._room,
            got_on=operations.issuer.activity.got_on,
            coder=coder or (Coder(BlockCode()) if schedule.coded else None),
            at_once=form.at_once,
        )

    def first_of_blocks(self, schedule: Schedule, flat: torch.Tensor, block: int) -> torch.Tensor:
        """Return where the blocks begin that were encoded together in `run` with a coder."""
        form = self._form(schedule, flat, scatters=False)
        if not schedule.coded or (form.cut and flat.numel() % schedule.chunks):
            return torch.arange(flat.numel(), device=flat.device)
        key = (id(schedule), flat.numel(), block)
        if key not in self._firsts:
            chunks = [chunk for bounds in form.cuts(flat) for chunk in bounds]
            self._firsts[key] = torch.cat([torch.arange(*chunk, block, device=flat.device) for chunk in chunks])
        return self._firsts[key]

    def _form(self, schedule: Schedule, flat: torch.Tensor, *, scatters: bool) -> Form:
        """Return how the schedule runs on tensors like `flat`: calls that the transport supports stay, the rest is lowered."""
        key = (id(schedule), flat.dtype, flat.device.type)
        if key not in self._forms:
            transport, members = self._operations.transport, self._operations.members
            lowered = lower(schedule, keep=lambda call: transport.calls(call, flat, members.ranks))
            calls = self._shared or transport.library
            # known of all hosts, not only of this one: all ranks must cut the buffer alike
            hosts = members.hosts.ranks if self._shared and can_share(flat) else ()
            self._forms[key] = Form.of(
                schedule, lowered, members.rank, calls=calls, on_a_host=lambda call: call.group in hosts, scatters=scatters
            )
        return self._forms[key]

    def _room(self, nbytes: int, device: torch.device, number: int) -> torch.Tensor:
        """Return bytes of scratch. The same `number` gets the same memory again."""
        room = self._scratch.get((device, number))
        if room is None or room.nbytes < nbytes:
            with torch.inference_mode(False):  # a tensor created in inference mode could not be written to outside it
                room = torch.empty(nbytes, dtype=torch.uint8, device=device)
            if nbytes <= KEEP:
                self._scratch[device, number] = room
        return room[:nbytes]
