"""Documents in one row, and what each token of them sees."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

rows_of_documents = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3)


def documents_of(rows: list[list[int]]) -> np.ndarray:
    """[B, L] of rows of documents of these lengths; padding is a document too."""
    length = max(map(sum, rows))
    padded = [[*row, length - sum(row)] for row in rows]
    begins = [np.repeat([0, *itertools.accumulate(row[:-1])], row) for row in padded]
    return np.stack(begins).astype("int64")


def visible(rows: list[list[int]]) -> np.ndarray:
    """[B, L, L] by the definition: keys of the same document that do not come later."""
    begins = documents_of(rows)
    length = begins.shape[1]
    return np.array([[[b[i] == b[j] and j <= i for j in range(length)] for i in range(length)] for b in begins])


prompts = st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=3)), min_size=1)
"""Lengths of the prompts, and of the answers to each."""


def answers_of(rows: list[tuple[int, list[int]]]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """[L]: where what each token belongs to begins; and of each token its prompt, and its answer or -1."""
    begins: list[int] = []
    belongs: list[tuple[int, int]] = []
    for number, (prompt, answers) in enumerate(rows):
        begins += [len(begins)] * prompt
        belongs += [(number, -1)] * prompt
        for answer, length in enumerate(answers):
            begins += [len(begins) - prompt] * length
            belongs += [(number, answer)] * length
    return np.array(begins), belongs
