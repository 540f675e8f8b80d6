"""A network as a graph: ranks, switches, and links with a bandwidth in each direction. People write it by hand.

    fabric "two unequal hosts"
    0-3 - s0 : 50            ranks 0 to 3 have a port of 50 GB/s each to the switch s0, in each direction
    4-5 - s1 : 50
    s0 - s1 : 10
    0 -> 4 : 2               one direction only

A number is a rank, any other word is a switch. Several links between two nodes add up. Lines that begin with # are comments.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .fabric_links import MAX_LINKS, MAX_NODES, NVLINK, PCIE, FabricError, Links
from .lstopo import lstopo_links

MOST = 1e6  # GB/s of a link
LONGEST, WORD = 2000, 64  # characters of a line, and of a switch's name
ENDS = r"[A-Za-z0-9_.+\- ]+?"
LINK = re.compile(rf"({ENDS})\s+(-|->)\s+({ENDS})\s*:\s*([0-9.eE+\-]+)", re.ASCII)
RANGE = re.compile(r"(\d{1,6})-(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Fabric:
    """Ranks 0 to `ranks` - 1, switches by name, and directed links.

    `links` maps (node, node) to GB/s. A node is a rank's number or a switch's name.
    """

    name: str
    ranks: int
    links: tuple[tuple[int | str, int | str, float], ...]

    @property
    def switches(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node for a, b, _ in self.links for node in (a, b) if isinstance(node, str)))


def make_fabric(name: str, links: Iterable[tuple[int | str, int | str, float]]) -> Fabric:
    """A checked fabric of directed links. Links between the same two nodes are added up."""
    total: dict[tuple[int | str, int | str], float] = {}
    for a, b, rate in links:
        if a == b:
            raise FabricError(f"{name}: {a} is linked to itself")
        if not (math.isfinite(rate) and 0 < rate <= MOST):
            raise FabricError(f"{name}: the link {a} -> {b} has {rate} GB/s; give more than 0 and at most {MOST:g}")
        total[a, b] = total.get((a, b), 0.0) + rate
    numbers = {node for pair in total for node in pair if isinstance(node, int)}
    if not numbers:
        raise FabricError(f"{name}: no rank has a link; ranks are numbers from 0")
    if sorted(numbers) != list(range(len(numbers))):
        missing = next(rank for rank in range(len(numbers) + 1) if rank not in numbers)
        raise FabricError(
            f"{name}: rank {missing} has no link, but rank {max(numbers)} has; number the ranks from 0 without gaps"
        )
    fabric = Fabric(name, len(numbers), tuple((a, b, rate) for (a, b), rate in total.items()))
    if len({node for pair in total for node in pair}) > MAX_NODES or len(total) > MAX_LINKS:
        raise FabricError(f"{name}: more than {MAX_NODES} nodes or {MAX_LINKS} links")
    return fabric


def parse_fabric(text: str) -> Fabric:
    """The fabric in a file. FabricError names the line if one makes no sense."""
    name, links = "fabric", []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = " ".join(raw[: LONGEST + 1].split("#")[0].split())
        if not line:
            continue
        if len(raw) > LONGEST:
            raise FabricError(f"line {number}: {len(raw)} characters; at most {LONGEST} are read")
        if line.startswith("fabric "):
            name = _name(line.removeprefix("fabric "), number)
            continue
        found = LINK.fullmatch(line)
        if not found:
            raise FabricError(f"line {number}: {line[:80]!r} is not like '0-3 - s0 : 50' (GB/s) or '0 -> 4 : 2'")
        left, way, right, rate = found.groups()
        try:
            value = float(rate)
        except ValueError:
            raise FabricError(f"line {number}: {rate[:40]!r} is not a number of GB/s") from None
        for a in _nodes(left, number):
            for b in _nodes(right, number):
                links.append((a, b, value))
                if way == "-":
                    links.append((b, a, value))
                if len(links) > MAX_LINKS:
                    raise FabricError(f"line {number}: more than {MAX_LINKS} links")
    return make_fabric(name, links)


def _nodes(text: str, number: int) -> list[int | str]:
    nodes: list[int | str] = []
    for word in text.split():
        if len(word) > WORD:
            raise FabricError(f"line {number}: {word[:40]!r}... is longer than the name of a switch")
        found = RANGE.fullmatch(word)
        if found:
            first, last = int(found.group(1)), int(found.group(2))
            if not 0 <= last - first < MAX_NODES:
                raise FabricError(f"line {number}: {word} is not a range of at most {MAX_NODES} ranks")
            nodes += range(first, last + 1)
        elif word.isdecimal():
            nodes.append(int(word[:7]))
        else:
            nodes.append(word)
    return nodes


def _name(text: str, number: int) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, str) or len(value) > 200:
        raise FabricError(f'line {number}: {text[:80]!r} is not a text in double quotes, such as "two hosts"')
    return value


def from_nvidia_smi(text: str) -> Fabric:
    """The GPUs of one host, from `nvidia-smi topo -m`. NV4 is four NVLinks. If all pairs are equal, it is an NVSwitch."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.split("\n")]
    table = {row[0]: row[1:] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and len(row) > 2}
    table = {name: cells for name, cells in table.items() if cells[0] != "GPU1"}  # not the heading
    count = len(table)
    if count < 2 or any(f"GPU{i}" not in table or len(table[f"GPU{i}"]) < count for i in range(count)):
        raise FabricError("this is not what `nvidia-smi topo -m` prints: no table of GPU0, GPU1, ...")
    pairs = {(i, j): table[f"GPU{i}"][j] for i in range(count) for j in range(count) if i != j}
    wires = {pair: int(cell[2:]) * NVLINK for pair, cell in pairs.items() if re.fullmatch(r"NV\d{1,3}", cell)}
    links: Links = []
    if len(wires) == len(pairs) and len(set(wires.values())) == 1 and count > 2:
        rate = next(iter(wires.values()))
        links = [link for i in range(count) for link in ((i, "nvswitch", rate), ("nvswitch", i, rate))]
    else:
        links = [(i, j, rate) for (i, j), rate in wires.items()]
        others = {pair: PCIE.get(cell) for pair, cell in pairs.items() if pair not in wires}
        wrong = next((pair for pair, rate in others.items() if rate is None), None)
        if wrong:
            raise FabricError(f"nvidia-smi: {pairs[wrong][:20]!r} between GPU{wrong[0]} and GPU{wrong[1]} is unknown")
        for i in range(count):
            mine = [rate for (a, _), rate in others.items() if a == i and rate is not None]
            if mine:
                links += [(i, "pcie", max(mine)), ("pcie", i, max(mine))]
    return make_fabric("nvidia-smi", links)


