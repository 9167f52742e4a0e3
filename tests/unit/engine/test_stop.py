"""Stop requests: a signal ends a run after its step, and breaks no system call of C++ code."""

from __future__ import annotations

import subprocess
import sys

import pytest

_READS = """
import ctypes, os, signal, threading, time
from llmsuite.engine.stop import StopRequest
from llmsuite.launch.interrupts import own_process

if {owned}:
    own_process()
read_end, write_end = os.pipe()

def act():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.{name})
    time.sleep(0.3)
    os.write(write_end, b"answer")

with StopRequest() as stop:
    threading.Thread(target=act).start()
    # a blocking call of C code, such as that of Paddle's TCPStore: it does not call `read` once more after EINTR
    received = ctypes.CDLL(None, use_errno=True).read(read_end, ctypes.create_string_buffer(16), 16)
    print(received, stop.requested())
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_does_not_interrupt_a_call_of_an_own_process(name: str) -> None:
    assert _printed(_READS.format(owned=True, name=name)).endswith("\n6 True\n")


def test_a_signal_interrupts_a_call_of_another_process() -> None:
    """Else Ctrl-C in a notebook would have to wait for the call."""
    assert _printed(_READS.format(owned=False, name="SIGINT")).endswith("\n-1 True\n")


def _printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
