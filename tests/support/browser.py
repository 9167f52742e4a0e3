"""Chromium without a screen: pages at the widths of a phone and of a desk, light and dark, and what is wrong there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AXE = Path(__file__).resolve().parents[1] / "vendored" / "axe.js"
IS_THERE = bool(shutil.which("chromium") and shutil.which("chromedriver"))
REASON = "needs chromium-driver"
VIEWS = [(width, scheme) for width in (390, 1440) for scheme in ("light", "dark")]
"""(width in pixels, colours) of the pages."""
_QUIET = ("no-first-run", "disable-background-networking", "disable-component-update", "disable-sync", "disable-quic")


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """A browser with a new profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    words = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", *_QUIET, f"user-data-dir={profile}")
    for word in (*words, "window-size=1440,1000"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def view(browser: Any, width: int, scheme: str) -> None:
    """Show pages in a width and colours."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def faults(browser: Any) -> list[str]:
    """What is wrong with the page as it is shown: cut off, hard to read or to use by axe, errors in the console."""
    wide = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    found = [f"{wide[0]} pixels wide in a window of {wide[1]}"] if wide[0] > wide[1] else []
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    said = browser.execute_async_script("axe.run().then(arguments[0], (error) => arguments[0]({error: String(error)}))")
    assert "error" not in said, said["error"]
    assert said["passes"], "axe has looked at nothing"
    for rule in said["violations"]:
        if rule["impact"] in ("serious", "critical"):
            nodes = [f"{node['target']}: {node['failureSummary']}" for node in rule["nodes"][:3]]
            found.append(f"{rule['id']}: {nodes}")
    return found + severe(browser)


def severe(browser: Any, allowed: str = "favicon") -> list[str]:
    """Errors of the console since it was asked last."""
    entries = browser.get_log("browser")
    return [e["message"] for e in entries if e["level"] == "SEVERE" and allowed not in e["message"]]


def waiting(browser: Any, seconds: int = 60) -> Any:
    """Waits until something is so. A page draws parts of it anew: what was found may be gone when it is read."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds, ignored_exceptions=[StaleElementReferenceException])


def screenshot(browser: Any, name: str, tmp_path: Path) -> None:
    """Keep what is seen, in LLMSUITE_SCREENSHOTS if that names a directory."""
    place = Path(os.environ.get("LLMSUITE_SCREENSHOTS", str(tmp_path)))
    place.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(place / name))
    assert (place / name).stat().st_size > 5000
