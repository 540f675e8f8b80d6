"""What hwloc's `lstopo` prints, as a fabric: the GPUs of a host, the PCIe bridges between them, and their NVLinks.

It reads the XML (`lstopo --of xml`), which has the speed of every PCIe link and the NVLinks. It also reads the text (`lstopo --of
console`), which has neither; there a link gets the usual rate of its bus. Every GPU is a rank, in the order of the file. A host
without GPUs has a rank per NUMA node."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from xml.parsers import expat

from .fabric_links import MAX_NODES, PCIE, FabricError, Links

MAX_BYTES, MAX_OBJECTS = 16 << 20, 100_000
ACCELERATORS = re.compile(r"(cuda|nvml|rsmi|hip|ze|ve)\d+(\.\d+)?")  # names of OS devices that run kernels
CLASSES = ("0302", "0380", "1200", "3D", "Display", "ProcessingAccelerator")  # of PCI devices, in XML and in text
SCREENS = ("0300", "VGA")
LEVELS = ("Package", "Die", "Group", "NUMANode", "Machine")


@dataclass(eq=False, slots=True)
class _Object:
    """An object of hwloc, with what is inside it."""

    kind: str
    name: str = ""
    speed: float = 0.0  # GB/s to the parent; 0 if unknown
    number: str = ""  # gp_index
    parent: _Object | None = None
    children: list[_Object] = field(default_factory=list)

    def add(self, child: _Object) -> _Object:
        child.parent = self
        self.children.append(child)
        return child


@dataclass(slots=True)
class _Host:
    root: _Object = field(default_factory=lambda: _Object("root"))
    nvlinks: list[tuple[list[str], list[float]]] = field(default_factory=list)  # objects, and a matrix of MB/s between them


def lstopo_links(text: str) -> Links:
    """The links of a host, from either form; FabricError if the text is neither."""
    if len(text) > MAX_BYTES:
        raise FabricError(f"lstopo: {len(text):,} characters; at most {MAX_BYTES:,} are read")
    host = _from_xml(text) if text.lstrip().startswith("<") else _from_text(text)
    objects = _all(host.root)
    ranks = _gpus(objects)
    if not ranks:
        ranks = [one for one in objects if one.kind == "NUMANode"]
    if len(ranks) < 2:
        raise FabricError(
            f"lstopo: {len(ranks)} GPU or NUMA node found, but a network needs 2. `lstopo --of xml` shows GPUs if hwloc was built"
            " with PCI and CUDA, NVML or RSMI"
        )
    if len(ranks) > MAX_NODES:
        raise FabricError(f"lstopo: {len(ranks)} GPUs or NUMA nodes; at most {MAX_NODES} are read")
    return [*_tree_links(objects, ranks), *_nvlinks(host, ranks)]


def _all(root: _Object) -> list[_Object]:
    found, todo = [], [root]
    while todo:
        one = todo.pop()
        found.append(one)
        todo += reversed(one.children)
    return found


def _gpus(objects: list[_Object]) -> list[_Object]:
    """PCI devices that run kernels according to their driver; without any, those of such a class; else those with a screen."""
    devices = [one for one in objects if one.kind == "PCI"]
    by_driver = [one for one in devices if any(ACCELERATORS.fullmatch(child.name) for child in one.children)]
    by_class = [one for one in devices if one.name.startswith(CLASSES)]
    return by_driver or by_class or [one for one in devices if one.name.startswith(SCREENS)]


def _tree_links(objects: list[_Object], ranks: list[_Object]) -> Links:
    """Links from every GPU up to where all meet. An object with one way down and one way up is part of the wire."""
    below = Counter(map(id, ranks))  # object -> how many ranks are in it
    for one in reversed(objects):  # parents come before their children
        if one.parent is not None:
            below[id(one.parent)] += below[id(one)]
    links: Links = []
    names: dict[int, str] = {}
    for rank, gpu in enumerate(ranks):
        node: int | str = rank
        here, rate = gpu, _rate(gpu)
        while here.parent is not None and below[id(here)] < len(ranks):
            up = here.parent
            if below[id(up)] == below[id(here)]:  # nothing joins here
                rate, here = min(rate, _rate(up)), up
                continue
            known = id(up) in names  # then it has its links upwards, too
            name = names.setdefault(id(up), f"{up.kind.lower()}{len(names)}")
            links += [(node, name, rate), (name, node, rate)]
            if known:
                break
            node, here, rate = name, up, _rate(up)
    return links


def _rate(one: _Object) -> float:
    """GB/s from an object to its parent."""
    if one.kind == "HostBridge":
        return PCIE["NODE"]
    if one.kind in LEVELS:
        return PCIE["SYS"]
    return one.speed or PCIE["PHB"]


def _nvlinks(host: _Host, ranks: list[_Object]) -> Links:
    owner: dict[str, int | str] = {}
    for rank, gpu in enumerate(ranks):
        owner |= {child.number: rank for child in (gpu, *gpu.children) if child.number}
    owner |= {one.number: "nvswitch" for one in _all(host.root) if "nvswitch" in one.name.lower() and one.number}
    links: Links = []
    for numbers, values in host.nvlinks:
        ends = [owner.get(number) for number in numbers]
        for i, a in enumerate(ends):
            for j, b in enumerate(ends):
                rate = values[i * len(ends) + j] / 1000
                if a is not None and b is not None and a != b and rate > 0:
                    links.append((a, b, rate))
    return links


def _from_xml(text: str) -> _Host:
    host = _Host()
    reader = _Reader(host, host.root)
    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.CharacterDataHandler = reader.characters
    parser.buffer_text = True  # otherwise one call per line
    # hwloc has a document type, but declares nothing in it; bombs need entities, or defaults of attributes
    parser.EntityDeclHandler = parser.AttlistDeclHandler = reader.refuse
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise FabricError(f"lstopo: line {error.lineno}: not XML: {expat.errors.messages[error.code]}") from None
    except FabricError:
        raise
    except ValueError as error:
        raise FabricError(f"lstopo: line {parser.CurrentLineNumber}: {error}") from None
    return host


@dataclass(slots=True)
class _Reader:
    host: _Host
    at: _Object
    count: int = 0
    matrix: str = ""  # its name
    texts: dict[str, list[str]] = field(default_factory=dict)  # the pieces of its texts
    collecting: str = ""

    def refuse(self, *_: object) -> None:
        raise FabricError("lstopo: the file declares an entity or an attribute, which hwloc never does")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "object":
            self.count += 1
            if self.count > MAX_OBJECTS:
                raise FabricError(f"lstopo: more than {MAX_OBJECTS:,} objects")
            self.at = self.at.add(_xml_object(attributes))
        elif tag.startswith("distances2"):
            self.matrix, self.texts = attributes.get("name", ""), {"indexes": [], "u64values": []}
        elif tag in self.texts:
            self.collecting = tag

    def characters(self, text: str) -> None:
        if self.collecting:
            self.texts[self.collecting].append(text)

    def end(self, tag: str) -> None:
        if tag == "object":
            self.at = self.at.parent or self.host.root
        elif tag in self.texts:
            self.collecting = ""
            self.texts[tag].append(" ")
        elif tag.startswith("distances2"):
            if self.matrix == "NVLinkBandwidth":
                words = {name: "".join(pieces).split() for name, pieces in self.texts.items()}
                numbers = [word.rpartition(":")[2] for word in words["indexes"]]
                values = [_number(word) for word in words["u64values"]]
                if len(values) != len(numbers) ** 2 or len(numbers) > 1024:
                    raise FabricError(f"lstopo: {len(values)} NVLink bandwidths between {len(numbers)} devices")
                self.host.nvlinks.append((numbers, values))
            self.matrix, self.texts, self.collecting = "", {}, ""


def _xml_object(attributes: dict[str, str]) -> _Object:
    kind, number = attributes.get("type", ""), attributes.get("gp_index", "")[:20]
    speed = _number(attributes.get("pci_link_speed", "0"))
    if kind == "PCIDev":
        return _Object("PCI", attributes.get("pci_type", "")[:40], speed, number)
    if kind == "Bridge":
        host = attributes.get("bridge_type", "").startswith("0")
        return _Object("HostBridge" if host else "PCIBridge", "", speed, number)
    return _Object(kind[:40], attributes.get("name", "")[:40], 0.0, number)


def _number(text: str) -> float:
    try:
        value = float(text) if len(text) < 30 else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e15:
        raise FabricError(f"lstopo: {text[:40]!r} is not a bandwidth")
    return value


DEVICE = re.compile(r"PCI (?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f] \(([^)]{1,40})\)")
SYSTEM = re.compile(r'[A-Za-z()]{1,30} "([^"]{1,40})"')


def _from_text(text: str) -> _Host:
    host = _Host()
    open_objects: list[tuple[int, _Object]] = [(-1, host.root)]
    count = 0
    for line in text.split("\n"):
        words = line.strip()
        if not words or words.startswith(("Misc", "depth", "Special", "Topology")):
            continue
        count += 1
        if count > MAX_OBJECTS or len(line) > 2000:
            raise FabricError(f"lstopo: more than {MAX_OBJECTS:,} lines, or a line of more than 2,000 characters")
        indent = len(line) - len(line.lstrip())
        while open_objects[-1][0] >= indent:
            open_objects.pop()
        parent = open_objects[-1][1]
        for part in words.split(" + "):
            parent = parent.add(_text_object(part))
        open_objects.append((indent, parent))
    if count == 0 or not host.root.children[0].kind.startswith("Machine"):
        raise FabricError("this is not what `lstopo --of console` prints: it begins with a line `Machine (...)`")
    return host


def _text_object(words: str) -> _Object:
    device, system = DEVICE.match(words), SYSTEM.match(words)
    if device:
        return _Object("PCI", device.group(1))
    if system:
        return _Object("OSDev", system.group(1))
    kind = words.split(" ")[0][:40]
    return _Object("PCIBridge" if kind.startswith("PCIBridge") else kind)
