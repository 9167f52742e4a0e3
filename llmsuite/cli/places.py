"""The models that a command line names: paths, and names on a hub, which are fetched first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmsuite.checkpoint.adapter_base import NAME_BASE
from llmsuite.errors import UserError
from llmsuite.hub.fetch import fetch_named
from llmsuite.hub.listing import Want
from llmsuite.hub.names import hub_name
from llmsuite.recipe.shape import base_named, missing_model
from llmsuite.regular import exists, is_dir

ALLOW_NONFINITE = "write weights even where values are NaN or infinite; else such a tensor is refused"
"""Help of `--allow-nonfinite`."""


def say(text: str) -> None:
    """Tell of a download; what a command answers goes to the standard output."""
    print(text, file=sys.stderr, flush=True)


def check_files(args: Any, options: Sequence[str]) -> None:
    """Raise UserError for a file that is given to an option and is not there, and for an `--output` in no directory: a
    model takes long to read."""
    for option in options:
        if args[option] and not exists(Path(args[option])):
            raise UserError(f"--{option}: {args[option]} is not here (working directory: {Path.cwd()})")
    if args.output and not is_dir(parent := Path(args.output).parent):
        raise UserError(f"--output: {parent} is no directory")


def find_place(given: str, want: Want = Want.MODEL, option: str = "", needs_base: bool = True) -> Path:
    """The directory or file that somebody names; for an adapter whose model is on a hub, that is fetched too.

    Args:
        given: a path, or a name on a hub.
        want: what is needed of it.
        option: the option it was given to, for the message.
        needs_base: whether the model of an adapter is needed too.

    Raises:
        UserError: there is nothing, here or on a hub.
    """
    prefix = f"{option}: " if option else ""
    name = hub_name(given)
    if name is not None and name.path:
        want = Want.FILE
    try:
        found = fetch_named(given, want, say)
    except UserError as error:
        unlike = "" if name is None or name.hub else f"{given} is not here, and "
        raise UserError(f"{prefix}{unlike}{error}") from error
    if found is not None:
        place = found.file if name is not None and name.path else found.directory
    else:
        place = Path(given)
        if not exists(place):
            raise UserError(f"{prefix}{missing_model(place, '')}")
    if needs_base and want is Want.MODEL and is_dir(place) and (base := base_named(place)) is not None:
        try:
            fetch_named(base, Want.MODEL, say)
        except UserError as error:
            raise UserError(
                f"{given}: the model of its adapters, {base}, is not there; {NAME_BASE}; {error}"
            ) from error
    return place


def find_model_arguments(args: Any, models: Sequence[str] = ("model", "source"), needs_base: bool = True) -> None:
    """Put directories in place of names in the arguments of `add_model_arguments`, or those like them.

    Args:
        args: changed in place.
        models: those that name a model.
        needs_base: whether the model of an adapter is needed too, where `--base` does not name it.
    """
    for key in models:
        if args.get(key):
            args[key] = str(find_place(args[key], needs_base=needs_base and not args.get("base")))
    for key, want in (("base", Want.MODEL), ("config", Want.CONFIG), ("tokenizer", Want.TOKENIZER)):
        if args.get(key):
            args[key] = str(find_place(args[key], want, f"--{key}"))
