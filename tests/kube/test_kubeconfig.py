"""Kubeconfigs are read as by the official client."""

import base64
import json
import ssl
import sys
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from cardwise.core.values.decoded import Json
from cardwise.kube import credentials, errors, kubeconfig
from cardwise.kube.credentials import Credentials
from cardwise.runtime.tls import certs

NOW = datetime.now(UTC)
DAY = timedelta(days=1)
CA = certs.new_authority("test CA", NOW, DAY)
SERVER = certs.new_leaf(CA, "server", ["kube.test"], certs.KeyPurpose.SERVER, now=NOW, lifetime=DAY)
CLIENT = certs.new_leaf(CA, "jane", [], certs.KeyPurpose.CLIENT, now=NOW, lifetime=DAY)


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


IN_IT = {"certificate-authority-data": in_base64(CA.cert)}
BESIDE = {"certificate-authority": "ca.crt"}
PAIR_IN_IT = {"client-certificate-data": in_base64(CLIENT.cert), "client-key-data": in_base64(CLIENT.key)}
PAIR_BESIDE = {"client-certificate": "tls.crt", "client-key": "tls.key"}


@pytest.fixture(autouse=True)
def _no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def write_kubeconfig(folder: Path, cluster: Json, user: Json | None, **context: str) -> Path:
    for name, content in (("ca.crt", CA.cert), ("tls.crt", CLIENT.cert), ("tls.key", CLIENT.key), ("token", b"file\n")):
        (folder / name).write_bytes(content)
    path = folder / "config"
    contexts = [{"name": "other", "context": {"cluster": "gone"}}, {"name": "c", "context": {"cluster": "k"} | context}]
    config: Json = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": contexts}
    config |= {"clusters": [{"name": "k", "cluster": {"server": "https://kube.test:6443/"} | cluster}]}
    if user is not None:
        contexts[1]["context"]["user"] = "u"
        config["users"] = [{"name": "u", "user": user}]
    path.write_text(yaml.safe_dump(config))
    return path


def describe_credentials(loaded: Credentials) -> Json:
    tls = loaded.ssl_context
    token = loaded.authorization() if loaded.authorization is not None else None
    return {
        "host": loaded.host,
        "name": loaded.server_hostname,
        "proxy": loaded.proxy,
        "namespace": loaded.namespace,
        "token": token.strip() if token else None,
        "authorities": tls and [authority["serialNumber"] for authority in tls.get_ca_certs()],
        "checks": tls and (tls.check_hostname, tls.verify_mode, tls.verify_flags, tls.minimum_version),
        "user": tls and user_of(tls),
    }


def user_of(client: ssl.SSLContext) -> str | None:
    """The user name that a TLS server sees in the client's certificate."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_OPTIONAL
    server.load_verify_locations(cadata=CA.cert.decode())
    with_files(server)
    known = complete_handshake(client, server).getpeercert()
    return known["subject"][0][0][1] if known else None


def complete_handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> ssl.SSLObject:
    """The server's side of a connection."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(back, there, server_hostname="kube.test")
    theirs = server.wrap_bio(there, back, server_side=True)
    for _ in range(3):
        for end in (ours, theirs):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return theirs


def with_files(server: ssl.SSLContext) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(SERVER.cert + SERVER.key)
        file.flush()
        server.load_cert_chain(file.name)


@pytest.mark.parametrize(
    ("cluster", "user", "context"),
    [
        pytest.param(IN_IT, PAIR_IN_IT, {}, id="as kubeadm writes it"),
        pytest.param(BESIDE, PAIR_BESIDE, {"namespace": "team-a"}, id="files beside it"),
        pytest.param(IN_IT, {"token": "secret"}, {}, id="token"),
        pytest.param(IN_IT, {"tokenFile": "token"}, {}, id="token in a file"),
        pytest.param(IN_IT, {"username": "jane", "password": "pass"}, {}, id="password"),
        pytest.param(IN_IT, {}, {}, id="user without anything"),
        pytest.param(IN_IT | {"tls-server-name": "kube.test"}, None, {}, id="no user"),
        pytest.param({"insecure-skip-tls-verify": True}, {"token": "secret"}, {}, id="not verified"),
        pytest.param({"server": "http://127.0.0.1:8001"}, {"token": "secret"}, {}, id="plain"),
        pytest.param(IN_IT | {"proxy-url": "http://proxy:3128"}, PAIR_BESIDE, {}, id="by a proxy"),
    ],
)
def test_kubeconfig_is_read_as_by_the_official_client(
    tmp_path: Path, cluster: Json, user: Json | None, context: Json
) -> None:
    path = write_kubeconfig(tmp_path, cluster, user, **context)
    configuration = kubeconfig.read_kubeconfig(path)
    assert configuration is not None
    assert describe_credentials(credentials._from_kubeconfig(configuration, "config")) == describe_credentials(
        credentials._load_by_library(str(path), "")
    )
    assert describe_credentials(credentials.load(path, "c")) == describe_credentials(credentials.load(path))


