"""What slots hold, as expressions over the ranks' inputs: every addition, in the order in which it happens.

Equal expressions have one number, so two slots hold equal bits if their numbers are equal. Floating-point addition commutes
(a + b = b + a to the last bit) but does not associate. So `add` only sorts its two operands. The result of a library call is
opaque: each result is a new expression, which all ranks of the call share. Encoding is a function: equal numbers have equal
codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import count, repeat
from typing import TypeVar

from .ops import ONE

V = TypeVar("V")
Node = tuple[int, int | Fraction | tuple[int, ...]]  # a sum, a product, or CALL and the inputs of a library call
CALL = -1


class Expressions:
    """The expressions of one schedule, by number: 0 to world - 1 are the ranks' inputs, `junk` is an unknown value."""

    def __init__(self, world: int) -> None:
        self.world = self.junk = world
        self.leaves_junk = False  # whether a call has left junk
        self._nodes: list[Node] = [(CALL, ())] * (world + 1)
        self._known: dict[Node, int] = {}
        self._products: dict[Fraction, dict[int, int]] = {}  # by factor first: hashing a Fraction takes as long as all the rest

    def add(self, a: int, b: int) -> int:
        """The sum of two expressions."""
        return self._number((a, b) if a <= b else (b, a))

    def add_all(self, left: list[int], right: list[int]) -> list[int]:
        """The sums of many pairs. An equal pair among them takes up a number that no slot will hold."""
        pairs: list[Node] = list(zip(map(min, left, right), map(max, left, right), strict=True))
        numbers = list(map(self._known.setdefault, pairs, count(len(self._nodes))))
        self._nodes += pairs
        return numbers

    def scale_all(self, values: list[int], factor: Fraction) -> list[int]:
        """Many expressions times one factor; equal ones as with `add_all`."""
        products = self._products.setdefault(factor, {})
        numbers = list(map(products.setdefault, values, count(len(self._nodes))))
        self._nodes += zip(values, repeat(factor))
        return numbers

    def scale_each(self, values: list[int], factors: list[Fraction]) -> list[int]:
        """Many expressions, each times its own factor. Few factors differ, and equal ones are mostly one object."""
        places: dict[int, list[int]] = {}
        for i, key in enumerate(map(id, factors)):
            places.setdefault(key, []).append(i)
        found = values.copy()
        for alike in places.values():
            if factors[alike[0]] is not ONE:
                for i, number in zip(alike, self.scale_all([values[i] for i in alike], factors[alike[0]]), strict=True):
                    found[i] = number
        return found

    def call(self, inputs: tuple[int, ...]) -> int:
        """The sum that a library call makes of its inputs. Only the library knows the order, so it equals no other."""
        self._nodes.append((CALL, inputs))
        return len(self._nodes) - 1

    def encode(self, a: int) -> int:
        """The rounded value of an encoded expression. In the table it is a call with one input."""
        return self._number((CALL, (a,)))

    def encodings(self) -> list[int]:
        """For each expression, the largest number of times that one of its inputs was encoded."""
        found = [0] * (self.world + 1)
        for number in range(self.world + 1, len(self._nodes)):
            parts, right = self._parts(number), self._nodes[number][1]
            found.append(max(found[part] for part in parts) + (isinstance(right, tuple) and len(right) == 1))
        return found

    def _number(self, node: Node) -> int:
        """The number of an expression: a new one if it has not occurred before."""
        new = len(self._nodes)
        number = self._known.setdefault(node, new)
        if number == new:
            self._nodes.append(node)
        return number

    def evaluate(
        self, wanted: Iterable[int], inputs: Callable[[int], V], add: Callable[[V, V], V], scale: Callable[[V, Fraction], V]
    ) -> dict[int, V]:
        """Evaluate the expressions `wanted`. Input i is `inputs(i)`; `inputs(self.junk)` is the value of junk."""
        kept = set(wanted)
        uses = self._uses(kept)
        values: dict[int, V] = {}

        def take(number: int) -> V:
            uses[number] -= 1  # free values after their last use: formal sums of all steps would fill the memory
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

    def prints(self, inputs: list[int], prime: int, whole: Callable[[Fraction], int]) -> list[int]:
        """Evaluate every expression modulo a prime, fast.

        `inputs` has one number per rank, and one for junk; `whole` is a factor modulo the prime.
        """
        values, factors = inputs.copy(), {factor: whole(factor) for factor in self._products}
        by_identity: dict[int, int] = {}  # hashing a fraction takes as long as all the rest
        keep = values.append
        for left, right in self._nodes[self.world + 1 :]:
            if isinstance(right, int):
                keep((values[left] + values[right]) % prime)
            elif isinstance(right, tuple):
                keep(sum(values[part] for part in right) % prime)
            else:
                factor = by_identity.get(id(right))
                if factor is None:
                    factor = by_identity[id(right)] = factors[right]
                keep(values[left] * factor % prime)
        return values

    def spoiled(self) -> set[int]:
        """Junk and all expressions that contain it, even times zero, because it may be infinite or NaN."""
        found = {self.junk}
        for number in range(self.world + 1, len(self._nodes) if self.leaves_junk else 0):
            if not found.isdisjoint(self._parts(number)):
                found.add(number)
        return found

    def _uses(self, wanted: set[int]) -> Counter[int]:
        """How often each expression is used in computing `wanted`."""
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
        """Format the expression: `(x0 + x1) + x2`, with `...` below `depth`."""
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
