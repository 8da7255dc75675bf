import gc
import json
import os
import socket
import ssl
import threading
import traceback
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from urllib3.exceptions import InsecureRequestWarning

from cardwise.kube import client as module
from cardwise.kube import credentials, errors, paths
from cardwise.kube.client import KubeClient
from cardwise.runtime.tls import certs
from tests.fakes.apiserver import Answer, ApiServer, Fault


@pytest.fixture
def api(api: ApiServer) -> ApiServer:
    """An API server whose path /x returns the received request."""
    api.answers["/x"] = lambda request: request.body
    return api


@pytest.fixture
def client(api: ApiServer, clock):
    """Over sockets."""
    kube_client = KubeClient(api.serve(), clock=clock)
    yield kube_client
    kube_client.close()


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
def test_responses_become_errors_by_status(api: ApiServer, client: KubeClient, status, reason, kind):
    api.fault(Fault(status=status, reason=reason, message="because"), "create")
    with pytest.raises(errors.KubeError) as caught:
        client.create(paths.pods("ns", "p", "binding"), {})
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.reason, caught.value.message) == (status, reason, "because")


def test_unknown_kind_differs_from_missing_object():
    """Responses as of kube-apiserver 1.37."""
    unknown = errors.from_response(404, b"404 page not found\n", {})
    status = '{"kind":"Status","reason":"NotFound","message":"%s","code":404}'
    without = errors.from_response(404, (status % "the server could not find the requested resource").encode(), {})
    missing = errors.from_response(404, (status % 'pods \\"x\\" not found').encode(), {})
    assert [type(error) for error in (unknown, without, missing)] == [
        errors.UnknownKind,
        errors.UnknownKind,
        errors.NotFound,
    ]


def test_retry_after_comes_from_header_or_body(api: ApiServer, client: KubeClient):
    api.fault(Fault(status=429, retry_after=7))
    with pytest.raises(errors.TooManyRequests) as caught:
        client.create("/x", {})
    assert caught.value.retry_after == 7.0
    body = json.dumps({"reason": "Timeout", "details": {"retryAfterSeconds": 3}}).encode()
    api.fault(Fault(status=504, body=body))
    with pytest.raises(errors.ServerError) as caught:
        client.create("/x", {})
    assert caught.value.retry_after == 3.0


def test_server_time_is_the_api_servers(api: ApiServer, client: KubeClient, clock):
    clock.set_wall(datetime(2024, 3, 1, 10, tzinfo=UTC))
    assert client.fetch_server_time() == datetime(2024, 3, 1, 10, tzinfo=UTC)
    api.answers["/version"] = Answer(200, b"{}", {"Date": "noon"})
    assert client.fetch_server_time() is None


def test_server_time_is_the_last_response_plus_the_time_since(api: ApiServer, client: KubeClient, clock):
    """Responses of failures and watches have the time too. Setting the machine's clock meanwhile changes nothing."""
    api.answers["/x"] = Answer(200, b"{}", {"Date": "Fri, 01 Mar 2024 10:00:00 GMT"})
    assert client.server_time() == clock.wall(), "no answer has told it"
    assert client.last_server_time() is None
    client.get("/x")
    clock.advance(90)
    clock.set_wall(datetime(2030, 1, 1, tzinfo=UTC))
    assert client.server_time() == datetime(2024, 3, 1, 10, 1, 30, tzinfo=UTC)
    with pytest.raises(errors.NotFound):
        client.get(paths.pods("ns", "none"))
    assert client.server_time() == datetime(2030, 1, 1, tzinfo=UTC)
    for date in ("noon", ""):
        api.answers["/x"] = Answer(200, b"{}", {"Date": date})
        client.get("/x")
    clock.set_wall(datetime(2031, 1, 1, tzinfo=UTC))
    assert client.server_time() == (datetime(2031, 1, 1, tzinfo=UTC))
    watch = client.watch(paths.pods(), resource_version="1")
    clock.set_wall(datetime(2040, 1, 1, tzinfo=UTC))
    assert client.server_time() == datetime(2031, 1, 1, tzinfo=UTC)
    watch.close()


def test_error_bodies_are_truncated_and_need_not_be_json(api: ApiServer, client: KubeClient):
    api.fault(Fault(status=502, body=b"<html>" + b"x" * 5000))
    with pytest.raises(errors.ServerError) as caught:
        client.create("/x", {})
    assert caught.value.message.startswith("<html>")
    assert len(str(caught.value)) < 600


