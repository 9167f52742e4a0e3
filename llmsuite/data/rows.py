"""What a row of data is once its file format no longer matters."""

from __future__ import annotations

import dataclasses
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Preference:
    """A conversation that ends with the user, a better and a worse answer to it."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
