"""Tasks in the background: after one that fails nothing is done."""

from __future__ import annotations

import pytest

from llmsuite.checkpoint.background import Writer
from llmsuite.errors import UserError


def _fail() -> None:
    raise UserError("the disk is full")


def test_what_follows_a_task_that_has_failed_is_dropped() -> None:
    writer, done = Writer(in_background=True), list[str]()
    writer.start(_fail)
    assert writer._thread is not None
    writer._thread.join()  # it has failed before anybody asks
    writer.follow(lambda: done.append("best"))
    with pytest.raises(UserError, match="full"):
        writer.wait()
    assert not done
    writer.start(lambda: done.append("next"))
    writer.wait()
    assert done == ["next"]
