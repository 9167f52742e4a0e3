"""Templates of ms-swift: texts and supervised parts recorded from its own `Template` and `LossScale` at 3602360a,
with a tokenizer of characters."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.rows import Message
from llmsuite.plugins.suites.swift_templates import _ANSWERS, _EMPTY_THOUGHT, DEFAULT
from llmsuite.plugins.suites.turn_texts import CHATML, LAST_ANSWER, LLAMA_3, turns_text
from tests.support.marked import marked
from tests.support.swift import BARE, RLHF
from tests.unit.plugins.suites.conftest import Converted

ACTION = "from-swift"
GRPO = {
    **BARE, "command": "swift rlhf", "rlhf_type": "grpo", "reward_funcs": "accuracy", "tuner_type": "full",
    "per_device_train_batch_size": 8, "num_generations": 8, "deepspeed": "zero2",
}  # fmt: skip
QWEN_3 = {**BARE, "model": "Qwen/Qwen3-8B"}
QWEN_2_5 = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN_2 = "You are a helpful assistant."
EMPTY = "<think>\n\n</think>\n\n"
THINKS = turns_text(CHATML, None, _EMPTY_THOUGHT)
IGNORES = turns_text(CHATML, None, _EMPTY_THOUGHT, _ANSWERS["ignore_empty_think"])


def test_each_answer_without_a_thought_begins_with_an_empty_one() -> None:
    text = THINKS
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
    found = marked(IGNORES, ("user", "Hi"), ("assistant", answer))
    assert found == f"{{user\nHi}}\n{{assistant\n{supervised}"


def test_the_last_answer_alone() -> None:
    turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "2+2?"), ("assistant", "4")]
    assert marked(turns_text(CHATML, QWEN_2_5, answer=LAST_ANSWER), *turns) == (
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
    template = ChatTemplate(THINKS, {}, "x")
    with pytest.raises(UserError, match="this template writes no tools"):
        template.render([Message("user", "Hi")], tools='[{"name": "f"}]')
    with pytest.raises(UserError, match="this template writes no tools"):
        template.render([Message("user", "Hi"), Message("assistant", "a"), Message("tool", "b")])


def test_other_turns_are_refused() -> None:
    for turns in (
        [("user", "Hi"), ("user", "Hi?"), ("assistant", "a")],
        [("assistant", "a"), ("user", "Hi")],
        [("user", "Hi"), ("system", "Be brief."), ("assistant", "a")],
    ):
        with pytest.raises(UserError, match="questions and answers in turn"):
            marked(THINKS, *turns)
    turns = [("user", "Hi"), ("assistant", "\nHello."), ("user", "2+2?"), ("assistant", "4")]
    with pytest.raises(UserError, match="no earlier answer that begins with white space"):
        marked(turns_text(CHATML, None, answer=LAST_ANSWER), *turns)


def test_templates_of_models(converted: Converted) -> None:
    def data(values: dict[str, Any], **more: Any) -> Any:
        found = converted(ACTION, {**values, **more}).recipe["data"]
        assert found["end_of_answer"] == "template"
        return found["chat_template"]

    for model in ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-32B"):
        assert data(BARE, model=model) == THINKS
    assert data(QWEN_3, loss_scale="ignore_empty_think") == IGNORES
    assert data(QWEN_3, add_non_thinking_prefix=False) == turns_text(CHATML, None)
    assert data(BARE, model="Qwen/Qwen2.5-1.5B", template="default") == DEFAULT
    assert data(BARE) == turns_text(CHATML, QWEN_2_5)
    assert data(BARE, system="") == turns_text(CHATML, None)
    assert data(BARE, loss_scale="last_round") == turns_text(CHATML, QWEN_2_5, answer=LAST_ANSWER)
    assert data(BARE, model="Qwen/Qwen2-7B-Instruct") == turns_text(CHATML, QWEN_2)
    assert data(BARE, model="Qwen/Qwen3-4B-Instruct-2507") == turns_text(CHATML, None)
    assert data(BARE, model="LLM-Research/Meta-Llama-3-8B-Instruct") == turns_text(LLAMA_3, None)
    assert data(RLHF) == turns_text(CHATML, QWEN_2_5, answer=LAST_ANSWER)


@pytest.mark.parametrize(
    "model",
    ["Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen2-Math-7B", "Qwen/Qwen2.5-7B-Instruct-1M", "Qwen/Qwen3-8B-Thinking-2507"],
)
def test_models_with_other_templates_are_refused(converted: Converted, model: str) -> None:
    with pytest.raises(UserError, match=r"template = not given|for images or sound"):
        converted(ACTION, {**BARE, "model": model})


def test_prompts_of_qwen_are_those_of_the_tokenizer(converted: Converted) -> None:
    given = {**GRPO, "model": "Qwen/Qwen2.5-7B-Instruct"}
    found = converted(ACTION, given).recipe
    assert not {"chat_template", "end_of_answer"} & found["data"].keys()
    assert "stop" not in found["rollout"]


def test_answers_of_base_models_end_at_both_tokens(converted: Converted) -> None:
    found = converted(ACTION, {**GRPO, "model": "Qwen/Qwen2.5-7B"}).recipe
    assert found["data"]["chat_template"] == turns_text(CHATML, QWEN_2_5, answer=LAST_ANSWER)
    assert found["rollout"]["stop"] == ["<|im_end|>"]
