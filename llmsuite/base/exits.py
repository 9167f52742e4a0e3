"""Exit codes: 0 done, 2 an error in the user's input, 1 a bug in llmsuite, 130 interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from llmsuite.base.errors import UserError
from llmsuite.base.redaction import printable


def exit_code(work: Callable[[], int]) -> int:
    """Do some work and return its exit code. Errors other than the user's are raised."""
    try:
        try:
            return work()
        finally:
            sys.stdout.flush()  # a closed pipe is noticed here rather than when Python exits
    except UserError as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `llmsuite list … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
