"""Python files that users name: their plugins, rewards, environments, collators."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from llmsuite.errors import UserError

_NAMED = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")


def import_file(path: Path) -> ModuleType:
    """The module in a Python file, by the file's name; what lies beside the file can be imported from it.

    Raises what the file raises; its module is not kept then.
    """
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def python_function(key: str) -> tuple[str, str] | None:
    """File and name of "FILE.py:NAME"; None for the name of something that is registered."""
    match = _NAMED.fullmatch(key)
    return (match["path"], match["name"]) if match else None


def from_file(key: str, kind: str) -> Any:
    """What "FILE.py:NAME" names; the file is imported as the neighbour of a script is. Raises UserError when there is
    none; `kind` is what messages call it."""
    parsed = python_function(key)
    assert parsed is not None, key
    path, name = Path(parsed[0]).resolve(), parsed[1]
    module = sys.modules.get(path.stem)
    if module is None:
        module = import_file(path)
    elif Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise UserError(f"{kind} {key}: a module {path.stem!r} is imported already; give the file another name")
    if not hasattr(module, name):
        what = "class" if kind == "environment" else "function"
        raise UserError(f"{kind} {key}: {path} has no {what} {name!r}")
    return getattr(module, name)
