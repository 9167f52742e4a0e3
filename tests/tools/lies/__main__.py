"""Feeds what reads strangers' models and data directories in which one thing is a lie: no traceback, no hang, no more
memory than a limit, nothing written.

python -m tests.tools.lies [--count N] [--seed SEED] [LAYOUT...]

A directory of each layout is made once. A lie is another value of a key of one of its JSON files, a key twice, a number
that is none, very many of something, another name, damage to the bytes, or a tensor of another dtype, shape or value.
What fails is made small by hypothesis and printed; the seed is above it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from tests.conftest import registry_with
from tests.support import tiny_llama
from tests.tools.fuzz import MOST_BYTES, limited
from tests.tools.lies import files, rows, tensors
from tests.tools.lies.base import Layout, Lie, lie_in_bytes, lie_in_json

LAYOUTS: Mapping[str, Layout] = {**tensors.LAYOUTS, **files.LAYOUTS, **rows.LAYOUTS}
LIES: Mapping[str, Lie] = {".json": lie_in_json, ".safetensors": tensors.lie_in_tensors, **files.LIES, **rows.LIES}
"""Lies by the suffix of a file; others are damaged."""


def make(place: Path, names: Sequence[str]) -> dict[str, Path]:
    """A directory of each layout, which everything reads: so that what is refused later is refused for a lie."""
    tiny_llama.write(place / "base")
    made = {}
    for name in names:
        LAYOUTS[name].make(place / name, place / "base")
        made[name] = place / name
        for read in LAYOUTS[name].reads:
            read(made[name])
    return made


def tell(layout: Layout, path: Path, data: st.DataObject) -> None:
    """Tell a lie in a file."""
    (layout.lie or LIES.get(path.suffix, lie_in_bytes))(path, data)


def is_refused(layout: Layout, directory: Path) -> bool:
    """Let everything read a directory. Raises what a reader raises that is no UserError, or that it hangs."""
    refused = False
    for read in layout.reads:
        with limited(layout.seconds), contextlib.suppress(UserError):
            read(directory)
            continue
        refused = True
    return refused


def times(place: Path) -> dict[Path, int]:
    """When each file was last written."""
    return {file: file.stat().st_mtime_ns for file in place.rglob("*")}


def feed(count: int, seed: int, names: Sequence[str]) -> None:
    """Tell some lies. Raises as `is_refused`, and AssertionError where a reader has written."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        made = make(place, names)
        chosen = [name for name in names for _ in range(LAYOUTS[name].share)]
        told, refused, seconds = (collections.Counter[str]() for _ in range(3))
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count, deadline=None, database=None, derandomize=False, report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(st.sampled_from(chosen), st.data())
        def one(name: str, data: st.DataObject) -> None:
            directory = made[name]
            began = time.monotonic()
            path = data.draw(st.sampled_from(sorted(file for file in directory.rglob("*") if file.is_file())))
            before = path.read_bytes()
            try:
                tell(LAYOUTS[name], path, data)
                written = times(place)
                told[name] += 1
                refused[name] += is_refused(LAYOUTS[name], directory)
                assert times(place) == written, "nothing is written"
            finally:
                path.write_bytes(before)
                seconds[name] += time.monotonic() - began

        one()
    for name in names:
        print(f"{name}: {told[name]} lies, {refused[name]} refused, {seconds[name]:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"any of {', '.join(LAYOUTS)}; all of them")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    if unknown := set(given.layouts) - LAYOUTS.keys():
        parser.error(f"no layouts: {', '.join(sorted(unknown))}")
    print(f"seed {given.seed}", flush=True)
    registry_with()  # adapters of plugins are read once these are loaded
    feed(given.count, given.seed, given.layouts or list(LAYOUTS))
    print(f"seed {given.seed}: {given.count} lies, and nothing failed")
