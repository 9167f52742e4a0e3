"""Paddle's first import in a process, without the warnings that users cannot act on."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import sys
import threading
import warnings

from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.variables import check_rank

# Paddle 3.3.1 prints them, and a warning about ccache, on every start; the number of threads is set on purpose.
_NOISE = ("OMP_NUM_THREADS set to", "if this PaddlePaddle binary is compiled with OpenBlas", "PLEASE USE OMP_NUM")


def start_paddle(
    backend: DeviceBackend, local_ranks: int, join: bool = False, fork: bool = False, answers: bool = False
) -> None:
    """Set the backend's environment, then import Paddle. What the user has set wins.

    Args:
        backend: backend of the device.
        local_ranks: number of ranks of the run on this machine.
        join: whether this process will be one of several ranks, which some backends have to prepare for.
        fork: whether forks of this process will be ranks; each has to call `backend.after_paddle`.
        answers: see `DeviceBackend.environment`.

    Raises:
        UserError: the environment says that this is a rank that cannot be.
    """
    check_rank()
    for name, value in backend.environment(local_ranks, answers).items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("GLOG_minloglevel", "2")
    if join or fork:
        backend.before_paddle()
    messages, on_term = io.StringIO(), signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings(), contextlib.redirect_stderr(messages):
        warnings.filterwarnings("ignore", message="No ccache found")
        import paddle  # noqa: F401
    # Paddle's handler prints the report of a crash where a scheduler or `docker stop` has ended the process
    if on_term is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_term)
    # a crash is told with the place in Python, in front of Paddle's report, which only knows Paddle's own code
    if sys.__stderr__ is not None:  # a notebook's sys.stderr is no file
        faulthandler.enable(sys.__stderr__)
    # Paddle 3.3.1 triggers it itself while it traces a program
    warnings.filterwarnings("ignore", message="Tensor do not have 'place' interface")
    for line in messages.getvalue().splitlines():
        if line.strip() and not any(noise in line for noise in _NOISE):
            print(line, file=sys.stderr)
    if join:
        backend.after_paddle()
