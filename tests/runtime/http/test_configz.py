import http.client
import json
from pathlib import Path
from typing import Any

import click
import pytest

import deviceplugin.__main__ as deviceplugin_part
import extender.__main__ as extender_part
import mps.__main__ as mps_part
import webhook.__main__ as webhook_part
from cardwise.runtime.http import configz
from cardwise.runtime.http.health import HealthServer
from cardwise.runtime.settings import HostPort

COMMANDS = {
    "webhook": webhook_part.main,
    "extender": extender_part.main,
    "deviceplugin": deviceplugin_part.main,
    "mps": mps_part.main,
}


def option_report(*arguments: str, environment: dict[str, str] | None = None) -> Any:
    @click.command(context_settings={"auto_envvar_prefix": "CARDWISE"})
    @click.option("--rate", type=float, default=1.5)
    @click.option("--where", "place", type=click.Path(path_type=Path), default=None)
    @click.option("--api-token", default="none")
    @click.option("--pin", hide_input=True, default="none")
    @click.option("--mirror", multiple=True)
    def command(**_: object) -> None:
        """Nothing."""

    runner = pytest.MonkeyPatch()
    for name, text in (environment or {}).items():
        runner.setenv(name, text)
    try:
        context = command.make_context("part", list(arguments))
    finally:
        runner.undo()
    return json.loads(configz.encode_settings(configz.describe_options(context)))


def test_each_setting_has_a_value_and_a_source():
    report = option_report("--where", "/run/x", environment={"CARDWISE_RATE": "2"})
    assert report["--rate"] == {"value": 2.0, "source": "environment"}
    assert report["--where"] == {"value": "/run/x", "source": "flag"}
    assert report["--mirror"] == {"value": [], "source": "default"}
    assert list(report) == sorted(report)


def test_secrets_are_never_shown():
    report = option_report("--api-token", "hush", "--pin", "1234", "--mirror", "https://me:hush@example.com/path")
    assert "hush" not in json.dumps(report)
    assert "1234" not in json.dumps(report)
    assert report["--api-token"]["value"] == configz.REDACTED
    assert report["--mirror"]["value"] == [f"https://{configz.REDACTED}@example.com/path"]


@pytest.mark.parametrize("part", COMMANDS)
def test_options_of_every_part_can_be_shown(part):
    needed = {"deviceplugin": ["--node-name=n1"], "mps": ["--node-name=n1"]}.get(part, [])
    context = COMMANDS[part].make_context(part, needed)
    report = json.loads(configz.encode_settings(configz.describe_options(context)))
    options = {max(parameter.opts, key=len) for parameter in COMMANDS[part].params if parameter.expose_value}
    assert report.keys() >= options
    assert report["--metrics-bind"] == {"value": ":9400", "source": "default"}
    assert "object at 0x" not in json.dumps(report), "a value that nobody can read"


def test_configz_is_served_next_to_the_metrics():
    server = HealthServer(HostPort("127.0.0.1", 0), config={"--rate": {"value": 2, "source": "flag"}})
    server.start()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/configz")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
        assert json.loads(answer.read()) == {"--rate": {"value": 2, "source": "flag"}}
        connection.close()
    finally:
        server.stop()
