"""Files of a run that cannot be written end it with their name, and hide no other error."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli import run as run_command
from llmsuite.launch.hang import STALLED
from llmsuite.observe import events
from llmsuite.observe.completions import CompletionsFile
from llmsuite.observe.events import EVENTS, add_event, read_events, write_environment
from llmsuite.observe.metrics import MetricsFile

FULL = "/dev/full"
"""A device on which every write fails as on a full disk."""


def test_events_and_environment(tmp_path: Path) -> None:
    for name in (EVENTS, "environment.json"):
        (tmp_path / name).symlink_to(FULL)
    with pytest.raises(UserError, match=rf"{EVENTS}: cannot be written: No space left on device; the run ends here"):
        add_event(tmp_path, "started")
    with pytest.raises(UserError, match=r"environment\.json: cannot be written: No space left on device; the run ends"):
        write_environment(tmp_path, {})


NO_ROOM = r"jsonl: cannot be written: No space left on device; the run ends here"


def test_metrics_on_a_full_disk_are_named(tmp_path: Path) -> None:
    made = MetricsFile(tmp_path / "metrics.jsonl", 0)
    made._file.close()
    made._file = open(FULL, "a")  # noqa: SIM115
    with pytest.raises(UserError, match=NO_ROOM):
        made.write({"step": 1})
    made.close()


def test_completions_on_a_full_disk_are_named(tmp_path: Path) -> None:
    made = CompletionsFile(tmp_path / "completions.jsonl", 0)
    made._file.close()
    made._file = open(FULL, "ab")  # noqa: SIM115
    with pytest.raises(UserError, match=NO_ROOM):
        made.write(1, [{"text": "a"}])
    made.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"completions\.jsonl: cannot be written: (Not a directory|File exists)"):
        CompletionsFile(tmp_path / "file" / "completions.jsonl", 0)


def test_the_error_that_ends_a_run_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_event(tmp_path, "started")
    run_command._note_end(tmp_path, STALLED)
    assert [event["event"] for event in read_events(tmp_path)] == ["started", "hung"]
    (tmp_path / EVENTS).unlink()
    (tmp_path / EVENTS).symlink_to(FULL)
    monkeypatch.setattr(events, "read_events", lambda run: [{"event": "started"}])
    run_command._note_end(tmp_path, STALLED)
