"""Tasks in the background: after one that fails nothing is done."""

from __future__ import annotations

import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.background import Writer


def _fail() -> None:
    raise UserError("the disk is full")


def test_tasks_after_a_failed_one_are_dropped() -> None:
    writer = Writer(in_background=True)
    done = list[str]()
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
