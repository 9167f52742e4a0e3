"""A rank that runs one program of docs/notes/upstream.md; `test_upstream` starts it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "notes" / "upstream.md"


def programs() -> dict[str, str]:
    """The program of each entry of the page, by its heading."""
    entries = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {}
    for entry in entries:
        (program,) = re.findall(r"```python\n(.*?)```", entry, re.DOTALL)
        found[entry.partition("\n")[0]] = program
    return found


def main(heading: str, directory: str) -> int:
    """Run it; `RANK.txt` in the directory has the message of the assertion at its end, or that there is none."""
    import paddle
    import paddle.distributed as dist

    dist.init_parallel_env()
    program = programs()[heading]
    said = "as it should be"
    try:
        exec(compile(program, heading, "exec"), {"__name__": "__main__"})
    except AssertionError as error:
        said = f"wrong: {error}"
    Path(directory, f"{os.environ['PADDLE_TRAINER_ID']}.txt").write_text(said, encoding="utf-8")
    # rank 0 serves the stores by which the others may still be meeting: it does not end before them
    paddle.disable_static()
    dist.barrier()
    return 0