def test_response_beyond_the_limit_is_not_read_to_its_end(api: ApiServer, client: KubeClient):
    large = b'"' + b"x" * 999_998 + b'"'
    for _ in range(3):
        assert client.request("POST", "/x", body=large, max_bytes=1_000_000) == large
        with pytest.raises(errors.Unreachable, match="the response has more than 999999 bytes"):
            client.request("POST", "/x", body=large, max_bytes=999_999)
    with pytest.raises(errors.NotFound):
        client.request("GET", paths.pods("ns", "none"), max_bytes=10)
    assert client.request("POST", "/x", body=b"{}") == b"{}"


def test_cut_and_refused_connections_are_unreachable(api: ApiServer, client: KubeClient):
    api.fault(Fault(lost=True))
    with pytest.raises(errors.Unreachable):
        client.create("/x", {})
    assert client.create("/x", {"a": 1}) == {"a": 1}  # the next one gets a fresh connection
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = KubeClient(f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(errors.Unreachable, match="GET /version") as raised:
            nobody.get("/version")
        assert errors.would_fail_other_writes(raised.value)


@pytest.mark.parametrize("verb", ["create", "update", "patch", "delete", "get"])
def test_managed_fields_are_not_decoded(api: ApiServer, client: KubeClient, verb: str):
    """Users who may change an object can fill its managedFields, and decoding a MiB of them blocks all threads for 0.2
    s.
    """
    fields = {"metadata": {"name": "p", "managedFields": [{"manager": "m"}]}, "data": {"a": "b"}}
    api.answers["/x"] = fields
    body = () if verb in ("get", "delete") else ({},)
    assert getattr(client, verb)("/x", *body) == {"metadata": {"name": "p"}, "data": {"a": "b"}}
    assert client.get("/x", managed_fields=True) == fields


def test_invalid_token_error_does_not_quote_it(api: ApiServer, clock):
    """The token may come from a file or a program, and is loaded again when it is renewed."""
    tokens = iter(["Bearer s3cr3t\nX-Evil: 1", "Bearer s3cr3t\ufffd", "Bearer fine\n"])
    client = KubeClient(api.serve(), authorization=lambda: next(tokens), clock=clock)
    for _ in range(2):
        with pytest.raises(errors.Unauthorized, match="the token has a line break or another character") as failure:
            client.get("/version")
        assert "s3cr3t" not in "".join(traceback.format_exception(failure.value))
    client.create("/x", {})
    assert [request.headers["Authorization"] for request in api.sent()] == ["Bearer fine"]
    client.close()


def test_invalid_list_or_length_is_unreachable(api: ApiServer, client: KubeClient):
    for body in (b'{"items":"x"}', b'{"items":[1]}', b"5", b"[[]]"):
        api.answers["/list"] = Answer(200, body, {})
        with pytest.raises(errors.Unreachable, match=r"GET /list: not a (List|list of this kind)"):
            list(client.list_objects("/list"))


def test_silence_is_unreachable_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = KubeClient(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(errors.TimedOut) as raised:
            client.get("/version", timeout=0.1)
        assert not errors.would_fail_other_writes(raised.value), "it may be this object alone"
        client.close()
        gc.collect()


def test_patch_kinds_and_bodies(api: ApiServer, client: KubeClient):
    with pytest.raises(errors.Unreachable, match="JSON, but not an object"):  # the server returns the body
        client.patch("/x", [{"op": "test"}], "json", "me")
    client.patch("/x", {"a": 1}, query={"dryRun": "All"})
    client.delete("/x", {"gracePeriodSeconds": 0})
    assert client.request("PUT", "/x", body=b'{"raw":1}') == b'{"raw":1}'
    assert [request.query for request in api.sent("patch")] == [
        {"fieldManager": "me"},
        {"dryRun": "All"},
    ]
    assert [request.headers["Content-Type"] for request in api.sent("patch")] == [
        "application/json-patch+json",
        "application/merge-patch+json",
    ]
    assert [request.raw for request in api.sent("delete")] == [b'{"gracePeriodSeconds":0}']


def test_pages_follow_continue(api: ApiServer, client: KubeClient):
    for number in range(7):
        api.write_object(paths.pods(), {"metadata": {"name": f"p{number}"}})
    pages = [json.loads(page)["items"] for page in client.list_pages(paths.pods(), limit=3)]
    assert [len(page) for page in pages] == [3, 3, 1]


def test_token_is_reloaded_after_a_while_and_after_401(api: ApiServer, clock):
    tokens = iter(["Bearer one", "bearer two\n", "Bearer three"])
    client = api.client(authorization=lambda: next(tokens), clock=clock)
    client.create("/x", {})
    client.create("/x", {})
    api.fault(Fault(status=401))
    with pytest.raises(errors.Unauthorized):
        client.create("/x", {})
    client.create("/x", {})
    clock.advance(11)
    client.get("/version")
    sent = [request.headers["Authorization"] for request in api.sent()]
    assert sent == ["Bearer one", "Bearer one", "Bearer one", "bearer two", "Bearer three"]


def test_no_request_is_sent_after_slow_credentials(api: ApiServer, clock):
    client = api.client(authorization=lambda: clock.sleep(3) or "Bearer late", clock=clock)
    with pytest.raises(errors.Unreachable, match="credentials took"):
        client.create("/x", {}, timeout=1)
    assert api.sent() == []
    clock.advance(11)
    client.create("/x", {}, timeout=5)
    assert [request.timeout for request in api.sent()] == [2]  # the remaining time


def test_child_of_a_fork_does_not_use_the_parents_connection(api: ApiServer, client: KubeClient):
    client.create("/x", {})
    before = client._pool
    client._pid = os.getppid()  # as in a forked child
    client.create("/x", {})
    assert client._pool is not before
    before.close()


def test_threads_share_the_client(api: ApiServer, client: KubeClient):
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
    with serving_tls(tmp_path, datetime.now(UTC)) as served:
        yield served


@contextmanager
def serving_tls(tmp_path, now: datetime):
    """An HTTPS server that answers one watch with one event and then stays silent, or `{}` to anything else.

    `now`: when its certificate was made, which is good for a day.
    """
    authority = certs.new_authority("test CA", now, timedelta(days=1))
    leaf = certs.new_leaf(
        authority, "server", ["kube.test", "127.0.0.2"], certs.KeyPurpose.SERVER, now=now, lifetime=timedelta(days=1)
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
                        connection.recv(1)
                    else:
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            except OSError:
                continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}", tmp_path, seen
    finally:
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
    with pytest.warns(InsecureRequestWarning):  # chosen by the user, and shown as such
        assert client.get("/version") == {}
    client.close()


def test_expired_certificate_error_shows_the_time(tmp_path):
    """The certificate or the clock may be wrong; the log line must show both."""
    with serving_tls(tmp_path, datetime.now(UTC) - timedelta(days=30)) as (url, directory, _):
        cluster = {"certificate-authority": str(directory / "ca.crt"), "tls-server-name": "kube.test"}
        client = KubeClient.load(kubeconfig(url, directory, **cluster))
        with pytest.raises(
            errors.Unreachable, match=r"certificate has expired.*this machine's clock, which shows 20\d\d-"
        ):
            client.get("/version")
        client.close()


def test_the_namespace_of_the_context_or_default(tmp_path):
    path = kubeconfig("http://127.0.0.1:1", tmp_path)
    assert KubeClient.load(path).namespace == "default"
    config = yaml.safe_load(path.read_text())
    config["contexts"][0]["context"]["namespace"] = "team-a"
    path.write_text(yaml.safe_dump(config))
    assert KubeClient.load(path).namespace == "team-a"


def test_a_context_other_than_the_current_one(tmp_path):
    path = kubeconfig("http://127.0.0.1:1", tmp_path)
    config = yaml.safe_load(path.read_text())
    config["contexts"].append({"name": "d", "context": {"cluster": "d", "user": "u", "namespace": "team-d"}})
    config["clusters"].append({"name": "d", "cluster": {"server": "http://127.0.0.1:2"}})
    path.write_text(yaml.safe_dump(config))
    assert KubeClient.load(path).namespace == "default"
    other = KubeClient.load(path, context="d")
    assert other.namespace == "team-d"
    with pytest.raises(errors.Unreachable, match="port=2"):
        other.get("/version")
    with pytest.raises(errors.KubeConfigError, match=r"has no context 'e'; its contexts: c, d"):
        KubeClient.load(path, context="e")


def test_watch_over_tls_can_be_ended_from_another_thread(tls_server):
    url, directory, _ = tls_server
    client = KubeClient.load(
        kubeconfig(
            url,
            directory,
            **{"certificate-authority": str(directory / "ca.crt"), "tls-server-name": "kube.test"},
        )
    )
    watch = client.watch("/api/v1/pods", resource_version="1", timeout_seconds=3600)
    lines = iter(watch)
    assert next(lines) == b'{"type":"ADDED","object":{}}'
    closing = threading.Thread(target=watch.close)
    closing.start()
    assert list(lines) == []
    closing.join(60)
    client.close()


@pytest.fixture
def service_account(tmp_path, monkeypatch):
    """The service account of a pod in a cluster without an API server."""
    authority = certs.new_authority("test CA", datetime.now(UTC), timedelta(days=1))
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    for name, content in (("ca.crt", authority.cert), ("token", b"first\n"), ("namespace", b"team-a")):
        (folder / name).write_bytes(content)
    monkeypatch.setattr(credentials, "_SERVICE_ACCOUNT", folder)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_all_proxy_is_ignored_in_a_pod(service_account, monkeypatch):
    """As in client-go, which does not read this variable."""
    monkeypatch.setenv("ALL_PROXY", "socks5://proxy:1080")
    assert credentials.load(None).proxy is None
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "fd00::/8")
    assert credentials.load(None).proxy is None
    monkeypatch.delenv("NO_PROXY")
    assert credentials.load(None).proxy == "http://proxy:3128"


def test_pod_uses_the_service_account_and_its_renewed_token(tls_server, service_account, monkeypatch):
    url, directory, seen = tls_server
    (service_account / "ca.crt").write_bytes((directory / "ca.crt").read_bytes())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.2")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", url.rpartition(":")[2])
    monkeypatch.setattr(module, "_TOKEN_SECONDS", 0.0)
    client = KubeClient.load()
    assert client.namespace == "team-a"
    client.get("/version")
    (service_account / "token").write_text("second")
    client.get("/version")
    client.close()
    heads = [head.lower() for head in seen]
    assert b"authorization: bearer first\r\n" in heads[0]
    assert b"authorization: bearer second\r\n" in heads[1]


