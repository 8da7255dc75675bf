"""`cardwise web` in a real browser, on the real API server: it shows what `kubectl` shows."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
from selenium.webdriver import Chrome

from tests.cluster.processes import PATIENCE
from tests.integration.sharing import Space, workload
from tests.web import browser

pytestmark = [pytest.mark.cluster("sim"), pytest.mark.in_order]

ADDRESS = "Cardwise is at "
MARKUP = "<img src=x onerror=document.title='attacked'>"


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    with browser.chromium() as chrome:
        yield chrome


@contextmanager
def page(space: Space, environment: Mapping[str, str] = {}) -> Iterator[str]:
    """The address of `cardwise web`, which Ctrl-C ends."""
    variables = os.environ | space.cluster.environment() | environment
    command = ["cardwise", "web", "--no-browser"]
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as served:
        assert served.stdout is not None
        line = served.stdout.readline()
        assert line.startswith(ADDRESS), line + served.stdout.read()
        try:
            yield line.removeprefix(ADDRESS).split()[0]
        finally:
            served.send_signal(signal.SIGINT)
            rest = served.stdout.read()
    assert (served.returncode, rest) == (0, "")


def shows(chrome: Chrome, condition: Callable[[str], bool], event: str) -> str:
    """The page's text, once it is so without a reload."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        text = str(chrome.execute_script("return document.getElementById('parts').innerText"))
        if condition(text):
            return text
        time.sleep(0.2)
    raise AssertionError(f"the page does not show that {event}:\n{text}")


def test_pods_come_wait_and_go_on_the_open_page(chrome, space):
    (node,) = space.nodes()
    with page(space) as address:
        chrome.get(f"{address}?name={node}")
        chrome.execute_script("window.opened = true")
        space.create(workload("notebook", gpu_mem=2000, annotations={"note": MARKUP}))
        assert space.placed("notebook")[0] == node
        text = shows(chrome, lambda text: f"{space.name}/notebook" in text, "the pod has come")
        assert "2 000 MiB" in text.replace("\N{NARROW NO-BREAK SPACE}", " ")
        space.create(workload("huge", gpu_mem=16000, node="nowhere"))
        space.wait(lambda: "conditions" in space.get("huge")["status"], "kube-scheduler has looked at it")
        space.delete("notebook", grace=0)
        shows(chrome, lambda text: f"{space.name}/notebook" not in text, "the pod has gone")
        assert chrome.execute_script("return window.opened"), "no reload"

        chrome.get(f"{address}waiting?namespace={space.name}")
        shows(chrome, lambda text: f"{space.name}/huge" in text, "the pod waits")
        chrome.execute_script("document.querySelector('details').open = true")
        text = shows(chrome, lambda text: "requests 16000 MiB" in text, "why it waits")
        chrome.get(f"{address}pod?namespace={space.name}&name=huge")
        shows(chrome, lambda text: "FailedScheduling" in text and "Created" in text, "its life")
        assert chrome.title == "Pod · Cardwise"
        assert browser.complaints(chrome) == []


def test_who_has_edit_in_a_namespace_sees_its_pods_and_no_others(chrome, space, tmp_path):
    space.nodes()
    space.create(workload("mine", gpu_mem=2000))
    space.placed("mine")
    kubeconfig = space.editor("ann", tmp_path)
    with page(space, {"KUBECONFIG": str(kubeconfig)}) as address:
        chrome.get(address)
        text = chrome.find_element("tag name", "main").text
        assert "you may not read" in text or "GPUs are not shown" in text
        chrome.get(f"{address}pod?namespace=kube-system&name=x")
        assert "Not permitted" in chrome.find_element("tag name", "main").text
        chrome.get(f"{address}pod?namespace={space.name}&name=mine")
        shows(chrome, lambda text: f"{space.name}/mine" in text, "the own pod")
