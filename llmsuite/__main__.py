"""The program `llmsuite`, and `python -m llmsuite`."""

import sys

TYPE_CHECKING = False  # type checkers know this name; an import of `typing` would run before Ctrl-C is caught
if TYPE_CHECKING:
    from types import FrameType

_INTERRUPTED = 130
_RETRY_SECONDS = 0.05
"""Seconds until an interrupt is repeated that an import has swallowed."""


def main() -> int:
    """Run one command; Ctrl-C ends it quietly at any moment, imports included."""
    interrupted: list[int] = []
    try:
        interrupted = _install_interrupt_handler()
        from llmsuite.launch.interrupts import own_process

        own_process()
        from llmsuite.base.redaction import install_redaction

        install_redaction(sys.argv)
        from llmsuite.cli.main import main as work

        code = work()
        _ignore_interrupts()
        if interrupted and code:  # an import that was interrupted may look like a package that is not installed
            code = _INTERRUPTED
    except BaseException as error:
        _ignore_interrupts()
        # inside C++ an interrupt becomes another error: "ImportError: initialization failed"
        if not interrupted and not isinstance(error, KeyboardInterrupt):
            raise
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        # CPython 3.10 to 3.13 marks a KeyboardInterrupt that has left an `exec` of text (as in dataclasses) as
        # unhandled although it was caught, and then ends the process by SIGINT. Running another text resets the mark.
        eval("None")
    return code


def _install_interrupt_handler() -> "list[int]":
    """Let Ctrl-C end an import that swallows it: modules built by Cython try to import `backports_abc`, and continue
    after any exception. Returns a list that receives the signals."""
    import signal

    interrupted: list[int] = []
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return interrupted  # a background job ignores the signal; or the caller has installed a handler

    def interrupt(number: int, frame: "FrameType | None") -> None:
        if _is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)
        elif number == signal.SIGALRM:
            return  # the first interrupt has left the import: do not interrupt the cleanup
        interrupted.append(number)
        sys.unraisablehook = _ignore_unraisable
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    return interrupted


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C: this process is about to end with its own exit code. While Python shuts down, the default action
    of the signal would end the process instead."""
    import signal

    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _ignore_unraisable(unraisable: object) -> None:
    """Drop an interrupt in code that cannot raise, such as a destructor; in imports the interrupt is repeated."""


def _is_importing(frame: "FrameType | None") -> bool:
    """True while a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    sys.exit(main())
