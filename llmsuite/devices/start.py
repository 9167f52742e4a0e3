"""First import of Paddle in a process, without the warnings that users cannot act on."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator

from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.variables import check_rank

# Paddle 3.3.1 prints them, and a warning about ccache, on every start; the number of threads is set on purpose.
_NOISE = ("OMP_NUM_THREADS set to", "if this PaddlePaddle binary is compiled with OpenBlas", "PLEASE USE OMP_NUM")


def start_paddle(
    backend: DeviceBackend, local_ranks: int, join: bool = False, fork: bool = False, inference_only: bool = False
) -> None:
    """Set the backend's environment variables, then import Paddle. Variables that the user has set take precedence.

    Args:
        backend: backend of the device.
        local_ranks: number of ranks of the run on this machine.
        join: this process will be one of several ranks, for which some backends prepare.
        fork: forks of this process will be ranks; each has to call `backend.after_paddle`.
        inference_only: see `DeviceBackend.environment`.

    Raises:
        UserError: the variables of a rank in the environment are invalid.
    """
    check_rank()
    for name, value in backend.environment(local_ranks, inference_only).items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("GLOG_minloglevel", "2")
    if join or fork:
        backend.before_paddle()
    messages = io.StringIO()
    with _own_termination(), warnings.catch_warnings(), contextlib.redirect_stderr(messages):
        warnings.filterwarnings("ignore", message="No ccache found")
        import paddle  # noqa: F401
    # a crash is reported with its Python stack, before Paddle's report, which has only Paddle's own code
    if sys.__stderr__ is not None:  # a notebook's sys.stderr has no file descriptor
        faulthandler.enable(sys.__stderr__)
    # Paddle 3.3.1 triggers this warning itself while it traces a program
    warnings.filterwarnings("ignore", message="Tensor do not have 'place' interface")
    for line in messages.getvalue().splitlines():
        if line.strip() and not any(noise in line for noise in _NOISE):
            print(line, file=sys.stderr)
    if join:
        backend.after_paddle()


@contextlib.contextmanager
def _own_termination() -> Iterator[None]:
    """Context in which SIGTERM waits, and after which its handler is the one of before.

    Paddle 3.3.1 installs a handler while it is imported. It would print a crash report where a scheduler or
    `docker stop` has ended the process.
    """
    on_term = signal.getsignal(signal.SIGTERM)
    if on_term is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, on_term)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
