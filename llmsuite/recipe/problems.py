"""Order and number of the problems that are reported for a recipe."""

from __future__ import annotations

import re

from llmsuite.base.errors import Problem

_MAX_PROBLEMS = 50


def first_problems(problems: list[Problem]) -> list[Problem]:
    """Return the first problems in order, followed by the number of the others."""
    problems = sorted_problems(problems)
    if len(problems) <= _MAX_PROBLEMS:
        return problems
    return [*problems[:_MAX_PROBLEMS], Problem("", "", f"and {len(problems) - _MAX_PROBLEMS:,} more problems")]


def sorted_problems(problems: list[Problem]) -> list[Problem]:
    """Return problems sorted by position in the file, those of the command line last, without duplicates."""

    def position(problem: Problem) -> tuple[int, int, int]:
        match = re.search(r":(\d+):(\d+)$", problem.where)
        in_file = match is not None and not problem.where.startswith("--")
        if match and in_file:
            return (0, int(match[1]), int(match[2]))
        return (1, 0, 0)

    return sorted(dict.fromkeys(problems), key=position)
