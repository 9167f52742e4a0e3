"""`llmsuite`, and `python -m llmsuite`."""

import sys

TYPE_CHECKING = False  # the name by which type checkers know it: `typing` would be imported before Ctrl-C is caught
if TYPE_CHECKING:
    from types import FrameType

_INTERRUPTED = 130
_AGAIN = 0.05
"""Seconds until an interruption is repeated that an import has not let through."""


def main() -> int:
    """Run one command; Ctrl-C ends it quietly at any moment, imports included."""
    interrupted: list[int] = []
    try:
        interrupted = _insist()
        from llmsuite.launch.interrupts import own_process

        own_process()
        from llmsuite.shown import hide_secrets

        hide_secrets(sys.argv)
        from llmsuite.cli.main import main as work

        code = work()
        _ignore()
        if interrupted and code:  # an import that it met counts as one of what is not installed
            code = _INTERRUPTED
    except BaseException as error:
        _ignore()
        # where it meets C++, an interruption becomes another error: "ImportError: initialization failed"
        if not interrupted and not isinstance(error, KeyboardInterrupt):
            raise
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        # CPython 3.10 to 3.13 notes a KeyboardInterrupt that has left an `exec` of text, as dataclasses have it, for
        # unhandled though it was caught, and ends the process by SIGINT then. The next such text is a new beginning.
        eval("None")
    return code


def _insist() -> "list[int]":
    """Let Ctrl-C end an import that forgets it. Modules that Cython made ask for `backports_abc` when they are
    imported, and go on whatever comes of that. Returns a list that receives the signals."""
    import signal

    interrupted: list[int] = []
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return interrupted  # of a job in the background, which ignores it, or whoever has called this has one

    def interrupt(number: int, frame: "FrameType | None") -> None:
        if _imports(frame):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        elif number == signal.SIGALRM:
            return  # it has left the import, and what it meets now is cleaning up
        interrupted.append(number)
        sys.unraisablehook = _say_nothing
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    return interrupted


def _ignore() -> None:
    """Ignore Ctrl-C: this process is about to end, with an exit code of its own. While Python ends, it would leave the
    signal to the system, which ends a process by it."""
    import signal

    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _say_nothing(unraisable: object) -> None:
    """An interruption met what cannot raise, such as the end of an object; in imports it is repeated."""


def _imports(frame: "FrameType | None") -> bool:
    """Whether a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    sys.exit(main())
