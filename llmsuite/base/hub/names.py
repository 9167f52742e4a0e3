"""Names of models and data sets on a hub.

hf:ORG/NAME            Hugging Face            ms:ORG/NAME          ModelScope
aistudio:ORG/NAME      AI Studio               ORG/NAME             the first hub of LLMSUITE_HUBS that has it
…@REVISION             a branch, a tag or a commit
…/FILE                 one file of it, with a hub in front
…?split=train          options of a data set
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import exists

HUBS = {"hf": "Hugging Face", "ms": "ModelScope", "aistudio": "AI Studio"}
ORDER = "LLMSUITE_HUBS"
"""Environment variable with the hubs for names without one, in the order of lookup, separated by commas."""
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(
    rf"(?:(?P<hub>{'|'.join(HUBS)}):)?(?P<repo>{_PART}(?:/{_PART})?)(?P<path>/[^@?]+)?"
    r"(?:@(?P<revision>[^?]+))?(?:\?(?P<query>.*))?"
)
_OURS = ("runs", "models", "data", "recipes", "checkpoints")
"""Directories that recipes name; a path in one of them is never looked up on a hub."""
_FILES = (".json", ".jsonl", ".txt", ".parquet", ".csv", ".bin", ".idx", ".gz", ".zst", ".gguf", ".safetensors")


@dataclasses.dataclass(frozen=True)
class HubName:
    """The name of a model or a data set."""

    hub: str
    """A key of HUBS; empty for the first in the user's order that has it."""
    repo: str
    """ORG/NAME; Hugging Face has some without ORG."""
    path: str = ""
    """One file of the repository; empty for all of it."""
    revision: str | None = None
    query: str = ""
    """Options of a data set, as in a URL."""

    def __str__(self) -> str:
        hub = f"{self.hub}:" if self.hub else ""
        path = f"/{self.path}" if self.path else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{hub}{self.repo}{path}{revision}" + (f"?{self.query}" if self.query else "")

    @property
    def is_pinned(self) -> bool:
        """True for a name with a hub and a commit, whose content never changes."""
        return bool(self.hub and self.revision and re.fullmatch(r"[0-9a-f]{40}", self.revision))

    def at(self, hub: str, revision: str | None) -> HubName:
        """Return the name on one hub, at a revision."""
        return dataclasses.replace(self, hub=hub, revision=revision)


def hub_name(given: str) -> HubName | None:
    """Parse a name on a hub; None for a path.

    A name without a hub counts as one if it is ORG/NAME, no file has this path, and it looks neither like a file nor
    like one of llmsuite's own directories, such as runs/NAME.

    Raises:
        UserError: it begins with a hub and is malformed.
    """
    match = _NAME.fullmatch(given)
    prefix = given.partition(":")[0]
    if prefix in HUBS and not given.startswith(f"{prefix}://"):
        has_no_owner = match is not None and "/" not in match["repo"]
        if match is None or match["hub"] is None or (has_no_owner and (prefix != "hf" or match["path"])):
            raise UserError(f"{given!r} is no name on {HUBS[prefix]}; write {prefix}:ORG/NAME or {prefix}:ORG/NAME@TAG")
        return _name(match)
    if match is None or "/" not in match["repo"] or match["path"]:
        return None
    first, _, last = match["repo"].partition("/")
    is_here = exists(given) or exists(f"{given}.idx")  # an indexed corpus is named without the ending of its files
    if first in _OURS or last.endswith(_FILES) or is_here:
        return None
    return _name(match)


def hub_order() -> Sequence[str]:
    """The hubs for names without one: LLMSUITE_HUBS, by default Hugging Face only.

    Raises:
        UserError: one of them is unknown.
    """
    names = [word.strip() for word in os.environ.get(ORDER, "").split(",") if word.strip()] or ["hf"]
    if unknown := [name for name in names if name not in HUBS]:
        raise UserError(f"{ORDER}: {unknown[0]!r} is no hub; known: {', '.join(HUBS)}")
    return list(dict.fromkeys(names))


def _name(match: re.Match[str]) -> HubName:
    path = (match["path"] or "").removeprefix("/")
    if ".." in path.split("/"):
        raise UserError(f"{match[0]!r} leaves the repository; name a file inside")
    return HubName(match["hub"] or "", match["repo"], path, match["revision"], match["query"] or "")
