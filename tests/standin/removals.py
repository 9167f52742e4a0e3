"""A wait, a cast or a copy is taken out of the engine, one at a time, in a process that goes on.

The text of a module is changed, compiled, and its functions get the code of the changed ones: so classes and objects
that are there stay as they are, and the next removal begins with the engine as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.paths import ROOT


@dataclasses.dataclass(frozen=True)
class Removal:
    """One change of the text."""

    file: str
    """Below the package."""
    text: str
    """What occurs once in it."""
    instead: str
    check: str
    """Name of the check that notices it."""

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.text.split())[:60]}"


@contextlib.contextmanager
def taken_away(removal: Removal) -> Iterator[None]:
    """While active, the engine of this process lacks it."""
    path = ROOT / "llmsuite" / removal.file
    source = path.read_text(encoding="utf-8")
    assert source.count(removal.text) == 1, f"{removal} occurs {source.count(removal.text)} times"
    importlib.import_module(".".join(Path("llmsuite", removal.file).with_suffix("").parts))
    before, after = (
        _functions(compile(text, str(path), "exec", dont_inherit=True))
        for text in (source, source.replace(removal.text, removal.instead))
    )
    assert after.keys() <= before.keys(), f"{removal}: other lines, or other functions"
    changed = {place: code for place, code in after.items() if code != before[place]}
    assert changed, f"{removal} changes nothing"
    gc.unfreeze()  # what a launcher has imported before its fork is left out of the list else
    found = [f for f in gc.get_objects() if isinstance(f, types.FunctionType) and _place(f.__code__, path) in changed]
    assert found, f"{removal} is in no function that is there"
    kept = [(function, function.__code__) for function in found]
    try:
        for function, code in kept:
            function.__code__ = changed[code.co_name, code.co_firstlineno]
        yield
    finally:
        for function, code in kept:
            function.__code__ = code


def _place(code: types.CodeType, path: Path) -> tuple[str, int] | None:
    return (code.co_name, code.co_firstlineno) if Path(code.co_filename) == path else None


def _functions(code: types.CodeType) -> dict[tuple[str, int], types.CodeType]:
    """The code of every function of a module, by name and first line."""
    found = {}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found[constant.co_name, constant.co_firstlineno] = constant
            found.update(_functions(constant))
    return found


def tell(
    path: Path,
    checks: Mapping[str, Callable[[], None]],
    removals: Sequence[Removal],
    numbers: Sequence[str] = (),
    agreed: Callable[[str | None], str | None] = lambda found: found,
) -> None:
    """Run checks as the engine is, then with each removal its check, and write what is wrong, null for nothing.

    Args:
        path: gets a JSON object: checks and removals by their names.
        checks: by name.
        removals: all that there are.
        numbers: of those to run; none for all of them.
        agreed: makes of what this process has found what all have.
    """
    chosen = [removals[int(number)] for number in numbers] or removals
    found: dict[str, str | None] = {}
    for name in dict.fromkeys(removal.check for removal in chosen) if numbers else checks:
        found[name] = agreed(_wrong(checks[name]))
    for removal in chosen:
        with taken_away(removal):
            found[str(removal)] = agreed(_wrong(checks[removal.check]))
    path.write_text(json.dumps(found), encoding="utf-8")


def _wrong(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
