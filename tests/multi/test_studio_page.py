"""The studio in a browser: from a recipe to a model that talks."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.support.browser import IS_THERE, REASON, VIEWS, faults, screenshot, severe, view, waiting
from tests.support.paths import ROOT
from tests.support.written_family import write_family

pytestmark = pytest.mark.skipif(not IS_THERE, reason=REASON)


@pytest.fixture(scope="module")
def address(runner: Runner) -> Iterator[str]:
    """Of a studio that ends without a run or a server left."""
    process = runner.start("studio", "--port=0", f"--runs={runner.directory / 'studio'}")
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", process.stdout.readline())
    assert found
    yield found[0]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert "Traceback" not in out
    assert "continues" not in out


def wait(browser: Any, seconds: int, done: Any) -> Any:
    return waiting(browser, seconds).until(done)


def fault(browser: Any) -> str:
    """What the page says went wrong."""
    text: str = browser.find_element("id", "fault").text
    return text


def choose(browser: Any, address: str) -> None:
    """The recipe of a tiny LoRA."""
    browser.get(address)
    wait(browser, 60, lambda b: len(b.find_elements("css selector", "#recipe option")) > 50)
    browser.find_element("id", "smoke").click()
    browser.find_element("id", "all-keys").click()
    browser.find_element("id", "find").send_keys("digits-lora")
    wait(browser, 60, lambda b: b.find_element("id", "verdict").text.startswith("Recipe is valid: lora"))


def change(browser: Any, key: str, value: str) -> None:
    field = browser.find_element("id", f"key-{key}")
    field.clear()
    field.send_keys(value)


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_it_can_be_read_and_used_everywhere(
    browser: Any, address: str, tmp_path: Path, width: int, scheme: str
) -> None:
    view(browser, width, scheme)
    choose(browser, address)
    change(browser, "train.learning_rate", "fast")
    wait(browser, 60, lambda b: "train.learning_rate: expected number > 0" in b.find_element("id", "verdict").text)
    assert not browser.find_element("id", "start").is_enabled()
    assert faults(browser) == []
    screenshot(browser, f"studio-{width}-{scheme}.png", tmp_path)


def test_a_click_maps_the_columns_of_own_data(browser: Any, address: str, tmp_path: Path) -> None:
    rows = tmp_path / "mine.csv"
    rows.write_text("Question,Our Answer\nWhy?,Because.\n")
    view(browser, 1440, "light")
    choose(browser, address)
    change(browser, "data.train", str(rows))
    wait(browser, 60, lambda b: "fit no format with conversation rows" in b.find_element("id", "verdict").text)
    assert browser.find_element("id", "verdict").get_attribute("class") == "bad"
    assert not browser.find_element("id", "start").is_enabled()
    (button,) = browser.find_elements("css selector", "#remedies button")
    assert button.text == 'Fill in data.columns: {"instruction":"Question","output":"Our Answer"}'
    button.click()
    wait(browser, 60, lambda b: b.find_element("id", "verdict").text.startswith("Recipe is valid: lora"))
    assert browser.find_elements("css selector", "#remedies button") == []


def test_from_a_recipe_to_a_model_that_talks(browser: Any, address: str, runner: Runner, tmp_path: Path) -> None:
    view(browser, 1440, "light")
    choose(browser, address)
    browser.find_element("id", "find-key").send_keys("max_steps")
    visible = [key for key in browser.find_elements("css selector", ".key") if key.is_displayed()]
    assert "train.max_steps" in [key.get_attribute("data-key") for key in visible]
    assert len(visible) < 10
    browser.find_element("id", "find-key").clear()
    browser.find_element("id", "smoke").click()  # adapters of a model that lies nowhere could not be used
    wait(
        browser, 60, lambda b: b.find_element("id", "key-model.weights").get_property("value") == "runs/digits-pretrain"
    )
    run = str(runner.directory / "studio" / "mine")
    changes = {"model.weights": str(write_family(runner.directory / "base", "llama")), "model.preset": "null",
               "train.max_steps": "3", "train.global_batch_size": "4", "train.micro_batch_size": "4",
               "train.eval_steps": "3", "train.log_steps": "1", "output_dir": run}  # fmt: skip
    for key, value in changes.items():
        change(browser, key, value)
    command = " ".join(["--" + key + "=" + value for key, value in changes.items()])
    wait(browser, 60, lambda b: command in b.find_element("id", "command").text)
    wait(browser, 60, lambda b: b.find_element("id", "plan").is_enabled())
    browser.find_element("id", "plan").click()
    wait(browser, 60, lambda b: "memory of a rank" in b.find_element("id", "planned").text)
    browser.find_element("id", "start").click()
    mine = f"[data-run='{run}']"
    wait(browser, 60, lambda b: b.find_elements("css selector", mine))
    wait(browser, 300, lambda b: b.find_elements("css selector", f"{mine} .good, {mine} .bad"))
    assert "step 3 of 3" in browser.find_element("css selector", mine).text
    watched = browser.find_element("css selector", f"{mine} .watch").get_attribute("href")
    wait(browser, 60, lambda b: b.find_elements("xpath", "//button[.='Talk to it']"))[0].click()
    wait(browser, 300, lambda b: b.find_elements("css selector", f"{mine} .chat") or fault(b))
    assert fault(browser) == ""
    chat = browser.find_element("css selector", f"{mine} .chat").get_attribute("href")
    screenshot(browser, "studio-run.png", tmp_path)
    assert severe(browser) == []
    browser.get(watched)
    wait(browser, 60, lambda b: b.find_elements("css selector", "#loss canvas"))
    assert browser.find_element("css selector", "[data-card=Stage] .value").text == "lora"
    browser.get(chat)
    browser.find_element("id", "text").send_keys("What is 1 plus 1?\n")
    wait(browser, 120, lambda b: b.find_elements("css selector", ".assistant[data-done]"))
    assert re.match(r"\d+ tokens", browser.find_element("css selector", ".note").text)
    assert severe(browser) == []


def test_from_a_file_of_rows_to_a_recipe(browser: Any, address: str, runner: Runner, tmp_path: Path) -> None:
    """The few keys that the recipe sets are shown, and what is trained of a row."""
    rows = tmp_path / "mine.csv"
    rows.write_text("instruction,output\n" + "Why?,Because.\n" * 45)
    model = write_family(runner.directory / "model of a page", "llama")
    view(browser, 1440, "light")
    browser.get(address)
    wait(browser, 60, lambda b: len(b.find_elements("css selector", "#recipe option")) > 50)
    browser.find_element("id", "new-weights").send_keys(str(model))
    browser.find_element("id", "new-data").send_keys(str(rows))
    browser.find_element("id", "make").click()
    wait(browser, 120, lambda b: "45 rows, 45 used" in b.find_element("id", "made").text or fault(b))
    assert fault(browser) == ""
    recipe = Path(browser.find_element("id", "made").text.partition("\n")[0])
    assert recipe.name.startswith("model-of-a-page-sft")
    try:
        wait(browser, 60, lambda b: b.find_element("id", "verdict").text.startswith("Recipe is valid: lora"))
        assert browser.find_element("id", "recipe").get_property("value") == str(recipe)
        visible = [
            key.get_attribute("data-key") for key in browser.find_elements("css selector", ".key") if key.is_displayed()
        ]
        assert {"data.train", "train.learning_rate", "train.num_epochs", "lora.rank"} <= set(visible)
        assert len(visible) < 30
        browser.find_element("id", "explain").click()
        wait(browser, 120, lambda b: b.find_elements("css selector", "#explained .trained") or fault(b))
        lines = browser.find_elements("css selector", "#explained div")
        trained = [line.text for line in lines if line.get_attribute("class") == "trained"]
        assert 0 < len(trained) < len(lines)
        assert all(" assistant " in line for line in trained)
        screenshot(browser, "studio-new.png", tmp_path)
        browser.find_element("id", "own").send_keys("recipes/llama/digits-sft.json\n")
        wait(browser, 60, lambda b: b.find_element("id", "key-stage").get_property("value") == "sft")
        assert severe(browser) == []
    finally:
        (ROOT / recipe).unlink()
