"""Chat templates by name: their texts, the tokens that they need, and templates of the user's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.contract.schema.chat_templates import NAMES, template_fault
from llmsuite.data import named_templates
from llmsuite.data.chat_template import BUILTIN, OWN, ChatTemplate, chosen_template, load_template
from llmsuite.data.conversation_formats import openai
from llmsuite.data.special_tokens import read_token_files
from tests.support.chat_rows import TOOLS, rows
from tests.support.paths import DATA, ROOT

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = Path(named_templates.__file__).parent / "chat_templates"
COPIES = {
    "qwen2.5": "qwen2_5",
    "qwen3": "qwen3",
    "llama3.1": "llama3_1",
    "deepseek-r1": "deepseekv3",
    "glm4.5": "glm4moe",
    "gpt-oss": "gptoss",
}
"""Files of tests/reference/chat_templates by the names of their copies."""
ASK: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]
TALK = [*ASK, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "And?"}]
CALL = {"id": "abc123XYZ", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abc123XYZ", "content": '{"sky": "clear"}'},
    {"role": "assistant", "content": "Clear."},
]


def named(name: str) -> ChatTemplate:
    return load_template(name, Path("/nowhere"), TOKENS)


def rendered(name: str, messages: list[dict[str, Any]], tools: list[Any] | None = None, asks: bool = False) -> str:
    row: dict[str, Any] = {"messages": messages}
    if tools:
        row["tools"] = tools
    conversation = openai(row)
    return named(name).render(conversation.messages, asks, conversation.tools)


def test_every_name_has_a_text_and_a_source() -> None:
    files = {path.stem for path in TEXTS.glob("*.jinja")}
    assert files | BUILTIN.keys() == NAMES.keys()
    assert not files & BUILTIN.keys()
    documented = set(re.findall(r"^\| ([\w.-]+) \|", (TEXTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert documented - {"name"} == files, "each has its source and licence in README.md"
    guide = (ROOT / "docs" / "guide" / "chat-templates.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in guide for name in NAMES)


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_the_published_texts(name: str) -> None:
    published = ROOT / "tests" / "reference" / "chat_templates" / f"{COPIES[name]}.jinja"
    assert chosen_template(name) == published.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "deepseek-v3",
            "<s>Be brief.<\uff5cUser\uff5c>Hi?<\uff5cAssistant\uff5c>Hello.<\uff5cend▁of▁sentence\uff5c>"
            "<\uff5cUser\uff5c>And?<\uff5cAssistant\uff5c>",
        ),
        (
            "gemma",
            "<s><start_of_turn>user\nBe brief.\n\nHi?<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
            "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("mistral", "<s>[INST] Be brief.\n\nHi?[/INST] Hello.</s>[INST] And?[/INST]"),
        ("mistral-v7", "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi?[/INST]Hello.</s>[INST]And?[/INST]"),
        (
            "phi3",
            "<|system|>\nBe brief.<|end|>\n<|user|>\nHi?<|end|>\n<|assistant|>\nHello.<|end|>\n<|user|>\nAnd?<|end|>\n"
            "<|assistant|>\n",
        ),
        (
            "phi4",
            "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi?<|im_end|>"
            "<|im_start|>assistant<|im_sep|>Hello.<|im_end|><|im_start|>user<|im_sep|>And?<|im_end|>"
            "<|im_start|>assistant<|im_sep|>",
        ),
    ],
)
def test_own_texts_have_the_documented_form(name: str, text: str) -> None:
    assert rendered(name, TALK, asks=True) == text


def test_calls_of_mistral_have_their_ids() -> None:
    tools = json.dumps(TOOLS)
    call = '[{"name": "weather", "arguments": {"city": "Rome"}, "id": "abc123XYZ"}]'
    result = '{"sky": "clear"}'
    assert rendered("mistral", CALLED, TOOLS) == (
        f"<s>[AVAILABLE_TOOLS] {tools}[/AVAILABLE_TOOLS][INST] Rome?[/INST][TOOL_CALLS] {call}</s>"
        f'[TOOL_RESULTS] {{"content": {result}, "call_id": "abc123XYZ"}}[/TOOL_RESULTS] Clear.</s>'
    )
    assert rendered("mistral-v7", CALLED, TOOLS) == (
        f"<s>[AVAILABLE_TOOLS]{tools}[/AVAILABLE_TOOLS][INST]Rome?[/INST][TOOL_CALLS]{call}</s>"
        f"[TOOL_RESULTS]abc123XYZ[TOOL_CONTENT]{result}[/TOOL_RESULTS]Clear.</s>"
    )
    for name in ("mistral", "mistral-v7"):
        assert len(named(name).supervised_turns(openai({"messages": CALLED, "tools": TOOLS}))) == 2
        without = [{key: value for key, value in turn.items() if key != "tool_call_id"} for turn in CALLED]
        without[1] = {**CALLED[1], "tool_calls": [{"type": "function", "function": CALL["function"]}]}
        assert "abc123XYZ" not in rendered(name, without, TOOLS)
        long = [CALLED[0], {**CALLED[1], "tool_calls": [{**CALL, "id": "call_0123456789"}]}]
        with pytest.raises(UserError, match="ids of tool calls of nine letters and digits, not call_0123456789"):
            rendered(name, long, TOOLS)


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma", "phi3", "phi4"])
def test_what_a_template_does_not_write_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"the template {name} has no turns of the role tool"):
        rendered(name, CALLED)
    with pytest.raises(UserError, match="leaves out the call of the tool 'weather'"):
        named(name).supervised_turns(openai({"messages": CALLED[:2]}))
    thinking = [*ASK, {"role": "assistant", "content": "Hello.", "reasoning_content": "hm"}]
    with pytest.raises(UserError, match=r"leaves out the thoughts of messages\[2\]"):
        named(name).supervised_turns(openai({"messages": thinking}))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_plain_conversations_can_be_trained_on(name: str) -> None:
    trained = 0
    for row in rows():
        if "tools" in row or "chat_template_kwargs" in row or "think" in json.dumps(row) or "reason" in json.dumps(row):
            continue
        conversation = openai(row)
        found = named(name).supervised_turns(conversation)
        assert len(found) == sum(conversation.supervised)
        for (before, after), message in zip(found, conversation.messages[-2 * len(found) + 1 :: 2]):
            assert message.content in after[len(before) :]
        trained += 1
    assert trained == 6


def test_a_tokenizer_without_the_tokens_is_refused_by_their_names() -> None:
    directory = DATA / "tokenizer"
    roles = dict(read_token_files(directory).roles)
    assert load_template("qwen3", directory, roles).name == "qwen3"
    with pytest.raises(UserError, match=r"chat template phi4 writes <\|im_sep\|>, which .* choose another .*qwen2\.5"):
        load_template("phi4", directory, roles)
    with pytest.raises(
        UserError, match=r"writes \[INST\], \[/INST\], which the tokenizer in .*tokenizer does not have"
    ):
        load_template("mistral", directory, roles)
    assert load_template("llama3", directory, roles).name == "llama3", "as before: with any tokenizer"


@pytest.mark.parametrize(
    ("value", "nearest"),
    [("qwen33", "qwen3"), ("Qwen2_5", "qwen2.5"), ("gpt_oss", "gpt-oss"), ("deepseekr1", "deepseek-r1")],
)
def test_an_unknown_name_has_the_nearest(value: str, nearest: str) -> None:
    fault = template_fault(value)
    assert fault is not None
    assert f"there is no {value!r}; did you mean {nearest!r}? it is one of tokenizer, chatml, deepseek-r1" in fault
    with pytest.raises(UserError, match=re.escape(f"did you mean {nearest!r}?")):
        load_template(value, Path("/nowhere"), TOKENS)


def test_ones_own_text_or_file(tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (tmp_path / "own.jinja").write_text(text)
    for value in (text, str(tmp_path / "own.jinja")):
        assert template_fault(value) is None
        found = load_template(value, Path("/nowhere"), TOKENS)
        assert found.source == text
        assert found.name == (OWN if value == text else value)
    with pytest.raises(UserError, match=r"chat template of data\.chat_template: Expected an expression"):
        load_template("{% for %}{{ x }}", Path("/nowhere"), TOKENS)
    with pytest.raises(UserError, match=r"none\.jinja: cannot be read"):
        load_template(str(tmp_path / "none.jinja"), Path("/nowhere"), TOKENS)


def test_the_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "templates"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(NAMES)


@pytest.mark.parametrize(
    ("name", "reference", "count"), [("mistral", "mistral_v3", 20), ("mistral-v7", "mistral_v7", 12)]
)
def test_own_texts_are_the_published_ones_where_they_do_not_change(name: str, reference: str, count: int) -> None:
    """Theirs write tools, and the system turn of v3, before the last question; v7 has a default system turn."""
    source = (ROOT / "tests" / "reference" / "chat_templates" / f"{reference}.jinja").read_text(encoding="utf-8")
    theirs = ChatTemplate(source, TOKENS, reference)
    compared = 0
    for row in rows():
        has_system = row["messages"][0]["role"] == "system"
        questions = sum(turn["role"] == "user" for turn in row["messages"])
        if "chat_template_kwargs" in row or (name == "mistral-v7" and ("tools" in row or not has_system)):
            continue
        if (has_system or "tools" in row) and questions > 1 and name == "mistral":
            continue
        conversation = openai(row)
        messages = conversation.messages
        is_prompt = has_system and name == "mistral"
        if is_prompt:
            messages = messages[:-1]
            if messages[-1].role != "user":
                continue
        texts = [each.render(messages, is_prompt, conversation.tools) for each in (named(name), theirs)]
        assert texts[0] == texts[1]
        compared += 1
    assert compared == count
