"""Write the rows under data/games: three games that a tiny model learns from rewards on a laptop.

guess: the model guesses a digit and is told higher or lower. calculator: it is asked for a product and has a tool that
computes. countdown: it reaches a number from two others by one operation. The conversations under sft show how turns
look, not how to be right: guesses, numbers, answers and operators are random there.

Usage:

    python data/make_games.py            write the files
    python data/make_games.py --check    exit 1 unless the files are exactly what would be written
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import generated

HERE = Path(__file__).resolve().parent
SEED = 20261122
COUNTS = {"train": 600, "eval": 100}
TURNS = 4
Row = dict[str, Any]


def turn(role: str, content: object) -> dict[str, str]:
    """A turn of a conversation."""
    return {"role": role, "content": str(content)}


def split_of(a: int, b: int) -> str:
    """Every seventh pair of numbers is in no conversation."""
    return "eval" if (min(a, b) * 31 + max(a, b) * 17) % 7 == 0 else "train"


def guess(draw: random.Random, split: str) -> Row:
    """A game; all begin alike."""
    return {"prompt": "Guess my digit."}


def guess_play(draw: random.Random, row: Row) -> list[dict[str, str]]:
    """Random guesses, truthfully answered, until the digit or the last turn."""
    secret, said = draw.randrange(10), []
    for number in range(TURNS):
        tried = draw.randrange(10)
        said.append(turn("assistant", tried))
        if tried == secret or number == TURNS - 1:
            break
        said.append(turn("user", "higher" if tried < secret else "lower"))
    return said


def pair(draw: random.Random, split: str, most: int) -> tuple[int, int]:
    """Two numbers of a split."""
    while True:
        a, b = draw.randint(2, most), draw.randint(2, most)
        if split_of(a, b) == split:
            return a, b


def calculator(draw: random.Random, split: str) -> Row:
    """A product."""
    a, b = pair(draw, split, 99)
    return {"prompt": f"{a} times {b}?", "answer": str(a * b)}


def calculator_play(draw: random.Random, row: Row) -> list[dict[str, str]]:
    """An answer at once, which is a random number, or a call of the tool for the product or for something else, and
    then its result or another number."""
    a, _, b = row["prompt"].rstrip("?").split()
    made_up = draw.randint(4, 9801)
    if draw.random() < 0.5:
        return [turn("assistant", made_up)]
    sign = draw.choice("+-*")
    result = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
    said = result if draw.random() < 0.5 else made_up
    return [turn("assistant", f"<calc>{a}{sign}{b}</calc>"), turn("tool", result), turn("assistant", said)]


def countdown(draw: random.Random, split: str) -> Row:
    """A number to reach from two others by one operation."""
    a, b = pair(draw, split, 30)
    target = draw.choice([a + b, abs(a - b), a * b])
    return {"prompt": f"Make {target} from {a} and {b}.", "numbers": [a, b], "target": target}


def countdown_play(draw: random.Random, row: Row) -> list[dict[str, str]]:
    """Both numbers in any order with any operator."""
    a, b = draw.sample(row["numbers"], 2)
    return [turn("assistant", f"{a}{draw.choice('+-*')}{b}")]


GAMES: dict[str, tuple[Callable[..., Row], Callable[..., list[dict[str, str]]]]] = {
    "guess": (guess, guess_play),
    "calculator": (calculator, calculator_play),
    "countdown": (countdown, countdown_play),
}


def conversations(split: str) -> Iterator[Row]:
    """Each game in turn, played at random."""
    draw = random.Random(f"{SEED} sft {split}")
    for number in range(COUNTS[split]):
        make, play = list(GAMES.values())[number % len(GAMES)]
        row = make(draw, "train")
        yield {"messages": [turn("user", row["prompt"]), *play(draw, row)]}


def prompts(game: str, split: str) -> Iterator[Row]:
    """Rows to play."""
    draw = random.Random(f"{SEED} {game} {split}")
    for _ in range(COUNTS[split]):
        yield GAMES[game][0](draw, split)


def files() -> dict[Path, bytes]:
    """What belongs on disk."""
    contents = {}
    for split in COUNTS:
        played = {game: prompts(game, split) for game in ("guess", "calculator", "countdown")}
        for name, rows in {"sft": conversations(split), **played}.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            contents[HERE / "games" / name / f"{split}.jsonl"] = lines.encode("ascii")
    return contents


def main(argv: Sequence[str] | None = None) -> int:
    return generated.write(files(), "Write the rows under data/games.", argv)


if __name__ == "__main__":
    sys.exit(main())
