"""The seam to the API server against the real one (etcd and kube-apiserver, no controllers)."""

import base64
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.kube.watch.reflector import Reflector, WatchPace
from cardwise.runtime.tls import filesets
from cardwise.runtime.tls.cabundle import CaBundle
from cardwise.runtime.tls.certstore import SecretStore
from cardwise.runtime.tls.tls import Rotator
from tests.cluster import PatientClient
from tests.cluster.processes import PATIENCE, wait_for
from tests.runtime.tls import certificates

pytestmark = [
    pytest.mark.cluster("api"),
    # The harness keeps its processes by pid and lets the Popen objects go.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]


class Patient(PatientClient):
    """Watches end as those of our parts."""

    def _open_response(self, *args, query=None, **settings):
        watches = "watch" in (query or {})
        return (KubeClient if watches else PatientClient)._open_response(self, *args, query=query, **settings)


@pytest.fixture(scope="module")
def client(plane):
    client = Patient.load(plane.kubeconfig("admin"))
    yield client
    client.close()


@pytest.fixture
def namespace(client, request):
    name = f"t-{abs(hash(request.node.name)) % 10**9}"
    client.create(paths.namespaces(), {"metadata": {"name": name}})
    # No controller makes it here, and admission wants it for every pod.
    client.create(f"/api/v1/namespaces/{name}/serviceaccounts", {"metadata": {"name": "default"}})
    return name


def eventually(condition: Callable[[], bool]) -> None:
    assert wait_for(condition), "did not come true in time"


def answers(client: KubeClient) -> bool:
    try:
        return client.request("GET", "/readyz") == b"ok"
    except errors.KubeError:
        return False


def pod(name: str) -> dict:
    return {
        "metadata": {"name": name},
        "spec": {"schedulerName": "nobody", "containers": [{"name": "c", "image": "none"}]},
    }


class Mirror:
    def __init__(self) -> None:
        self.payloads: dict[str, str] = {}

    def on_change(self, key, old, new):
        assert self.payloads.get(key) == old
        self.payloads[key] = new

    def on_delete(self, key, old):
        assert self.payloads.pop(key) == old

    def on_synced(self): ...


def project(raw: bytes) -> tuple[str, str]:
    manifest = json.loads(raw)
    return manifest["metadata"]["name"], manifest.get("data", {}).get("x", "")


def truth(client: KubeClient, namespace: str) -> dict[str, str]:
    return dict(project(json.dumps(path).encode()) for path in client.get(paths.configmaps(namespace))["items"])


def test_reflector_through_churn_and_a_restart_of_the_api_server(
    plane, client: KubeClient, namespace: str, monkeypatch: pytest.MonkeyPatch
):
    watches = []
    watch = client.watch
    monkeypatch.setattr(client, "watch", lambda *args, **options: watches.append(args) or watch(*args, **options))
    path = paths.configmaps(namespace)
    for number in range(60):
        client.create(path, {"metadata": {"name": f"c{number}"}, "data": {"x": "0"}})
    handler = Mirror()
    pace = WatchPace(watch_min=1.0, watch_max=2.0, silence=4.0, backoff_initial=0.1, backoff_cap=1.0)
    reflector = Reflector(client, path, project, handler, list_limit=25, pace=pace)
    reflector.start()
    try:
        assert reflector.synced.wait(PATIENCE)
        assert handler.payloads == truth(client, namespace)
        for number in range(0, 60, 2):
            client.patch(f"{path}/c{number}", {"data": {"x": "1"}})
        for number in range(0, 60, 5):
            client.delete(f"{path}/c{number}")
        eventually(lambda: handler.payloads == truth(client, namespace))
        # Several watches long: the version is carried over, not listed again.
        relists, events = reflector.relists, reflector.events
        eventually(lambda so_many=len(watches) + 3: len(watches) >= so_many)
        client.create(path, {"metadata": {"name": "late"}})
        eventually(lambda: "late" in handler.payloads)
        assert reflector.relists == relists == 1
        assert reflector.events > events
        plane.process("kube-apiserver").restart()
        eventually(lambda: answers(client))
        client.create(path, {"metadata": {"name": "after"}})
        client.delete(f"{path}/late")
        eventually(lambda: handler.payloads == truth(client, namespace))
        assert reflector.handler_errors == 0
    finally:
        reflector.stop(PATIENCE)
    assert not reflector._thread.is_alive()


def test_silent_api_server_is_noticed(plane, client: KubeClient, namespace: str):
    path = paths.configmaps(namespace)
    handler = Mirror()
    pace = WatchPace(watch_min=1.0, watch_max=1.5, silence=2.0, backoff_initial=0.1, backoff_cap=0.5)
    reflector = Reflector(client, path, project, handler, pace=pace)
    reflector.start()
    try:
        assert reflector.synced.wait(PATIENCE)
        eventually(lambda: reflector.disconnected_seconds() == 0)  # it is infinite until the first watch is open
        process = plane.process("kube-apiserver")
        process.pause()
        try:
            eventually(lambda: reflector.disconnected_seconds() > 1.0)
            assert reflector.staleness_seconds() > 1.0
        finally:
            process.resume()
        client.create(path, {"metadata": {"name": "after"}})
        eventually(lambda: "after" in handler.payloads)
    finally:
        reflector.stop()


def test_events_are_accepted(client: KubeClient, namespace: str):
    stored = client.create(paths.pods(namespace), pod("p"))
    recorder = EventRecorder(client, "cardwise-extender")
    about = ObjectRef.pod(namespace, "p", stored["metadata"]["uid"])
    for _ in range(3):
        recorder.record(about, "GpuMemoryExhausted", "no card has 8138 MiB free", "Warning")
    recorder.record(ObjectRef.node("n1"), "CardUnhealthy", "card 1", "Warning")
    recorder.stop(PATIENCE)
    assert (recorder.written, recorder.failed) == (4, 0)
    (event,) = client.get(paths.events(namespace), {"fieldSelector": "involvedObject.name=p"})["items"]
    assert (event["count"], event["reason"]) == (3, "GpuMemoryExhausted")


def test_replicas_agree_on_certificates_and_the_webhooks_carry_their_ca(client, namespace, tmp_path):
    hosts = ["cardwise-webhook.cardwise.svc"]
    past = datetime.now(UTC) - timedelta(days=300)
    rotators = [
        Rotator(SecretStore(client, namespace, "certs"), hosts, tmp_path / str(number), need_client=True)
        for number in range(4)
    ]
    for seed in (None, past):
        if seed is not None:
            client.delete(paths.secrets(namespace, "certs"))
            SecretStore(client, namespace, "certs").save(certificates.issue_files(past, hosts), None)
        threads = [threading.Thread(target=rotator.ensure_certificates) for rotator in rotators]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        sets = [filesets.read_files(tmp_path / str(number)) for number in range(4)]
        assert sets[0]
        assert all(rotator == sets[0] for rotator in sets)

    pem = rotators[0].ensure_certificates()
    name = f"hooks-{namespace}"
    hook = {
        "name": "a.cardwise.dev",
        "clientConfig": {"url": "https://localhost/x"},
        "rules": [{"apiGroups": ["none.dev"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["x"]}],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    configurations = [paths.mutatingwebhookconfigurations(name), paths.validatingwebhookconfigurations(name)]
    bundle = CaBundle(client, configurations, interval=600)
    bundle.set_bundle(pem)
    bundle.start()
    try:
        # The chart's objects come later than we do.
        for path in configurations:
            client.create(
                path.rpartition("/")[0], {"metadata": {"name": name}, "webhooks": [hook, {**hook, "name": "b.x.dev"}]}
            )

        def carried() -> set[str]:
            return {
                rotator["clientConfig"].get("caBundle", "")
                for path in configurations
                for rotator in client.get(path)["webhooks"]
            }

        expected = {base64.b64encode(pem).decode()}
        eventually(lambda: carried() == expected)
        assert bundle.asserted.wait(PATIENCE)
        # An upgrade drops it: the watch brings it back, long before the interval.
        client.patch(configurations[0], [{"op": "remove", "path": "/webhooks/1/clientConfig/caBundle"}], "json")
        eventually(lambda: carried() == expected)
    finally:
        bundle.stop()
        for path in configurations:
            client.delete(path)
