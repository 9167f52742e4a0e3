"""Where things are kept from run to run."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$LLMSUITE_CACHE`, else llmsuite's directory below `$XDG_CACHE_HOME` or `~/.cache`."""
    if "LLMSUITE_CACHE" in os.environ:
        return Path(os.environ["LLMSUITE_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "llmsuite"