def proxy_of(path: Path) -> str | None:
    """The credentials, which must be the same by both readers."""
    (proxy,) = {credentials.load(path).proxy, credentials._load_by_library(str(path), "").proxy}
    return proxy


@pytest.mark.parametrize(
    ("variables", "proxy"),
    [
        ({"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ({"https_proxy": "https://proxy:3128"}, "https://proxy:3128"),
        ({"HTTPS_PROXY": "proxy:3128"}, "http://proxy:3128"),
        ({"HTTPS_PROXY": "http://one:1", "https_proxy": "http://two:2"}, "http://one:1"),
        ({"HTTP_PROXY": "http://proxy:3128"}, None),
        ({"ALL_PROXY": "socks5://proxy:1080", "all_proxy": "http://proxy:3128"}, None),
    ],
)
def test_proxy_from_the_environment_as_in_client_go(tmp_path, monkeypatch, variables, proxy):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert proxy_of(write_kubeconfig(tmp_path, IN_IT, {"token": "secret"})) == proxy


@pytest.mark.parametrize(
    ("no_proxy", "host", "direct"),
    [
        ("kube.test", "kube.test", True),
        ("test", "kube.test", True),
        (".test, x", "kube.test", True),
        ("*.test", "kube.test", True),
        ("*", "kube.test", True),
        (".kube.test", "kube.test", False),
        ("ube.test", "kube.test", False),
        ("kube.test:6443", "kube.test", True),
        ("kube.test:443", "kube.test", False),
        ("10.96.0.1", "10.96.0.1", True),
        ("10.96.0.1:6443", "10.96.0.1", True),
        ("10.96.0.1:443", "10.96.0.1", False),
        ("192.168.0.0/16,10.0.0.0/8", "10.96.0.1", True),
        ("10.0.0.0/16", "10.96.0.1", False),
        ("0.1", "10.96.0.1", False),
        ("fd00::/8", "[fd00::1]", True),
        ("[fd00::1]:6443", "[fd00::1]", True),
        ("fd00:0::1", "[fd00::1]", True),
        ("fd00::/8,1.2.3.4/99", "10.96.0.1", False),
        ("", "127.0.0.9", True),
        ("", "[::1]", True),
        ("", "localhost", True),
    ],
)
def test_no_proxy_is_read_as_by_client_go(tmp_path, monkeypatch, no_proxy, host, direct):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    path = write_kubeconfig(tmp_path, IN_IT | {"server": f"https://{host}:6443"}, {"token": "secret"})
    assert (proxy_of(path) is None) is direct


def test_proxy_of_the_kubeconfig_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://other:3128")
    monkeypatch.setenv("NO_PROXY", "*")
    path = write_kubeconfig(tmp_path, IN_IT | {"proxy-url": "http://proxy:3128"}, {"token": "secret"})
    assert proxy_of(path) == "http://proxy:3128"


@pytest.mark.parametrize("read", [credentials.load, lambda path: credentials._load_by_library(str(path), "")])
def test_unusable_proxy_error_has_a_remedy_and_no_password(tmp_path, monkeypatch, read):
    monkeypatch.setenv("https_proxy", "socks5://jane:secret@proxy:1080")
    path = write_kubeconfig(tmp_path, IN_IT, {"token": "x"})
    with pytest.raises(errors.KubeConfigError) as raised:
        read(path)
    assert str(raised.value) == (
        "https_proxy is not the URL of an HTTP proxy such as http://10.0.0.1:3128; SOCKS is not supported. Correct it, "
        "unset it, or add kube.test to NO_PROXY"
    )
    path = write_kubeconfig(tmp_path, IN_IT | {"proxy-url": "socks5://jane:secret@proxy:1080"}, {"token": "x"})
    with pytest.raises(errors.KubeConfigError) as raised:
        read(path)
    assert "secret" not in str(raised.value)


def test_a_token_that_is_renewed_in_its_file_is_read_anew(tmp_path: Path) -> None:
    authorization = credentials.load(write_kubeconfig(tmp_path, IN_IT, {"tokenFile": "token"})).authorization
    assert authorization is not None
    assert authorization() == "Bearer file"
    (tmp_path / "token").write_text("new")
    assert authorization() == "Bearer new"
    (tmp_path / "token").unlink()
    assert authorization() is None


@pytest.mark.parametrize("user", [{"exec": {"command": "aws"}}, {"auth-provider": {"name": "oidc"}}, "jane", None])
def test_unsupported_kubeconfigs_are_left_to_the_official_client(tmp_path: Path, user: Any) -> None:
    path = write_kubeconfig(tmp_path, IN_IT, {"token": "x"})
    config = yaml.safe_load(path.read_text())
    config["users"][0]["user"] = user
    path.write_text(yaml.safe_dump(config))
    assert kubeconfig.read_kubeconfig(path) is None
    assert kubeconfig.read_kubeconfig(path, "other") is None, "its cluster is not there"
    assert kubeconfig.read_kubeconfig(tmp_path) is None
    path.write_text("a: [")
    assert kubeconfig.read_kubeconfig(path) is None


def test_exec_plugin_provides_the_token(tmp_path: Path) -> None:
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "told"},
    }
    run = {
        "apiVersion": credential["apiVersion"],
        "command": sys.executable,
        "args": ["-c", f"print({json.dumps(credential)!r})"],
    }
    loaded = credentials.load(write_kubeconfig(tmp_path, IN_IT, {"exec": run}))
    assert describe_credentials(loaded)["token"] == "Bearer told"


