"""The rollout engines that come with llmsuite, and their recipe keys, `rollout.NAME`. Imports no NumPy."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, Literal

from llmsuite.schema.numbers import NonNegativeInt, PositiveFloat
from llmsuite.schema.section import Section
from llmsuite.specs import RolloutEngineSpec


@dataclasses.dataclass(kw_only=True)
class OpenaiSection(Section):
    """Servers that draw completions and take new weights, as `llmsuite serve --rl` does. The environment variable
    LLMSUITE_API_KEY has their key, if they ask for one."""

    urls: list[str] = dataclasses.field(default_factory=list)
    """Where they listen, such as ["http://127.0.0.1:8000"]; each draws a part of the completions."""
    dialect: Literal["llmsuite", "vllm"] = "llmsuite"
    """What they are. llmsuite: `llmsuite serve --rl`; vllm: vLLM from 0.32 on, with `--enable-scale-out` and with
    VLLM_SERVER_DEV_MODE=1, without which it takes no weights."""
    weights_dir: str | None = None
    """Directory for the weights of each version, which the servers read under the same path. null: "weights" in
    output_dir. Only the newest stay."""
    timeout: PositiveFloat = 600.0
    """Seconds in which an answer has to be there as a whole."""
    retries: NonNegativeInt = 8
    """Further tries when a server cannot be reached, is busy, fails or has lost the weights; after 0.5 seconds, then
    after twice as long each time, 10 seconds at most."""

    def problems(self) -> Iterator[tuple[str, str]]:
        for url in self.urls:
            if not re.match(r"https?://[^/\s]+$", url.rstrip("/")):
                yield "urls", f"has {url!r}; write http://HOST:PORT or https://HOST:PORT, without a path"
        if len(set(self.urls)) < len(self.urls):
            yield "urls", "names a server twice"


def _made(address: str, context: Any) -> Any:
    """What the factory at an address makes of its context."""
    return pkgutil.resolve_name(address)(context)


BUILTIN = [
    RolloutEngineSpec(
        name="local",
        help="a model beside the one that is trained, in the same processes",
        factory=functools.partial(_made, "llmsuite.rl.local:LocalEngine"),
    ),
    RolloutEngineSpec(
        name="openai",
        help="servers that take new weights, such as `llmsuite serve --rl`",
        config_cls=OpenaiSection,
        factory=functools.partial(_made, "llmsuite.rl.remote:RemoteEngine"),
        remote=True,
    ),
]
