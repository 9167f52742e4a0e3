"""A hub on this machine, asked by this process, with an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmsuite.cache import private_cache
from llmsuite.hub import download
from llmsuite.hub.here import PINS
from tests.tools.hub_server import HubServer


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("LLMSUITE_CACHE", str(private_cache(tmp_path / "cache")))
    monkeypatch.setenv(PINS, "")
    monkeypatch.setattr(download, "_WAIT_SECONDS", 0.01)
    yield server
    server.stop()
