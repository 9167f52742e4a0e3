"""Resolves the models that a command line names: paths, and names on a hub, which are fetched first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.hub.fetch import fetch_named
from llmsuite.base.hub.listing import Want
from llmsuite.base.hub.names import hub_name
from llmsuite.base.safe_files import exists, is_dir
from llmsuite.checkpoint.adapter_base import NAME_BASE
from llmsuite.recipe.shape import base_named, missing_model

ALLOW_NONFINITE_HELP = "write weights even if values are NaN or infinite; without this option such a tensor is refused"
"""Help of `--allow-nonfinite`."""


def print_status(text: str) -> None:
    """Print the progress of a download to stderr; stdout is for the results of a command."""
    print(text, file=sys.stderr, flush=True)


def optional_path(text: str | None) -> Path | None:
    """The path of an option; None for an option that is empty or not given."""
    return Path(text) if text else None


def check_files(args: Any, options: Sequence[str]) -> None:
    """Raise UserError for a file that an option names and that does not exist, and for an `--output` in a missing
    directory. Checked first because a model takes long to read."""
    for option in options:
        if args[option] and not exists(Path(args[option])):
            raise UserError(f"--{option}: {args[option]} does not exist (working directory: {Path.cwd()})")
    if args.output:
        parent = Path(args.output).parent
        if not is_dir(parent):
            raise UserError(f"--output: {parent} is no directory")


def find_model_path(given: str, want: Want = Want.MODEL, option: str = "", needs_base: bool = True) -> Path:
    """The directory or file of a model; for an adapter whose base model is on a hub, that is fetched too.

    Args:
        given: a path, or a name on a hub.
        want: the part that is needed.
        option: the option that names it, for the message.
        needs_base: the base model of an adapter is needed too.

    Raises:
        UserError: it exists neither here nor on a hub.
    """
    prefix = f"{option}: " if option else ""
    name = hub_name(given)
    if name is not None and name.path:
        want = Want.FILE
    try:
        found = fetch_named(given, want, print_status)
    except UserError as error:
        missing = "" if name is None or name.hub else f"{given} does not exist here, and "
        raise UserError(f"{prefix}{missing}{error}") from error
    if found is not None:
        place = found.file if name is not None and name.path else found.directory
    else:
        place = Path(given)
        if not exists(place):
            raise UserError(f"{prefix}{missing_model(place, '')}")
    base = None
    if needs_base and want is Want.MODEL and is_dir(place):
        base = base_named(place)
    if base is not None:
        try:
            fetch_named(base, Want.MODEL, print_status)
        except UserError as error:
            raise UserError(
                f"{given}: the base model of its adapters, {base}, is missing; {NAME_BASE}; {error}"
            ) from error
    return place


def resolve_model_arguments(args: Any, models: Sequence[str] = ("model", "source"), needs_base: bool = True) -> None:
    """Replace names of models by directories, in arguments such as those of `add_model_arguments`.

    Args:
        args: changed in place.
        models: the arguments that name a model.
        needs_base: the base model of an adapter is needed too, where `--base` does not name it.
    """
    for key in models:
        if args.get(key):
            args[key] = str(find_model_path(args[key], needs_base=needs_base and not args.get("base")))
    for key, want in (("base", Want.MODEL), ("config", Want.CONFIG), ("tokenizer", Want.TOKENIZER)):
        if args.get(key):
            args[key] = str(find_model_path(args[key], want, f"--{key}"))
