"""Several models side by side on the page to chat on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import IS_THERE, REASON, VIEWS, faults, screenshot, severe, view
from tests.support.chat import MODELS, QUESTION, columns, press, say, talk, tick, wait

pytestmark = pytest.mark.skipif(not IS_THERE, reason=REASON)


def test_several_models_answer_side_by_side(page: Any) -> None:
    tick(page, "scripted", "other", "third")
    assert [box.get_attribute("value") for box in page.find_elements("css selector", "#which input")] == [*MODELS]
    assert not page.find_element("css selector", "#which input[value=fourth]").is_enabled(), "three are the most"
    assert page.find_element("css selector", "#models summary").text == "Models: scripted, other, third"
    count = "one two three four five six seven eight nine ten"  # long enough to have a speed
    say(page, count)
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == 3)
    heard = [("scripted", f"You said: {count}"), ("other", f"other heard: {count}"), ("third", f"third heard: {count}")]
    assert columns(page) == heard
    notes = [note.text for note in page.find_elements("css selector", ".note")]
    assert [bool(re.fullmatch(r"12 tokens, [\d.]+ tokens/s", note)) for note in notes] == [True] * 3
    say(page, "two")
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == 6)
    second = {body["model"]: [message["content"].strip() for message in body["messages"]] for body in page.asked[3:]}
    assert second == {name: [count, answer, "two"] for name, answer in heard}, "each reads its own answers"
    places = [one.rect for one in page.find_elements("css selector", ".answers:last-child .assistant")]
    assert len({place["y"] for place in places}) == 1
    assert places[0]["x"] < places[1]["x"] < places[2]["x"]
    view(page, 390, "light")
    places = [one.rect for one in page.find_elements("css selector", ".answers:last-child .assistant")]
    assert len({place["x"] for place in places}) == 1
    assert places[0]["y"] < places[1]["y"] < places[2]["y"]
    assert severe(page) == []


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_it_can_be_read_everywhere(page: Any, tmp_path: Path, width: int, scheme: str) -> None:
    view(page, width, scheme)
    tick(page, "scripted", "other", "third")
    page.find_element("css selector", "#models summary").click()
    say(page, QUESTION)
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == 3)
    assert [who for who, _ in columns(page)] == ["scripted", "other", "third"]
    assert faults(page) == []
    page.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
    screenshot(page, f"chat-models-{width}-{scheme}.png", tmp_path)


def test_conversations_with_several_models_are_kept(page: Any) -> None:
    tick(page, "other", "third")
    say(page, "one")
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == 2)
    page.find_element("id", "new").click()
    tick(page, "fourth")
    page.refresh()
    wait(page, lambda b: b.find_element("css selector", "#models summary").text == "Model: fourth")
    page.find_element("css selector", "#past summary").click()
    page.find_element("css selector", "#conversations .open").click()
    assert columns(page) == [("other", "other heard: one"), ("third", "third heard: one")]
    assert page.find_element("css selector", "#models summary").text == "Models: other, third"
    tick(page, "scripted")
    talk(page, "two")
    assert [message["content"].strip() for message in page.asked[-1]["messages"]] == ["one", "other heard: one", "two"]
    page.find_elements("css selector", "#turns button")[1].click()
    page.find_element("css selector", ".edit").send_keys(" more\n")
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == 1)
    assert columns(page) == [("scripted", "You said: one more")]


def test_each_answer_is_stopped_and_drawn_again_by_itself(page: Any) -> None:
    tick(page, "scripted", "other")
    say(page, "apart")
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == 1)
    assert page.find_element("id", "send").text == "Stop"
    press(page, "Regenerate", by="keyboard")
    wait(page, lambda b: len(b.asked) == 3)
    assert page.asked[2]["model"] == "scripted"
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == 1)
    before = columns(page)[1][1].count("word")
    wait(page, lambda b: columns(b)[1][1].count("word") > before)
    page.find_element("css selector", "[aria-label='Stop: the answer of other']").send_keys(" ")
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == 2)
    notes = [note.text for note in page.find_elements("css selector", ".note")]
    assert ["stopped" in note for note in notes] == [False, True]
    focused = page.switch_to.active_element.get_attribute("aria-label")
    assert focused == "Copy: the answer of other", "the keyboard stays where it was"
    assert page.find_element("id", "send").text == "Send"
    stopped = columns(page)[1][1]
    say(page, "slowly")
    wait(page, lambda b: all(text.count("word") > 2 for _, text in columns(b)))
    told = {body["model"]: [message["content"] for message in body["messages"]] for body in page.asked[3:]}
    assert told["other"][1].split() == stopped.split()
    assert told["scripted"][1].split() == ["You", "said:", "apart"]
    page.find_element("id", "text").send_keys("\ue00c")  # Escape
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == 4)
    assert severe(page) == []


def test_a_model_that_fails_leaves_the_others_their_answers(page: Any) -> None:
    tick(page, "scripted", "other")
    say(page, "split")
    wait(page, lambda b: b.find_elements("css selector", ".error") and b.find_elements("css selector", "[data-done]"))
    assert columns(page) == [("scripted", "You said: split"), ("other", "max_tokens: at most 64")]
    press(page, "Try again")
    wait(page, lambda b: len(b.asked) == 3 and b.find_elements("css selector", ".error"))
    assert page.asked[-1]["model"] == "other"
    say(page, "better")
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == 3)
    told = {body["model"]: [message["content"].strip() for message in body["messages"]] for body in page.asked[3:]}
    assert told == {"scripted": ["split", "You said: split", "better"], "other": ["better"]}
    assert columns(page) == [("scripted", "You said: better"), ("other", "other heard: better")]
    severe(page)
