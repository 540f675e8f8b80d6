"""MSCCL's XML as a value: thread blocks per GPU, steps per thread block. The parser does not trust its input.

    <algo name="ring" proto="Simple" nchannels="1" nchunksperloop="4" ngpus="4" coll="allreduce" inplace="1">
      <gpu id="0" i_chunks="4" o_chunks="0" s_chunks="0">
        <tb id="0" send="1" recv="3" chan="0">
          <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>

A thread block runs its steps in order, sends to one GPU and receives from one, on a channel. A step waits for step `deps` of
thread block `depid` of its GPU. Format: microsoft/msccl-tools writes these files, microsoft/msccl runs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.parsers import expat

from .limits import MAX_CHUNKS, MAX_RANKS, check_name
from .ops import ScheduleError

MAX_BYTES = 64 << 20
MAX_STEPS = 2_000_000
MAX_TOUCHED = 1 << 22  # chunks, over all steps: Swing on 1,024 ranks sends and receives this many
RECEIVES = frozenset({"r", "rcs", "rrc", "rrs", "rrcs"})
SENDS = frozenset({"s", "rcs", "rrs", "rrcs"})
TYPES = RECEIVES | SENDS | {"nop", "cpy", "re"}
BUFFERS = frozenset({"i", "o", "s"})


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a thread block."""

    kind: str
    source: tuple[str, int]  # buffer and first chunk
    target: tuple[str, int]
    count: int
    after: tuple[int, int] | None  # thread block and step of the same GPU that must be done


@dataclass(frozen=True, slots=True)
class ThreadBlock:
    """The steps of one thread block, in order. `send` and `receive` are GPUs, or -1."""

    number: int
    send: int
    receive: int
    channel: int
    steps: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm of MSCCL: `gpus[r]` are the thread blocks of rank r."""

    name: str
    collective: str
    chunks: int
    in_place: bool
    gpus: tuple[tuple[ThreadBlock, ...], ...]


def parse(xml: str | bytes) -> Algorithm:
    """Parse the XML. Raises ScheduleError with the line if it is not an algorithm."""
    size = len(xml)
    if size > MAX_BYTES:
        raise ScheduleError(f"{size:,} bytes of XML; at most {MAX_BYTES:,} are read")
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.StartDoctypeDeclHandler = reader.refuse_doctype  # without one there are no entities, and so no entity bombs
    reader.line = lambda: parser.CurrentLineNumber
    try:
        parser.Parse(xml, True)
    except expat.ExpatError as error:
        raise ScheduleError(f"line {error.lineno}: not XML: {expat.errors.messages[error.code]}") from None
    except (ValueError, UnicodeEncodeError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError(f"not XML: {error}") from None
    return reader.result()


@dataclass(slots=True)
class _Reader:
    """Builds the algorithm from the parser's events."""

    path: list[str] = field(default_factory=list)
    head: dict[str, str] = field(default_factory=dict)
    gpus: dict[int, list[ThreadBlock]] = field(default_factory=dict)
    block: dict[str, str] = field(default_factory=dict)
    steps: list[Instruction] = field(default_factory=list)
    count: int = 0
    touched: int = 0
    line: object = None

    def fail(self, fact: str) -> ScheduleError:
        return ScheduleError(f"line {self.line() if callable(self.line) else 0}: {fact}")

    def refuse_doctype(self, *_: object) -> None:
        raise self.fail("a document type, which MSCCL never writes")

    def start(self, name: str, attributes: dict[str, str]) -> None:
        wanted = ("algo", "gpu", "tb", "step")
        self.path.append(name)
        names = wanted[: len(self.path)]
        if tuple(self.path) != names and not (len(self.path) == 4 and self.path[:3] == list(wanted[:3]) and name == "op"):
            raise self.fail(f"<{name[:40]}> where <{wanted[min(len(self.path), 4) - 1]}> was expected")
        if name == "algo":
            self.head = attributes
        elif name == "gpu":
            rank = self.number(attributes, "id", 0, MAX_RANKS - 1)
            if rank in self.gpus:
                raise self.fail(f"gpu {rank} appears twice")
            self.gpus[rank] = []
        elif name == "tb":
            self.block, self.steps = attributes, []
        else:
            self.steps.append(self.instruction(attributes))

    def end(self, name: str) -> None:
        self.path.pop()
        if name == "tb":
            block, largest = self.block, MAX_RANKS - 1
            mine = self.gpus[list(self.gpus)[-1]]
            number = self.number(block, "id", 0, 1 << 20)
            if number != len(mine):
                raise self.fail(f"thread block {number} where {len(mine)} was expected")
            send, receive = self.number(block, "send", -1, largest), self.number(block, "recv", -1, largest)
            mine.append(ThreadBlock(number, send, receive, self.number(block, "chan", 0, 1 << 20), tuple(self.steps)))

    def instruction(self, attributes: dict[str, str]) -> Instruction:
        self.count += 1
        if self.count > MAX_STEPS:
            raise self.fail(f"more than {MAX_STEPS:,} steps")
        kind = attributes.get("type", "")
        if kind not in TYPES:
            raise self.fail(f"type {kind[:40]!r} is none of {', '.join(sorted(TYPES))}")
        if self.number(attributes, "s" if "s" in attributes else "step", 0, MAX_STEPS) != len(self.steps):
            raise self.fail(f"step {attributes.get('s', attributes.get('step'))} where {len(self.steps)} was expected")
        places = []
        for side in ("src", "dst"):
            buffer = attributes.get(f"{side}buf", attributes.get("buf", "i"))
            if buffer not in BUFFERS:
                raise self.fail(f"{side}buf {buffer[:40]!r} is none of i, o, s")
            key = f"{side}off" if f"{side}off" in attributes else "off"
            places.append((buffer, self.number(attributes, key, -1, MAX_CHUNKS) if kind != "nop" else -1))
        block, step = self.number(attributes, "depid", -1, 1 << 20, -1), self.number(attributes, "deps", -1, MAX_STEPS, -1)
        count = 0 if kind == "nop" else self.number(attributes, "cnt", 1, MAX_CHUNKS, 1)
        self.touched += count
        if self.touched > MAX_TOUCHED:
            raise self.fail(f"more than {MAX_TOUCHED:,} chunks in all steps together")
        return Instruction(kind, places[0], places[1], count, (block, step) if block >= 0 and step >= 0 else None)

    def number(self, attributes: dict[str, str], name: str, least: int, most: int, default: int | None = None) -> int:
        text = attributes.get(name)
        if text is None and default is not None:
            return default
        try:
            value = int(text) if text is not None and len(text) <= 18 and text.isascii() else None
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise self.fail(f"{name}={(text or '')[:40]!r} is not a whole number from {least} to {most}")
        return value

    def result(self) -> Algorithm:
        head, ranks = self.head, len(self.gpus)
        if not ranks:
            raise ScheduleError("the algorithm has no <gpu>")
        if sorted(self.gpus) != list(range(ranks)) or self.number(head, "ngpus", 1, MAX_RANKS, ranks) != ranks:
            raise ScheduleError(
                f"the gpus are {sorted(self.gpus)[:8]}; wanted 0 to ngpus - 1, {head.get('ngpus', '?')[:18]} in all"
            )
        chunks = self.number(head, "nchunksperloop", 1, MAX_CHUNKS)
        name = check_name(head.get("name", "msccl"))
        gpus = tuple(tuple(self.gpus[rank]) for rank in range(ranks))
        return Algorithm(name, head.get("coll", ""), chunks, head.get("inplace", "1") != "0", gpus)
