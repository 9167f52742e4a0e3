"""The page to chat on in a browser, before a server that says what it is told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import IS_THERE, REASON, VIEWS, faults, screenshot, severe, view
from tests.support.chat import press, said, say, talk, tick, wait

pytestmark = pytest.mark.skipif(not IS_THERE, reason=REASON)


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_it_can_be_read_and_used_everywhere(page: Any, tmp_path: Path, width: int, scheme: str) -> None:
    view(page, width, scheme)
    talk(page, "markdown")
    talk(page, "nothing")
    say(page, "fail")
    wait(page, lambda b: b.find_elements("css selector", ".error"))
    tick(page, "scripted", "other", "third")
    say(page, "split")
    wait(page, lambda b: len(b.find_elements("css selector", ".error")) == 1)
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == 4)
    assert any("400" in line for line in severe(page)), "the refused request, which the browser tells"
    for summary in page.find_elements("css selector", "details:not([open]) summary"):
        summary.click()
    page.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
    assert faults(page) == []
    screenshot(page, f"chat-{width}-{scheme}.png", tmp_path)


def test_markdown_is_shown_and_nothing_of_it_acts(page: Any) -> None:
    talk(page, "markdown")
    answer = page.find_element("css selector", ".assistant .said")
    assert answer.find_element("css selector", "strong").text == "how"
    assert answer.find_element("css selector", "pre .hljs-keyword").text == "def"
    assert len(answer.find_elements("css selector", "td")) == 2
    assert answer.find_elements("css selector", "img, script, form, input, [style], [id], [onerror]") == []
    links = [(link.text, link.get_attribute("href")) for link in answer.find_elements("css selector", "a")]
    assert links == [("a link", None), ("another", "https://example.com/")]
    assert answer.find_elements("css selector", "a")[1].get_attribute("rel") == "noopener noreferrer"
    assert '<img src=x onerror="document.title=' in answer.text, "HTML is text"
    assert page.title == "scripted"
    assert severe(page) == []
    talk(page, "<b>bold?</b>")
    assert said(page)[2] == "<b>bold?</b>"


def test_settings_are_sent_and_kept(page: Any) -> None:
    page.find_element("css selector", "#settings summary").click()
    for field, value in (
        ("system", "Be brief."),
        ("temperature", "0.2"),
        ("top_p", "0.9"),
        ("tokens", "33"),
        ("seed", "5"),
    ):
        element = page.find_element("id", field)
        element.clear()
        element.send_keys(value)
    page.find_element("id", "key").send_keys("secret")
    tick(page, "other")
    talk(page, "Hello")
    asked = page.asked[-1]
    assert asked["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert [asked[key] for key in ("model", "temperature", "top_p", "max_tokens", "seed")] == ["other", 0.2, 0.9, 33, 5]
    assert "tokens/s" in page.find_element("css selector", ".note").text
    page.refresh()
    assert page.find_element("id", "system").get_property("value") == "Be brief."
    assert page.find_element("id", "tokens").get_property("value") == "33"
    assert "secret" not in page.execute_script("return JSON.stringify(localStorage)")


def test_a_stopped_answer_stays_in_the_conversation(page: Any) -> None:
    say(page, "slowly")
    wait(page, lambda b: len(b.find_elements("css selector", ".said")) == 2 and said(b)[1].count("word") > 3)
    page.find_element("id", "send").click()
    wait(page, lambda b: b.find_elements("css selector", "[data-done]"))
    kept = said(page)[1]
    assert "stopped" in page.find_element("css selector", ".note").text
    talk(page, "And now?")
    messages = page.asked[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[0]["content"] == "slowly"
    assert messages[1]["content"].split() == kept.split()
    assert severe(page) == []


def test_an_answer_without_a_word_says_so(page: Any) -> None:
    talk(page, "nothing")
    assert said(page) == ["nothing", "The model ended its answer without a word."]


def test_what_fails_is_told_and_tried_again(page: Any) -> None:
    say(page, "fail")
    wait(page, lambda b: b.find_elements("css selector", ".error"))
    assert said(page) == ["fail", "max_tokens: at most 64"]
    press(page, "Try again")
    wait(page, lambda b: len(b.asked) == 2)
    wait(page, lambda b: b.find_elements("css selector", ".error"))
    talk(page, "better")
    assert page.asked[-1]["messages"] == [{"role": "user", "content": "better"}], "what had no answer is gone"
    assert said(page) == ["better", "You said: better"]
    severe(page)


def test_answers_are_drawn_again_and_messages_changed(page: Any) -> None:
    talk(page, "one")
    talk(page, "two")
    press(page, "Regenerate", 0)
    wait(page, lambda b: len(b.asked) == 3)
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == 1)
    assert page.asked[-1]["messages"] == [{"role": "user", "content": "one"}]
    press(page, "Edit", 0)
    area = page.find_element("css selector", ".edit")
    area.clear()
    area.send_keys("three\n")
    wait(page, lambda b: len(b.asked) == 4 and b.find_elements("css selector", "[data-done]"))
    assert said(page) == ["three", "You said: three"]


def test_conversations_are_kept_in_the_browser(page: Any) -> None:
    talk(page, "first")
    page.find_element("id", "new").click()
    talk(page, "second")
    page.refresh()
    page.find_element("css selector", "#past summary").click()
    assert [each.text for each in page.find_elements("css selector", "#conversations .open")] == ["second", "first"]
    page.find_elements("css selector", "#conversations .open")[1].click()
    assert said(page) == ["first", "You said: first"]
    talk(page, "more")
    assert [message["content"].strip() for message in page.asked[-1]["messages"]] == [
        "first",
        "You said: first",
        "more",
    ]
    page.find_elements("css selector", "#conversations li button:last-child")[0].click()
    assert [each.text for each in page.find_elements("css selector", "#conversations .open")] == ["second"]
    page.find_element("id", "forget").click()
    page.refresh()
    assert page.find_element("css selector", "#past summary").text == "History (0)"
    assert severe(page) == []


def test_copying_says_what_became_of_it(page: Any) -> None:
    permissions = {"origin": page.current_url.rstrip("/"), "permissions": ["clipboardReadWrite"]}
    page.execute_cdp_cmd("Browser.grantPermissions", permissions)
    talk(page, "markdown")
    page.find_element("css selector", ".block button").click()
    wait(page, lambda b: b.find_element("css selector", ".block button").text == "Copied")
    copied = page.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied.strip() == "def double(x):  # twice\n    return 2 * x"
