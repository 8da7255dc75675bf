"""Who gets in: only this machine, only with the token, only by the address that was printed."""

import hashlib
import http.client
import re
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from flask import Flask

import cardwise.web
from cardwise.core.api import names
from cardwise.web import app, command, server
from cardwise.web.server import PageServer
from cardwise.web.snapshot import ClusterReader
from tests.cli.clusters import lists, run

STATIC = Path(cardwise.web.__file__).parent / "static"
# dist/idiomorph.min.js of idiomorph 0.8.0, https://registry.npmjs.org/idiomorph/-/idiomorph-0.8.0.tgz
IDIOMORPH = "4cbd535caf7663a51eda9bce6595371c384fc430d54b8d414e29a61167f19f96"
ADDRESS = re.compile(r"Cardwise is at (http://127\.0\.0\.1:\d+/[-\w]{43}/) \(Ctrl-C ends it\)")


@pytest.fixture
def page_server() -> Iterator[PageServer]:
    reader = ClusterReader(lists().kube, names.NAMESPACE)
    with server.open_server(app.create_app(reader)) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def send(running: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def token_path(running: PageServer) -> str:
    return "/" + running.address.split("/", 3)[3]


def test_the_address_opens_the_page_and_its_files(page_server):
    path = token_path(page_server)
    status, text = send(page_server, path)
    assert (status, "<title>GPUs" in text) == (200, True)
    for file in ("style.css", "page.js", "idiomorph.min.js", "icon.svg"):
        assert send(page_server, f"{path}static/{file}")[0] == 200


def test_without_the_token_there_is_nothing(page_server):
    for path in ("/", "/nodes", "/static/page.js", "/" + "x" * 43 + "/", "/%ff/", token_path(page_server)[:-2] + "/"):
        status, text = send(page_server, path)
        assert status == 404, path
        assert "n1" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", ""])
def test_another_name_for_this_address_gets_nothing(page_server, host):
    assert send(page_server, token_path(page_server), Host=host)[0] == 400


def test_a_request_of_another_web_page_gets_nothing(page_server):
    assert send(page_server, token_path(page_server), Origin="http://evil.example")[0] == 403
    own = page_server.address.rsplit("/", 2)[0]
    assert send(page_server, token_path(page_server), Origin=own)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reads_are_taken(page_server, method):
    assert send(page_server, token_path(page_server), method)[0] == 405


def test_it_listens_on_the_loopback_address_with_a_new_token_each_time(page_server):
    assert page_server.server_address[0] == "127.0.0.1"
    with server.open_server(Flask("other")) as other:
        assert other.address.split("/")[3] != page_server.address.split("/")[3]
        assert len(other.address.split("/")[3]) >= 43


def test_connections_beyond_the_limit_are_closed(page_server, monkeypatch):
    idle = [http.client.HTTPConnection("127.0.0.1", page_server.port) for _ in range(server.MAX_CONNECTIONS)]
    for connection in idle:
        connection.connect()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        send(page_server, token_path(page_server))
    for connection in idle:
        connection.close()


def test_the_library_is_the_file_that_its_package_has():
    assert hashlib.sha256((STATIC / "idiomorph.min.js").read_bytes()).hexdigest() == IDIOMORPH
    assert "Zero-Clause BSD" in (STATIC / "idiomorph.LICENSE").read_text()


def test_the_command_prints_the_address_and_ends_cleanly(monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(command.webbrowser, "open", opened.append)

    monkeypatch.setattr(server.PageServer, "serve_forever", lambda self: None)  # Werkzeug returns at Ctrl-C
    outcome = run(monkeypatch, lists(), "web")
    assert outcome.exit_code == 0
    assert ADDRESS.search(outcome.output)
    assert len(opened) == 1
    opened.clear()
    run(monkeypatch, lists(), "web", "--no-browser")
    assert not opened


@pytest.mark.parametrize("end", [None, SystemExit(143), KeyboardInterrupt()])
def test_the_browsers_command_line_does_not_have_the_token(monkeypatch, end):
    """Every user of the machine may read it."""
    files: list[tuple[Path, int, str]] = []

    def open_in_browser(url: str) -> None:
        file = Path(unquote(urlsplit(url).path))
        assert urlsplit(url).scheme == "file"
        files.append((file, stat.S_IMODE(file.stat().st_mode), file.read_text()))

    def serve_forever(running: PageServer) -> None:
        assert files[0][0].exists(), "the browser may be slow"
        if end is not None:
            raise end

    monkeypatch.setattr(command.webbrowser, "open", open_in_browser)
    monkeypatch.setattr(server.PageServer, "serve_forever", serve_forever)
    outcome = run(monkeypatch, lists(), "web")
    ((file, mode, page),) = files
    address = ADDRESS.search(outcome.output)[1]
    assert mode == 0o600
    assert f'<meta http-equiv="refresh" content="0; url={address}">' in page
    assert not file.exists()


def test_without_a_place_for_a_file_the_address_is_still_printed(monkeypatch):
    monkeypatch.setattr(server.PageServer, "serve_forever", lambda self: None)
    monkeypatch.setattr(tempfile, "tempdir", "/proc/no-such-folder")
    outcome = run(monkeypatch, lists(), "web")
    assert (outcome.exit_code, bool(ADDRESS.search(outcome.output))) == (0, True)


def test_without_flask_the_command_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flask", None)
    for module in ("app", "server"):
        monkeypatch.delitem(sys.modules, f"cardwise.web.{module}")
        monkeypatch.delattr(cardwise.web, module)
    outcome = run(monkeypatch, lists(), "web")
    assert outcome.exit_code == 1
    assert "cardwise[web]" in outcome.output


def test_a_port_in_use_is_an_error_that_says_so(monkeypatch, page_server):
    outcome = run(monkeypatch, lists(), "web", "--no-browser", "--port", str(page_server.port))
    assert f"port {page_server.port} of 127.0.0.1 cannot be used" in outcome.output
