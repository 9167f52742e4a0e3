"""Process groups that several runs in the same processes share, for tests and benchmarks.

Each Gloo group has two threads that wake up all the time; after some dozen runs the processes would do nothing else.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any


def reused(new_group: Callable[[list[int]], Any], groups: dict[Any, Any]) -> Callable[[list[int]], Any]:
    """`new_group` for one run: the first time it asks for some ranks it gets the first such group, and so on."""
    asked: collections.Counter[tuple[int, ...]] = collections.Counter()

    def group_of(ranks: list[int]) -> Any:
        key = tuple(ranks)
        asked[key] += 1
        if (key, asked[key]) not in groups:
            groups[key, asked[key]] = new_group(ranks)
        return groups[key, asked[key]]

    return group_of
