"""A server that samples as it is told to."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle

from llmsuite.base.files import broken_file, sha256_of
from llmsuite.contract.registry import Registry
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.group_sampling import SampleRequest, SamplingParams
from llmsuite.inference.load import parameter_shapes
from llmsuite.recipe.resolve import plan_run
from llmsuite.rl.engine import EngineContext
from llmsuite.rl.remote import RemoteEngine
from tests.support.paths import ROOT

PARAMS = SamplingParams(num_generations=2, max_completion_length=5, temperature=1.0, batch_size=4)
REQUESTS = [SampleRequest((7, i), (0, 1, i)) for i in range(5)]
STOP = {2}
Answer = tuple[int, Any]


class FakeServer:
    """Draws the number of the weights and the prompt; `faults` are answers it gives first, each for one request."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.digest: str | None = None
        self.asked: list[str] = []
        """The requests in order; for completions with the version that sampled them."""
        self.faults: dict[str, list[Callable[[Answer], Answer | None]]] = {}
        self.delay = 0.0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                name = self.path.removeprefix("/v1/")
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer: Answer | None = outer.answer(name, body)
                if faults := outer.faults.get(name):
                    answer = faults.pop(0)(answer)  # type: ignore[arg-type]
                if answer is None:  # it dies in the middle
                    self.connection.close()
                    return
                data = json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, name: str, body: Any) -> Answer:
        marks = {"weights_version": self.version, "weights_digest": self.digest}
        if name == "completions":
            time.sleep(self.delay)
            self.asked.append(f"completions {self.version}")
            rows = [(prompt, n) for prompt in body["prompt"] for n in range(body["n"])]
            ids = [[self.version or 0, prompt[1], n, 2] for prompt, n in rows]
            choices = [
                {
                    "index": i,
                    "prompt_token_ids": rows[i][0],
                    "token_ids": ids[i],
                    "logprobs": {"token_logprobs": [-0.5] * 4},
                    "finish_reason": "stop",
                }
                for i in range(len(rows))
            ]
            return 200, {**marks, "choices": choices}
        self.asked.append(name)
        if name == "update_weights":
            place = Path(body["directory"])
            assert broken_file(place) is None
            assert sha256_of(place / "manifest.json") == body["digest"]
            self.version = body["version"]
            self.digest = body["digest"]
        return 200, {"weights_version": self.version, "weights_digest": self.digest}

    def forget(self) -> None:
        """Forget the weights, as after a restart."""
        self.version = self.digest = None


def engine(registry: Registry, folder: Path, urls: list[str], *words: str) -> RemoteEngine:
    keys = ["--rollout.engine=openai", f"--rollout.openai.urls={json.dumps(urls)}", "--rollout.openai.retries=2"]
    words = (*keys, f"--output_dir={folder}", *words)
    plan = plan_run(ROOT / "recipes" / "llama" / "grpo.json", words, registry, smoke=True)
    precision = plan.parallel.engine.precision
    section = plan.train.rollout.openai
    return RemoteEngine(EngineContext(plan.model, CpuBackend(), precision, section, plan.output_dir, True, print))


def weights(made: RemoteEngine, value: float) -> Iterator[tuple[str, Any]]:
    for name, shape in parameter_shapes(made._family, made._config).items():
        yield name, paddle.full(shape, value)


def sampled_ids(made: RemoteEngine) -> list[list[list[int]]]:
    return [[d.ids for d in group] for group in made.begin(REQUESTS, PARAMS, STOP)()]


def expected(version: int) -> list[list[list[int]]]:
    return [[[version, i, n, 2] for n in range(2)] for i in range(5)]
