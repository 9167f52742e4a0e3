"""Names that a stranger's files give for other files: those of the same directory and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_manifest, read_weight_map, remote_files
from llmsuite.base.safe_files import is_local_name

ODD = ["../x", "/etc/passwd", "..", ".", "", "a\0b", "a\\b", "a/../../x", "\ud800", "a//b", "./a", "a/", 7, None, ["a"]]
BELOW = ["a", "a/b", "model-00001-of-00002.safetensors", "\u00e4 b"]


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", ODD)
def test_what_leads_elsewhere_is_no_name(name: Any) -> None:
    assert not is_local_name(name)
    assert not is_local_name(name, below=True)


@pytest.mark.parametrize("name", BELOW)
def test_what_lies_below_is_one(name: str) -> None:
    assert is_local_name(name, below=True)
    assert is_local_name(name) == ("/" not in name)


@pytest.mark.parametrize("name", [name for name in ODD if isinstance(name, str)])
def test_every_file_that_names_others_asks(tmp_path: Path, name: str) -> None:
    write(tmp_path / "manifest.json", {"files": {name: {"size": 1, "sha256": "0"}}})
    with pytest.raises(UserError, match=r"manifest\.json"):
        read_manifest(tmp_path)
    with pytest.raises(UserError, match=r"plain file name|surrogate"):
        read_weight_map(write(tmp_path / "index.json", {"weight_map": {"t": name}}))
    write(tmp_path / "elsewhere.json", {"files": {name: {"machine": 1, "rank": 2}}})
    with pytest.raises(UserError, match=r"elsewhere\.json"):
        remote_files(tmp_path)


@pytest.mark.parametrize("entry", [{"size": 1.0, "sha256": "0"}, {"size": -1, "sha256": "0"}, {"size": 1, "sha256": 7}])
def test_sizes_of_a_manifest_are_whole_numbers_and_digests_texts(tmp_path: Path, entry: dict[str, Any]) -> None:
    write(tmp_path / "manifest.json", {"files": {"a": entry}})
    with pytest.raises(UserError, match="no integer as size"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [None, [], {}, {"files": None}, {"files": []}, {"files": {"a": {"rank": "1"}}}])
def test_a_list_of_what_lies_elsewhere_has_its_form(tmp_path: Path, content: Any) -> None:
    write(tmp_path / "elsewhere.json", content)
    with pytest.raises(UserError, match=r"elsewhere\.json"):
        remote_files(tmp_path)
