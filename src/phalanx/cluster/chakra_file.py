"""An execution trace of Chakra (MLCommons) as a workload: one step on one GPU shows when each gradient is ready.

It reads PyTorch traces from Chakra's converter, as protobuf (`.et`, also compressed) and as JSON (`chakra_jsonizer`). A node
becomes the event that torch.profiler would have written: a host operation, or a kernel with the host operation that launched it.
A compressed file may also hold torch.profiler's own trace, which `export_chrome_trace("trace.json.gz")` writes.
It leaves out collectives, because the plan has its own. Schema: et_def.proto of mlcommons/chakra at commit 6dc63e1. It reads a
node's number, name, type, dependencies, times, input shapes and `is_cpu_op`."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.schedule.plain_json import brief, loads

from .trace_file import NOT_A_TRACE, Event, from_events, from_trace, is_trace
from .workload import Compute, Model

MAX_BYTES = 512 << 20
MAX_NODES = 2_000_000
COMPUTES = (4, "COMP_NODE")
GZIP = b"\x1f\x8b"
VERSION = re.compile(rb"[\w.+\-]*", re.ASCII)
CAMEL = ("ctrlDeps", "dataDeps", "durationMicros", "ctrl_deps", "data_deps", "duration_micros")


@dataclass(frozen=True, slots=True)
class Node:
    """The fields that we read from a node."""

    number: int
    name: str
    computes: bool
    after: tuple[int, ...]
    start: int  # us
    duration: int
    shapes: str
    on_host: bool


def is_chakra(data: bytes) -> bool:
    """Whether `from_chakra` is for this file: it is compressed, or looks like the protobuf or the JSON of an execution trace."""
    head = data[:65536]
    if data.lstrip()[:1] == b"{":
        return b'"traceEvents"' not in head and any(f'"{name}"'.encode() in head for name in CAMEL)
    if data[:2] == GZIP:
        return True
    # The first message has the version, field 1, first. Text may begin with `[` and a new line, which look like such a message.
    tag = 2 if head[:1] >= b"\x80" else 1  # after the length of the message
    if len(head) < tag + 2 or head[tag] != 10:
        return False
    version = head[tag + 2 : tag + 2 + head[tag + 1]]
    return len(version) == head[tag + 1] and VERSION.fullmatch(version) is not None


def from_chakra(data: bytes, batch: float) -> tuple[Model, Compute]:
    """The model and the device of a trace of one step with `batch` samples; ValueError for anything else."""
    if data[:2] == GZIP:
        data = _unpacked(data)
        if data.lstrip()[:1] == b"{" and not is_chakra(data):
            text = _text(data)
            if not is_trace(text):
                raise ValueError(f"the compressed file holds neither a trace of torch.profiler nor one of Chakra: {brief(text)}")
            return from_trace(text, batch)
    nodes = list(_nodes(data))
    hosts = {node.number: node for node in nodes if node.on_host}
    events: list[Event] = []
    for node in nodes:
        event: Event = {"name": node.name, "ph": "X", "ts": node.start, "dur": node.duration}
        if node.on_host:
            dims = _dims(node.shapes)
            events.append(event | {"cat": "cpu_op", "args": {"Input Dims": dims} if dims else {}})
        elif node.computes:
            launched = max((hosts[other].start for other in node.after if other in hosts), default=node.start)
            call = {
                "name": "launch",
                "ph": "X",
                "cat": "cuda_runtime",
                "ts": launched + 0.5,
                "dur": 0,
            }  # inside the operation: half a us after its start
            events += [one | {"args": {"correlation": node.number}} for one in (event | {"cat": "kernel"}, call)]
    return from_events(events, batch)


def _dims(shapes: str) -> list[Any]:
    try:
        found = loads(shapes) if shapes else []
    except ValueError:
        return []
    return found if isinstance(found, list) and found and isinstance(found[0], list) else []


def _nodes(data: bytes) -> Iterator[Node]:
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data):,} bytes of a trace; at most {MAX_BYTES:,} are read")
    values = map(_from_json, _objects(data)) if data.lstrip()[:1] == b"{" else map(_from_protobuf, _messages(data))
    for count, node in enumerate(values):
        if count > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} nodes")
        if node is not None:
            yield node


def _unpacked(data: bytes) -> bytes:
    machine = zlib.decompressobj(wbits=31)
    try:
        found = machine.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"{NOT_A_TRACE}: {error}") from None
    if machine.unconsumed_tail:
        raise ValueError(f"more than {MAX_BYTES:,} bytes of a trace, unpacked")
    if not machine.eof or machine.unused_data:
        raise ValueError(f"the compressed trace {'has more after its end' if machine.eof else 'is cut off'}; copy the file again")
    return found


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{NOT_A_TRACE}: it is not UTF-8") from None


# ---- JSON: one object after another, the first for the whole trace; 64-bit numbers are strings ---------------------------------


def _objects(data: bytes) -> Iterator[dict[str, Any]]:
    text = _text(data)
    read, at = json.JSONDecoder().raw_decode, 0
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text):
            return
        try:
            value, at = read(text, at)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{NOT_A_TRACE}: {str(error)[:200]}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{NOT_A_TRACE}: {brief(value)} where a node was expected")
        yield value


def _from_json(value: dict[str, Any]) -> Node | None:
    def get(camel: str, snake: str, default: Any) -> Any:
        return value.get(camel, value.get(snake, default))

    if "name" not in value or "type" not in value:
        return None  # this object describes the whole trace
    after = [*_list(get("ctrlDeps", "ctrl_deps", [])), *_list(get("dataDeps", "data_deps", []))]
    inputs, on_host = value.get("inputs", {}), False
    for attribute in _list(value.get("attr", [])):
        if isinstance(attribute, dict) and attribute.get("name") == "is_cpu_op":
            on_host = bool(attribute.get("boolVal", attribute.get("bool_val", attribute.get("int32Val", False))))
    return Node(
        _whole(value.get("id", 0)),
        str(value["name"])[:200],
        value["type"] in COMPUTES,
        tuple(map(_whole, after)),
        _whole(get("startTimeMicros", "start_time_micros", 0)),
        _whole(get("durationMicros", "duration_micros", 0)),
        str(inputs.get("shapes", ""))[:10_000] if isinstance(inputs, dict) else "",
        on_host,
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _whole(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 20:
        value = int(value)
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{NOT_A_TRACE}: {brief(value)} where a whole number was expected")
    return value


# ---- protobuf: messages, each after its length; the first describes the whole trace --------------------------------------------

Field = tuple[int, int | bytes]  # its number, and its value: a number or bytes


def _messages(data: bytes) -> Iterator[bytes]:
    at, first = 0, True
    while at < len(data):
        size, at = _varint(data, at)
        if at + size > len(data):
            raise ValueError(f"{NOT_A_TRACE}: it ends inside a message")
        if not first:
            yield data[at : at + size]
        first, at = False, at + size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError(f"{NOT_A_TRACE}: a number does not end")


def _fields(data: bytes) -> Iterator[Field]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError(f"{NOT_A_TRACE}: it ends inside a field")
            yield key >> 3, data[at : at + size]
            at += size
        else:
            raise ValueError(f"{NOT_A_TRACE}: a field of kind {kind}")
    if at > len(data):
        raise ValueError(f"{NOT_A_TRACE}: it ends inside a field")


def _from_protobuf(data: bytes) -> Node:
    numbers = {1: 0, 3: 0, 6: 0, 7: 0}  # id, type, start, duration
    name = shapes = ""
    after: list[int] = []
    on_host = False
    for field, value in _fields(data):
        if field in numbers and isinstance(value, int):
            numbers[field] = value
        elif field in (4, 5):
            after += [value] if isinstance(value, int) else _packed(value)
        elif isinstance(value, bytes):
            if field == 2:
                name = value[:200].decode("utf-8", "replace")
            elif field == 8:
                shapes = next((v for f, v in _fields(value) if f == 2 and isinstance(v, bytes)), b"")[:10_000].decode(
                    "utf-8", "replace"
                )
            elif field == 10:
                attribute = dict(_fields(value))
                on_host = bool(attribute.get(27, 0)) if attribute.get(1) == b"is_cpu_op" else on_host
    return Node(numbers[1], name, numbers[3] in COMPUTES, tuple(after), numbers[6], numbers[7], shapes, on_host)


def _packed(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found
