"""Read pickles of plain values and byte arrays without Python's unpickler.

A pickle is a program, and the unpickler runs it with any function that the file names. Here pickletools only splits the file
into opcodes, and we interpret those that build plain values: lists, tuples, dicts, bytes, text and integers. A `Vocabulary` has
what a file may name: for CIFAR a few callables, each replaced by one of our own functions. We reject everything else, with its
position. Time and memory are linear in the length of the file.

An `Unpickler` with an allow-list in `find_class` would be shorter, but bounds neither. A file of 200 bytes can use pairs of
pairs, nested 40 levels deep, as a key, whose hash takes 2**40 steps. And a memo index of 60 million, in 4 bytes, makes CPython
3.11 allocate 900 MB.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


class PickleRefused(ValueError):  # noqa: N818  says what happened
    """The pickle holds something other than plain values, or is damaged."""


@dataclass(frozen=True)
class Named:
    """A callable, by its name in the pickle."""

    name: str


@dataclass
class Array:
    """An array under construction: numpy makes an empty one first and fills it from its state."""

    value: np.ndarray | None = None


@dataclass(frozen=True)
class ByteType:
    """numpy's dtype of unsigned bytes, the only one we accept."""


@dataclass(frozen=True)
class Vocabulary:
    """What a pickle may name, and what we do with it. Each function raises, or takes time bounded by its arguments."""

    known: Callable[[str], Any]  # our replacement for a callable in the pickle
    call: Callable[[Any, tuple[Any, ...], Budget], Any]  # the result of a call with these arguments
    build: Callable[[Any, Any], None]  # sets the state of what a call made
    keys: tuple[type, ...]  # types of dict keys; their hash must not depend on nested contents


MARK = object()
MAX_DIMS = 32  # of an array: NumPy 1 has no more


def load_plain(data: bytes, words: Vocabulary | None = None) -> Any:
    """Load the value of a pickle. With CIFAR's vocabulary, its `Array`s have a `value`."""
    words = words or ARRAYS
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    room = Budget(len(data))
    position = 0
    try:
        for opcode, argument, place in pickletools.genops(data):
            position = place or 0
            if opcode.name == "STOP":
                (value,) = stack
                return value
            _step(opcode.name, argument, stack, memo, room, words)
    except PickleRefused as error:
        raise PickleRefused(f"{error} (byte {position})") from None
    # Warning: pickletools warns of escapes in texts of protocol 0, which are rejected anyway; warnings may be errors
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, Warning) as error:
        raise PickleRefused(f"a damaged pickle: {str(error)[:200] or type(error).__name__} (byte {position})") from None
    raise PickleRefused("a damaged pickle: it has no end")


