"""Ports for processes that listen at one they are told."""

from __future__ import annotations

import random
import socket


def free_address(host: str) -> str:
    """HOST:PORT with a port at which nobody listens, on any address of this machine.

    It lies below those that Linux gives to connections and to whoever listens at port 0: else one of them may take it
    before it is used.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
            return f"{host}:{port}"
