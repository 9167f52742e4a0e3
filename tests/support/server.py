"""A server in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai

from tests.multi.conftest import Runner

KEY = "the-key"
LIMITS = ("--max_body_bytes", "100000", "--body_timeout", "2", "--max_new_tokens", "64", "--batch_size", "16")


class Server:
    """`llmsuite serve` on a free port."""

    def __init__(self, runner: Runner, model: Path, *words: str, **environment: str):
        self.process: subprocess.Popen[str] = runner.start(
            "serve", str(model), "--port", "0", "--name", "tiny", *words, **environment
        )
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if found := re.search(r"answers on http://([\d.]+):(\d+)", line):
                self.host = found[1]
                self.port = int(found[2])
                break
        else:
            raise AssertionError("".join(said))
        self.url = f"http://{self.host}:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": KEY, "max_retries": 0, "timeout": 120, **options})

    def get(self, path: str) -> str:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=30) as response:
            text: str = response.read().decode()
            return text

    def post(self, body: bytes, kind: str = "application/json", path: str = "/v1/completions") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": kind}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers), timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def send(self, raw: bytes, seconds: float = 20) -> bytes:
        """What comes back for bytes that are no whole request."""
        with socket.create_connection((self.host, self.port), timeout=seconds) as connection:
            connection.sendall(raw)
            received = b""
            while part := connection.recv(65536):
                received += part
            return received

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode
