"""How work ends: errors as exit codes. 0 done, 2 the user's input is wrong, 1 a fault of ours, 130 stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from llmsuite.errors import UserError


def exit_code(work: Callable[[], int]) -> int:
    """Do some work; returns its exit code. A fault of ours is raised."""
    try:
        try:
            return work()
        finally:
            sys.stdout.flush()  # a reader that is gone is noticed here rather than when Python exits
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `llmsuite list … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
