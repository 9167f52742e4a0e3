"""Archives that lie about themselves: what they cost is in proportion to their size, and each fault is named."""

from __future__ import annotations

import contextlib
import gzip
import io
import resource
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.data import archives
from llmsuite.data.archives import read_members

MANY = 100_000


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a member of a .tar, whatever it says of its size."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def used(call: Callable[[], object]) -> float:
    """Seconds of the processor."""
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime - begun


@pytest.mark.further
@pytest.mark.parametrize("wanted", [True, False])
def test_many_members_take_time_by_their_number(tmp_path: Path, wanted: bool) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"".join(member(f"m{i}") for i in range(MANY)) + bytes(1024))
    found: list[str] = []

    def read() -> None:
        found.extend(name for name, _ in read_members(path, lambda name: wanted))

    assert used(read) < 60, "seconds; a way that looks through all names for each takes an hour"
    assert len(found) == (MANY if wanted else 0)


@pytest.mark.further
def test_many_members_of_a_zip_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(MANY // 5):
            archive.writestr(f"m{i}", b"")
    assert len(list(read_members(path))) == MANY // 5


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("packed", [True, False])
def test_a_large_header_is_refused(tmp_path: Path, kind: bytes, packed: bool) -> None:
    size = 1 << 33
    content = member("././@LongLink", size, kind) + bytes(4096)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(UserError, match=r"has a name or a header of 8,589,93\d,\d+ bytes"):
        list(read_members(path))


def test_endless_small_headers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_MIN_BUDGET_BYTES", 1 << 20)
    content = b"".join(member("a", 64 << 10, tarfile.XGLTYPE) + bytes(64 << 10) for _ in range(64))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=r"unpacks to more than 100 times its size|is not a complete"):
        list(read_members(tmp_path / "a.tar.gz"))


def test_a_long_name_is_read(tmp_path: Path) -> None:
    name = "d/" * 100 + "train.json"
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo(name)
        info.size = 2
        archive.addfile(info, io.BytesIO(b"{}"))
    assert list(read_members(tmp_path / "a.tar.gz")) == [(name, b"{}")]


def test_negative_sizes_are_refused(tmp_path: Path) -> None:
    header = bytearray(member("train.json"))
    header[124:136] = b"\xff" + (-512).to_bytes(11, "big", signed=True)
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:512]) + 8 * 32)
    (tmp_path / "a.tar").write_bytes(bytes(header) + bytes(1024))
    with pytest.raises(UserError, match=r"is not a complete|bytes; it is damaged"):
        list(read_members(tmp_path / "a.tar"))


@pytest.mark.parametrize(("claimed", "says"), [(3, "is not a complete"), (1 << 31, "unpacks to more than 100 times")])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_with_a_wrong_size_is_refused(tmp_path: Path, claimed: int, says: str, method: int) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("train.json", b'{"a": 1}\n' * 4)
    content = bytearray(path.read_bytes())
    directory = content.index(b"PK\1\2")
    content[directory + 24 : directory + 28] = struct.pack("<I", claimed)
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        list(read_members(path))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_unsupported_methods_of_a_zip_are_refused(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.writestr("train.json", b"{}")
    with pytest.raises(UserError, match=r"'train\.json' has an unsupported compression method"):
        list(read_members(tmp_path / "a.zip"))


def test_every_truncation_and_changed_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    """No change of an archive ends in another error than a UserError."""
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("t\u00e9" * 60 + "/train.json")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"{}\n"))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as zipped:
        zipped.writestr("train.json", b"{}\n")
    for name in ("a.tar", "a.zip"):
        whole = (tmp_path / name).read_bytes()[:4096]
        used_bytes = [i for i, byte in enumerate(whole) if byte]
        changed = [
            whole[:i] + bytes([whole[i] ^ flip]) + whole[i + 1 :] for i in used_bytes for flip in (1, 0x80, 0xFF)
        ]
        for content in [*(whole[:i] for i in range(0, len(whole), 37)), *changed]:
            (tmp_path / "changed").write_bytes(content)
            with contextlib.suppress(UserError):
                list(read_members(tmp_path / "changed"))
