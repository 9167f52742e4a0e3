"""The command `llmsuite plugins list|info|new`: the installed plugins, what they provide, the errors of broken ones,
and the package of a new one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.cli.new_plugin import KINDS, Kind, write_plugin
from llmsuite.contract.registry import Registry, left_out_notes

_WIDTH = 100


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "action",
        type=Literal["list", "info", "new"],
        help="list: all plugins; info: details of one; new: write the package of a new one",
    )
    parser.add_argument(
        "name",
        type=str | None,
        nargs="?",
        default=None,
        help="with info: the plugin's name; with new: the name of what it adds, as recipes have it",
    )
    parser.add_argument("--kind", type=Kind | None, default=None, help="with new: what it adds (default: stage)")
    parser.add_argument(
        "-o", "--output", type=str | None, default=None, help="with new: directory to write (default: llmsuite-NAME)"
    )


def _counted(provides: Iterable[str]) -> list[str]:
    """Registered things such as "stage dpo"; several of a kind as a number, such as "3 stages"."""
    kinds: dict[str, list[str]] = {}
    for thing in provides:
        kinds.setdefault(thing.rpartition(" ")[0], []).append(thing)
    return [things[0] if len(things) == 1 else f"{len(things)} {kind}s" for kind, things in kinds.items()]


def _new(args: Any, registry: Registry) -> int:
    if args.name is None:
        raise UserError(f"plugins new: give a name; --kind is one of {', '.join(KINDS)}")
    directory = Path(args.output or f"llmsuite-{args.name.replace('_', '-')}")
    for path in write_plugin(args.name, args.kind or "stage", directory, registry):
        print(f"wrote {directory / path}")
    print(f"next: cd {directory} && pip install --no-deps --no-build-isolation -e . && pytest")
    return 0


def run(args: Any, registry: Registry) -> int:
    if args.action == "new":
        return _new(args, registry)
    if args.kind is not None or args.output is not None:
        raise UserError(f"plugins {args.action}: --kind and -o are options of plugins new")
    if args.action == "list":
        for info in registry.plugins:
            status = "broken" if info.error else "ok"
            row = f"{info.name}  {info.distribution}  {status}  {', '.join(_counted(info.provides))}".rstrip()
            print(textwrap.fill(row, _WIDTH, subsequent_indent="    ", break_on_hyphens=False))
            if info.error:
                print("".join(f"    {line}\n" for line in info.error.splitlines()), end="")
        for text in left_out_notes():
            print(textwrap.fill(text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False))
        return 0
    names = ", ".join(dict.fromkeys(info.name for info in registry.plugins))
    if args.name is None:
        raise UserError(f"plugins info: name one of {names}")
    found = [info for info in registry.plugins if info.name == args.name]
    if not found:
        raise UserError(f"no plugin is called {args.name!r}; there are: {names}")
    for info in found:
        print(f"name          {info.name}")
        print(f"distribution  {info.distribution}")
        print(f"entry point   {info.value}")
        print(f"loaded in     {info.load_seconds:.3f} s")
        print(f"provides      {', '.join(info.provides) or 'nothing'}")
        print(f"hooks         {', '.join(info.hooks) or 'none'}")
        print(f"status        {info.error or 'ok'}")
    return 0
