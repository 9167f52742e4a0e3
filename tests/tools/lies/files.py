"""Layouts of other programs: GGUF, and the pickles of Paddle."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from llmsuite.base.files import committed_directory, remove_directory
from llmsuite.checkpoint.convert.gguf import import_gguf
from llmsuite.checkpoint.convert.paddle_save import write_pickle
from tests.support import tiny_llama
from tests.support.damage import damaged, damages, values
from tests.support.gguf_files import write_gguf
from tests.support.tiny_llama import CONFIG, FAMILIES
from tests.tools.lies.base import MANY, NAMES, Layout, lie_in_bytes
from tests.tools.lies.tensors import other_arrays, read_source

# GGUF


@dataclasses.dataclass
class _Entry:
    """A field or a tensor of a GGUF file, in the bytes that it is made of."""

    name: bytes
    kind: int
    content: bytes
    """Of a field its value."""
    dims: list[int] = dataclasses.field(default_factory=list)
    offset: int = 0

    def packed(self, is_field: bool) -> bytes:
        name = struct.pack("<Q", len(self.name)) + self.name
        if is_field:
            return name + struct.pack("<I", self.kind) + self.content
        dims = struct.pack("<I", len(self.dims)) + b"".join(struct.pack("<Q", n) for n in self.dims)
        return name + dims + struct.pack("<IQ", self.kind, self.offset)


class _Parts:
    """A GGUF file, taken apart and put together."""

    def __init__(self, content: bytes):
        self._content = content
        self._at = 24
        self.counts = list(struct.unpack_from("<QQ", content, 8))
        self.fields = [self._field() for _ in range(self.counts[1])]
        self.tensors = [self._tensor() for _ in range(self.counts[0])]
        self.rest = content[-(-self._at // 32) * 32 :]

    def _number(self, form: str) -> int:
        (found,) = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return int(found)

    def _text(self) -> bytes:
        size = self._number("Q")
        self._at += size
        return self._content[self._at - size : self._at]

    def _skip(self, kind: int) -> None:
        if kind == 8:
            self._text()
        elif kind == 9:
            inner = self._number("I")
            count = self._number("Q")
            for _ in range(count):
                self._skip(inner)
        else:
            self._at += {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}[kind]

    def _field(self) -> _Entry:
        name = self._text()
        kind = self._number("I")
        start = self._at
        self._skip(kind)
        return _Entry(name, kind, self._content[start : self._at])

    def _tensor(self) -> _Entry:
        name = self._text()
        dims = [self._number("Q") for _ in range(self._number("I"))]
        return _Entry(name, self._number("I"), b"", dims, self._number("Q"))

    def packed(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", 3, *self.counts)
        head += b"".join(entry.packed(True) for entry in self.fields)
        head += b"".join(entry.packed(False) for entry in self.tensors)
        return head + b"\0" * (-len(head) % 32) + self.rest


_NUMBERS = [0, 1, 2, 3, 7, 31, 32, 33, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
_VALUES = {
    4: [struct.pack("<I", n) for n in (0, 1, 5, 2**31, 2**32 - 1)],
    6: [struct.pack("<f", n) for n in (0.0, -1.0, 1e-38, 3e38, float("nan"), float("inf"))],
    7: [b"\0", b"\1", b"\2"],
    8: [struct.pack("<Q", len(text)) + text for text in (b"", b"gpt2", b"llama", b"\xff", b"{{", b"[" * 9999, b"\0")],
    10: [struct.pack("<Q", n) for n in (0, 2**63, 2**64 - 1)],
    12: [struct.pack("<d", n) for n in (0.0, 1e300, float("nan"))],
    9: [
        struct.pack("<IQ", 4, 0), struct.pack("<IQ", 5, 2) + b"\0" * 8, struct.pack("<IQ", 4, 2**60),
        struct.pack("<IQ", 5, MANY) + b"\xff" * 4 * MANY, struct.pack("<IQ", 8, 2) + (b"\1" + b"\0" * 7 + b"a") * 2,
        struct.pack("<IQ", 8, MANY) + (b"\1" + b"\0" * 7 + b"a") * MANY, struct.pack("<IQ", 99, 1) + b"\0",
        struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 1) + b"\0" * 4,
        struct.pack("<IQ", 6, 3) + struct.pack("<3f", float("nan"), 1e38, -1),
    ],
}  # fmt: skip
"""Values of fields, by the number of their type."""


def lie_in_gguf(path: Path, data: st.DataObject) -> None:
    """Tell a lie in a GGUF file: a count, a name, a type, a value, a size, a place."""
    if data.draw(st.integers(0, 5)) == 0:
        content = path.read_bytes()
        damage = data.draw(damages)
        path.write_bytes(damaged(content, [(place / 4, what, bytes_) for place, what, bytes_ in damage]))
        return
    parts = _Parts(path.read_bytes())
    kind = data.draw(st.sampled_from(["count", "field", "field", "field", "tensor", "tensor", "twice", "rest"]))
    number = st.sampled_from(_NUMBERS)
    if kind == "count":
        parts.counts[data.draw(st.integers(0, 1))] = data.draw(number)
    elif kind == "field":
        entry = data.draw(st.sampled_from(parts.fields))
        what = data.draw(st.sampled_from(["value", "value", "type", "name"]))
        if what == "name":
            entry.name = data.draw(st.sampled_from(NAMES)).encode("utf-8", "surrogatepass")
        else:
            entry.kind = (
                entry.kind if what == "value" and entry.kind in _VALUES else data.draw(st.sampled_from(list(_VALUES)))
            )
            entry.content = data.draw(st.sampled_from(_VALUES[entry.kind]))
    elif kind == "tensor":
        entry = data.draw(st.sampled_from(parts.tensors))
        what = data.draw(st.sampled_from(["dims", "dim", "type", "offset", "name"]))
        if what == "dims":
            entry.dims = data.draw(st.lists(number, max_size=9))
        elif what == "dim" and entry.dims:
            entry.dims[0] = data.draw(number)
        elif what == "type":
            entry.kind = data.draw(st.integers(0, 40) | number.filter(lambda n: n < 2**32))
        elif what == "offset":
            entry.offset = data.draw(number)
        else:
            entry.name = data.draw(st.sampled_from(parts.tensors)).name
    elif kind == "twice":
        parts.fields.append(data.draw(st.sampled_from(parts.fields)))
        parts.counts[1] += 1
    else:
        parts.rest = damaged(parts.rest, data.draw(damages))
    path.write_bytes(parts.packed())


def make_gguf(directory: Path, base: Path) -> None:
    directory.mkdir()
    write_gguf(directory / "model.gguf", kind=None)


def make_blocks(directory: Path, base: Path) -> None:
    """With matrices in blocks."""
    import gguf

    directory.mkdir()
    config = dataclasses.replace(CONFIG, hidden_size=32, intermediate_size=64, head_dim=16)
    from tests.support.gguf_files import TOKENS

    config = dataclasses.replace(config, vocab_size=len(TOKENS), num_attention_heads=2, num_key_value_heads=2)
    write_gguf(directory / "model.gguf", config, kind=gguf.GGMLQuantizationType.Q8_0)


def read_gguf(directory: Path) -> None:
    """Import a file, and remove what was made of it."""
    target = directory.parent / "imported"
    try:
        with committed_directory(target) as made:
            import_gguf(directory / "model.gguf", made, FAMILIES)
    except BaseException:
        assert not target.exists(), "what is refused is not there"
        raise
    remove_directory(target)


# pickles of Paddle


def make_distcp(directory: Path, base: Path) -> None:
    """As dist.save_state_dict writes it."""
    import paddle
    import paddle.distributed as dist

    state = {tiny_llama.to_paddlenlp(name): paddle.to_tensor(value) for name, value in tiny_llama.values().items()}
    slots = {f"{name}_moment1_0": value for name, value in state.items()}
    dist.save_state_dict({"model": state, "optimizer": slots}, str(directory))
    (directory / "config.json").write_text(json.dumps(CONFIG.to_hf()))


def make_pdparams(directory: Path, base: Path) -> None:
    """As PaddleNLP saves a model, in two numbered files."""
    directory.mkdir()
    shutil.copy(base / "config.json", directory)
    state = {tiny_llama.to_paddlenlp(name): value for name, value in tiny_llama.values().items()}
    names = list(state)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        write_pickle(directory / f"model_state-{number:05d}-of-00002.pdparams", {name: state[name] for name in part})


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value in what a pickle has: what it is in, and its key or number there."""
    inside = node if isinstance(node, dict) else getattr(node, "__dict__", None)
    if isinstance(node, list):
        inside = dict(enumerate(node))
    for key, value in (inside or {}).items():
        yield node, key
        yield from _places(value)


