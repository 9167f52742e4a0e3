"""The cache directory and its permissions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmsuite.base import cache
from llmsuite.base.cache import BUILT, cache_root, isolated_cache
from llmsuite.base.errors import UserError


def test_an_isolated_cache_shares_only_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is made from within another one."""
    monkeypatch.setenv("LLMSUITE_CACHE", str(tmp_path / "common"))
    (tmp_path / "common" / "tokens").mkdir(parents=True)
    for name in ("one", "two"):
        monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path / name)))
        assert [path.name for path in cache_root().iterdir()] == [BUILT]
        (cache_root() / BUILT / f"{name}.so").touch()
    assert sorted(path.name for path in (tmp_path / "common" / BUILT).iterdir()) == ["one.so", "two.so"]
    assert isolated_cache(tmp_path / "two") == tmp_path / "two", "another rank may make it too"


def test_an_empty_variable_is_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for empty in ("LLMSUITE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(empty, "")
    assert cache.cache_root() == tmp_path / ".cache" / "llmsuite"


def test_other_users_cannot_put_code_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "built" / "kernels"
    assert cache.private_directory(place).stat().st_mode & 0o777 == 0o700
    (tmp_path / "built").chmod(0o777)
    cache.private_directory(place)
    assert (tmp_path / "built").stat().st_mode & 0o022 == 0
    file = place / "a.so"
    link = place / "b.so"
    file.touch(0o700)
    link.symlink_to(file)
    assert cache.is_private_file(file)
    assert not cache.is_private_file(link)
    file.chmod(0o720)
    assert not cache.is_private_file(file)
    with pytest.raises(UserError, match="Not a directory; set LLMSUITE_CACHE"):
        cache.private_directory(file / "built" / "kernels")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not cache.is_private_file(file)
    with pytest.raises(UserError, match="belongs to another user"):
        cache.private_directory(place)
