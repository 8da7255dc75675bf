"""Every kubeconfig that cannot be used is one line, which holds no credential."""

import base64
import sys
from pathlib import Path

import pytest
import yaml

from cardwise.cli import main
from cardwise.core.values.decoded import Json

SECRET = "SECRET-abc"
ENCODED = base64.b64encode(SECRET.encode()).decode()
NOBODY = "http://127.0.0.1:1"  # no program listens there
EXEC = {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"}


def kubeconfig(user: Json | None = None, *, context: Json | None = None, **cluster: object) -> Json:
    """One context, cluster and user, with these fields beside or in place of the usual ones."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"} | (context or {})}],
        "clusters": [{"name": "k", "cluster": {"server": NOBODY} | cluster}],
        "users": [{"name": "u", "user": {"token": SECRET} if user is None else user}],
    }


def remove_key(config: Json, key: str) -> Json:
    return {name: field for name, field in config.items() if name != key}


FILES: dict[str, object] = {
    "a token with a line break": kubeconfig({"token": f"{SECRET}\n{SECRET}"}),
    "a token that is not ASCII": kubeconfig({"token": f"{SECRET} \N{EURO SIGN}"}),
    "a token that is a number": kubeconfig({"token": 123}),
    "a password with a line break": kubeconfig({"username": "u", "password": f"{SECRET}\n"}),
    "a tokenFile with a line break": kubeconfig({"tokenFile": "token"}),
    "no tokenFile": kubeconfig({"tokenFile": "nowhere"}),
    "no user": remove_key(kubeconfig(), "users"),
    "no such user": kubeconfig(context={"user": "x"}),
    "no such cluster": kubeconfig(context={"cluster": "x"}),
    "no contexts": remove_key(kubeconfig(), "contexts"),
    "a context that is none": kubeconfig() | {"contexts": ["c"]},
    "users that are no list": kubeconfig() | {"users": {"u": {"token": SECRET}}},
    "no server": kubeconfig(server=None),
    "a server that is no URL": kubeconfig(server="not a url"),
    "a server of another scheme": kubeconfig(server=f"ftp://u:{SECRET}@host"),
    "a server with a port of none": kubeconfig(server="http://127.0.0.1:99999"),
    "a server that is a list": kubeconfig(server=["x"]),
    "a proxy that is none": kubeconfig(**{"proxy-url": "::::"}),
    "a namespace of no name": kubeconfig(context={"namespace": "a/../b"}),
    "a namespace that is a number": kubeconfig(context={"namespace": 7}),
    "a CA that is no base64": kubeconfig(server="https://127.0.0.1:1", **{"certificate-authority-data": "*x*"}),
    "a CA that is none": kubeconfig(server="https://127.0.0.1:1", **{"certificate-authority-data": ENCODED}),
    "a certificate that is none": kubeconfig(
        {"client-certificate-data": ENCODED, "client-key-data": ENCODED}, server="https://127.0.0.1:1"
    ),
    "a certificate that is no base64": kubeconfig({"client-certificate-data": SECRET + "!", "client-key-data": "%"}),
    "no file of a certificate": kubeconfig({"client-certificate": "nowhere", "client-key": "nowhere"}),
    "a plugin that fails": kubeconfig({"exec": EXEC | {"command": "false"}}),
    "a plugin that is not there": kubeconfig({"exec": EXEC | {"command": "/nowhere"}}),
    "a plugin that prints no credential": kubeconfig({"exec": EXEC | {"command": "echo", "args": [SECRET]}}),
    "a plugin without a command": kubeconfig({"exec": EXEC}),
    "an old plugin": kubeconfig({"auth-provider": {"name": "oidc", "config": {"id-token": SECRET}}}),
    "nothing": "",
    "two documents": f"{yaml.safe_dump(kubeconfig())}---\n{yaml.safe_dump(kubeconfig())}",
    "no YAML": f"token: [{SECRET}",
    "bytes": "\0\1\2",
    "a list": "[]",
    "a text": SECRET,
    "too deep": "[" * 5000,
}


@pytest.mark.parametrize("file", FILES)
def test_a_kubeconfig_that_cannot_be_used_is_one_line_without_a_credential(monkeypatch, capsys, tmp_path, file):
    content = FILES[file]
    path = tmp_path / "kubeconfig"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, allow_unicode=True))
    (tmp_path / "token").write_text(f"{SECRET}\n{SECRET}\n")
    monkeypatch.setattr(sys, "argv", ["cardwise", "gangs", "--kubeconfig", str(path)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    message = str(ended.value.code)
    printed = capsys.readouterr()
    assert message.startswith("cardwise: ")
    assert "\n" not in message
    assert SECRET not in message + printed.err + printed.out
    assert ENCODED not in message + printed.err + printed.out


@pytest.mark.parametrize("path", [Path("nowhere"), Path()])
def test_a_kubeconfig_that_is_no_file_is_said_to_be_none(monkeypatch, capsys, tmp_path, path):
    monkeypatch.setattr(sys, "argv", ["cardwise", "gangs", "--kubeconfig", str(tmp_path / path)])
    with pytest.raises(SystemExit):
        main.main()
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / path))
    monkeypatch.setattr(sys, "argv", ["cardwise", "gangs"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert "no usable credentials in" in str(ended.value.code)
