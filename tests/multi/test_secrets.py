"""No command shows or records a secret that it was given: in addresses, options, variables and logins."""

from __future__ import annotations

import base64
import http.server
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmsuite.base.cache import BUILT
from llmsuite.contract.registry import Registry
from tests.support.paths import ROOT
from tests.tools.warm import warm

USER_PASSWORD = "pw-Zq81vXr3"
USER_TOKEN = "usertok-Zq82vXr3"
QUERY = "query-Zq83vXr3"
SIGNATURE = "Zq84vXr3c2lnbmF0dXJl%2F%3D"
UNNAMED = "unnamed-Zq85vXr3"
FRAGMENT = "frag-Zq86vXr3"
OPTION = "option-Zq87vXr3"
LOGIN = "login-Zq89vXr3"
VARIABLES = {
    "LLMSUITE_API_KEY": "server-Zq90vXr3",
    "HF_TOKEN": "hf_Zq91vXr3",
    "WANDB_API_KEY": "wandb-Zq92vXr3",
    "AWS_SECRET_ACCESS_KEY": "aws/Zq93vXr3+x",
    "MLFLOW_TRACKING_PASSWORD": "mlflow-Zq94vXr3",
    "LLMSUITE_LAUNCH_KEY": "launch-Zq95vXr3",
    "https_proxy": "http://me:proxy-Zq96vXr3@127.0.0.1:9",
}
MARK = "vXr3"
"""What every secret has."""
BASIC = base64.b64encode(f"me:{USER_PASSWORD}".encode()).decode()


