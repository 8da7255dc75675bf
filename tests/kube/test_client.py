import gc
import json
import os
import socket
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler

import pytest
import yaml
from urllib3.exceptions import InsecureRequestWarning

from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.runtime import certs
from tests.kube.fakeapi import FakeApi, Fault, status_body


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (400, "BadRequest", errors.BadRequest),
        (401, "Unauthorized", errors.Unauthorized),
        (403, "Forbidden", errors.Forbidden),
        (404, "NotFound", errors.NotFound),
        (409, "Conflict", errors.Conflict),
        (409, "AlreadyExists", errors.AlreadyExists),
        (410, "Gone", errors.Gone),
        (410, "Expired", errors.Gone),
        (422, "Invalid", errors.Invalid),
        (429, "TooManyRequests", errors.TooManyRequests),
        (500, "InternalError", errors.ServerError),
        (503, "ServiceUnavailable", errors.ServerError),
        (418, "", errors.KubeError),
    ],
)
def test_answers_become_errors_by_status(api: FakeApi, client: KubeClient, status, reason, kind):
    api.faults["POST"].append(Fault(status=status, body=status_body(status, reason, "because")))
    with pytest.raises(errors.KubeError) as caught:
        client.create(paths.pods("ns", "p", "binding"), {})
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.reason, caught.value.message) == (status, reason, "because")


def test_retry_after_comes_from_header_or_body(api: FakeApi, client: KubeClient):
    api.faults["POST"].append(Fault(status=429, headers={"Retry-After": "7"}))
    with pytest.raises(errors.TooManyRequests) as caught:
        client.create("/x", {})
    assert caught.value.retry_after == 7.0
    body = json.dumps({"reason": "Timeout", "details": {"retryAfterSeconds": 3}}).encode()
    api.faults["POST"].append(Fault(status=504, body=body))
    with pytest.raises(errors.ServerError) as caught:
        client.create("/x", {})
    assert caught.value.retry_after == 3.0


def test_the_clock_is_that_of_the_other_side(api: FakeApi, client: KubeClient, monkeypatch):
    api.faults["list"].append(Fault(status=200, body=b"{}"))
    monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", lambda *_: "Fri, 01 Mar 2024 10:00:00 GMT")
    assert client.clock() == datetime(2024, 3, 1, 10, tzinfo=UTC)
    api.faults["list"].append(Fault(status=200, body=b"{}"))
    monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", lambda *_: "noon")
    assert client.clock() is None


def test_error_bodies_are_truncated_and_need_not_be_json(api: FakeApi, client: KubeClient):
    api.faults["POST"].append(Fault(status=502, body=b"<html>" + b"x" * 5000))
    with pytest.raises(errors.ServerError) as caught:
        client.create("/x", {})
    assert caught.value.message.startswith("<html>")
    assert len(str(caught.value)) < 600


