"""Suggestions for names that do not exist."""

from __future__ import annotations

from llmsuite.base.suggestions import final_suggestion, nearest, suggestion


def test_the_nearest_name_is_suggested() -> None:
    known = {"pretrain": 1, "sft": 2}
    assert nearest("pretrian", known) == "pretrain"
    assert suggestion("pretrian", known) == "did you mean 'pretrain'? "
    assert final_suggestion("pretrian", known) == "; did you mean 'pretrain'?"
    assert final_suggestion("pretrian", known, quotes=False) == "; did you mean pretrain?"


def test_no_name_is_suggested_that_is_too_far() -> None:
    assert nearest("pretrian", ["pretrain"], cutoff=0.99) is None
    assert (suggestion("pretrian", ["dpo"]), final_suggestion("pretrian", ["dpo"])) == ("", "")
