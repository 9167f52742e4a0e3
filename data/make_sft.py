"""Write the conversations under data/sft: the questions of data/preference with their right answers.

Usage:

    python data/make_sft.py            write the files
    python data/make_sft.py --check    exit 1 unless the files are exactly what would be written
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import generated

HERE = Path(__file__).resolve().parent
SEED = 20240814
ROUNDS = (1, 1, 2, 3)
"""Questions in a conversation, in turn: one each for half of the rows."""
SYSTEM = "Answer in the form asked for, with nothing else."
"""Opens every third conversation."""


def build(split: str) -> list[dict[str, Any]]:
    """The rows of a split. Every question is asked once."""
    text = (HERE / "preference" / f"{split}.jsonl").read_text(encoding="ascii")
    questions = [json.loads(line) for line in text.splitlines()]
    random.Random(f"{SEED} {split}").shuffle(questions)
    rows: list[dict[str, Any]] = []
    while questions:
        count = ROUNDS[len(rows) % len(ROUNDS)]
        asked, questions = questions[:count], questions[count:]
        messages = [{"role": "system", "content": SYSTEM}] if len(rows) % 3 == 0 else []
        for question in asked:
            messages += question["prompt"] + question["chosen"]
        rows.append({"messages": messages, "tasks": [question["task"] for question in asked]})
    return rows


def files() -> dict[Path, bytes]:
    """What belongs on disk."""
    contents = {}
    for split in ("train", "eval"):
        lines = "".join(json.dumps(row) + "\n" for row in build(split))
        contents[HERE / "sft" / f"{split}.jsonl"] = lines.encode("ascii")
    return contents


def main(argv: Sequence[str] | None = None) -> int:
    return generated.write(files(), "Write the conversations under data/sft.", argv)


if __name__ == "__main__":
    sys.exit(main())