def test_service_account_token_is_reread_after_seconds_and_after_401(api: ApiServer, clock, service_account):
    """Independent of jumps of the wall clock, and at once after a 401."""
    loaded = credentials.load(None)
    assert loaded.host == "https://[fd00::1]:443"
    client = KubeClient(api.serve(), authorization=loaded.authorization, clock=clock)
    client.create("/x", {})
    (service_account / "token").write_text("second")
    clock.set_wall(datetime(2020, 1, 1, tzinfo=UTC))
    clock.advance(11)
    client.create("/x", {})
    (service_account / "token").write_text("third")
    api.fault(Fault(status=401))
    with pytest.raises(errors.Unauthorized):
        client.create("/x", {})
    client.create("/x", {})
    sent = [request.headers["Authorization"] for request in api.sent()]
    assert sent == ["Bearer first", "Bearer second", "Bearer second", "Bearer third"]
    client.close()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("ca.crt", b"", "ca.crt is empty"),
        ("ca.crt", b"x", "certificate"),
        ("ca.crt", None, "ca.crt"),
        ("PORT", None, "PORT"),
    ],
)
def test_damaged_service_account_error_names_the_file(service_account, monkeypatch, name, content, reason):
    if name == "PORT":
        monkeypatch.delenv("KUBERNETES_SERVICE_PORT")
    elif content is None:
        (service_account / name).unlink()
    else:
        (service_account / name).write_bytes(content)
    with pytest.raises(errors.KubeConfigError, match=f"the pod's service account: .*{reason}"):
        KubeClient.load()


def test_missing_credentials_error_names_the_sources(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(errors.KubeConfigError, match=r"nothing.*--kubeconfig"):
        KubeClient.load()


def test_paths():
    assert paths.pods() == "/api/v1/pods"
    assert paths.pods("ns", "p", "binding") == "/api/v1/namespaces/ns/pods/p/binding"
    assert paths.nodes("n", "status") == "/api/v1/nodes/n/status"
    assert paths.extendedresources("gpu-1", "status") == "/apis/cardwise.dev/v1alpha1/extendedresources/gpu-1/status"
    with pytest.raises(errors.InvalidName, match="namespaced"):
        paths.pods("", "p")


@pytest.mark.parametrize("text", ["root:x:0:0:root:/root:/bin/sh\n", "- a\n", "a: [\n"])
def test_other_files_are_reported_as_invalid_kubeconfig(tmp_path, text):
    path = tmp_path / "passwd"
    path.write_text(text)
    with pytest.raises(errors.KubeConfigError, match=r"passwd: not a kubeconfig; use --kubeconfig"):
        KubeClient.load(path)
