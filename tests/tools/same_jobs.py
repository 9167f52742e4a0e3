"""How many files of other suites are the same job here: the table of docs/guide/from-other-suites.md.

    python -m tests.tools.same_jobs llamafactory=DIRECTORY swift=DIRECTORY … [--reasons] [--write]

A directory is a checkout of the suite at the commit of its list in tests/unit/plugins/suites; the files themselves are
not in this repository. `swift=` may be left out for a directory with that name. Of a list whose files are of various
commits, the directory has each file as it is at its own commit. Suites without a directory keep the numbers of their
list.

`--reasons` counts the reasons of refusals: how many files have one, and how many have no other; the reasons that most
files have alone come first. `--write` writes what becomes of each file into the lists, and the numbers into the table
of the documentation.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.plugins.suites.known import SUITES
from tests.conftest import registry_with
from tests.support.paths import ROOT
from tests.support.suite_files import LISTS, VALID, Outcome, digest, listed, load, outcome, table, without_training

PAGES = (ROOT / "docs/guide/from-other-suites.md", ROOT / "docs/zh/guide/from-other-suites.md")
_REPOSITORIES = {
    "llamafactory": "hiyouga/LLaMA-Factory",
    "trl": "huggingface/trl",
    "swift": "modelscope/ms-swift",
    "axolotl": "axolotl-ai-cloud/axolotl",
    "paddleformers": "PaddlePaddle/PaddleFormers",
}
_SHOWN = 60
"""Characters of a refusal in a list."""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="same_jobs", description=__doc__)
    parser.add_argument("directories", nargs="*", metavar="[SUITE=]DIRECTORY")
    parser.add_argument("--reasons", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(words)
    lists = {path.stem: load(path) for path in LISTS}
    try:
        roots = _roots(given.directories, lists)
        found = {name: _outcomes(name, root, lists[name]) for name, root in roots.items()}
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for name, results in found.items():
        for file, result in results.items():
            lists[name]["files"][file]["becomes"] = _shortest(result, lists[name]["files"][file]["becomes"])
    print("\n".join(table(lists)))
    for name, root in roots.items():
        others = sorted(without_training(root, lists[name]))
        print(f"\n{SUITES[lists[name]['action']].name}: {len(others)} files do not train, among them: "
              f"{', '.join(others[:5])}")  # fmt: skip
    if given.reasons:
        _print_reasons(found)
    if given.write:
        _write(lists)
    return 0


def _roots(directories: Sequence[str], lists: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """Return the directory of each suite. Raises UserError for one that is unknown or missing."""
    roots: dict[str, Path] = {}
    for word in directories:
        name, equals, place = word.partition("=")
        if not equals:
            name, place = Path(word).resolve().name, word
        if name not in lists or not Path(place).is_dir():
            sources = "".join(
                f"\n  {known}=DIRECTORY: {_REPOSITORIES[known]} at {found.get('commit', 'the commits of its list')}"
                for known, found in lists.items()
            )
            raise UserError(f"{word}: is not the directory of a suite; give checkouts, such as{sources}")
        roots[name] = Path(place).resolve()
    return roots


def _outcomes(name: str, root: Path, found: Mapping[str, Any]) -> dict[str, Outcome]:
    """What becomes of each file of a list. Raises UserError if the directory does not have the files of the list."""
    files = found["files"]
    action = found["action"]
    others = listed(root, found) ^ set(files)
    others |= {file for file in set(files) - others if digest(action, root / file) != files[file]["sha256"]}
    if others:
        raise UserError(
            f"{name}={root}: {len(others)} files differ from those of the list, such as {min(others)}; it has to be "
            f"{_REPOSITORIES[name]} at {found.get('commit', 'the commits of the list')}"
        )
    registry = registry_with()
    with _offline(root) as recipe:
        return {file: outcome(action, root / file, registry, recipe) for file in sorted(files)}


@contextlib.contextmanager
def _offline(root: Path) -> Iterator[Path]:
    """Run in the checkout, where data/dataset_info.json is, with an empty cache; yields a file for recipes. There is no
    hub: tests.conftest has taken it away."""
    place = Path.cwd()
    cache = os.environ.get("LLMSUITE_CACHE")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["LLMSUITE_CACHE"] = f"{scratch}/cache"
        os.chdir(root)
        try:
            yield Path(scratch) / "recipe.json"
        finally:
            os.chdir(place)
            os.environ.pop("LLMSUITE_CACHE")
            if cache is not None:
                os.environ["LLMSUITE_CACHE"] = cache


def _shortest(result: Outcome, before: str) -> str:
    """What a list has for a file: the outcome, or a part of the refusal; the part that it has, if it is still true."""
    if result.text in VALID or (before not in VALID and before in result.text):
        return result.text if result.text in VALID else before
    if result.reasons and result.reasons[0][0]:
        return f"{result.reasons[0][0]} ="
    return result.text.partition("\n")[0].partition(": ")[2][:_SHOWN] or result.text[:_SHOWN]


def _print_reasons(found: Mapping[str, Mapping[str, Outcome]]) -> None:
    files: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    alone: collections.Counter[tuple[str, str]] = collections.Counter()
    for name, results in found.items():
        for file, result in results.items():
            if result.text in VALID:
                continue
            for reason in result.reasons:
                files[reason].add(f"{name}/{file}")
            if len(set(result.reasons)) == 1:
                alone[result.reasons[0]] += 1
    print("\n| files | alone | argument | reason |\n|---|---|---|---|")
    for reason in sorted(files, key=lambda reason: (-alone[reason], -len(files[reason]), reason)):
        print(f"| {len(files[reason])} | {alone[reason]} | {reason[0]} | {reason[1].splitlines()[0]} |")


def _write(lists: Mapping[str, Mapping[str, Any]]) -> None:
    for path in LISTS:
        path.write_text(json.dumps(lists[path.stem], indent=1, sort_keys=True) + "\n", encoding="utf-8")
    counts = {row.split(" | ")[0]: row.split(" | ")[2:] for row in table(lists)[2:]}
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        for at, line in enumerate(lines):
            cells = line.split(" | ")
            if len(cells) == 5 and cells[0] in counts:
                lines[at] = " | ".join([*cells[:2], *counts[cells[0]]])
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
