"""`llmsuite`, and `python -m llmsuite`."""

import sys


def main() -> int:
    """Run one command; Ctrl-C ends it quietly at any moment, imports included."""
    try:
        from llmsuite.cli.main import main as work

        return work()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
