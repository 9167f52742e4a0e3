"""Fetching from a hub, with all kinds of failures."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.hub.fetch import fetch, fetch_named
from llmsuite.base.hub.listing import Listing, RemoteFile, Want, select
from llmsuite.base.hub.local_copies import PINS, cached, pinned
from llmsuite.base.hub.names import HubName, hub_name
from tests.support.hub_model import FILES, NEEDED, WEIGHTS
from tests.tools.hub_server import HubServer

NAME = HubName("hf", "org/model")


def test_only_what_is_needed_and_once(hub: HubServer) -> None:
    repo = hub.add("org/model", dict(FILES))
    reports: list[str] = []
    found = fetch(NAME, Want.MODEL, reports.append)
    assert {p.name for p in found.directory.iterdir()} == NEEDED
    assert (found.directory / "model.safetensors").read_bytes() == WEIGHTS
    assert found.name == HubName("hf", "org/model", revision=repo.commit)
    assert [text.partition(":")[0] for text in reports] == ["fetching hf"]
    hub.asked.clear()
    assert fetch(found.name, Want.MODEL, reports.append) == found
    assert hub.asked == []  # a commit never changes
    assert fetch(NAME, Want.MODEL, reports.append) == found
    assert hub.asked == [("GET", "/api/models/org/model")]


def test_a_part_of_a_repository_is_fetched(hub: HubServer) -> None:
    hub.add("org/model", dict(FILES))
    config = fetch(NAME, Want.CONFIG, print)
    assert {p.name for p in config.directory.iterdir()} == {"config.json"}
    assert cached(NAME, Want.CONFIG) == config
    assert cached(NAME, Want.MODEL) is None
    fetch(NAME, Want.TOKENIZER, print)
    assert hub.downloads("model.safetensors") == 0
    assert fetch(NAME, Want.MODEL, print).directory == config.directory
    assert hub.downloads("config.json") == 1


def test_a_pin_outlives_a_new_commit(hub: HubServer) -> None:
    repo = hub.add("org/model", dict(FILES))
    first = fetch_named("org/model", Want.MODEL, print)
    assert first is not None
    assert json.loads(os.environ[PINS]) == {"model org/model": str(first.name)}
    repo.files["model.safetensors"] = os.urandom(5000)
    repo.renew()
    assert pinned("org/model") == str(first.name)
    assert fetch_named("org/model", Want.MODEL, print) == first
    second = fetch(NAME, Want.MODEL, print)
    assert second.name.revision == repo.commit
    assert (first.directory / "model.safetensors").read_bytes() == WEIGHTS  # of a run that still reads it


def test_a_connection_that_breaks(hub: HubServer) -> None:
    hub.add("org/model", dict(FILES))
    hub.cuts["model.safetensors"] = [100_000, 0, 0, 150_000]
    found = fetch(NAME, Want.MODEL, print)
    assert (found.directory / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads("model.safetensors") == 5
    hub.cuts["tokenizer.json"] = [0] * 100
    hub.models["org/model"].files["tokenizer.json"] = b"another"
    hub.models["org/model"].renew()
    with pytest.raises(
        UserError, match=r"breaks off at byte 0 of tokenizer\.json: .*the part that has arrived is kept: start again"
    ):
        fetch(NAME, Want.MODEL, print)


@pytest.mark.parametrize("wrong", [b"x" * 400_000, b"x" * 399_000, b"x" * 401_000])
def test_a_damaged_file(hub: HubServer, wrong: bytes) -> None:
    hub.add("org/model", dict(FILES))
    hub.sent["model.safetensors"] = [wrong]
    reports: list[str] = []
    found = fetch(NAME, Want.MODEL, reports.append)
    assert (found.directory / "model.safetensors").read_bytes() == WEIGHTS
    assert fetch(found.name, Want.MODEL, reports.append) == found
    if len(wrong) == len(WEIGHTS):
        assert "model.safetensors arrived damaged; fetching again" in reports[1]


def test_a_hub_that_always_sends_something_else(hub: HubServer) -> None:
    hub.add("org/model", dict(FILES))
    hub.sent["model.safetensors"] = [b"x" * 400_000, b"y" * 400_000]
    with pytest.raises(UserError, match=r"model\.safetensors has another size or digest than on Hugging Face, twice"):
        fetch(NAME, Want.MODEL, print)
    assert cached(NAME, Want.MODEL) is None
    assert not list(Path(os.environ["HF_HOME"]).rglob("*.incomplete"))
    hub.sent.clear()
    assert (fetch(NAME, Want.MODEL, print).directory / "model.safetensors").read_bytes() == WEIGHTS


def test_files_of_others_are_checked_once(hub: HubServer) -> None:
    """Files in the cache that programs share may be damaged too."""
    from huggingface_hub import snapshot_download

    hub.add("org/model", dict(FILES))
    cache = Path(os.environ["HF_HOME"]) / "hub"
    path = Path(snapshot_download("org/model", cache_dir=cache, endpoint=hub.url)) / "model.safetensors"
    path.resolve().write_bytes(b"x" * len(WEIGHTS))
    assert fetch(NAME, Want.MODEL, print).directory == path.parent
    assert path.read_bytes() == WEIGHTS


def test_gated_and_private(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.add("org/model", dict(FILES), gated=True)
    hub.add("org/secret", dict(FILES), private=True)
    gated = (
        r"is gated, and {}: accept its licence at http.*/org/model, then log in with `hf auth login`, or set HF_TOKEN"
    )
    with pytest.raises(UserError, match=gated.format("you are not logged in")):
        fetch(NAME, Want.MODEL, print)
    with pytest.raises(UserError, match="has no model org/secret; if it is private, log in with `hf auth login`"):
        fetch(HubName("hf", "org/secret"), Want.MODEL, print)
    monkeypatch.setenv("HF_TOKEN", "of-somebody")
    with pytest.raises(UserError, match=gated.format("the account of this token has no access")):
        fetch(NAME, Want.MODEL, print)
    monkeypatch.setenv("HF_TOKEN", "allowed")
    for name in ("org/model", "org/secret"):
        fetch(HubName("hf", name), Want.MODEL, print)
    assert "Bearer allowed" in hub.tokens
    written = [p for p in tmp_path.rglob("*") if p.is_file() and b"allowed" in p.read_bytes()]
    assert written == []


def test_a_missing_repository_is_reported(hub: HubServer) -> None:
    hub.add("org/model", dict(FILES))
    with pytest.raises(UserError, match=r"hf:org/modl: http.* has no model org/modl"):
        fetch(HubName("", "org/modl"), Want.MODEL, print)
    with pytest.raises(UserError, match="has no revision 'v9'; name a branch, a tag or a commit"):
        fetch(HubName("hf", "org/model", revision="v9"), Want.MODEL, print)
    with pytest.raises(UserError, match=r"has no file m\.gguf; it has README\.md, config\.json"):
        fetch(HubName("hf", "org/model", "m.gguf"), Want.FILE, print)


def test_offline_only_the_cache_is_used(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/model", dict(FILES))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, and it is not in the cache"):
        fetch(NAME, Want.MODEL, print)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    fetch(NAME, Want.TOKENIZER, print)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"only a part of it is in the cache: model\.safetensors is missing"):
        fetch(NAME, Want.MODEL, print)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    found = fetch(NAME, Want.MODEL, print)
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(NAME, Want.MODEL, print) == found
    assert hub.asked == []


def test_a_hub_that_does_not_answer(hub: HubServer) -> None:
    hub.add("org/model", dict(FILES))
    found = fetch(NAME, Want.MODEL, print)
    reports: list[str] = []
    hub.status = 503
    assert fetch(NAME, Want.MODEL, reports.append) == found
    hub.stop()
    assert fetch(NAME, Want.MODEL, reports.append) == found
    assert all("cannot be reached" in t and "continuing with the files fetched before" in t for t in reports)
    assert len(reports) == 2
    with pytest.raises(UserError, match=r"cannot be reached .*HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror"):
        fetch(HubName("hf", "org/other"), Want.MODEL, print)


def test_a_disk_without_room(hub: HubServer) -> None:
    hub.add("org/model", dict(FILES), told_size={"model.safetensors": 10**18})
    with pytest.raises(UserError, match=r"needs 1,000,000,000\.0 GB, and .* left; make room, or set HF_HOME"):
        fetch(NAME, Want.MODEL, print)
    assert hub.downloads("config.json") == 0


def test_a_disk_that_becomes_full(hub: HubServer) -> None:
    """A limit of the size of files stands for the disk: the error is of the same kind."""
    hub.add("org/model", dict(FILES))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(
            UserError, match="cannot be written: File too large; the part that has arrived is kept; make room"
        ):
            fetch(NAME, Want.MODEL, print)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    hub.asked.clear()
    fetch(NAME, Want.MODEL, print)
    assert hub.downloads("config.json") == 0


_FETCH = """
import sys
from llmsuite.base.hub.fetch import fetch_named
from llmsuite.base.hub.listing import Want
print(fetch_named(sys.argv[1], Want.MODEL, print).directory)
"""


def test_a_killed_download_is_resumed(hub: HubServer) -> None:
    weights = os.urandom(25_000_000)  # the library writes 10 MB at a time
    hub.add("org/model", {**FILES, "model.safetensors": weights})
    hub.slow["model.safetensors"] = 0.01
    started = subprocess.Popen([sys.executable, "-c", _FETCH, "org/model"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        parts = list(Path(os.environ["HF_HOME"]).rglob("*.incomplete"))
        if parts and parts[0].stat().st_size > 1_000_000:
            break
        time.sleep(0.02)
    started.send_signal(signal.SIGKILL)
    started.wait()
    kept = parts[0].stat().st_size
    assert 1_000_000 < kept < len(weights)
    hub.slow.clear()
    found = fetch(NAME, Want.MODEL, print)
    assert (found.directory / "model.safetensors").read_bytes() == weights
    assert hub.downloads("model.safetensors") == 2


def test_processes_that_start_together_fetch_once(hub: HubServer) -> None:
    hub.add("org/model", dict(FILES))
    words = [sys.executable, "-c", _FETCH, "org/model"]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].splitlines()[-1] for process in started]
    assert len(set(outputs)) == 1
    assert hub.downloads("model.safetensors") == 1


def test_the_first_hub_that_has_it(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/model", dict(FILES))
    monkeypatch.setenv("LLMSUITE_HUBS", "aistudio,hf")
    monkeypatch.setenv("STUDIO_GIT_HOST", hub.url)  # speaks another language, and so has nothing
    monkeypatch.setenv("STUDIO_MODEL_API_URL_PREFIX", hub.url)
    monkeypatch.setenv("AISTUDIO_ACCESS_TOKEN", "none")
    name = hub_name("org/model")
    assert name is not None
    assert fetch(name, Want.MODEL, print).name.hub == "hf"


def listing(*paths: str) -> Listing:
    return Listing("0" * 40, {path: RemoteFile(1) for path in paths})


@pytest.mark.parametrize(
    ("paths", "chosen"),
    [
        (["model.safetensors", "model.fp16.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (
            ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"],
            ["model-00001-of-00002.safetensors", "model.safetensors.index.json"],
        ),
        (["model.safetensors", "scales.safetensors"], ["model.safetensors", "scales.safetensors"]),
        (["adapter_model.safetensors", "adapter_config.json"], ["adapter_config.json", "adapter_model.safetensors"]),
        (["model.safetensors", "sub/model.safetensors", "flax_model.msgpack", "tf_model.h5"], ["model.safetensors"]),
        (
            ["model.safetensors", "vocab.json", "merges.txt", "tokenizer.model", "args.bin", "chat_template.jinja"],
            ["chat_template.jinja", "merges.txt", "model.safetensors", "tokenizer.model", "vocab.json"],
        ),
    ],
)  # fmt: skip
def test_files_of_a_model(paths: list[str], chosen: list[str]) -> None:
    assert select(NAME, listing(*paths), Want.MODEL) == chosen


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["model-q4.gguf"], "llmsuite import hf:org/model/model-q4.gguf -o DIR"),
        (["pytorch_model.bin", "config.json"], "its weights are pickles"),
        (["README.md"], "it has README.md"),
    ],
)
def test_a_repository_without_a_model(paths: list[str], message: str) -> None:
    with pytest.raises(UserError, match="has no safetensors") as caught:
        select(NAME, listing(*paths), Want.MODEL)
    assert message in str(caught.value)
