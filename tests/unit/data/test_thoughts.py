"""Where thoughts are in rendered turns."""

from __future__ import annotations

import pytest

from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.rows import Message
from llmsuite.data.thoughts import thought_span
from llmsuite.data.turns import parse_message
from tests.support.paths import ROOT

TEMPLATES = ROOT / "tests" / "reference" / "chat_templates"


@pytest.mark.parametrize(
    ("thoughts", "content", "turn", "expected"),
    [
        ("two", "4", "<think>\ntwo\n</think>\n\n4<|im_end|>\n", "two"),
        ("two", "4", "two\n</think>\n\n4<|im_end|>\n", "two"),  # the prompt has opened them
        ("think", "4", "<think>\nthink\n</think>\n\n4<|im_end|>\n", "think"),
        ("4", "2+2=4", "<think>\n4\n</think>\n\n2+2=4<|im_end|>\n", "4"),
        ("a", "b", "analysis: a final: b<|return|>", "a"),
        # the template has left them out, and the content has the same words
        ("Yes.", "Yes.", "Yes.<|im_end|>\n", None),
        ("4", "2+2=4", "2+2=4<|im_end|>\n", None),
        ("Paris", "Paris is the capital.", "Paris is the capital.<|im_end|>\n", None),
        ("", "4", "<think>\n\n</think>\n\n4<|im_end|>\n", None),
    ],
)
def test_thoughts_are_found_before_the_content_only(
    thoughts: str, content: str, turn: str, expected: str | None
) -> None:
    span = thought_span(Message("assistant", content, reasoning=thoughts), turn)
    assert (None if span is None else turn[slice(*span)]) == expected
    if span is not None and "<think>" in turn:
        assert turn[: span[0]].rstrip().endswith("<think>")


def test_an_empty_key_of_thoughts_hides_no_other() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}{% endfor %}", {}, "own")
    turn = {"role": "assistant", "content": "4", "reasoning_content": "", "reasoning": "two and two"}
    assert template.render([parse_message(turn, "turn")]) == "two and two|4"


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3"])
def test_a_template_that_cuts_thoughts_answers_after_them(name: str) -> None:
    """A client sends the thoughts of an answer back; the template never shows them to the model."""
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), {"bos_token": "<s>", "eos_token": "</s>"}, name)
    messages = [Message("user", "2+2?"), Message("assistant", "4", reasoning="two and two"), Message("user", "Sure?")]
    text = template.render(messages, add_generation_prompt=True)
    assert "two and two" not in text
    assert template.missing_part(text, messages, "") == "the thoughts of messages[1] ('reasoning_content')"
    assert template.missing_part(text, messages, "", may_drop_thoughts=True) is None
    plain = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, "plain")
    assert plain.missing_part("2+2?4Sure?", messages, "", may_drop_thoughts=True) is not None
