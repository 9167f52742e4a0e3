"""A hub on this machine, used by this process, with an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmsuite.base.cache import isolated_cache
from llmsuite.base.hub import download
from llmsuite.base.hub.local_copies import PINS
from tests.tools.hub_server import HubServer


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path / "cache")))
    monkeypatch.setenv(PINS, "")
    monkeypatch.setattr(download, "_WAIT_SECONDS", 0.01)
    yield server
    server.stop()
