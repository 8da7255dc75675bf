"""A headless Chromium from Debian, driven by Selenium."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

DESKTOP, PHONE = (1280, 900), (390, 844)


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """Skips the test where Chromium is not installed."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    options = Options()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


def appear(chrome: webdriver.Chrome, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> None:
    """The window's size, and the person's colour scheme."""
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def first_paint(chrome: webdriver.Chrome) -> float:
    """Milliseconds from the navigation to the first paint with content."""
    script = "return performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)[0] ?? null"
    milliseconds: float = chrome.execute_script(script)
    return milliseconds


def update_times(chrome: webdriver.Chrome) -> list[float]:
    """Milliseconds of script for each update of the page."""
    durations: list[float] = chrome.execute_script("return performance.getEntriesByName('update').map(e => e.duration)")
    return durations


def complaints(chrome: webdriver.Chrome) -> list[Any]:
    """What Chromium wrote to its console: errors of scripts, and what the Content-Security-Policy has stopped."""
    return [entry["message"] for entry in chrome.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def accessibility(chrome: webdriver.Chrome, axe: Path) -> list[str]:
    """What axe-core finds: the impact, the rule, and where."""
    # Scripts of the page itself must come from its server; the driver's may not.
    chrome.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    chrome.execute_script(axe.read_text())
    violations = chrome.execute_async_script("const done = arguments[0]; axe.run().then(r => done(r.violations))")
    return [f"{v['impact']} {v['id']}: {json.dumps([n['target'] for n in v['nodes']][:5])}" for v in violations]
