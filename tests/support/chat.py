"""The page to chat on in a browser, before a server that says what it is told to, and what people do there."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from llmsuite.base.web.local import LocalHandler, LocalServer
from llmsuite.serving.page import chat_page
from tests.support.browser import view, waiting

MARKDOWN = """Here is **how**, with `x = 1`:

```python
def double(x):  # twice
    return 2 * x
```

| a | b |
|---|---|
| 1 | 2 |

<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>
[a link](javascript:document.title='owned') and [another](https://example.com) ![picture](https://example.com/x.png)
<form action="https://example.com"><input name="password"></form><p style="position:fixed" id="send">end</p>
"""


MODELS = ("scripted", "other", "third", "fourth")
QUESTION = "What is a tensor?"
ANSWERS = {
    "scripted": "An array of numbers with any number of **dimensions**:\n\n```python\nx = paddle.zeros([2, 3])\n```\n",
    "other": "An array.\n\n| dimensions | name |\n|---|---|\n| 0 | scalar |\n| 1 | vector |\n| 2 | matrix |\n",
    "third": "A box of numbers;\n`x.shape` tells its sizes.\n",
}


class Scripted(LocalHandler):
    """A chat server of four models that echo, and know the words "markdown", "nothing", "slowly" and "fail"; "other" is
    slow when it is told "apart", and fails when it is told "split"."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        if self.path == "/":
            self.answer(chat_page().html, Content_Security_Policy=chat_page().policy)
        elif self.path == "/healthz":
            self.answer(json.dumps({"status": "ok", "model": "scripted"}), "application/json")
        else:
            known = [*({"id": name} for name in MODELS), {"id": "another name", "root": "scripted"}]
            self.answer(json.dumps({"data": known}), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        said = body["messages"][-1]["content"]
        model = body.get("model", "scripted")
        if said == "fail" or (said, model) == ("split", "other"):
            self.answer(json.dumps({"error": {"message": "max_tokens: at most 64"}}), "application/json", 400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        echo = f"You said: {said}" if model == "scripted" else f"{model} heard: {said}"
        words = {"markdown": MARKDOWN, "nothing": "", "slowly": "word " * 600}.get(said, echo)
        if (said, model) == ("apart", "other"):
            words = "word " * 600
        words = ANSWERS[model] if said == QUESTION else words
        lines = said in ("markdown", QUESTION)
        for part in words.splitlines(keepends=True) if lines else words.split(" "):
            self.event({"choices": [{"delta": {"content": part + ("" if lines else " ")}}]})
            time.sleep(0.02)
        self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        self.event({"choices": [], "usage": {"completion_tokens": len(words.split())}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())


@contextlib.contextmanager
def scripted_page(browser: Any) -> Iterator[Any]:
    """The page in the browser, with nothing kept; `page.asked` is what its server was asked."""
    handler = type("Handler", (Scripted,), {"asked": []})
    server = LocalServer(0, handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    view(browser, 1440, "light")
    browser.get(f"http://127.0.0.1:{server.server_port}/")
    browser.asked = handler.asked
    yield browser
    server.shutdown()
    thread.join()
    server.server_close()


def say(page: Any, text: str) -> None:
    page.find_element("id", "text").send_keys(text + "\n")


def wait(page: Any, done: Any) -> None:
    waiting(page).until(done)


def talk(page: Any, text: str) -> None:
    """Say something and wait for the end of the answer."""
    count = len(page.find_elements("css selector", "[data-done]"))
    say(page, text)
    wait(page, lambda b: len(b.find_elements("css selector", "[data-done]")) == count + 1)


def said(page: Any) -> list[str]:
    return [place.text for place in page.find_elements("css selector", "#turns .said")]


def press(page: Any, name: str, number: int = -1, by: str = "mouse") -> None:
    """Press a button of the conversation; by "keyboard" where the page moves under a mouse, as answers grow in it."""
    button = page.find_elements("xpath", f"//ol[@id='turns']//button[normalize-space()='{name}']")[number]
    button.click() if by == "mouse" else button.send_keys(" ")


def tick(page: Any, *models: str) -> None:
    """Let these models answer, and no others."""
    wait(page, lambda b: b.find_element("id", "models").is_displayed())
    if page.find_element("id", "models").get_attribute("open") is None:
        page.find_element("css selector", "#models summary").click()
    boxes = {name: page.find_element("css selector", f"#which input[value={name}]") for name in MODELS}
    for wanted in (True, False):  # one of them is always ticked
        for name, box in boxes.items():
            if (name in models) == wanted != box.is_selected():
                box.click()
    assert [name for name, box in boxes.items() if box.is_selected()] == list(models)


def columns(page: Any) -> list[tuple[str, str]]:
    """Who says what in answer to the last message."""
    last = page.find_elements("css selector", ".answers")[-1]
    found = last.find_elements("css selector", ".assistant")
    return [tuple(one.find_element("css selector", each).text for each in ("h2", ".said")) for one in found]
