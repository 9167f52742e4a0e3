"""Words that no file can have for a name: every command says so, or that nothing is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmsuite.cli.main import main

ODD = {"long": "a" * 300, "deep": "a/" * 3000 + "a", "nul": "a\0b", "half": "\ud800", "on a hub": f"org/{'a' * 300}"}
COMMANDS = [
    "align", "checkpoints list", "convert", "eval", "export", "generate", "import", "merge", "plan", "push", "report",
    "rehearse", "run", "runs show", "serve", "show", "stats", "validate", "verify", "watch",
]  # fmt: skip
TARGETS = {"push": ["hf:a/b"], "align": ["--against=x"]}
"""The other arguments that a command needs."""
OUTPUT = ("convert", "export", "import", "merge")


@pytest.mark.parametrize("word", ODD.values(), ids=ODD)
@pytest.mark.parametrize("command", COMMANDS)
def test_odd_names_are_no_bugs(
    command: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = ["-o", str(tmp_path / "out")] if command in OUTPUT else []
    assert main([*command.split(), word, *TARGETS.get(command, []), *output]) == 2
    assert capsys.readouterr().err
    assert not list(tmp_path.iterdir())
