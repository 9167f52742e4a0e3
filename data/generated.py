"""What the scripts beside this file share: writing their files, or checking them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def write(files: Mapping[Path, bytes], description: str, argv: Sequence[str] | None) -> int:
    """Write the files that are not current, or with `--check` name them and return 1."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not current")
    check = parser.parse_args(argv).check
    stale = {path: new for path, new in files.items() if not path.is_file() or path.read_bytes() != new}
    for path, new in stale.items():
        if check:
            print(f"{path}: not what this script writes", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(new)
    return 1 if check and stale else 0
