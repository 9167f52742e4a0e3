"""Thoughts of an answer come back apart from its content, complete or as a stream, and the template takes variables."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.prompts import Prompter
from tests.support.paths import DATA
from tests.support.served import make_service
from tests.support.tool_calls import CALLS, TOOLS, says

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opens is defined %}<think>\n{% endif %}{% endif %}"
)
ASK: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "1+1?"}]}
THOUGHT = "<think>\nOne and one.\n</think>\n\nTwo."


@pytest.fixture
def prompter(tmp_path: Path) -> Prompter:
    directory = tmp_path / "thinks"
    shutil.copytree(DATA / "tokenizer", directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return Prompter(TextTokenizer(directory), "tokenizer")


def streamed(client: openai.OpenAI, **keys: Any) -> tuple[str, str, list[Any]]:
    """Thoughts, content and calls of a stream."""
    thoughts = ""
    content = ""
    calls: list[Any] = []
    for chunk in client.chat.completions.create(**ASK, stream=True, **keys):
        delta: Any = chunk.choices[0].delta
        thoughts += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        calls += delta.tool_calls or []
    return thoughts, content, calls


def test_thoughts_are_apart_from_the_content(prompter: Prompter) -> None:
    with says(THOUGHT, prompter=prompter) as client:
        message: Any = client.chat.completions.create(**ASK).choices[0].message
        assert (message.reasoning_content, message.content) == ("One and one.", "Two.")
        assert streamed(client)[:2] == ("One and one.", "Two.")
        again: Any = {**ASK, "messages": [*ASK["messages"], message.model_dump(exclude_none=True), *ASK["messages"]]}
        assert client.chat.completions.create(**again).choices[0].message.content == "Two."


def test_a_prompt_may_have_opened_the_thoughts(prompter: Prompter) -> None:
    keys: Any = {"extra_body": {"chat_template_kwargs": {"opens": True}}}
    seen: list[list[int]] = []
    with says("One and one.\n</think>\n\nTwo.", seen, prompter) as client:
        message: Any = client.chat.completions.create(**ASK, **keys).choices[0].message
        assert (message.reasoning_content, message.content) == ("One and one.", "Two.")
        assert streamed(client, **keys)[:2] == ("One and one.", "Two.")
        assert make_service().generator.tokenizer.decode(seen[0], False).endswith("<think>\n")
    off: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    with says("Two.", seen, prompter) as client:
        message = client.chat.completions.create(**ASK, **off).choices[0].message
        assert message.content == "Two."
        assert getattr(message, "reasoning_content", None) is None
        assert make_service().generator.tokenizer.decode(seen[-1], False).endswith("</think>\n\n")
        with pytest.raises(openai.BadRequestError, match="has no variable 'thinks', which chat_template_kwargs sets"):
            client.chat.completions.create(**ASK, extra_body={"chat_template_kwargs": {"thinks": 1}})
        with pytest.raises(openai.BadRequestError, match=r"'chat_template_kwargs\.messages' is not set by hand"):
            client.chat.completions.create(**ASK, extra_body={"chat_template_kwargs": {"messages": []}})


def test_calls_follow_thoughts(prompter: Prompter) -> None:
    with says(f"<think>\nI add.\n</think>\n\n{CALLS}", prompter=prompter) as client:
        choice = client.chat.completions.create(**ASK, tools=TOOLS).choices[0]
        message: Any = choice.message
        assert (choice.finish_reason, message.reasoning_content, message.content) == ("tool_calls", "I add.", None)
        assert len(message.tool_calls) == 2
        thoughts, content, calls = streamed(client, tools=TOOLS)
        assert (thoughts, content, len(calls)) == ("I add.", "", 2)


def test_a_model_without_thoughts_answers_as_before() -> None:
    with says(THOUGHT) as client:
        message: Any = client.chat.completions.create(**ASK).choices[0].message
        assert message.content == THOUGHT
        assert getattr(message, "reasoning_content", None) is None


def test_an_unknown_key_of_a_turn_is_refused_by_name() -> None:
    with says("Two.") as client:
        turn: Any = {"role": "user", "content": "1+1?", "mood": "good", "annotations": []}
        with pytest.raises(openai.BadRequestError, match=r"does not read the key 'mood' of messages\[0\]"):
            client.chat.completions.create(model="toy", messages=[turn])


IN_CHANNELS = "<|channel|>analysis<|message|>One and one.<|end|><|start|>assistant<|channel|>final<|message|>Two."


def channels_prompter(directory: Path) -> Prompter:
    shutil.copytree(DATA / "tokenizer", directory)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.reasoning_content %}<|start|>{{ m.role }}<|channel|>analysis<|message|>"
        "{{ m.reasoning_content }}<|end|>{% endif %}"
        "<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    return Prompter(TextTokenizer(directory), "tokenizer")


def test_thoughts_are_those_of_a_channel(tmp_path: Path) -> None:
    prompter = channels_prompter(tmp_path / "channels")
    with says(IN_CHANNELS, prompter=prompter) as client:
        message: Any = client.chat.completions.create(**ASK).choices[0].message
        assert (message.reasoning_content, message.content) == ("One and one.", "Two.")
        assert streamed(client)[:2] == ("One and one.", "Two.")


def test_responses_have_the_thoughts_as_an_item(prompter: Prompter) -> None:
    with says(THOUGHT, prompter=prompter) as client:
        found: Any = client.responses.create(model="toy", input="1+1?", include=["message.output_text.logprobs"])
        assert [item.type for item in found.output] == ["reasoning", "message"]
        assert [part.text for part in found.output[0].content] == ["One and one."]
        assert found.output_text == "Two."
        logprobs = found.output[1].content[0].logprobs
        assert "".join(entry.token for entry in logprobs).strip() == "Two."
        assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
        events = list(client.responses.create(model="toy", input="1+1?", stream=True))
        kinds = [event.type for event in events]
        assert kinds[2] == "response.output_item.added"
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
        thoughts = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
        content = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert (thoughts, content) == ("One and one.", "Two.")
        places = [e.output_index for e in events if e.type == "response.output_item.added"]
        assert places == [0, 1]
        last: Any = events[-1]
        assert [item.type for item in last.response.output] == ["reasoning", "message"]
        assert [item.status for item in last.response.output] == ["completed", "completed"]
        # a client sends both back
        again: Any = [item.model_dump(exclude_none=True) for item in found.output]
        talk: Any = [{"role": "user", "content": "1+1?"}, *again, {"role": "user", "content": "Sure?"}]
        for item in again:
            for part in item["content"]:
                part.pop("logprobs", None)
                part.pop("annotations", None)
        assert client.responses.create(model="toy", input=talk).output_text == "Two."
        for wrong, message in (
            ([again[0], talk[0]], r"input\[1\]: an answer or a call of the assistant follows its reasoning"),
            ([talk[0], again[0]], "input: ends with reasoning"),
            ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}], r"input\[0\]\.content: a list of"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                client.responses.create(model="toy", input=wrong)


def test_a_response_of_calls_after_thoughts(prompter: Prompter) -> None:
    flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    with says(f"<think>\nI add.\n</think>\n\n{CALLS}", prompter=prompter) as client:
        found: Any = client.responses.create(model="toy", input="1+1?", tools=flat)
        assert [item.type for item in found.output] == ["reasoning", "function_call", "function_call"]
        events = list(client.responses.create(model="toy", input="1+1?", tools=flat, stream=True))
        last: Any = events[-1]
        assert [item.type for item in last.response.output] == ["reasoning", "function_call", "function_call"]
        assert [e.output_index for e in events if e.type == "response.output_item.added"] == [0, 1, 2]


THINKS_AGAIN = (
    "<|channel|>analysis<|message|>One and one.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Two it is.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Two.<|end|>"
)


def test_later_thoughts_are_an_item_of_their_own(tmp_path: Path) -> None:
    keys: Any = {"model": "toy", "include": ["message.output_text.logprobs"]}
    with says(THINKS_AGAIN, prompter=channels_prompter(tmp_path / "channels")) as client:
        complete: Any = client.responses.create(input="1+1?", **keys)
        assert [item.type for item in complete.output] == ["reasoning", "message"]
        assert complete.output[0].content[0].text == "One and one.\nTwo it is."
        shown = "".join(entry.token for entry in complete.output[1].content[0].logprobs)
        assert "it is" not in shown
        events: list[Any] = list(client.responses.create(input="1+1?", stream=True, **keys))
        last = events[-1].response
        assert [item.type for item in last.output] == ["reasoning", "message", "reasoning"]
        assert [last.output[i].content[0].text for i in (0, 2)] == ["One and one.", "Two it is."]
        assert last.output_text == complete.output_text
        assert last.usage.output_tokens_details == complete.usage.output_tokens_details
        assert len({item.id for item in last.output}) == 3
        for kind in ("response.output_item.added", "response.output_item.done"):
            assert sorted(e.output_index for e in events if e.type == kind) == [0, 1, 2]
        done = [(e.output_index, e.text) for e in events if e.type == "response.reasoning_text.done"]
        assert done == [(0, "One and one."), (2, "Two it is.")]
        # a client sends all items back
        again: Any = [item.model_dump(exclude_none=True) for item in last.output]
        for part in again[1]["content"]:
            part.pop("logprobs", None)
            part.pop("annotations", None)
        talk: Any = [{"role": "user", "content": "1+1?"}, *again, {"role": "user", "content": "Sure?"}]
        assert client.responses.create(model="toy", input=talk).output_text == complete.output_text
