"""What slots hold, as expressions: every addition, in the order in which it happens, over the inputs of the ranks.

Equal expressions are one number, so that two slots hold equal bits if their numbers are equal: floating-point addition commutes,
a + b = b + a to the last bit, but it does not associate. `add` therefore sorts its two operands and nothing else. What a library
call computes is opaque: each of its results is an expression of its own, which all ranks of the call share. Encoding is a
function: equal numbers have equal codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TypeVar

V = TypeVar("V")
Node = tuple[int, int | Fraction | tuple[int, ...]]  # a sum, a product, or CALL and the inputs of a library call
CALL = -1


class Expressions:
    """The expressions of one schedule, by number: 0 to world - 1 are the ranks' inputs, `junk` is what nobody knows."""

    def __init__(self, world: int) -> None:
        self.world = self.junk = world
        self.leaves_junk = False  # whether a call has left any
        self._nodes: list[Node] = [(CALL, ())] * (world + 1)
        self._known: dict[Node, int] = {}
        self._products: dict[Fraction, dict[int, int]] = {}  # by factor, whose hash takes as long as all the rest

    def add(self, a: int, b: int) -> int:
        """The sum of two expressions."""
        return self._number((a, b) if a <= b else (b, a))

    def scaling(self, factor: Fraction) -> Callable[[int], int]:
        """The function that multiplies an expression by `factor`."""
        products, nodes = self._products.setdefault(factor, {}), self._nodes

        def scale(a: int) -> int:
            found = products.get(a)
            if found is None:
                nodes.append((a, factor))
                found = products[a] = len(nodes) - 1
            return found

        return scale

    def call(self, inputs: tuple[int, ...]) -> int:
        """The sum that a library call makes of its inputs, in an order that only the library knows: equal to no other."""
        self._nodes.append((CALL, inputs))
        return len(self._nodes) - 1

    def encode(self, a: int) -> int:
        """What the code of an expression stands for: nearly the same number. In the table it is a call with one input."""
        return self._number((CALL, (a,)))

    def encodings(self) -> list[int]:
        """How often some input of each expression was encoded on its way there."""
        found = [0] * (self.world + 1)
        for number in range(self.world + 1, len(self._nodes)):
            parts, right = self._parts(number), self._nodes[number][1]
            found.append(max(found[part] for part in parts) + (isinstance(right, tuple) and len(right) == 1))
        return found

    def _number(self, node: Node) -> int:
        """The number of an expression, which is new if nobody has made it before."""
        new = len(self._nodes)
        number = self._known.setdefault(node, new)
        if number == new:
            self._nodes.append(node)
        return number

    def evaluate(
        self, wanted: Iterable[int], inputs: Callable[[int], V], add: Callable[[V, V], V], scale: Callable[[V, Fraction], V]
    ) -> dict[int, V]:
        """The values of `wanted`, where input i is `inputs(i)`; `inputs(self.junk)` is the value of junk."""
        kept = set(wanted)
        uses = self._uses(kept)
        values: dict[int, V] = {}

        def take(number: int) -> V:
            uses[number] -= 1  # what nobody needs any more is forgotten: formal sums of all steps would fill the memory
            return values[number] if uses[number] or number in kept else values.pop(number)

        for number in sorted(uses):
            if number <= self.world:
                values[number] = inputs(number)
                continue
            left, right = self._nodes[number]
            if isinstance(right, tuple):
                total = take(right[0])
                for part in right[1:]:
                    total = add(total, take(part))
                values[number] = total
            else:
                values[number] = scale(take(left), right) if isinstance(right, Fraction) else add(take(left), take(right))
        return values

    def prints(self, inputs: list[int], prime: int, scale: Callable[[int, Fraction], int]) -> list[int]:
        """Every expression modulo a prime, at full speed. `inputs` has one number per rank, and one for junk."""
        values = inputs.copy()
        keep = values.append
        for left, right in self._nodes[self.world + 1 :]:
            if isinstance(right, int):
                keep((values[left] + values[right]) % prime)
            elif isinstance(right, tuple):
                keep(sum(values[part] for part in right) % prime)
            else:
                keep(scale(values[left], right))
        return values

    def spoiled(self) -> set[int]:
        """Junk, and all expressions into which junk went, if only times zero: it may be infinite, or no number."""
        found = {self.junk}
        for number in range(self.world + 1, len(self._nodes) if self.leaves_junk else 0):
            if not found.isdisjoint(self._parts(number)):
                found.add(number)
        return found

    def _uses(self, wanted: set[int]) -> Counter[int]:
        """How often each expression that `wanted` are made of is used."""
        uses: Counter[int] = Counter(dict.fromkeys(wanted, 0))
        todo = list(wanted)
        while todo:
            for part in self._parts(todo.pop()):
                if part not in uses:
                    todo.append(part)
                uses[part] += 1
        return uses

    def _parts(self, number: int) -> tuple[int, ...]:
        if number <= self.world:
            return ()
        left, right = self._nodes[number]
        if isinstance(right, tuple):
            return right
        return (left,) if isinstance(right, Fraction) else (left, right)

    def text(self, number: int, depth: int = 5) -> str:
        """The expression for people: `(x0 + x1) + x2`, and `...` deep inside."""
        if number <= self.world:
            return "?" if number == self.junk else f"x{number}"
        if depth == 0:
            return "..."
        right, parts = self._nodes[number][1], self._parts(number)
        inner = [self.text(part, depth - 1) for part in parts[:4]] + ["..."] * (len(parts) > 4)
        if isinstance(right, tuple):
            return f"{'code' if len(right) == 1 else 'call'}({', '.join(inner)})"
        inner = [f"({text})" if text.count(" + ") and not text.startswith(("call(", "code(")) else text for text in inner]
        return f"{right} * {inner[0]}" if isinstance(right, Fraction) else " + ".join(inner)
