"""Keys of sections are read by name where the name is not known in advance, and recorded as read or not."""

from __future__ import annotations

import dataclasses

from llmsuite.contract.schema.section import Section, changed_keys, forget_reads, stored, subsection, unread, values_of


@dataclasses.dataclass(kw_only=True)
class Inner(Section):
    size: int = 2
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True)
class Outer(Section):
    path: str
    inner: Inner = dataclasses.field(default_factory=Inner)


def outer(**values: object) -> Outer:
    section = Outer(path="here", inner=Inner(**values))  # type: ignore[arg-type]
    forget_reads(section)
    return section


def test_stored_records_nothing() -> None:
    section = outer(size=3)
    assert stored(section, "inner", "size") == 3
    assert stored(section, "path") == "here"
    assert set(unread(section)) == {("path",), ("inner", "size"), ("inner", "names")}


def test_stored_is_none_where_there_is_no_such_key() -> None:
    assert stored(outer(), "other", "size") is None
    assert stored(outer(), "path", "size") is None
    assert stored(None, "size") is None


def test_values_of_records_all_keys() -> None:
    section = outer(size=3)
    assert values_of(section.inner) == {"size": 3, "names": []}
    assert list(unread(section)) == [("path",)]


def test_subsection_is_none_where_there_is_none() -> None:
    section = outer()
    assert subsection(section, "inner") is section.inner
    assert subsection(section, "other") is None


def test_changed_keys_are_those_without_their_default() -> None:
    assert changed_keys(Inner()) == []
    assert changed_keys(Inner(size=3, names=["a"])) == ["size", "names"]
    assert changed_keys(Inner(size=2, names=["a"])) == ["names"]
    assert changed_keys(Outer(path="here")) == ["path"]