@pytest.mark.parametrize(
    "broken", [{"certificate-authority": "none"}, {"certificate-authority-data": in_base64(b"no certificate")}]
)
def test_missing_or_invalid_certificate_is_reported(tmp_path: Path, broken: Json) -> None:
    path = write_kubeconfig(tmp_path, broken, {"token": "x"})
    with pytest.raises(errors.KubeConfigError, match=r"no usable credentials in .*config: .*; use --kubeconfig"):
        credentials.load(path)


def test_certificates_with_a_text_around_them_are_taken(tmp_path: Path) -> None:
    around = "# Gültig\n".encode() + CA.cert
    loaded = credentials.load(
        write_kubeconfig(tmp_path, {"certificate-authority-data": in_base64(around)}, {"token": "x"})
    )
    assert len(describe_credentials(loaded)["authorities"]) == 1


@pytest.mark.parametrize("by_library", [False, True])
def test_connections_do_not_change_the_tls_context(tmp_path: Path, *, by_library: bool) -> None:
    """urllib3 sets the ALPN protocols for each connection, while other threads connect with the same context."""
    path = write_kubeconfig(tmp_path, IN_IT, PAIR_IN_IT)
    client = (credentials._load_by_library(str(path), "") if by_library else credentials.load(path)).ssl_context
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with_files(server)
    server.set_alpn_protocols(["of-a-connection", "http/1.1"])
    assert client is not None
    client.set_alpn_protocols(["of-a-connection"])
    assert complete_handshake(client, server).selected_alpn_protocol() == "http/1.1"


def test_tls_context_has_pythons_defaults_except_strict_verification(tmp_path: Path) -> None:
    """From Python 3.13 on, an intermediate CA is trusted without its root, as in Go."""
    client = credentials.load(write_kubeconfig(tmp_path, IN_IT, None)).ssl_context
    assert client is not None
    assert client.verify_flags == ssl.create_default_context().verify_flags & ~ssl.VERIFY_X509_STRICT


@pytest.mark.parametrize(
    ("cluster", "field"),
    [
        ({"server": server}, r"clusters\[\]\.cluster\.server")
        for server in ("ftp://x", "https://[::1", "https://x:99999", "https://x:abc", "", "http://a b")
    ]
    + [({"proxy-url": proxy}, r"clusters\[\]\.cluster\.proxy-url") for proxy in ("::::", "socks5://10.0.0.1:1")],
)
@pytest.mark.parametrize("user", [{"token": "x"}, {"exec": {"command": "true", "apiVersion": "v1"}}])
def test_invalid_url_error_names_field_and_file(tmp_path: Path, user: Json, cluster: Json, field: str) -> None:
    path = write_kubeconfig(tmp_path, IN_IT | cluster, user)
    reason = rf"({field}.* is not a URL|Invalid IPv6 URL)"
    with pytest.raises(errors.KubeConfigError, match=rf"no usable credentials in .*config: .*{reason}"):
        credentials.load(path)


@pytest.mark.parametrize("token", ["s3cr3t\r\nX-Evil: 1", "s3cr3t\n1", "s3cr3t\u20ac", "s3cr3t\x00"])
def test_invalid_token_error_does_not_quote_it(tmp_path: Path, token: str) -> None:
    path = write_kubeconfig(tmp_path, IN_IT, {"token": token})
    with pytest.raises(errors.KubeConfigError, match=r"config: users\[\]\.user\.token has a line break") as failure:
        credentials.load(path)
    assert "s3cr3t" not in "".join(traceback.format_exception(failure.value))


def test_a_line_break_at_the_end_of_a_token_is_left_out(tmp_path: Path) -> None:
    assert credentials.load(write_kubeconfig(tmp_path, IN_IT, {"token": "x\n"})).authorization is not None


@pytest.mark.parametrize("content", ["[" * 20_000, 'current-context: "\\e[31mx"\ncontexts: []\n'])
def test_invalid_kubeconfig_error_has_no_escape_sequences(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(errors.KubeConfigError, match="no usable credentials in ") as failure:
        credentials.load(path)
    assert str(failure.value).isprintable()
