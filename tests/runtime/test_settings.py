import click
import pytest
from click.testing import CliRunner

from cardwise.runtime.settings import (
    CONTEXT_SETTINGS,
    DURATION,
    HOST_PORT,
    CommonSettings,
    HostPort,
    common_options,
    parse_duration,
)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--bind", type=HOST_PORT, default="0.0.0.0:8443")
@click.option("--every", type=DURATION, default="12h")
@common_options
def part(common: CommonSettings, bind: HostPort, every: float) -> None:
    click.echo(f"{common.log_level} {common.metrics_bind} {common.kubeconfig} {bind} {every}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("1h30m", 5400), ("1.5m", 90), ("250ms", 0.25), ("2d", 172800), ("0", 0)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "5 minutes", "-5s", "5s,", "1h-30m"])
def test_bad_durations_say_what_to_write(text):
    with pytest.raises(ValueError, match="30s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("0.0.0.0:8443", HostPort("0.0.0.0", 8443)),
        (":9400", HostPort("", 9400)),
        ("[::1]:80", HostPort("::1", 80)),
        ("localhost:0", HostPort("localhost", 0)),
    ],
)
def test_addresses_round_trip(text, parsed):
    assert HostPort.parse(text) == parsed
    assert str(parsed) == text


@pytest.mark.parametrize("text", ["", "8443", "host:", "host:http", "host:70000", "::1:80"])
def test_bad_addresses_say_what_to_write(text):
    with pytest.raises(ValueError, match="8443"):
        HostPort.parse(text)


def test_defaults_environment_and_command_line(tmp_path):
    config = tmp_path / "config"
    config.touch()
    run = CliRunner().invoke
    assert run(part, []).output == "info :9400 None 0.0.0.0:8443 43200.0\n"
    env = {"CARDWISE_LOG_LEVEL": "debug", "CARDWISE_EVERY": "1m", "CARDWISE_KUBECONFIG": str(config)}
    assert run(part, ["--bind", ":1"], env=env).output == f"debug :9400 {config} :1 60.0\n"
    assert run(part, ["--log-level", "error"], env=env).output.startswith("error ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--every", "5"], ["--every", "30s"]),
        (["--metrics-bind", "9400"], ["--metrics-bind", "HOST:PORT"]),
        (["--kubeconfig", "/nowhere"], ["--kubeconfig", "/nowhere"]),
    ],
)
def test_bad_values_name_the_option(args, words):
    completed = CliRunner().invoke(part, args)
    assert completed.exit_code == 2
    for word in words:
        assert word in completed.output


def test_bad_value_in_the_environment_names_the_variable_or_option():
    completed = CliRunner().invoke(part, [], env={"CARDWISE_METRICS_BIND": "x"})
    assert completed.exit_code == 2
    assert "metrics-bind" in completed.output
