"""docs/guide/environments.md: what it says to write works."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from llmsuite.contract.specs import Turn
from llmsuite.rl.environments import Begin, EnvironmentSource, Step, StepResult
from tests.support.paths import ROOT

TEXT = (ROOT / "docs" / "guide" / "environments.md").read_text(encoding="utf-8")


def test_the_class_on_the_page_is_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n# games.py\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "games_of_the_guide.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "games_of_the_guide.py"
    try:
        call = EnvironmentSource(f"{path}:Reverse").make_handler()
        answer, why = call(Begin({"word": "abc", "messages": []}, 1))
        assert why == ""
        assert isinstance(answer, StepResult)
        assert [m.content for m in answer.messages] == ["Write abc backwards."]
        for text, done, reward in (("abc", False, 0.0), (" cba\n", True, 0.5)):
            answer, why = call(Step(answer.state, Turn(text=text, ids=[1], finish_reason="stop")))
            assert isinstance(answer, StepResult)
            assert (why, answer.done, answer.scores) == ("", done, (reward,))
    finally:
        sys.modules.pop("games_of_the_guide", None)
