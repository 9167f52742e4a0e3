"""Methods of adapters beyond LoRA, DoRA and PiSSA: a mixer between the factors, MoRA, VeRA and LoKr."""

from __future__ import annotations

import functools

from llmsuite.contract.hookspecs import AdapterMethod, hookimpl


@functools.cache
def methods() -> tuple[AdapterMethod, ...]:
    """Return the methods; always the same objects, as configurations of adapters are compared by them."""
    from llmsuite.plugins.adapters_extra.lokr import Lokr
    from llmsuite.plugins.adapters_extra.mixer import Mixer
    from llmsuite.plugins.adapters_extra.mora import Mora
    from llmsuite.plugins.adapters_extra.vera import Vera

    return Mixer(), Mora(), Vera(), Lokr()


@hookimpl
def llmsuite_register_adapters() -> list[AdapterMethod]:
    return list(methods())
