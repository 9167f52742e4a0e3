"""The built-in rollout engines and their recipe keys, `rollout.NAME`. Imports no NumPy."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, Literal

from llmsuite.contract.schema.numbers import NonNegativeInt, PositiveFloat
from llmsuite.contract.schema.section import Section
from llmsuite.contract.specs import RolloutEngineSpec


@dataclasses.dataclass(kw_only=True)
class OpenaiSection(Section):
    """Servers that sample completions and accept new weights, as `llmsuite serve --rl` does. The environment variable
    LLMSUITE_API_KEY holds their API key, if they require one."""

    urls: list[str] = dataclasses.field(default_factory=list)
    """Addresses of the servers, such as ["http://127.0.0.1:8000"]; each samples a part of the completions."""
    dialect: Literal["llmsuite", "vllm"] = "llmsuite"
    """The kind of server. llmsuite: `llmsuite serve --rl`; vllm: vLLM 0.32 or newer, with `--enable-scale-out` and
    VLLM_SERVER_DEV_MODE=1, without which it accepts no weights."""
    weights_dir: str | None = None
    """Directory for the weights of each version, which the servers read under the same path. null: "weights" in
    output_dir. Only the newest stay."""
    timeout: PositiveFloat = 600.0
    """Seconds within which the full response has to arrive."""
    retries: NonNegativeInt = 8
    """Retries when a server cannot be reached, is busy, fails or has lost the weights; after 0.5 seconds, then after
    twice as long each time, 10 seconds at most."""

    def problems(self) -> Iterator[tuple[str, str]]:
        for url in self.urls:
            if not re.match(r"https?://[^/\s]+$", url.rstrip("/")):
                yield "urls", f"has {url!r}; write http://HOST:PORT or https://HOST:PORT, without a path"
        if len(set(self.urls)) < len(self.urls):
            yield "urls", "names a server twice"


def _made(address: str, context: Any) -> Any:
    """The engine that the factory at an address makes for a context."""
    return pkgutil.resolve_name(address)(context)


BUILTIN = [
    RolloutEngineSpec(
        name="local",
        help="a second copy of the trained model, in the same processes",
        factory=functools.partial(_made, "llmsuite.rl.local:LocalEngine"),
    ),
    RolloutEngineSpec(
        name="openai",
        help="servers that accept new weights, such as `llmsuite serve --rl`",
        config_cls=OpenaiSection,
        factory=functools.partial(_made, "llmsuite.rl.remote:RemoteEngine"),
        remote=True,
    ),
]
