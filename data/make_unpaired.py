"""Write the rows under data/unpaired: the questions of data/preference, each with one answer that is wanted or not.

Usage:

    python data/make_unpaired.py            write the files
    python data/make_unpaired.py --check    exit 1 unless the files are exactly what would be written
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    parser = argparse.ArgumentParser(description="Write the rows under data/unpaired.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not current")
    check = parser.parse_args(argv).check
    stale = {path: new for path, new in files().items() if not path.is_file() or path.read_bytes() != new}
    for path, new in stale.items():
        if check:
            print(f"{path}: not what this script writes", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(new)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
