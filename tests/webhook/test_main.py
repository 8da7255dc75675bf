"""Errors of the command line before the webhook serves."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from cardwise.runtime import logs
from webhook.__main__ import main


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    """The kubeconfig of an API server that need not be reachable."""
    path = tmp_path / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_external_certificates_without_a_ca_error_names_the_file(
    tmp_path: Path, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # the setting affects the whole process
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).write_bytes(b"of cert-manager")
    done = CliRunner().invoke(main, [f"--kubeconfig={kubeconfig}", f"--tls-dir={tmp_path}"])
    assert done.exit_code == 1
    assert f"{tmp_path}/ca.crt: not a readable CA" in done.output
    assert "write the CA that signed tls.crt there" in done.output
    assert "Traceback" not in done.output


def test_nvidia_gpu_setting_has_two_values() -> None:
    text = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    assert "--nvidia-gpu [leave|take]" in text
    done = CliRunner().invoke(main, ["--nvidia-gpu=both"])
    assert done.exit_code == 2
    assert "'both' is not one of 'leave', 'take'" in done.output


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--isolation=on", "'on' is not one of 'none', 'advisory', 'mps'"),
        ("--share-agent=yes", "'yes' is not one of 'always', 'mps', 'never'"),
        ("--share-agent-user=-1", "-1 is not in the range x>=0"),
    ],
)
def test_invalid_mps_and_agent_settings_error_names_the_option(flag: str, says: str) -> None:
    done = CliRunner().invoke(main, [flag])
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())
    assert flag.partition("=")[0] in done.output


def test_the_defaults_are_those_of_the_chart() -> None:
    chart = yaml.safe_load((Path(__file__).parents[2] / "helm/cardwise/values.yaml").read_text())["webhook"]
    text = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    for name, default in (("isolation", chart["isolation"]), ("share-agent", chart["shareAgent"])):
        (option,) = [parameter for parameter in main.params if f"--{name}" in parameter.opts]
        assert option.default == default
    assert f" default: {chart['shareAgentUser']}" in text
    assert chart["shareAgentImage"] == ""


def test_unreadable_ca_error_names_the_option(
    tmp_path: Path, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    (tmp_path / "ca.crt").write_text("no PEM")
    done = CliRunner().invoke(main, [f"--kubeconfig={kubeconfig}", f"--client-ca={tmp_path / 'ca.crt'}"])
    assert done.exit_code == 1
    assert "check --client-ca" in done.output
