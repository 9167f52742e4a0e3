"""Interrupts that are held until code which they would break has ended."""

from __future__ import annotations

import signal
import threading

import pytest

from llmsuite.base.interrupts import held_interrupts


def interrupted(done: list[str], error: Exception | None = None) -> None:
    """Receive two interrupts while they are held."""
    with held_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("inside")
        if error is not None:
            raise error
    done.append("after")


def test_an_interrupt_waits_for_the_end() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(done)
    assert done == ["inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_is_raised_where_no_interrupt_came() -> None:
    with pytest.raises(ValueError, match="inside"), held_interrupts():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_comes_before_an_error() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted([], ValueError("inside"))


def test_other_handlers_stay() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing() -> None:
    found = []

    def work() -> None:
        with held_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
