"""The order in which problems of a recipe are told, and how many of them."""

from __future__ import annotations

import re

from llmsuite.errors import Problem

_MOST_PROBLEMS = 50


def first_ones(problems: list[Problem]) -> list[Problem]:
    """The first problems, in order, and how many more there are."""
    problems = in_order(problems)
    if len(problems) <= _MOST_PROBLEMS:
        return problems
    return [*problems[:_MOST_PROBLEMS], Problem("", "", f"and {len(problems) - _MOST_PROBLEMS:,} more problems")]


def in_order(problems: list[Problem]) -> list[Problem]:
    """Problems sorted by position in the file, command line last, without duplicates."""

    def position(problem: Problem) -> tuple[int, int, int]:
        match = re.search(r":(\d+):(\d+)$", problem.where)
        in_file = match is not None and not problem.where.startswith("--")
        return (0, int(match[1]), int(match[2])) if match and in_file else (1, 0, 0)

    return sorted(dict.fromkeys(problems), key=position)