class Budget:
    """The bytes that calls may still produce: a call takes 5 bytes of the pickle, but may repeat a long text of the memo."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise PickleRefused("it makes more bytes than it has")


def _step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any], room: Budget, words: Vocabulary) -> None:
    if name in ("PROTO", "FRAME"):
        return
    if name in CONSTANTS:
        stack.append(CONSTANTS[name]())
    elif name in TEXTS_OF_PYTHON_2:
        stack.append(argument.encode("latin-1"))
    elif name in ARGUMENTS:
        stack.append(argument)
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in TUPLES:
        size = TUPLES[name]
        if size > len(stack):
            raise IndexError("a tuple of more values than there are")
        stack[len(stack) - size :] = [tuple(stack[len(stack) - size :])]
    elif name == "TUPLE":
        stack.append(tuple(_above_mark(stack)))
    elif name == "APPEND":
        value = stack.pop()
        _of(list, stack[-1]).append(value)
    elif name == "APPENDS":
        values = _above_mark(stack)
        _of(list, stack[-1]).extend(values)
    elif name == "SETITEM":
        value, key = stack.pop(), stack.pop()
        _of(dict, stack[-1])[_of(words.keys, key)] = value
    elif name == "SETITEMS":
        values = _above_mark(stack)
        for key, value in zip(values[::2], values[1::2]):
            _of(dict, stack[-1])[_of(words.keys, key)] = value
    elif name == "GLOBAL":
        stack.append(words.known(argument.replace(" ", ".", 1)))
    elif name == "STACK_GLOBAL":
        last, module = _of(str, stack.pop()), _of(str, stack.pop())
        stack.append(words.known(f"{module}.{last}"))
    elif name in ("REDUCE", "NEWOBJ"):
        arguments, function = _of(tuple, stack.pop()), stack.pop()
        stack.append(words.call(function, arguments, room))
    elif name == "BUILD":
        state = stack.pop()
        words.build(stack[-1], state)
    else:
        raise PickleRefused(f"opcode {name} is not one that builds plain values")


CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: MARK,
}
ARGUMENTS = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
    | {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
)
TEXTS_OF_PYTHON_2 = frozenset({"BINSTRING", "SHORT_BINSTRING"})  # bytes, though pickletools shows them as text
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _above_mark(stack: list[Any]) -> list[Any]:
    values: list[Any] = []
    while (value := stack.pop()) is not MARK:
        values.append(value)
    values.reverse()
    return values


def _of(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} where there should be none")
    return value


def _known(name: str) -> Any:
    if name not in CALLABLES and name != "numpy.ndarray":
        raise PickleRefused(f"it names {name[:100]}, which is neither a plain value nor an array of bytes")
    return Named(name)


def _call(function: Any, arguments: tuple[Any, ...], room: Budget) -> Any:
    if arguments and isinstance(arguments[0], str):
        room.take(len(arguments[0]))
    return CALLABLES[_of(Named, function).name](*arguments)


def _empty_array(*_: Any) -> Array:
    return Array()


def _byte_type(code: Any, *_: Any) -> ByteType:
    if code not in ("u1", "|u1", b"u1", b"|u1"):
        raise PickleRefused(f"an array of type {_shown(code)}; only unsigned bytes are read")
    return ByteType()


def _filled_array(data: Any, _type: ByteType, shape: tuple[int, ...], order: str) -> Array:
    return Array(_shaped(data, _type, shape, order == "F"))


def _encoded(text: str, encoding: str) -> bytes:
    """Decode bytes that Python 3 wrote for Python 2: `_codecs.encode(text, "latin1")`."""
    if encoding != "latin1":
        raise PickleRefused(f"bytes in {_shown(encoding)}")
    return _of(str, text).encode("latin-1")


CALLABLES: dict[str, Callable[..., Any]] = {
    "numpy.core.multiarray._reconstruct": _empty_array,
    "numpy._core.multiarray._reconstruct": _empty_array,
    "numpy.core.numeric._frombuffer": _filled_array,
    "numpy._core.numeric._frombuffer": _filled_array,
    "numpy.dtype": _byte_type,
    "_codecs.encode": _encoded,
}


def _set_state(owner: Any, state: Any) -> None:
    if isinstance(owner, ByteType):  # byte order and fields, irrelevant for bytes
        return
    _version, shape, kind, fortran, data = _of(tuple, state)
    _of(Array, owner).value = _shaped(data, kind, shape, fortran)


def _shaped(data: Any, kind: Any, shape: Any, fortran: bool) -> np.ndarray:
    _of(ByteType, kind)
    flat = np.frombuffer(_of((bytes, bytearray), data), np.uint8)
    if any(_of(int, size) < 0 for size in _of(tuple, shape)):  # numpy would infer a size of -1
        raise ValueError("an array of a negative size")
    if len(shape) > MAX_DIMS or math.prod(shape) != len(flat):
        raise ValueError(f"{len(flat)} bytes for an array of another size")
    return flat.reshape(shape, order="F" if fortran else "C")


def _shown(value: Any) -> str:
    """A text for a message. For anything else only its type: nested pairs could print without end."""
    return repr(value[:40]) if isinstance(value, (str, bytes)) else f"a {type(value).__name__}"


ARRAYS = Vocabulary(_known, _call, _set_state, (bytes, str))
