"""Where files are kept from run to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmsuite.cache import BUILT, cache_root, private_cache


def test_a_private_cache_shares_what_was_compiled_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is made from within another one."""
    monkeypatch.setenv("LLMSUITE_CACHE", str(tmp_path / "common"))
    (tmp_path / "common" / "tokens").mkdir(parents=True)
    for name in ("one", "two"):
        monkeypatch.setenv("LLMSUITE_CACHE", str(private_cache(tmp_path / name)))
        assert [path.name for path in cache_root().iterdir()] == [BUILT]
        (cache_root() / BUILT / f"{name}.so").touch()
    assert sorted(path.name for path in (tmp_path / "common" / BUILT).iterdir()) == ["one.so", "two.so"]
    assert private_cache(tmp_path / "two") == tmp_path / "two", "another rank may make it too"
