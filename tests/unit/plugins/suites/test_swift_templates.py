"""Templates of ms-swift: texts and supervised parts recorded from its own `Template` and `LossScale` at 3602360a,
with a tokenizer of characters."""

from __future__ import annotations

import re
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.rows import Message
from llmsuite.plugins.suites.convert import convert
from llmsuite.plugins.suites.known import SUITES
from llmsuite.plugins.suites.swift_templates import _WITH_SYSTEM, DEFAULT, chatml
from tests.support.marked import marked
from tests.support.swift import BARE
from tests.unit.plugins.suites.conftest import Converted

ACTION = "from-swift"
QWEN_3 = {**BARE, "model": "Qwen/Qwen3-8B"}
QWEN_2_5 = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
EMPTY = "<think>\n\n</think>\n\n"


def test_each_answer_without_a_thought_begins_with_an_empty_one() -> None:
    text = chatml(None, True, "default")
    turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "2+2?"), ("assistant", "<think>\nfour\n</think>\n\n4")]
    assert marked(text, *turns) == (
        f"{{user\nHi}}\n{{assistant\n[{EMPTY}Hello.}}\n]{{user\n2+2?}}\n{{assistant\n[<think>\nfour\n</think>\n\n4}}\n]"
    )
    assert marked(text, ("system", ""), ("user", "Hi"), ("assistant", "<think> on")) == (
        "{user\nHi}\n{assistant\n[<think> on}\n]"
    )
    assert marked(text, ("system", "Be brief."), ("user", "Hi"), ("assistant", " Hello </think> x ")) == (
        f"{{system\nBe brief.}}\n{{user\nHi}}\n{{assistant\n[{EMPTY} Hello </think> x }}\n]"
    )


@pytest.mark.parametrize(
    ("answer", "supervised"),
    [
        ("Hello.", f"{EMPTY}[Hello.}}\n]"),
        (f"{EMPTY}Hello.", f"{EMPTY}[Hello.}}\n]"),
        ("<think>  </think>   Hello", "<think>  </think>   [Hello}\n]"),
        ("<think>x</think>y", "[<think>x</think>y}\n]"),
        ("<think> on", "[<think> on}\n]"),
        ("", f"{EMPTY}[}}\n]"),
    ],
)
def test_an_empty_thought_is_not_supervised(answer: str, supervised: str) -> None:
    found = marked(chatml(None, True, "ignore_empty_think"), ("user", "Hi"), ("assistant", answer))
    assert found == f"{{user\nHi}}\n{{assistant\n{supervised}"


def test_the_last_answer_alone() -> None:
    turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "2+2?"), ("assistant", "4")]
    assert marked(chatml(QWEN_2_5, False, "last_round"), *turns) == (
        f"{{system\n{QWEN_2_5}}}\n{{user\nHi}}\n{{assistant\nHello.}}\n{{user\n2+2?}}\n{{assistant\n[4}}\n]"
    )


def test_the_template_default() -> None:
    def rendered(*turns: tuple[str, str]) -> str:
        return marked(DEFAULT, *turns, eos="<|end|>")

    assert rendered(("user", "Hi"), ("assistant", " Hello.")) == (
        "You are a helpful assistant.\n\n### Human:\nHi\n\n### Assistant:\n[ Hello.<|end|>]"
    )
    assert rendered(("system", "Be brief."), ("user", "Hi"), ("assistant", "a")) == (
        "Be brief.\n\n### Human:\nHi\n\n### Assistant:\n[a<|end|>]"
    )
    assert rendered(("system", ""), ("user", "Hi"), ("assistant", "a")).startswith("### Human:\nHi")
    with pytest.raises(UserError, match="one question and its answer"):
        rendered(("user", "Hi"), ("assistant", "a"), ("user", "b"), ("assistant", "c"))


def test_rows_with_tools_are_refused() -> None:
    template = ChatTemplate(chatml(None, True, "default"), {}, "x")
    with pytest.raises(UserError, match="this template writes no tools"):
        template.render([Message("user", "Hi")], tools='[{"name": "f"}]')
    with pytest.raises(UserError, match="this template writes no tools"):
        template.render([Message("user", "Hi"), Message("assistant", "a"), Message("tool", "b")])


def test_templates_of_models(converted: Converted) -> None:
    def data(**values: Any) -> Any:
        return converted(ACTION, {**BARE, **values}).recipe["data"]

    for model in ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-32B"):
        assert data(model=model)["chat_template"] == chatml(None, True, "default")
    assert data(**QWEN_3 | {"loss_scale": "ignore_empty_think"})["chat_template"] == chatml(
        None, True, "ignore_empty_think"
    )
    assert data(**QWEN_3 | {"add_non_thinking_prefix": False})["chat_template"] == chatml(None, False, "default")
    assert data(model="Qwen/Qwen2.5-1.5B", template="default")["chat_template"] == DEFAULT
    assert "system" not in data(**QWEN_3 | {"system": ""})
    assert data(loss_scale="last_round")["chat_template"] == chatml(QWEN_2_5, False, "last_round")
    assert data(model="Qwen/Qwen2-7B-Instruct", loss_scale="last_round")["chat_template"] == chatml(
        "You are a helpful assistant.", False, "last_round"
    )
    assert "chat_template" not in data(model="Qwen/Qwen3-4B-Instruct-2507")


def test_qwen_2_5_math_has_the_system_turn_that_is_given(registry: Registry) -> None:
    """Without one it has another than Qwen2.5."""
    given = {**BARE, "model": "Qwen/Qwen2.5-Math-1.5B"}
    found = convert(SUITES[ACTION], {**given, "system": "Be brief."}, "x.yaml", registry)
    assert found.recipe["data"]["chat_template"] == chatml(QWEN_2_5, False, "default")
    instruct = {**given, "model": "Qwen/Qwen2.5-Math-1.5B-Instruct", "system": "Be brief."}
    assert convert(SUITES[ACTION], instruct, "x.yaml", registry).recipe["data"]["chat_template"] == "qwen2.5"
    with pytest.raises(UserError, match="template = not given"):
        convert(SUITES[ACTION], given, "x.yaml", registry)


def test_known_templates() -> None:
    for model in ("Qwen/Qwen2-7B-Instruct", "Qwen/Qwen2.5-Coder-7B-Instruct", "models/Qwen2.5-7B-Instruct/"):
        assert re.search(_WITH_SYSTEM, model, re.IGNORECASE)
    for model in (
        "Qwen/Qwen2-7B",
        "Qwen/Qwen2.5-7B",
        "Qwen/Qwen2-VL-7B-Instruct",
        "Qwen/Qwen2-Math-7B",
        "Qwen/Qwen2.5-7B-Instruct-AWQ",
    ):
        assert not re.search(_WITH_SYSTEM, model, re.IGNORECASE)