RATES = {
    "SDR": 0.25,
    "DDR": 0.5,
    "QDR": 1.0,
    "FDR10": 1.25,
    "FDR": 1.7,
    "EDR": 3.125,
    "HDR": 6.25,
    "NDR": 12.5,
    "XDR": 25.0,
}  # per lane


def from_ibnetdiscover(text: str) -> Fabric:
    """Hosts and switches of an InfiniBand network, from `ibnetdiscover`. Every adapter is a rank, in the order of the file."""
    here: str | None = None
    names: dict[str, int | str] = {}
    links: Links = []
    for line in text.split("\n"):
        head = re.match(r'(Switch|Ca|Rt)\s+\d+\s+"([^"]{1,80})"', line)
        port = re.match(r'\[\d+\](?:\[\w+\])?(?:\(\w+\))?\s+"([^"]{1,80})"\[\d+\].*?(\d{1,2})x([A-Z]+\d*)', line)
        if head:
            here = head.group(2)
            if here not in names:
                names[here] = sum(isinstance(n, int) for n in names.values()) if head.group(1) == "Ca" else here
        elif port and here is not None and port.group(3) in RATES:
            links.append((here, port.group(1), int(port.group(2)) * RATES[port.group(3)]))
    if not links:
        raise FabricError("this is not what `ibnetdiscover` prints: no port of a switch or an adapter")
    unknown = next((b for _, b, _ in links if b not in names), None)
    if unknown is not None:
        raise FabricError(f"ibnetdiscover: {unknown!r} is linked but not described")
    return make_fabric("ibnetdiscover", [(names[str(a)], names[str(b)], rate) for a, b, rate in links])


def from_lstopo(text: str) -> Fabric:
    """The GPUs of one host, or its NUMA nodes if it has none, from `lstopo --of xml` or `lstopo --of console`."""
    return make_fabric("lstopo", lstopo_links(text))


def read_fabric(text: str) -> Fabric:
    """A fabric from any of these formats, recognised by its content."""
    if "<topology" in text[:2000] or text.startswith("Machine"):
        return from_lstopo(text)
    if "GPU0" in text and "GPU1" in text and re.search(r"\b(NV\d|PIX|PXB|PHB|NODE|SYS)\b", text):
        return from_nvidia_smi(text)
    if re.search(r'^(Switch|Ca)\s+\d+\s+"', text, re.M):
        return from_ibnetdiscover(text)
    return parse_fabric(text)