def test_cut_and_refused_connections_are_unreachable(api: FakeApi, client: KubeClient):
    api.faults["POST"].append(Fault(then="cut"))
    with pytest.raises(errors.Unreachable):
        client.create("/x", {})
    assert client.create("/x", {"a": 1}) == {"a": 1}  # the next one gets a fresh connection
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = KubeClient(f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(errors.Unreachable, match="GET /version"):
            nobody.get("/version")


def test_silence_is_unreachable_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = KubeClient(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(errors.Unreachable):
            client.get("/version", timeout=0.1)
        client.close()
        gc.collect()


def test_patch_kinds_and_bodies(api: FakeApi, client: KubeClient):
    assert client.patch("/p", [{"op": "test"}], "json", "me") == {"value": [{"op": "test"}]}
    client.patch("/p", {"a": 1}, "apply", "me", force=True)
    client.delete("/p", {"gracePeriodSeconds": 0})
    assert client.request("PUT", "/p", body=b'{"raw":1}') == b'{"raw":1}'
    with api.condition:
        queries = [query for _, _, query, _ in api.requests]
    assert queries[:2] == [{"fieldManager": "me"}, {"fieldManager": "me", "force": "true"}]
    with pytest.raises(ValueError, match="field_manager"):
        client.patch("/p", {}, "apply")


def test_pages_follow_continue(api: FakeApi, client: KubeClient):
    for number in range(7):
        api.put(f"p{number}")
    pages = [json.loads(page)["items"] for page in client.list_pages(paths.pods(), limit=3)]
    assert [len(page) for page in pages] == [3, 3, 1]


def test_token_is_asked_for_again_after_a_while_and_after_401(api: FakeApi):
    tokens = iter(["Bearer one", "bearer two\n", "Bearer three"])
    client = KubeClient(api.url, authorization=lambda: next(tokens))
    client.create("/x", {})
    client.create("/x", {})
    assert client._headers["application/json"]["Authorization"] == "Bearer one"
    api.faults["POST"].append(Fault(status=401))
    with pytest.raises(errors.Unauthorized):
        client.create("/x", {})
    client.create("/x", {})
    assert client._headers["application/json"]["Authorization"] == "bearer two"
    client._headers_until = 0
    client.get("/x")
    assert client._headers[""]["Authorization"] == "Bearer three"
    client.close()


def test_nothing_is_sent_when_the_credentials_took_all_of_its_time(api: FakeApi):
    client = KubeClient(api.url, authorization=lambda: time.sleep(0.3) or "Bearer late")
    with pytest.raises(errors.Unreachable, match="credentials took"):
        client.create("/x", {}, timeout=0.1)
    client.create("/y", {}, timeout=5)
    assert api.count("POST") == 1
    client.close()


def test_child_of_a_fork_does_not_use_the_parents_connection(api: FakeApi, client: KubeClient):
    client.create("/x", {})
    before = client._pool
    client._pid = os.getppid()  # as if this were the child
    client.create("/x", {})
    assert client._pool is not before
    before.close()


def test_threads_share_it(api: FakeApi, client: KubeClient):
    answers: list[dict] = []

    def work(number: int) -> None:
        answers.extend(client.create("/x", {"n": number, "turn": turn}) for turn in range(20))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 160


@pytest.fixture
def tls_server(tmp_path):
    """An HTTPS server that answers one watch with one event and then stays silent, or `{}` to anything else."""
    now = datetime.now(UTC)
    authority = certs.new_authority("test CA", now, timedelta(days=1))
    leaf = certs.new_leaf(
        authority, "server", ["kube.test", "127.0.0.2"], certs.Use.SERVER, now=now, lifetime=timedelta(days=1)
    )
    (tmp_path / "ca.crt").write_bytes(authority.cert)
    (tmp_path / "tls.crt").write_bytes(leaf.cert)
    (tmp_path / "tls.key").write_bytes(leaf.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    listener = socket.create_server(("", 0))
    seen: list[bytes] = []
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            try:
                plain, _ = listener.accept()
                with context.wrap_socket(plain, server_side=True) as connection:
                    head = connection.recv(4096)
                    seen.append(head)
                    if b"watch=true" in head:
                        line = b'{"type":"ADDED","object":{}}\n'
                        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                        connection.sendall(b"%x\r\n%s\r\n" % (len(line), line))
                        connection.settimeout(5)
                        connection.recv(1)
                    else:
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            except OSError:
                continue

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"https://127.0.0.1:{listener.getsockname()[1]}", tmp_path, seen
    done.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def kubeconfig(url: str, directory, **cluster: object):
    path = directory / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": url, **cluster}}],
                "users": [{"name": "u", "user": {"token": "secret-token"}}],
            }
        )
    )
    return path


