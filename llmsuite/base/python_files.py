"""Python files that users name: their plugins, rewards, environments, collators."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import symtable
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_file, real_path
from llmsuite.base.suggestions import final_suggestion

ALLOW_CODE = "LLMSUITE_ALLOW_CODE"
"""Environment variable that allows every file that a recipe names; the ranks of a run inherit it."""
_NAMED = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")


def import_file(path: Path) -> ModuleType:
    """Import a Python file as a module with the file's name; it can import other files of its directory.

    Exceptions of the file are raised here; its module is then not kept in `sys.modules`.
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
    if match:
        return (match["path"], match["name"])
    return None


def static_fault(key: str, arguments: Sequence[str] = ()) -> str | None:
    """The error in "FILE.py:NAME", as far as it can be found without running the file; None where there is none.

    Args:
        key: "FILE.py:NAME".
        arguments: names of the positional arguments that the function will get; empty for a class.
    """
    parsed = python_function(key)
    assert parsed is not None, key
    path, name = parsed
    if not is_file(Path(path)):
        return f"{path} is not a file (working directory: {Path.cwd()})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shown when the file is imported
            source = importlib.util.decode_source(Path(path).read_bytes())
            module = ast.parse(source, path)
            symbols = symtable.symtable(source, path, "exec")
    except (SyntaxError, ValueError) as error:
        where = ""
        if isinstance(error, SyntaxError) and error.lineno:
            where = f", line {error.lineno}"
        return f"{path}{where}: is no Python: {error.msg if isinstance(error, SyntaxError) else error}"
    imported = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    if any(alias.name == "*" for node in imported for alias in node.names):
        return None
    bound = sorted(s.get_name() for s in symbols.get_symbols() if s.is_assigned() or s.is_imported())
    if name not in bound:
        hint = final_suggestion(name, bound)
        return f"{path} has no {'function' if arguments else 'class'} {name!r}{hint}"
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [node for node in module.body if isinstance(node, definitions) and node.name == name]
    if arguments and found and not isinstance(found[-1], ast.ClassDef):
        return _call_fault(path, found[-1], arguments)
    return None


def _call_fault(path: str, function: ast.FunctionDef | ast.AsyncFunctionDef, arguments: Sequence[str]) -> str | None:
    """The reason why a function cannot be called with these arguments; None where it can, or where it is decorated."""
    own = function.args
    places = [*own.posonlyargs, *own.args]
    required = [a.arg for a, default in zip(own.kwonlyargs, own.kw_defaults) if default is None]
    is_enough = len(places) - len(own.defaults) <= len(arguments) and not required
    if function.decorator_list or (is_enough and (own.vararg or len(arguments) <= len(places))):
        return None
    takes = ", ".join([a.arg for a in places] + required)
    return (
        f"{path}, line {function.lineno}: {function.name}({takes}) is called as {function.name}({', '.join(arguments)})"
    )


def from_file(key: str, kind: str) -> Any:
    """The function or class that "FILE.py:NAME" names; the file is imported as by a script in its directory. Raises
    UserError when there is none; `kind` is its name in messages."""
    parsed = python_function(key)
    assert parsed is not None, key
    path = real_path(parsed[0])
    name = parsed[1]
    module = sys.modules.get(path.stem)
    if module is None:
        module = import_file(path)
    elif real_path(getattr(module, "__file__", None) or "") != path:
        raise UserError(f"{kind} {key}: a module {path.stem!r} is imported already; give the file another name")
    if not hasattr(module, name):
        what = "class" if kind == "environment" else "function"
        raise UserError(f"{kind} {key}: {path} has no {what} {name!r}")
    return getattr(module, name)


@contextlib.contextmanager
def code_allowed() -> Iterator[None]:
    """While active, every file that a recipe names may be run, here and in child processes."""
    with variable(ALLOW_CODE, "1"):
        yield


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """While active, an environment variable has a value, here and in child processes."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
