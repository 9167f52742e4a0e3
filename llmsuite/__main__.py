"""`llmsuite`, and `python -m llmsuite`."""

import sys

_INTERRUPTED = 130


def main() -> int:
    """Run one command; Ctrl-C ends it quietly at any moment, imports included."""
    try:
        from llmsuite.cli.main import main as work

        code = work()
    except KeyboardInterrupt:
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        # CPython 3.10 to 3.13 notes a KeyboardInterrupt that has left an `exec` of text, as dataclasses have it, for
        # unhandled though it was caught, and ends the process by SIGINT then. The next such text is a new beginning.
        eval("None")
    return code


if __name__ == "__main__":
    sys.exit(main())
