"""Write the rows under data/unpaired: the questions of data/preference, each with one answer that is wanted or not.

Usage:

    python data/make_unpaired.py            write the files
    python data/make_unpaired.py --check    exit 1 unless the files are exactly what would be written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import generated

HERE = Path(__file__).resolve().parent


def build(split: str) -> list[dict[str, Any]]:
    """The rows of a split, in the order of the pairs: of each the right answer or the other one, in turn."""
    text = (HERE / "preference" / f"{split}.jsonl").read_text(encoding="ascii")
    rows = []
    for number, pair in enumerate(map(json.loads, text.splitlines())):
        is_wanted = number % 2 == 0
        completion = pair["chosen" if is_wanted else "rejected"]
        rows.append({"prompt": pair["prompt"], "completion": completion, "label": is_wanted, "task": pair["task"]})
    return rows


def files() -> dict[Path, bytes]:
    """What belongs on disk."""
    contents = {}
    for split in ("train", "eval"):
        lines = "".join(json.dumps(row) + "\n" for row in build(split))
        contents[HERE / "unpaired" / f"{split}.jsonl"] = lines.encode("ascii")
    return contents


def main(argv: Sequence[str] | None = None) -> int:
    return generated.write(files(), "Write the rows under data/unpaired.", argv)


if __name__ == "__main__":
    sys.exit(main())
