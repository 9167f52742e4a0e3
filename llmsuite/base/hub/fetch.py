"""Fetches models and data sets of a hub, once, and pins their commits.

The launcher of a run fetches before it starts ranks, and passes the commits to them by the variable LLMSUITE_HUB_PINS,
so that all ranks read the same commit when the hub changes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from urllib.parse import quote

from llmsuite.base.cache import locked
from llmsuite.base.errors import UserError
from llmsuite.base.files import write_text_atomic
from llmsuite.base.hub.download import disk_errors, fetch_files
from llmsuite.base.hub.listing import Kind, NotOnHub, Report, Unreachable, Want, select
from llmsuite.base.hub.local_copies import (
    Fetched,
    cached,
    is_offline,
    is_verified,
    known_listing,
    known_pins,
    listing_path,
    missing_files,
    on_disk,
    open_hub,
    pin,
    pinned,
    verified_files,
)
from llmsuite.base.hub.names import HubName, hub_name, hub_order
from llmsuite.base.safe_files import is_file


def fetch(given: HubName, want: Want, report: Report, kind: Kind = "model") -> Fetched:
    """Fetch the required files of a repository, unless they are here.

    Of processes that fetch the same, one does and the others wait. Where the hub cannot be reached, the files fetched
    before are used.

    Raises:
        UserError: no hub has it or may be asked, access is denied, the disk is full, or the files arrive damaged.
    """
    missing: list[UserError] = []
    for hub in _hubs(given):
        name = given.at(hub, given.revision)
        try:
            return _fetch_from(name, want, report, kind)
        except (NotOnHub, Unreachable) as error:
            missing.append(error)
    raise _joined_errors(missing)


def _hubs(given: HubName) -> Sequence[str]:
    """The hubs that are asked for a name, in order: its own, or all."""
    if given.hub:
        return [given.hub]
    return hub_order()


def find_commit(given: HubName, report: Report) -> HubName:
    """The name of a data set with its hub and its newest commit; where no hub can be reached, with the commit that was
    found last.

    Raises:
        UserError: no hub has it, or none can be reached and no commit was found before.
    """
    if given.is_pinned:
        return given
    missing: list[UserError] = []
    for hub in _hubs(given):
        name = given.at(hub, given.revision)
        revision = quote(name.revision or "default", safe="")
        last = listing_path(name.at(hub, "last"), "dataset").with_name(f"last-{revision}")
        try:
            if is_offline():
                raise Unreachable(f"{name}: HF_HUB_OFFLINE is set, and it was never fetched here")
            found = name.at(hub, open_hub(hub).listing(name, "dataset").revision)
        except Unreachable as error:
            if not is_file(last):
                missing.append(error)
                continue
            found = name.at(hub, last.read_text().strip())
            report(f"{name}: the hub cannot be reached; continuing with {found}")
        except NotOnHub as error:
            missing.append(error)
            continue
        last.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(last, str(found.revision))
        return found
    raise _joined_errors(missing)


def _joined_errors(errors: Sequence[UserError]) -> UserError:
    if len(errors) == 1:
        return errors[0]
    return UserError("\n".join(map(str, errors)))


def _fetch_from(name: HubName, want: Want, report: Report, kind: Kind) -> Fetched:
    if is_offline() or name.is_pinned:
        found = on_disk(name, kind)
        lacking = missing_files(found, want, kind) if found is not None else []
        if found is not None and not lacking and (is_offline() or is_verified(found, want, kind)):
            return found
        if is_offline():
            part = f"only a part of it is in the cache: {', '.join(lacking[:5])} is missing"
            what = part if lacking else "it is not in the cache"
            raise Unreachable(f"{name}: HF_HUB_OFFLINE is set, and {what}; fetch it with a connection first")
    hub = open_hub(name.hub)
    try:
        listing = None
        if name.is_pinned:
            listing = known_listing(name, kind)
        if listing is None:
            listing = hub.listing(name, kind)
    except Unreachable as error:
        found = cached(name, want, kind)
        if found is None:
            raise
        report(f"{error}; continuing with the files fetched before: {found.name}")
        return found
    exact = name.at(name.hub, listing.revision)
    note = listing_path(exact, kind)
    with locked(note.parent / "lock"), disk_errors(name):
        directory = hub.begin(name, kind, listing)
        files = {path: dataclasses.asdict(file) for path, file in listing.files.items()}
        write_text_atomic(note, json.dumps({"name": str(exact), "files": files}, indent=1) + "\n")
        checked = verified_files(exact, kind)
        todo = [path for path in select(exact, listing, want) if not checked.has(directory / path)]
        if todo:
            fetch_files(hub, exact, kind, {path: listing.files[path] for path in todo}, directory, report)
            checked.add([directory / path for path in todo])
    return Fetched(exact, directory)


def fetch_named(given: str, want: Want, report: Report) -> Fetched | None:
    """Fetch the model that a name stands for, pin it, and return it; None where the name is a path."""
    is_known = f"model {given}" in known_pins()
    name = hub_name(pinned(given))
    if name is None:
        return None
    found = cached(name, want) if is_known else None  # by the process that started this one
    if found is None:
        found = fetch(name, want, report)
        pin(given, found.name)
    return found
