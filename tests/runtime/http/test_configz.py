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


def told(*arguments: str, environment: dict[str, str] | None = None, decided: dict[str, object] | None = None) -> Any:
    @click.command(context_settings={"auto_envvar_prefix": "CARDWISE"})
    @click.option("--rate", type=float, default=1.5)
    @click.option("--where", "place", type=click.Path(path_type=Path), default=None)
    @click.option("--api-token", default="none")
    @click.option("--pin", hide_input=True, default="none")
    @click.option("--mirror", multiple=True)
    def command(**_: object) -> None:
        """Nothing."""

    runner = pytest.MonkeyPatch()
    for name, value in (environment or {}).items():
        runner.setenv(name, value)
    try:
        context = command.make_context("part", list(arguments))
    finally:
        runner.undo()
    return json.loads(configz.encode(configz.describe_options(context, decided)))


def test_each_setting_says_its_value_and_where_it_is_from():
    found = told("--where", "/run/x", environment={"CARDWISE_RATE": "2"})
    assert found["--rate"] == {"value": 2.0, "source": "environment"}
    assert found["--where"] == {"value": "/run/x", "source": "flag"}
    assert found["--mirror"] == {"value": [], "source": "default"}
    assert list(found) == sorted(found)


def test_what_the_part_has_decided_goes_before_what_was_left_out():
    assert told(decided={"place": Path("/tmp/y"), "stranger": 1})["--where"]["value"] == "/tmp/y"


def test_secrets_are_never_told():
    found = told("--api-token", "hush", "--pin", "1234", "--mirror", "https://me:hush@example.com/path")
    assert "hush" not in json.dumps(found)
    assert "1234" not in json.dumps(found)
    assert found["--api-token"]["value"] == configz.REDACTED
    assert found["--mirror"]["value"] == [f"https://{configz.REDACTED}@example.com/path"]


@pytest.mark.parametrize("part", COMMANDS)
def test_all_options_of_every_part_can_be_told(part, tmp_path):
    program = tmp_path / "control"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    needed = {"deviceplugin": ["--node-name=n1"], "mps": ["--node-name=n1", f"--control={program}"]}.get(part, [])
    context = COMMANDS[part].make_context(part, needed)
    found = json.loads(configz.encode(configz.describe_options(context)))
    options = {max(one.opts, key=len) for one in COMMANDS[part].params if one.expose_value}
    assert found.keys() >= options
    assert found["--metrics-bind"] == {"value": ":9400", "source": "default"}
    assert "object at 0x" not in json.dumps(found), "a value that nobody can read"


def test_it_is_served_beside_the_metrics():
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
