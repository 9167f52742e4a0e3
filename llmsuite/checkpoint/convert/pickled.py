"""Reads files of `paddle.save` without running anything; tensors stay on disk until they are read.

A pickle is a program, and unpickling runs it. This module interprets only the few instructions that build data: it can
neither import nor call, so a file that tries to is refused before anything happens. A function that a pickle names is
only a pair of strings here, and the few that `paddle.save` needs (`numpy._reconstruct`, `tuple` …) are replaced by code
that arranges the data on the stack.
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import struct
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import open_regular
from llmsuite.checkpoint.tensors import TensorSpec, sliced

_MAX_REPEATED = 4
"""Most values, per byte of the file, inside objects that are recalled from the memo. In regular files these are shapes,
and tensors with two names; in a malicious file a few bytes could nest the same pair exponentially often."""
_MAX_DEPTH = 50
_MAX_DIMS = 8
_LONG_TEXT = 4096  # longer ones are values of a tensor, as pickle protocol 2 writes them
_METADATA = ("paddle.distributed.flex_checkpoint.dcp.metadata", "paddle.distributed.checkpoint.metadata")
_RECORDS = {(m, c): c for m in _METADATA for c in ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")}
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_BUILTINS = ("builtins", "__builtin__")
# Paddle stores the bits of bfloat16 as uint16, which is otherwise no dtype of a parameter
_DTYPES: dict[str, Any] = {"u2": ml_dtypes.bfloat16, "f2": "f2", "f4": "f4", "f8": "f8", "i4": "i4", "i8": "i8"}


@dataclasses.dataclass(eq=False)
class Record:
    """The fields of an object of one of Paddle's metadata classes."""

    kind: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class StoredArray:
    """An array in a pickle."""

    path: Path
    shape: tuple[int, ...] = ()
    code: str = ""
    """Dtype in NumPy's notation, such as "f4"."""
    by_columns: bool = False
    raw: Any = None

    def spec(self, name: str) -> TensorSpec:
        """Name, shape and dtype. Raises UserError for a dtype that no parameter has."""
        if self.code not in _DTYPES:
            raise UserError(f"{self.path}: {name!r} has dtype {self.code}; supported: {', '.join(_DTYPES)}")
        return TensorSpec(name, self.shape, np.dtype(_DTYPES[self.code]).name)

    def read(self, index: Sequence[slice] | None = None) -> np.ndarray:
        """Return the values, or those of a slice, copied from disk. Only this array is mapped."""
        dtype = np.dtype(_DTYPES[self.code])
        order = "F" if self.by_columns else "C"
        try:
            if isinstance(self.raw, _Range) and not self.raw.is_text and 0 not in self.shape:
                values = np.memmap(self.path, dtype, "r", self.raw.start, self.shape, order=order)  # type: ignore[call-overload]
            else:
                content = self.raw if isinstance(self.raw, bytes) else self.raw.load(self.path)
                values = np.frombuffer(content, dtype).reshape(self.shape, order=order)  # type: ignore[call-overload]
        except (ValueError, OSError) as error:
            raise UserError(f"{self.path}: an array of {list(self.shape)} cannot be read: {error}") from error
        return np.array(sliced(values, index), order="C")

    def digest(self) -> str:
        """sha256 of its values."""
        return hashlib.sha256(self.read().reshape(-1).view("uint8").data).hexdigest()


def without_paddle_name(value: Any) -> Any:
    """The array of a pickled parameter, which may be a pair of Paddle's name and the array."""
    if isinstance(value, tuple) and len(value) == 2:
        return value[1]
    return value


