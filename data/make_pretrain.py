"""Write the text under data/pretrain: short documents about facts that a tiny model can learn in a few steps.

A document says one thing in one to three sentences; a blank line parts it from the next. Half of what a document says
follows from what stands before in it, so the loss of a model that learns falls far below that of the letters alone.

Usage:

    python data/make_pretrain.py            write the files
    python data/make_pretrain.py --check    exit 1 unless the files are exactly what would be written
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import generated

HERE = Path(__file__).resolve().parent
SOURCE: dict[str, Any] = json.loads((HERE / "preference_source.json").read_text(encoding="ascii"))
"""Words, opposites and capitals, the same as in the preference rows."""

SEED = 20240608
NUM_DOCUMENTS = {"train": 1600, "eval": 160}


def _sum(rng: random.Random) -> str:
    a, b = rng.randrange(2, 30), rng.randrange(2, 30)
    return f"{a} plus {b} is {a + b}. So {a + b} minus {b} is {a}."


def _count(rng: random.Random) -> str:
    first, step = rng.randrange(1, 40), rng.randrange(1, 4)
    numbers = ", ".join(str(first + i * step) for i in range(6))
    return f"Counting from {first} in steps of {step} goes {numbers}."


def _capital(rng: random.Random) -> str:
    country, capital, other = rng.choice(SOURCE["capitals"])
    return f"The capital of {country} is {capital}. It is not {other}. {capital} is the capital of {country}."


def _opposite(rng: random.Random) -> str:
    word, opposite, _ = rng.choice(SOURCE["opposites"])
    return f"The opposite of {word} is {opposite}, and the opposite of {opposite} is {word}."


def _story(rng: random.Random) -> str:
    subject, verb, place = (rng.choice(SOURCE[key]) for key in ("subjects", "verbs", "places"))
    return f"The {subject} {verb} the {place}. Who was it? The {subject}. Where? The {place}."


def _word(rng: random.Random) -> str:
    word = rng.choice(SOURCE["words"])
    return (
        f"The word {word} has {len(word)} letters: {' '.join(word)}. It begins with {word[0]} and ends with {word[-1]}."
    )


DOCUMENTS: tuple[Callable[[random.Random], str], ...] = (_sum, _count, _capital, _opposite, _story, _word)


def files() -> dict[Path, bytes]:
    """What belongs on disk."""
    contents = {}
    for split, count in NUM_DOCUMENTS.items():
        rng = random.Random(f"{SEED} {split}")
        text = "\n\n".join(rng.choice(DOCUMENTS)(rng) for _ in range(count)) + "\n"
        contents[HERE / "pretrain" / f"{split}.txt"] = text.encode("ascii")
    return contents


def main(argv: Sequence[str] | None = None) -> int:
    return generated.write(files(), "Write the text under data/pretrain.", argv)


if __name__ == "__main__":
    sys.exit(main())