def test_kubeconfig_with_ca_server_name_and_token(tls_server):
    url, directory, seen = tls_server
    cluster = {"certificate-authority": str(directory / "ca.crt")}
    client = KubeClient.load(kubeconfig(url, directory, **cluster, **{"tls-server-name": "kube.test"}))
    assert client.get("/version") == {}
    assert b"authorization: bearer secret-token" in seen[0].lower()
    client.close()
    client = KubeClient.load(kubeconfig(url, directory, **cluster))
    with pytest.raises(errors.Unreachable, match="certificate"):
        client.get("/version")
    client.close()
    client = KubeClient.load(kubeconfig(url, directory, **{"insecure-skip-tls-verify": True}))
    with pytest.warns(InsecureRequestWarning):  # the user's choice, and told so
        assert client.get("/version") == {}
    client.close()


def test_the_namespace_of_the_context_or_default(tmp_path):
    path = kubeconfig("http://127.0.0.1:1", tmp_path)
    assert KubeClient.load(path).namespace == "default"
    config = yaml.safe_load(path.read_text())
    config["contexts"][0]["context"]["namespace"] = "team-a"
    path.write_text(yaml.safe_dump(config))
    assert KubeClient.load(path).namespace == "team-a"


def test_watch_over_tls_can_be_ended_from_another_thread(tls_server):
    url, directory, _ = tls_server
    client = KubeClient.load(
        kubeconfig(
            url,
            directory,
            **{"certificate-authority": str(directory / "ca.crt"), "tls-server-name": "kube.test"},
        )
    )
    watch = client.watch("/api/v1/pods", resource_version="1", timeout_seconds=60)
    lines = []
    started = time.monotonic()
    threading.Timer(0.2, watch.close).start()
    lines.extend(watch)
    assert lines == [b'{"type":"ADDED","object":{}}']
    assert time.monotonic() - started < 5
    client.close()


def test_in_a_pod_the_service_account_is_used_and_its_token_followed(tls_server, monkeypatch):
    from kubernetes.config import incluster_config

    from cardwise.kube import client as module
    from cardwise.kube import credentials

    url, directory, seen = tls_server
    token = directory / "token"
    token.write_text("first")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.2")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", url.rpartition(":")[2])
    monkeypatch.setattr(credentials, "_SERVICE_ACCOUNT_TOKEN", token)
    (directory / "namespace").write_text("team-a")
    monkeypatch.setattr(credentials, "_SERVICE_ACCOUNT_NAMESPACE", directory / "namespace")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(directory / "ca.crt"))
    # The loader's own minute, and ours, shortened.
    monkeypatch.setattr(module, "_TOKEN_SECONDS", 0.0)
    loader = incluster_config.InClusterConfigLoader
    read = loader._read_token_file

    def read_and_expire(self):
        read(self)
        self.token_expires_at -= timedelta(minutes=2)

    monkeypatch.setattr(loader, "_read_token_file", read_and_expire)
    client = KubeClient.load()
    assert client.namespace == "team-a"
    client.get("/version")
    token.write_text("second")
    client.get("/version")
    client.close()
    heads = [head.lower() for head in seen]
    assert b"authorization: bearer first" in heads[0]
    assert b"authorization: bearer second" in heads[1]


def test_no_credentials_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(errors.KubeConfigError, match=r"nothing.*--kubeconfig"):
        KubeClient.load()


def test_paths():
    assert paths.pods() == "/api/v1/pods"
    assert paths.pods("ns", "p", "binding") == "/api/v1/namespaces/ns/pods/p/binding"
    assert paths.nodes("n", "status") == "/api/v1/nodes/n/status"
    assert paths.extendedresources("gpu-1", "status") == "/apis/cardwise.dev/v1alpha1/extendedresources/gpu-1/status"
    with pytest.raises(ValueError, match="namespaced"):
        paths.pods("", "p")


@pytest.mark.parametrize("text", ["root:x:0:0:root:/root:/bin/sh\n", "- a\n", "a: [\n"])
def test_a_file_of_something_else_is_called_no_kubeconfig(tmp_path, text):
    path = tmp_path / "passwd"
    path.write_text(text)
    with pytest.raises(errors.KubeConfigError, match=r"passwd: it is no kubeconfig; give --kubeconfig"):
        KubeClient.load(path)