def read_pickle(path: Path) -> Any:
    """The data of a pickle: dicts, lists, tuples, strings, numbers, `Record` and `StoredArray`.

    Raises:
        UserError: it is damaged, or names a function or class that is not needed for data of a checkpoint.
    """
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Machine(path, content).run()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (LookupError, ValueError, TypeError, AttributeError, struct.error, OverflowError) as error:
        raise UserError(f"{path}: is not a complete file of paddle.save: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Range:
    """Bytes of the file that have not been read yet."""

    start: int
    size: int
    is_text: bool = False
    """True where each byte is stored as a character, in UTF-8."""

    def load(self, path: Path) -> bytes:
        with open_regular(path) as file:
            file.seek(self.start)
            content = file.read(self.size)
        if self.is_text:
            return content.decode("utf-8", "surrogatepass").encode("latin1")
        return content


@dataclasses.dataclass(frozen=True)
class _Name:
    """A name that a pickle would import."""

    module: str
    name: str


@dataclasses.dataclass(eq=False)
class _Dtype:
    code: str


class _Mark:
    pass


class _Machine:
    """Interprets the instructions of a pickle that build data."""

    def __init__(self, path: Path, content: mmap.mmap):
        self._path = path
        self._content = content
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._repeated = 0
        self._closed = set[int]()
        """Ids of objects that were recalled from the memo: they must not be filled later, as their size was counted."""

    def run(self) -> Any:
        while (code := self._content[self._at : self._at + 1]) != b".":
            self._at += 1
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise ValueError(f"unknown instruction {code!r} at byte {self._at - 1}")
            instruction(self)
        (result,) = self._stack
        _check_depth(result)
        return result

    # reading the file

    def _number(self, form: str) -> Any:
        size = struct.calcsize(form)
        (value,) = struct.unpack_from(form, self._take(size))
        return value

    def _take(self, size: int) -> bytes:
        return self._content[self._skip(size) : self._at]

    def _skip(self, size: int) -> int:
        start = self._at
        if not 0 <= size <= len(self._content) - start:
            raise ValueError(f"ends within the {size} bytes at byte {start}")
        self._at += size
        return start

    def _line(self) -> str:
        end = self._content.find(b"\n", self._at, self._at + _LONG_TEXT)
        if end < 0:
            raise ValueError(f"a name without an end at byte {self._at}")
        text = self._take(end - self._at).decode("ascii")
        self._at += 1
        return text

    # the stack

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _since_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while not isinstance(self._stack[at], _Mark):
            at -= 1
            if at < 0:
                raise ValueError("a mark is missing")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def push_text(self, form: str) -> None:
        size = self._number(form)
        start = self._skip(size)
        if size > _LONG_TEXT:
            self._push(_Range(start, size, is_text=True))
        else:
            self._push(self._content[start : self._at].decode("utf-8", "surrogatepass"))

    def push_bytes(self, form: str) -> None:
        size = self._number(form)
        self._push(_Range(self._skip(size), size))

    def push_long(self) -> None:
        self._push(int.from_bytes(self._take(self._number("<B")), "little", signed=True))

    def push_tuple(self, size: int) -> None:
        items = tuple(self._stack[-size:])
        if len(items) < size:
            raise ValueError("the stack is empty")
        self._stack[-size:] = [items]

    def set_items(self, items: Sequence[Any]) -> None:
        target = self._open()
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("sets items of what is no dict")
        for key, value in zip(items[::2], items[1::2]):
            if not isinstance(key, (str, int, Record)):  # hashing nested tuples may take exponential time
                raise ValueError(f"has a {type(key).__name__} as key")
            target[key] = value

    def append(self, items: Sequence[Any]) -> None:
        target = self._open()
        if not isinstance(target, list):
            raise ValueError("appends to what is no list")
        target.extend(items)

    def pop_pair(self) -> Sequence[Any]:
        value = self._stack.pop()
        key = self._stack.pop()
        return key, value

    def remember(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def recall(self, index: int) -> None:
        level = [self._memo[index]]
        while level:
            self._closed.update(id(node) for node in level if isinstance(node, (dict, list, Record)))
            level = [child for node in level for child in _inside(node)]
            self._repeated += len(level)
            if self._repeated > _MAX_REPEATED * len(self._content):
                raise ValueError(f"names more than {_MAX_REPEATED} values for each of its bytes again")
        self._push(self._memo[index])

    def _open(self) -> Any:
        """The value on top of the stack, to be filled."""
        target = self._stack[-1]
        if id(target) in self._closed:
            raise ValueError(f"fills a {type(target).__name__} that was used before")
        return target

    # instructions that would import and call

    def name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("has a name that is no text")
        if (module, name) not in _RECORDS and name not in _CALLABLE.get(module, ()):
            self._refuse(module, name)
        self._push(_Name(module, name))

    def call(self) -> None:
        function, arguments = self.pop_pair()
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise ValueError("calls what is no function")
        self._push(self._arrange(function, arguments))

    def _arrange(self, function: _Name, arguments: tuple[Any, ...]) -> Any:
        """The result of calling one of the known functions."""
        name = function.name
        if name == "tuple":
            (items,) = arguments
            return tuple(items)
        if name == "OrderedDict" and not arguments:
            return {}
        if name == "_reconstruct" and arguments[0] == _Name("numpy", "ndarray"):
            return StoredArray(self._path)
        if name == "dtype" and isinstance(arguments[0], str):
            return _Dtype(arguments[0])
        if name == "scalar" and isinstance(arguments[0], _Dtype):
            return StoredArray(self._path, (), arguments[0].code, raw=arguments[1]).read().item()
        if name == "encode" and arguments[1] == "latin1":
            if isinstance(arguments[0], str):
                return arguments[0].encode("latin1")
            return arguments[0]
        # written by paddle.save for a tensor of a static program; compared literally, so nothing is evaluated
        if name == "eval" and arguments[0] == "data" and list(arguments[1]) == ["data"]:
            return arguments[1]["data"]
        self._refuse(function.module, name)

    def new(self) -> None:
        cls, arguments = self.pop_pair()
        kind = None
        if isinstance(cls, _Name):
            kind = _RECORDS.get((cls.module, cls.name))
        if kind is None or arguments != ():
            raise ValueError("makes an object of a class that no checkpoint has")
        self._push(Record(kind))

    def build(self) -> None:
        state = self._stack.pop()
        target = self._open()
        if isinstance(target, Record) and isinstance(state, dict):
            target.fields.update(state)
        elif isinstance(target, _Dtype) and isinstance(state, tuple):
            if state[1] not in ("<", "|"):
                raise ValueError("has numbers in another byte order than this machine")
        elif isinstance(target, StoredArray) and isinstance(state, tuple):
            self._fill(target, state)
        else:
            raise ValueError(f"sets the state of a {type(target).__name__}")

    def _fill(self, array: StoredArray, state: tuple[Any, ...]) -> None:
        _, shape, dtype, by_columns, raw = state
        if len(shape) > _MAX_DIMS or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("has an array whose shape is no shape")
        array.shape = tuple(shape)
        array.code = dtype.code
        array.by_columns = bool(by_columns)
        array.raw = raw
        itemsize = np.dtype(_DTYPES.get(dtype.code, dtype.code)).itemsize
        expected = int(np.prod(shape, dtype="float64")) * itemsize
        found = len(raw) if isinstance(raw, bytes) else raw.size
        if expected != found and not (isinstance(raw, _Range) and raw.is_text):
            raise ValueError(f"has {found:,} bytes for an array that takes {expected:,}")

    def _refuse(self, module: Any, name: Any) -> NoReturn:
        raise UserError(
            f"{self._path}: asks for {module}.{name}, which is not data of a checkpoint: it may be made to run code. "
            "Nothing was run; do not load this file by other means"
        )


def _inside(node: Any) -> Sequence[Any]:
    """The values directly inside a value of a pickle."""
    if isinstance(node, Record):
        node = node.fields
    if isinstance(node, dict):
        return [*node, *node.values()]
    if isinstance(node, (list, tuple)):
        return node
    return ()


def _check_depth(result: Any) -> None:
    """Raise ValueError for values nested deeper than `_MAX_DEPTH`, as code that reads them is recursive."""
    level = [result]
    for _ in range(_MAX_DEPTH):
        level = [child for node in level for child in _inside(node)]
    if level:
        raise ValueError(f"has values nested deeper than {_MAX_DEPTH} levels")


_CALLABLE: dict[Hashable, tuple[str, ...]] = {
    "numpy": ("ndarray", "dtype"),
    "collections": ("OrderedDict",),
    "_codecs": ("encode",),
    **dict.fromkeys(_NUMPY, ("_reconstruct", "scalar")),
    **dict.fromkeys(_BUILTINS, ("tuple", "eval")),
}
_INSTRUCTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": lambda m: _none(m._number("<B")),  # protocol
    b"\x95": lambda m: _none(m._number("<Q")),  # frame
    b"(": lambda m: m._push(_Mark()),
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"K": lambda m: m._push(m._number("<B")),
    b"M": lambda m: m._push(m._number("<H")),
    b"J": lambda m: m._push(m._number("<i")),
    b"G": lambda m: m._push(m._number(">d")),
    b"\x8a": _Machine.push_long,
    b"\x8c": lambda m: m.push_text("<B"),
    b"X": lambda m: m.push_text("<I"),
    b"\x8d": lambda m: m.push_text("<Q"),
    b"C": lambda m: m.push_bytes("<B"),
    b"B": lambda m: m.push_bytes("<I"),
    b"\x8e": lambda m: m.push_bytes("<Q"),
    b"}": lambda m: m._push({}),
    b"]": lambda m: m._push([]),
    b")": lambda m: m._push(()),
    b"\x85": lambda m: m.push_tuple(1),
    b"\x86": lambda m: m.push_tuple(2),
    b"\x87": lambda m: m.push_tuple(3),
    b"t": lambda m: m._push(tuple(m._since_mark())),
    b"s": lambda m: m.set_items(m.pop_pair()),
    b"u": lambda m: m.set_items(m._since_mark()),
    b"a": lambda m: m.append([m._stack.pop()]),
    b"e": lambda m: m.append(m._since_mark()),
    b"q": lambda m: m.remember(m._number("<B")),
    b"r": lambda m: m.remember(m._number("<I")),
    b"\x94": lambda m: m.remember(len(m._memo)),
    b"h": lambda m: m.recall(m._number("<B")),
    b"j": lambda m: m.recall(m._number("<I")),
    b"c": lambda m: m.name(m._line(), m._line()),
    b"\x93": lambda m: m.name(*m.pop_pair()),
    b"R": _Machine.call,
    b"\x81": _Machine.new,
    b"b": _Machine.build,
}


def _none(value: Any) -> None:
    """Ignore the operand of an instruction without effect."""
