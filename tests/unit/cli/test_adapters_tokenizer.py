"""Every model written from an adapter, and every answer with it, uses the adapter's own tokenizer and chat template."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.model_writer import write_hf, write_paddlenlp
from llmsuite.cli.main import main
from llmsuite.data.chat_template import tokenizer_template
from tests.support import tiny_llama
from tests.support.served_adapters import write_adapter
from tests.support.tiny_llama import FAMILIES

CONFIG = dataclasses.replace(tiny_llama.CONFIG, vocab_size=512, hidden_size=64, intermediate_size=64, head_dim=16)
"""A shape whose matrices are stored in groups of 64."""
OWN = "{{ raise_exception('the template of the adapter') }}"
ENDS = {"eos_token_id": [7]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, and an adapter that brings its template alone, and ends that its base does not have."""
    found = tmp_path_factory.mktemp("carried")
    tiny_llama.write(found / "base", CONFIG, tokenizer=tiny_llama.TOKENIZER)
    adapter = write_adapter(found / "adapter", "a", {"base_model_name_or_path": str(found / "base")}, config=CONFIG)
    (adapter / "chat_template.jinja").write_text(OWN)
    (adapter / "generation_config.json").write_text(json.dumps(ENDS))
    (found / "texts.txt").write_text("hello world " * 80)
    (found / "questions.jsonl").write_text('{"prompt": "Hi", "answer": "x"}\n')
    (found / "recipe.json").write_text(
        json.dumps(
            {
                "stage": "infer",
                "model": {"family": "llama", "weights": str(adapter)},
                "data": {"prompts": str(found / "questions.jsonl")},
                "output_dir": str(found / "answers"),
            }
        )
    )
    return found


def exported(write: Callable[[Any, Path], None]) -> Callable[[Path, Path], Path]:
    """The files that an exporter writes of the base with its adapter."""

    def work(place: Path, target: Path) -> Path:
        target.mkdir()
        write(add_adapter(open_model(place / "base", FAMILIES), place / "adapter"), target)
        return target

    return work


def commanded(*words: str, inside: str = ".") -> Callable[[Path, Path], Path]:
    """The files that a command writes."""

    def work(place: Path, target: Path) -> Path:
        given = [word.format(texts=place / "texts.txt") for word in words]
        assert main([given[0], str(place / "adapter"), "-o", str(target), *given[1:]]) == 0
        return target / inside

    return work


WRITERS = {
    "merge": commanded("merge"),
    "merge paddlenlp": commanded("merge", "--layout", "paddlenlp"),
    "merge distcp": commanded("merge", "--layout", "distcp"),
    "convert": commanded("convert", "--layout", "paddlenlp"),
    "calibrate nf4": commanded("calibrate", "--texts", "{texts}", "--max_length", "32", "--windows", "1"),
    "calibrate int4": commanded(
        "calibrate", "--texts", "{texts}", "--precision", "int4", "--max_length", "32", "--windows", "1"
    ),
    "export": commanded("export"),
    "deploy hf": commanded("deploy", inside="hf"),
    "exporter hf": exported(write_hf),
    "exporter paddlenlp": exported(write_paddlenlp),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_written_models_have_the_template_of_the_adapter(writer: str, place: Path, tmp_path: Path) -> None:
    written = WRITERS[writer](place, tmp_path / "out")
    assert tokenizer_template(written) == OWN
    assert json.loads((written / "generation_config.json").read_text()) == ENDS
    if writer != "convert":  # an adapter stays one without the files of its base
        base = (place / "base" / "tokenizer.json").read_bytes()
        assert (written / "tokenizer.json").read_bytes() == base


def test_a_gguf_file_has_the_template_of_the_adapter(place: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    commanded("merge", "--layout", "gguf")(place, tmp_path / "out")
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == OWN
    assert fields["tokenizer.ggml.eot_token_id"].contents() == ENDS["eos_token_id"][0]


ANSWERERS = {
    "generate": ("generate", "{place}/adapter", "--prompt", "Hi"),
    "generate --base": ("generate", "{place}/adapter", "--base", "{place}/base", "--prompt", "Hi"),
    "eval": ("eval", "{place}/adapter", "--exact_match", "{place}/questions.jsonl"),
    "infer": ("run", "{place}/recipe.json"),
    "program": ("generate", "{place}/program", "--engine", "static", "--prompt", "Hi"),
}


@pytest.mark.parametrize("answerer", ANSWERERS)
def test_requests_use_the_template_of_the_adapter(
    answerer: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if answerer == "program" and not (place / "program").exists():
        commanded("export")(place, place / "program")
    assert main([word.format(place=place) for word in ANSWERERS[answerer]]) == 2
    assert "the template of the adapter" in capsys.readouterr().err


def test_a_complete_tokenizer_of_an_adapter_is_used_alone(place: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(place / "adapter", adapter)
    (adapter / "chat_template.jinja").unlink()
    shutil.copy(tiny_llama.TOKENIZER / "tokenizer.json", adapter)
    (adapter / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert main(["merge", str(adapter), "-o", str(tmp_path / "out")]) == 0
    assert tokenizer_template(tmp_path / "out") is None