def secrets_in(content: bytes) -> list[str]:
    """The lines in which there is a secret."""
    marks = (MARK.encode(), BASIC.encode())
    return [repr(line[:300]) for line in content.split(b"\n") if any(mark in line for mark in marks)]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server of rows: whoever asks for /train.jsonl gets them; all else is not there."""
    rows = (ROOT / "data/sft/train.jsonl").read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path.startswith("/train.jsonl")
            self.send_response(200 if is_known else 404)
            body = rows if is_known else f"no {self.path} for {self.headers.get('Authorization')}".encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            """An answer that quotes the request, as proxies do that explain themselves."""
            self.rfile.read(int(self.headers["Content-Length"]))
            body = f"{self.path} {self.headers.get('Authorization')} may not".encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """That of a user who has logged in, and whose home and cache are below `tmp_path`."""
    home = tmp_path / "home"
    for login in (home / ".cache/aistudio/.auth/token", home / ".cache/huggingface/token"):
        login.parent.mkdir(parents=True)
        login.write_text(LOGIN)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / BUILT).symlink_to(Path(os.environ["LLMSUITE_CACHE"]) / BUILT)  # what takes long
    places = {"HOME": home, "LLMSUITE_CACHE": tmp_path / "cache", "HF_HOME": home / ".cache/huggingface"}
    given = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_CACHE", "XDG_CACHE_HOME")}
    return {**given, **VARIABLES, **{name: str(place) for name, place in places.items()}}


def urls(port: int) -> list[str]:
    """Addresses of what is there, and of what is not, that have each kind of secret."""
    host = f"127.0.0.1:{port}"
    return [
        f"http://me:{USER_PASSWORD}@{host}/train.jsonl?token={QUERY}&X-Amz-Signature={SIGNATURE}&{UNNAMED}#{FRAGMENT}",
        f"http://{USER_TOKEN}@{host}/other.jsonl?{UNNAMED}#{FRAGMENT}",
    ]


def check(words: list[str], environment: dict[str, str], where: Path) -> str:
    """Run a command to its end; returns what it printed. Neither that nor a file below a directory has a secret."""
    _, printed = warm().run("llmsuite.__main__", words, environment)
    found = secrets_in(printed.encode())
    logins = {where / "home/.cache/aistudio/.auth/token", where / "home/.cache/huggingface/token"}
    for path in where.rglob("*"):
        found += [f"name {path}"] if MARK in path.name else []
        if path.is_file() and path not in logins and path.suffix != ".given":
            found += [f"{path}: {line}" for line in secrets_in(path.read_bytes())]
    assert not found, "\n".join([f"llmsuite {' '.join(words)}", *found])
    return printed


SMALL = ["--smoke", "--launch.num_devices=1", "--parallel={}", "--train.max_steps=1"]
NAMES_A_MODEL = {
    "import": ["{url}", "-o", "{out}"],
    "merge": ["{url}", "-o", "{out}"],
    "convert": ["{url}", "--layout", "hf", "-o", "{out}"],
    "push": ["{url}", "hf:org/name"],
    "generate": ["{url}", "--prompt", "{url}"],
    "serve": ["{url}", "--port", "0", "--api_key", OPTION],
    "eval": ["{url}", "--data", "{url}"],
    "calibrate": ["{url}", "--texts", "{url}", "-o", "{out}"],
    "export": ["{url}", "-o", "{out}"],
    "verify": ["{url}", "--source", "{url}"],
    "deploy": ["{url}", "-o", "{out}"],
}
"""Commands that take a model, which no address of HTTP is: each says so."""
OTHERS = {
    "run": ["recipes/llama/sft.json", "--data.train={url}", "--output_dir={out}"],
    "validate": ["recipes/llama/sft.json", "--data.train={url}"],
    "plan": ["recipes/llama/sft.json", "--data.train={url}", "--plot", "{url}"],
    "rehearse": ["recipes/llama/sft.json", "--data.train={url}"],
    "align": ["recipes/llama/sft.json", "{url}"],
    "show": ["recipes/llama/sft.json", "--data.train={url}", "--json"],
    "list": ["keys", "--stage", "{url}"],
    "recipe": ["new", "--stage", "sft", "--weights", "{url}", "--data", "{url}"],
    "data": ["stats", "recipes/llama/sft.json", "--data.train={url}"],
    "checkpoints": ["list", "{url}"],
    "runs": ["list", "{url}"],
    "sweep": ["recipes/llama/sft.json", "--data.train={url}", "--output_dir={out}", "--seed=1,2"],
    "report": ["{url}"],
    "watch": ["{url}"],
    "studio": ["--port", "{url}"],
    "schema": ["--stage", "{url}"],
    "plugins": ["info", "{url}"],
    "doctor": ["--device", "{url}"],
    "completion": ["{url}"],
}


def test_each_command_is_tried(registry: Registry) -> None:
    assert sorted({**NAMES_A_MODEL, **OTHERS}) == sorted(registry.commands)


@pytest.mark.parametrize("command", [*NAMES_A_MODEL, *OTHERS])
def test_a_command_keeps_secrets(command: str, environment: dict[str, str], tmp_path: Path, port: int) -> None:
    url = urls(port)[0]
    words = [word.format(url=url, out=tmp_path / "out") for word in {**NAMES_A_MODEL, **OTHERS}[command]]
    check([command, *words], environment, tmp_path)


def test_a_recipe_that_was_asked_for_keeps_its_urls(environment: dict[str, str], tmp_path: Path, port: int) -> None:
    """It is to be run."""
    url = urls(port)[0]
    recipe = tmp_path / "new.given"
    words = [
        "recipe",
        "new",
        "--stage",
        "sft",
        "--family",
        "llama",
        "--preset",
        "llama-7b",
        "--num_devices",
        "8",
        "--data",
        url,
    ]
    check([*words, "-o", str(recipe)], environment, tmp_path)
    assert url in recipe.read_text()
    assert "note: secrets are not printed" in check(words, environment, tmp_path)


def test_a_run_keeps_secrets(environment: dict[str, str], tmp_path: Path, port: int) -> None:
    """Data and rewards by HTTP: what is fetched, drawn and recorded; a page is written of it."""
    run = tmp_path / "run"
    words = ["run", "recipes/llama/sft.json", *SMALL, f"--data.train={urls(port)[0]}", f"--output_dir={run}"]
    assert "fetching http://***@127.0.0.1" in check(words, environment, tmp_path)
    assert (run / "metrics.jsonl").is_file()
    for words in (["report", str(run)], ["runs", "show", str(run)], ["show", str(run / "recipe.json")]):
        check(words, environment, tmp_path)
    missing = ["run", "recipes/llama/sft.json", *SMALL, f"--data.train={urls(port)[1]}", f"--output_dir={run}-2"]
    assert "answers 404: no /other.jsonl" in check(missing, environment, tmp_path)


def test_a_reward_keeps_secrets(environment: dict[str, str], tmp_path: Path, port: int) -> None:
    url = f"http://me:{USER_PASSWORD}@127.0.0.1:{port}/score?key={QUERY}"
    reward = ['--reward.functions={"http":1.0}', f"--reward.http.url={url}", "--reward.http.retries=0"]
    words = ["run", "recipes/llama/grpo.json", *SMALL, *reward, f"--output_dir={tmp_path / 'run'}"]
    assert "a reward is missing: http: " in check(words, environment, tmp_path)


def test_what_fails_by_a_fault_of_ours_keeps_secrets(environment: dict[str, str], tmp_path: Path, port: int) -> None:
    """A plugin raises what has everything in it, and Python prints the calls."""
    plugin = tmp_path / "raises.py"
    plugin.write_text(
        "import logging, os, sys, warnings\n"
        "import llmsuite\n"
        "from llmsuite.contract.specs import Command\n"
        "def add(parser):\n"
        "    parser.add_argument('--url', type=str)\n"
        "    parser.add_argument('--api_key', type=str)\n"
        "def run(args, registry):\n"
        "    print(args.url, args.api_key, *os.environ.values())\n"
        "    print(args.url, args.api_key, *os.environ.values(), file=sys.stderr)\n"
        "    warnings.warn(args.url + args.api_key)\n"
        "    logging.error('%s', (args, dict(os.environ)))\n"
        "    raise RuntimeError(args.url, args.api_key, dict(os.environ))\n"
        "@llmsuite.hookimpl\n"
        "def llmsuite_register_commands():\n"
        "    return [Command(name='raises', help='raises', run=run, add_arguments=add)]\n"
    )
    for url in urls(port):
        words = ["--plugin", str(plugin), "raises", "--url", url, "--api_key", OPTION]
        printed = check(words, environment, tmp_path)
        assert "RuntimeError: (" in printed
        assert printed.count("***") > 10


def test_a_server_keeps_its_keys(environment: dict[str, str], tmp_path: Path) -> None:
    """What it says of itself, from its start to its end."""
    model = tmp_path / "model"
    check(["run", "recipes/llama/sft.json", *SMALL, f"--output_dir={model}"], environment, tmp_path)
    server = warm().start("llmsuite.__main__", ["serve", str(model), "--port", "0", "--api_key", OPTION], environment)
    deadline = time.monotonic() + 120
    while "http://" not in (said := server._output.read_text()):
        assert server.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    server.send_signal(signal.SIGINT)
    printed, _ = server.communicate()
    assert not secrets_in(printed.encode())
