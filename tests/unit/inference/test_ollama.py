"""A Modelfile has the tokens that end answers, and the chat template as one of Go where turns stand by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmsuite.data.chat_template import BUILTIN, ChatTemplate
from llmsuite.data.rows import Message
from llmsuite.inference.ollama import modelfile, parse_template, read_dialogue
from tests.support.gguf_cases import write_tokenizer

SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are SmolLM<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [Message(role, f"{role} says") for role in ("system", "user", "assistant", "user")]


def write(directory: Path, template: str) -> Path:
    write_tokenizer(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.mark.parametrize("source", [SMOLLM, BUILTIN["chatml"], BUILTIN["llama3"]], ids=["smollm", "chatml", "llama3"])
def test_turns_have_the_text_of_the_template(source: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<|begin|>"}, "a model")
    turns = parse_template(template)
    assert turns is not None
    for talk in (TALK, TALK[1:], TALK[:2], TALK[1:2]):
        assert turns.render(talk) == template.render(talk, add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | length }}{% for m in messages %}{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content if m.role != 'system' else raise_exception('no') }}{% endfor %}",
        "{% for m in messages %}{{ '{{' }}{{ m.content }}\n{% endfor %}",
        "{{ messages[-1].content }}",
    ],
    ids=["counts", "no system", "signs of Go", "last turn only"],
)
def test_other_templates_have_no_counterpart(tmp_path: Path, source: str) -> None:
    assert parse_template(ChatTemplate(source, {}, "a model")) is None
    text = modelfile(write(tmp_path / "model", source), "model.gguf", adds_bos=False)
    assert "TEMPLATE" not in text
    assert "# The chat template is not one of single turns" in text


def test_a_modelfile_has_template_and_stop_words(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", SMOLLM)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 0]}', encoding="utf-8")
    assert read_dialogue(directory).eom_id is None
    assert modelfile(directory, "model.gguf", adds_bos=False) == (
        "FROM ./model.gguf\n"
        'TEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        '{{ end }}{{ end }}<|im_start|>assistant\n"""\n'
        'SYSTEM """You are SmolLM"""\n'
        'PARAMETER stop "<|endoftext|>"\nPARAMETER stop "<|im_end|>"\n'
    )
    dialogue = read_dialogue(directory)
    assert (dialogue.bos_id, dialogue.eos_id, dialogue.pad_id, dialogue.eot_id) == (1, 2, 0, 0)
    assert dialogue.chat_template == SMOLLM


def test_the_token_that_llama_cpp_adds_is_not_written_twice(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", "{{ bos_token }}" + BUILTIN["llama3"].removeprefix("{{ bos_token }}"))
    with_bos, plain = (modelfile(directory, "model.gguf", adds_bos=adds) for adds in (True, False))
    assert 'TEMPLATE """{{ range' in with_bos
    assert 'TEMPLATE """<|im_start|>{{ range' in plain


def test_ends_and_control_tokens_of_all_files(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}")
    (directory / "config.json").write_text(json.dumps({"eos_token_id": [2, 45, 46, 47]}))
    content = json.loads((directory / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    (directory / "tokenizer.json").write_text(json.dumps(content))
    dialogue = read_dialogue(directory)
    assert (dialogue.eos_id, dialogue.eot_id, dialogue.eom_id) == (2, 45, 46)
    assert dialogue.control == {0, 1, 2}, "those with a role, and what the template writes"
    assert (dialogue.adds_bos, modelfile(directory, "m.gguf", False).count("PARAMETER stop")) == (False, 4)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}))
    assert read_dialogue(directory).adds_bos
