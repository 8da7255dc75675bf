"""The command `cardwise web`. Flask is imported when it runs: it is in the extra `cardwise[web]`."""

import html
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import click

from cardwise.cli import console, options, signals

_MISSING_FLASK = "the page needs Flask: pipx install 'cardwise[web]', or pip install 'cardwise[web]'"
_REDIRECT: Final = """\
<!DOCTYPE html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={address}">
<title>Cardwise</title>
<a href="{address}">Cardwise</a>
"""


@click.command()
@options.cluster
@options.cardwise_namespace
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1. Default: a free one.")
@click.option("--no-browser", is_flag=True, help="Print the address, and open no browser.")
def web(cardwise_namespace: str, port: int, no_browser: bool) -> None:
    """Show GPUs, waiting pods, gangs and quotas in the browser, as far as you may read them. Ctrl-C ends it.

    Only this machine can connect, and only with the address that is printed. The page changes nothing.
    """
    try:
        from cardwise.web import app, server, snapshot  # noqa: PLC0415 - see above
    except ModuleNotFoundError as error:
        if error.name not in ("flask", "werkzeug", "jinja2"):
            raise
        raise click.ClickException(_MISSING_FLASK) from error
    client = options.load_client()
    reader = snapshot.ClusterReader(client, cardwise_namespace, options.current_clock())
    reader.latest()  # an error of the first read ends the program, as in any other command
    page_app = app.create_app(reader)
    page_app.test_client().get("/")  # a large cluster takes a second to draw: before the browser asks
    try:
        page_server = server.open_server(page_app, port)
    except OSError as error:
        raise click.ClickException(f"port {port} of 127.0.0.1 cannot be used: {error.strerror}") from error
    console.print_text(f"Cardwise is at {page_server.address} (Ctrl-C ends it)")
    with signals.raise_on_signals(), page_server, ExitStack() as stack:
        if not no_browser:
            with suppress(OSError):  # without a place for a file the printed address must do
                stack.enter_context(_browser_at(page_server.address))
        page_server.serve_forever()


@contextmanager
def _browser_at(address: str) -> Iterator[None]:
    """Open the address in the browser, by a file that exists during the context and that only this user can read.

    Every user of the machine can read the browser's command line, so the token must not be there. Jupyter does so too.
    """
    with tempfile.NamedTemporaryFile("w", prefix="cardwise-", suffix=".html") as file:
        file.write(_REDIRECT.format(address=html.escape(address)))
        file.flush()
        webbrowser.open(Path(file.name).as_uri())
        yield
