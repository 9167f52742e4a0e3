"""Files of paddle.save: read as Paddle reads them, and never run."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.convert.pdparams import PickledTensors
from llmsuite.checkpoint.convert.pickled import StoredArray, read_pickle

NUMBERS = np.arange(1, 2001, dtype="float32").reshape(50, 40)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int64", "int32"])
def test_a_state_dict_is_read_as_paddle_reads_it(tmp_path: Path, protocol: int, dtype: str) -> None:
    tensors = {"a": paddle.to_tensor(NUMBERS).astype(dtype), "b": paddle.to_tensor(NUMBERS[0]).astype(dtype)}
    paddle.save({**tensors, "scalar": paddle.to_tensor(3.0).astype(dtype)}, str(tmp_path / "x"), protocol=protocol)
    files = PickledTensors([tmp_path / "x"])
    assert files.names == ["a", "b", "scalar"]
    expected = NUMBERS.astype(files.spec("a").dtype)
    assert files.spec("a").dtype == dtype
    assert np.array_equal(files.read("a"), expected)
    assert np.array_equal(files.read("a", [slice(3, 9), slice(1, 2)]), expected[3:9, 1:2])
    assert np.array_equal(files.read("b"), expected[0])
    assert float(files.read("scalar")) == 3.0


def test_values_other_than_tensors_are_plain_data(tmp_path: Path) -> None:
    data = {"n": {"x": [1, -2, 1 << 70, 2.5, None, True]}, "ordered": OrderedDict(a=1), "np": np.float32(0.5)}
    with open(tmp_path / "x", "wb") as file:
        pickle.dump({**data, "columns": np.asfortranarray(NUMBERS)}, file, protocol=4)
    read = read_pickle(tmp_path / "x")
    columns = read.pop("columns")
    assert read == data
    assert np.array_equal(columns.read(), NUMBERS)
    assert np.array_equal(columns.read([slice(2, 5), slice(0, 40)]), NUMBERS[2:5])


def _read_bytes(directory: Path, content: bytes) -> Any:
    (directory / "bytes").write_bytes(content)
    return read_pickle(directory / "bytes")


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class SetsState:
    """Pickles as an object with a state, whose class decides what happens to it."""


def short_text(text: str) -> bytes:
    return b"\x8c" + struct.pack("<B", len(text)) + text.encode()


def by_stack(module: str, name: str, *arguments: str) -> bytes:
    """A call of a name that is put together on the stack."""
    words = b"".join(short_text(word) for word in arguments)
    return b"\x80\x04" + short_text(module) + short_text(name) + b"\x93(" + words + b"tR."


def payloads(mark: Path) -> dict[str, bytes]:
    """Pickles each of which would make the file `mark` if they were run."""
    command = f"touch {mark}"
    python = f"open({str(mark)!r}, 'w')"
    array = pickle.dumps(NUMBERS, protocol=4)
    return {
        "os.system": pickle.dumps(Calls(os.system, command)),
        "eval": pickle.dumps(Calls(eval, python)),
        "eval with names": pickle.dumps(Calls(eval, python, {"data": 1})),
        "exec": pickle.dumps({"w": Calls(exec, python)}),
        "subprocess, protocol 2": pickle.dumps({"w": ("name", Calls(subprocess.check_call, ["touch", str(mark)]))}, 2),
        "protocol 0": pickle.dumps(Calls(os.system, command), protocol=0),
        "instance": f"(S'{command}'\nios\nsystem\n.".encode(),
        "object": f"(cos\nsystem\nS'{command}'\no.".encode(),
        "dotted name": by_stack("numpy", "core._internal.os.system", command),
        "dotted name of an allowed module": by_stack("builtins", "tuple.__class__.__base__.__subclasses__"),
        "module of an allowed name": by_stack("os", "eval", command),
        "import by an allowed module": by_stack("builtins", "__import__", "os"),
        "getattr": by_stack("builtins", "getattr", "x", "y"),
        "after a good array": array[:-1] + pickle.dumps(Calls(os.system, command)),
        "state of a class": pickle.dumps(SetsState()),
        "numpy's own loader": by_stack("numpy", "load", str(mark)),
        "extension registry": b"\x80\x04\x82\x01.",
        "persistent id": b"\x80\x04Pos.system\n.",
    }


@pytest.mark.parametrize("name", list(payloads(Path("x"))))
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(UserError, match=r"bytes: (asks for|is not a complete file)"):
        _read_bytes(tmp_path, payloads(mark)[name])
    assert not mark.exists()


@pytest.mark.parametrize("name", ["os.system", "eval", "eval with names", "protocol 0", "instance", "object"])
def test_these_payloads_are_real(tmp_path: Path, name: str) -> None:
    pickle.loads(payloads(tmp_path / "mark")[name])
    assert (tmp_path / "mark").exists()


def test_a_tensor_of_a_static_program_needs_no_evaluation(tmp_path: Path) -> None:
    read = _read_bytes(tmp_path, pickle.dumps({"w": Calls(eval, "data", {"data": NUMBERS})}, 4))
    assert np.array_equal(read["w"].read(), NUMBERS)


def bomb() -> bytes:
    """Thirty tuples, each of two times the one before: a key whose hash takes 2^30 steps."""
    tuples = b")\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(30))
    return b"\x80\x04" + tuples + b"}h\x1eNs."


def test_a_tuple_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tuple as key"):
        _read_bytes(tmp_path, pickle.dumps({("a", "b"): 1}, 4))


def test_a_nest_of_tuples_is_refused_before_it_is_hashed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="values for each of its bytes again"):
        _read_bytes(tmp_path, bomb())


def nests(kind: str) -> Any:
    """A value that doubles with each of 40 steps."""
    made: Any = "x"
    for _ in range(40):
        made = {"tuple": (made, made), "list": [made, made], "dict": {"a": made, "b": made}}[kind]
    return made


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_exponential_nesting_by_the_memo_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match="values for each of its bytes again"):
        _read_bytes(tmp_path, pickle.dumps(nests(kind), 4))


def test_a_recalled_object_cannot_be_filled(tmp_path: Path) -> None:
    """Forty empty lists, each of which gets the next one twice."""
    made = b"".join(b"]\x940" for _ in range(40))
    filled = b"".join(b"h%ch%ca0h%ch%ca0" % (i, i + 1, i, i + 1) for i in range(39))
    with pytest.raises(UserError, match="fills a list that was used before"):
        _read_bytes(tmp_path, b"\x80\x04" + made.replace(b"0", b"") + filled.replace(b"0", b"") + b".")


def test_shared_objects_are_read(tmp_path: Path) -> None:
    shape = (3, 4)
    assert _read_bytes(tmp_path, pickle.dumps({f"t{i}": [shape, shape] for i in range(500)}, 4))["t499"] == [
        shape,
        shape,
    ]


def test_nested_values_have_a_depth_limit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nested deeper than 50 levels"):
        _read_bytes(tmp_path, b"\x80\x04N" + b"\x85" * 100_000 + b".")


def test_a_size_beyond_the_file_is_damage(tmp_path: Path) -> None:
    for code, form in ((b"\x8d", "<Q"), (b"\x8e", "<Q"), (b"B", "<I"), (b"X", "<I")):
        with pytest.raises(UserError, match="ends within"):
            _read_bytes(tmp_path, b"\x80\x04" + code + struct.pack(form, 1 << 31) + b".")


GOOD = pickle.dumps({"a": ("name", NUMBERS[:2, :3].copy()), "b": [1, 2.0, "text"], "c": {"d": b"bytes"}}, protocol=4)


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(content[: data.draw(st.integers(0, len(content)))])
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(cut)
    try:
        _read_all(read_pickle(path))
    except UserError as error:
        assert str(path) in str(error)  # noqa: PT017  (it may as well be read)


def _read_all(value: Any) -> None:
    if isinstance(value, StoredArray):
        value.spec("x")
        value.read()
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        _read_all(item)
