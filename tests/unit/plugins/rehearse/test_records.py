"""The records of the virtual device, counted."""

from __future__ import annotations

from types import CodeType
from typing import Any

import llmsuite
from llmsuite.plugins.rehearse import records
from llmsuite.plugins.rehearse.records import Places, parse_alive, parse_records, summary

PACKAGE = llmsuite.__file__.removesuffix("__init__.py")


def compiled(file: str, text: str) -> CodeType:
    """Code that seems to be in a file of the package."""
    return compile(text, PACKAGE + file, "exec")


def test_the_innermost_line_of_the_package_is_named() -> None:
    places = Places()
    names: dict[str, Any] = {"look": places.current}
    exec(compiled("devices/tensors.py", "def array_of():\n    return look()"), names)
    exec(compiled("parallel/collective.py", "\ndef read():\n    return array_of()"), names)
    exec(compiled("engine/step.py", "found = [read(), read()]"), names)
    # helpers that copy name their callers
    assert names["found"] == [0, 0]
    assert places.name(0) == "parallel/collective.py:3"
    assert places.name(places.current()) == records.UNKNOWN
    assert places.name(-1) == records.UNKNOWN


def places() -> Places:
    found = Places()
    found.names += ["parallel/optimizer.py:10", "stages/sft.py:20"]
    return found


LINES = [
    "0\t1\tmatmul\t-1\t\t4000\t100\t1000000\t-1",
    "0\t1\tmatmul\t-1\t\t4000\t100\t2000000\t-1",
    "1\t2\tall_reduce\t-1\t7\t0\t64\t3000000\t4",
    "2\t1\tupload\t1\t\t0\t8\t4000000\t-1",
    "3\t1\tread\t0\t\t0\t8\t5000000\t-1",
    "5\t1\tstream\t0\t\t0\t0\t6000000\t-1",
    "4\t1\tcopy\t0\t\t0\t32\t7000000\t-1",
    "6\t1\trecord\t-1\t\t0\t0\t8000000\t3",
]


def test_a_step_is_counted() -> None:
    found = summary(parse_records(LINES, places(), {"7": "ranks 0,1,2,3"}))
    assert found["launches"] == 4  # events are none
    assert found["flops"] == 8000
    assert found["host_seconds"] == 0.007
    assert found["kernels"] == [{"name": "matmul", "count": 2, "bytes": 200, "flops": 8000}]
    assert found["reads"] == [{"place": "parallel/optimizer.py:10", "count": 1, "bytes": 8, "flops": 0}]
    assert found["uploads"] == [{"place": "stages/sft.py:20", "count": 1, "bytes": 8, "flops": 0}]
    (wait,) = found["waits"]
    assert (wait["place"], wait["name"], wait["count"]) == ("parallel/optimizer.py:10", "stream", 1)
    (message,) = found["messages"]
    assert (message["group"], message["name"], message["bytes"]) == ("ranks 0,1,2,3", "all_reduce", 64)


def test_no_step_has_no_time() -> None:
    assert summary([])["host_seconds"] == 0


def test_what_is_alive_is_summed_by_place() -> None:
    lines = ["10\tempty\t0", "5\tmatmul\t1", "20\tempty\t0", "4\tempty\t1"]
    assert parse_alive(lines, places()) == [
        {"place": "parallel/optimizer.py:10", "kernel": "empty", "count": 2, "bytes": 30},
        {"place": "stages/sft.py:20", "kernel": "matmul", "count": 1, "bytes": 5},
        {"place": "stages/sft.py:20", "kernel": "empty", "count": 1, "bytes": 4},
    ]
