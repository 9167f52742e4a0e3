"""Prompts that begin alike."""

from __future__ import annotations

SYSTEM = [5, 9, 14, 3, 3, 22, 8, 30, 11, 2]
PROMPTS = [
    [*SYSTEM, 7, 12], [*SYSTEM, 4], [*SYSTEM, 17, 18, 19, 21, 6, 6, 25], SYSTEM, [*SYSTEM[:5], 1, 2, 3, 4],
    [16, 20], [*SYSTEM, 7, 12], [*SYSTEM[:4]],
]  # fmt: skip
