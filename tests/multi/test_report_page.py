"""The page of a run in a browser: as a file, and served while the run goes on."""

from __future__ import annotations

import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from llmsuite.observe.report import write_report
from llmsuite.observe.runs import read_run
from tests.multi.conftest import Runner
from tests.support.browser import IS_THERE, REASON, VIEWS, faults, screenshot, severe, view, waiting
from tests.support.report_charts import CHARTS
from tests.support.run_folder import PIPELINE, make_preferences, make_run, record

pytestmark = pytest.mark.skipif(not IS_THERE, reason=REASON)


def _legend(browser: Any, chart: str) -> dict[str, str]:
    """The curves of a chart and the values that stand beside their names."""
    found = {}
    for button in browser.find_elements("css selector", f"#{chart} .legend button"):
        value = button.find_element("css selector", "b").text
        found[button.text.removesuffix(value).strip()] = value
    return found


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_a_report_at_every_width_and_in_both_colours(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    run = make_preferences(tmp_path / "preferences", num_steps=200)
    path = write_report([read_run(run)])[0]
    view(browser, width, scheme)
    browser.get(path.as_uri())
    assert _legend(browser, "accuracy") == {"train": "0.75", "eval": "0.875"}
    assert {"margin", "pairs", "logps", "grad_norm"} <= {
        figure.get_attribute("id") for figure in browser.find_elements("tag name", "figure")
    }
    for summary in browser.find_elements("css selector", "details:not([open]) > summary"):
        summary.click()
    assert faults(browser) == []
    browser.execute_script("scrollTo(0, 0)")
    screenshot(browser, f"report-{width}-{scheme}.png", tmp_path)


def test_two_runs_and_their_pipeline(browser: Any, tmp_path: Path) -> None:
    first = make_run(tmp_path / "one", sections=PIPELINE, global_batch_size=8)
    runs = [first, make_run(tmp_path / "two", num_steps=8, learning_rate=0.5)]
    page = write_report([read_run(path) for path in runs])[0]
    view(browser, 1440, "light")
    browser.get(page.as_uri())
    assert browser.title == "one and two"
    drawn = {figure.get_attribute("id"): figure for figure in browser.find_elements("tag name", "figure")}
    assert list(drawn) == CHARTS
    for figure in drawn.values():
        size = figure.find_element("tag name", "canvas").size
        assert size["width"] > 300
        assert size["height"] > 150
    assert _legend(browser, "loss") == {
        "one train": "0.6", "one eval": "0.75", "two train": "0.375", "two eval": "0.75"
    }  # fmt: skip
    assert len(browser.find_elements("css selector", "#passes rect")) == 2 * 4 * 2 * 2
    cells = [cell.text for cell in browser.find_elements("css selector", "th")]
    assert "train.learning_rate" in cells
    assert severe(browser) == []
    screenshot(browser, "report-of-two.png", tmp_path)


def test_charts_tell_values_hide_curves_and_smooth(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    path = make_run(tmp_path / "a", num_steps=40)
    lines = [json.dumps(record(step, 2.0 + (-1) ** step)) + "\n" for step in range(41, 101)]
    with open(path / "metrics.jsonl", "a") as file:
        file.write("".join(lines))
    view(browser, 1440, "light")
    browser.get(write_report([read_run(path)])[0].as_uri())
    plot = browser.find_element("css selector", "#loss .plot")
    assert _legend(browser, "loss")["train"] == "3"
    plot.send_keys(Keys.HOME)
    assert browser.find_element("css selector", "#loss .at").text == "step 1"
    plot.send_keys(Keys.ARROW_RIGHT)
    assert _legend(browser, "loss")["train"] == "1.5"  # 3 / step
    assert "step 2: train 1.5" in plot.get_attribute("aria-label")
    ActionChains(browser).move_to_element_with_offset(plot, 100, 0).perform()
    assert browser.find_element("css selector", "#grad_norm .at").text != "step 2", "the charts show the same step"
    # a part, and the whole again
    ActionChains(browser).move_to_element(plot).click_and_hold().move_by_offset(60, 0).release().perform()
    whole = browser.find_element("css selector", "#loss figcaption button")
    limits = "return (([s]) => [s.scales.x.min, s.scales.x.max])([Charts.shown.get('loss').chart])"
    part = browser.execute_script(limits)
    assert whole.is_displayed()
    assert part[1] - part[0] < 50
    whole.click()
    assert browser.execute_script(limits) == [1, 100]
    log = browser.find_element("css selector", "#loss figcaption button:last-child")
    log.click()
    assert log.get_attribute("aria-pressed") == "true"
    assert browser.execute_script("return Charts.shown.get('loss').chart.scales.y.distr") == 3
    browser.find_element("css selector", "#loss .legend button").click()
    assert browser.execute_script("return Charts.shown.get('loss').chart.series[1].show") is False
    browser.find_element("css selector", "#loss .legend button").click()
    browser.execute_script(
        "const s = document.getElementById('smoothing'); s.value = 0.95; s.dispatchEvent(new Event('input'))"
    )
    table = browser.execute_script("return Charts.shown.get('loss').chart.data.map((d) => d.at(-1))")
    assert table[1] == 3.0
    assert table[3] == pytest.approx(2.0, abs=0.1)
    assert severe(browser) == []


def test_what_it_is_told_is_text(browser: Any, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    path = make_preferences(tmp_path / "a", num_steps=3, text=evil)
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "loss": 1.0, f"x{evil}": 1.0}) + "\n")
    browser.get(write_report([read_run(path)])[0].as_uri())
    assert evil in browser.find_element("css selector", ".completion pre").get_property("textContent")
    assert browser.title == "a"
    assert browser.find_elements("css selector", "img") == []
    assert severe(browser) == []


def test_a_run_that_goes_on_is_watched(browser: Any, runner: Runner, tmp_path: Path) -> None:

    path = make_run(tmp_path / "live", end=None)
    process = runner.start("watch", str(path), "--port=0")
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", said)
        assert address, said
        view(browser, 1440, "light")
        browser.get(address[0])

        def steps(browser: Any) -> str:
            found = browser.find_elements("css selector", "[data-card=Steps] .value")
            return found[0].text if found else ""

        wait = waiting(browser)
        wait.until(lambda b: steps(b) == "5")
        assert browser.find_element("css selector", "[data-card=Status] .value").text == "running"
        canvas = browser.find_element("css selector", "#loss canvas")
        browser.find_element("css selector", "[data-key=recipe] summary").click()
        numbers = random.Random(0)
        with open(path / "metrics.jsonl", "a") as file:
            file.write("".join(json.dumps(record(step, numbers.random())) + "\n" for step in range(6, 40)))
        wait.until(lambda b: steps(b) == "39")
        assert browser.find_element("css selector", "#loss canvas") == canvas, "it is drawn anew"
        assert browser.find_element("css selector", "[data-key=recipe]").get_attribute("open") == "true"
        assert browser.find_element("css selector", "#loss .at").text == "step 39"
        assert severe(browser) == []
        screenshot(browser, "watch.png", tmp_path)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in out + (err or "")
        wait.until(lambda b: b.find_element("id", "lost").is_displayed())
    finally:
        process.kill()
        process.wait()
