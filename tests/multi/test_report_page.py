"""The page of a run in a browser: as a file, and served while the run goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite.observe.report import write_report
from llmsuite.observe.runs import read_run
from tests.multi.conftest import Runner
from tests.unit.observe.run_folder import PIPELINE, make_run, record
from tests.unit.observe.test_report import CHARTS

pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")), reason="needs chromium-driver"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    quiet = ("no-first-run", "disable-background-networking", "disable-component-update", "disable-sync")
    profile = f"user-data-dir={tmp_path_factory.mktemp('profile')}"
    for word in ("headless", "no-sandbox", "disable-gpu", *quiet, "window-size=1300,1400", profile):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def _severe(browser: Any) -> list[str]:
    """Errors, but for the icon that browsers ask every server for."""
    entries = browser.get_log("browser")
    return [e["message"] for e in entries if e["level"] == "SEVERE" and "favicon" not in e["message"]]


def _screenshot(browser: Any, name: str, tmp_path: Path) -> None:
    place = Path(os.environ.get("LLMSUITE_SCREENSHOTS", str(tmp_path)))
    place.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(place / name))
    assert (place / name).stat().st_size > 20000


def test_the_report_of_two_runs(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    first = make_run(tmp_path / "one", sections=PIPELINE, global_batch_size=8)
    runs = [first, make_run(tmp_path / "two", num_steps=8, learning_rate=0.5)]
    page = write_report([read_run(path) for path in runs])[0]
    browser.get(page.as_uri())
    assert browser.title == "one"
    drawn = {figure.get_attribute("id"): figure for figure in browser.find_elements(By.TAG_NAME, "figure")}
    assert list(drawn) == [*CHARTS, "schedule"]
    for figure in drawn.values():
        size = figure.find_element(By.TAG_NAME, "svg").size
        assert size["width"] > 300
        assert size["height"] > 150
    words = [text.get_property("textContent") for text in drawn["loss"].find_elements(By.TAG_NAME, "text")]
    assert {"Loss", "step", "one train", "one eval", "two train", "two eval"} <= {word.strip() for word in words}
    words = [text.get_property("textContent") for text in drawn["schedule"].find_elements(By.TAG_NAME, "text")]
    assert "pipeline stage" in [word.strip() for word in words]
    assert len(drawn["schedule"].find_elements(By.CSS_SELECTOR, "svg path[d]")) > 30
    cells = [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "td")]
    assert "train.learning_rate" in cells
    assert _severe(browser) == []
    _screenshot(browser, "report.png", tmp_path)


def test_a_run_that_goes_on_is_watched(browser: Any, runner: Runner, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    path = make_run(tmp_path / "live", end=None)
    process = runner.start("watch", str(path), "--port=0")
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", said)
        assert address, said
        browser.get(address[0])
        summary = lambda b: b.find_element(By.ID, "summary").get_property("textContent")  # noqa: E731
        wait = WebDriverWait(browser, 60)
        wait.until(lambda b: "last step5" in summary(b))
        assert "statusrunning" in summary(browser)
        before = browser.find_element(By.CSS_SELECTOR, "#loss svg").get_attribute("outerHTML")
        with open(path / "metrics.jsonl", "a") as file:
            file.write("".join(json.dumps(record(step, 0.1)) + "\n" for step in range(6, 40)))
        wait.until(lambda b: "last step39" in summary(b))
        assert browser.find_element(By.CSS_SELECTOR, "#loss svg").get_attribute("outerHTML") != before
        assert _severe(browser) == []
        _screenshot(browser, "watch.png", tmp_path)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
        wait.until(lambda b: b.find_element(By.ID, "lost").is_displayed())
    finally:
        process.kill()
        process.wait()