def _nest(kind: str) -> Any:
    """A small pickle of what is very large once it is looked at."""
    odd: Any = "x"
    for _ in range(60):
        odd = {"tuples": (odd, odd), "lists": [odd, odd], "objects": {"a": odd, "b": odd}}[kind]
    return odd


def lie_in_pickle(path: Path, data: st.DataObject) -> None:
    """Tell a lie in a pickle: in its bytes, a value, a key, an array."""
    kind = data.draw(st.sampled_from(["bytes", "bytes", "value", "value", "array", "nest", "many", "name", "key"]))
    if kind == "bytes":
        return lie_in_bytes(path, data)
    tree = pickle.loads(path.read_bytes())
    places = list(_places(tree))
    node, key = data.draw(st.sampled_from(places))
    arrays = (
        {name: value for name, value in tree.items() if isinstance(value, np.ndarray)} if isinstance(tree, dict) else {}
    )
    if kind == "array" and arrays:
        name = data.draw(st.sampled_from(sorted(arrays)))
        tree = other_arrays(arrays, name, data.draw(st.sampled_from(["value", "kind"])), data)
    elif kind == "key" and isinstance(node, dict):
        odd_keys = st.sampled_from([*NAMES, 7, 2.5, (1, 2), None, b"x"])
        node[data.draw(odd_keys)] = node.pop(key)
    else:
        odd = {
            "nest": st.sampled_from(["tuples", "lists", "objects"]).map(_nest),
            "many": st.sampled_from([[1] * MANY, (0,) * MANY, dict.fromkeys(map(str, range(MANY)), 1)]),
            "name": st.sampled_from(NAMES),
        }.get(kind, values | st.tuples(st.integers(-3, 40)) | st.just(2**70))
        _set(node, key, data.draw(odd))
    path.write_bytes(pickle.dumps(tree, protocol=4))
    return None


def _set(node: Any, key: Any, value: Any) -> None:
    if isinstance(node, (dict, list)):
        node[key] = value
    else:
        object.__setattr__(node, key, value)


LAYOUTS = {
    "gguf": Layout(make_gguf, (read_gguf,)),
    "gguf-blocks": Layout(make_blocks, (read_gguf,)),
    "distcp": Layout(make_distcp, (read_source,)),
    "pdparams": Layout(make_pdparams, (read_source,)),
}
"""GGUF and pickles."""
LIES = dict.fromkeys((".metadata", ".distcp", ".pdparams"), lie_in_pickle) | {".gguf": lie_in_gguf}
