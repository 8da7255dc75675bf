"""What the API server of the tests claims to do as the real one does: the same tests against both.

The real one is etcd and kube-apiserver without controllers. What they tell about time is not compared.
"""

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import yaml

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.pods.eviction import evict
from tests.cluster.controlplane import ETCD, ControlPlane
from tests.cluster.parts import CHART
from tests.cluster.processes import PATIENCE
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock

REAL = [
    pytest.mark.cluster("api"),
    # The harness keeps its processes by pid and lets the Popen objects go.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]
_numbers = count(1)


@dataclass
class Server:
    client: KubeClient
    compact: Callable[[], None]  # forgets the history
    elapse: Callable[[float], None] = lambda _: None  # where time does not pass by itself

    def make(self, path: str, name: str, **fields: Any) -> Json:
        metadata = {"name": name} | fields.pop("metadata", {})
        return self.client.create(path, {"metadata": metadata} | fields)

    def watched(self, path: str, since: Json, **query: str) -> list[tuple[str, str]]:
        """Type and name of what a watch tells of since that object or list, up to an object named "end"."""
        watch = self.client.watch(path, query, since["metadata"]["resourceVersion"], 60)
        events = []
        for line in watch:
            event = json.loads(line)
            if event["type"] != "BOOKMARK":
                events.append((event["type"], event["object"]["metadata"]["name"]))
            if events[-1:] == [("ADDED", "end")]:
                break
        watch.close()
        return events[:-1]


@pytest.fixture(scope="module", params=["memory", "http", pytest.param("real", marks=REAL)])
def kind(request: pytest.FixtureRequest) -> str:
    """Of the module, so that the tests of each follow one another: the real one stops for who does not use it."""
    return str(request.param)


@pytest.fixture
def server(kind: str, request: pytest.FixtureRequest) -> Iterator[Server]:
    if kind == "real":
        yield request.getfixturevalue("real")
        return
    clock = FakeClock()
    api = ApiServer(clock)
    if kind == "memory":
        client, elapse = api.client(), lambda _: None
    else:
        client, elapse = KubeClient(api.serve()), lambda seconds: (clock.until_waiting(), clock.advance(seconds))
    yield Server(client, api.compact, elapse)
    client.close()
    api.close()


@pytest.fixture(scope="module")
def real(plane: ControlPlane) -> Iterator[Server]:
    def compact() -> None:
        def call_etcd(method: str, body: Json) -> Json:
            url = f"http://127.0.0.1:{plane.ports[ETCD]}/v3/kv/{method}"
            with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=PATIENCE) as answer:
                return json.load(answer)

        call_etcd("compaction", {"revision": call_etcd("range", {"key": "AA=="})["header"]["revision"]})

    client = KubeClient.load(plane.kubeconfig("admin"))
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for file in (CHART / "files" / "crds").glob("*.yaml"):
        client.create(definitions, yaml.safe_load(file.read_text()))
    for definition in client.get(definitions)["items"]:
        await_kind(client, definition)
    yield Server(client, compact)
    client.close()


def await_kind(client: KubeClient, definition: Json) -> None:
    """Until the API server serves the kind."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    query = {"fieldSelector": f"metadata.name={definition['metadata']['name']}"}
    conditions = definition.get("status", {}).get("conditions") or ()
    if not any(condition["type"] == "Established" and condition["status"] == "True" for condition in conditions):
        watch = client.watch(path, query, definition["metadata"]["resourceVersion"], 60)
        await_kind(client, json.loads(next(iter(watch)))["object"])
        watch.close()


@pytest.fixture
def client(server: Server) -> KubeClient:
    return server.client


@pytest.fixture
def ns(server: Server) -> str:
    """A namespace of the test's own, in which pods can be made."""
    name = f"t{next(_numbers)}"
    server.make(paths.namespaces(), name)
    server.make(f"/api/v1/namespaces/{name}/serviceaccounts", "default")
    return name


@pytest.fixture
def card(server: Server) -> Json:
    """Of the cluster, so each test has another one."""
    name = f"card-{next(_numbers)}"
    spec = {"node": "n1", "index": 0, "uuid": name, "model": "K80", "memoryMiB": 11441}
    return server.make(paths.extendedresources(), name, spec=spec, **of_kind("ExtendedResource"))


def of_kind(kind: str) -> Json:
    return {"apiVersion": names.API_VERSION, "kind": kind}


def pod(server: Server, ns: str, name: str = "p", *, node: str = "", metadata: Json | None = None, **spec: Any) -> Json:
    spec = {"schedulerName": "nobody", "containers": [{"name": "c", "image": "none"}]} | spec
    created = server.make(paths.pods(ns), name, metadata=metadata or {}, spec=spec)
    if node:
        bind(server, created, node)
    return server.client.get(paths.pods(ns, name))


def bind(server: Server, pod: Json, node: str = "n1", **metadata: Any) -> None:
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name} | metadata}
    server.client.create(paths.pods(namespace, name, "binding"), binding | {"target": {"kind": "Node", "name": node}})


def version(manifest: Json) -> int:
    return int(manifest["metadata"]["resourceVersion"])


class TestObjects:
    def test_an_object_gets_its_metadata_once(self, server, client, ns):
        configmap = server.make(paths.configmaps(ns), "a", data={"x": "1"})
        assert configmap["metadata"].keys() >= {"uid", "resourceVersion", "creationTimestamp"}
        assert configmap["metadata"]["namespace"] == ns
        metadata = {"uid": "mine", "creationTimestamp": "2001-01-01T00:00:00Z", "resourceVersion": ""}
        other = server.make(paths.configmaps(ns), "b", metadata=metadata)
        assert other["metadata"]["uid"] not in ("mine", configmap["metadata"]["uid"])
        assert not other["metadata"]["creationTimestamp"].startswith("2001")
        assert version(other) > version(configmap)
        assert client.get(paths.configmaps(ns, "a")) == configmap
        client.delete(paths.configmaps(ns, "a"))
        again = server.make(paths.configmaps(ns), "a")
        assert again["metadata"]["uid"] != configmap["metadata"]["uid"]

    def test_errors_are_told_apart(self, server, client, ns):
        server.make(paths.configmaps(ns), "a")
        with pytest.raises(errors.AlreadyExists):
            server.make(paths.configmaps(ns), "a")
        with pytest.raises(errors.NotFound, match="not found"):
            client.get(paths.configmaps(ns, "b"))
        with pytest.raises(errors.NotFound, match="not found"):
            client.delete(paths.configmaps(ns, "b"))
        with pytest.raises(errors.NotFound, match="not found"):
            client.patch(paths.configmaps(ns, "b"), {})
        with pytest.raises(errors.NotFound, match="could not find the requested resource"):
            client.get("/api/v1/things")
        with pytest.raises(errors.NotFound):
            client.get("/apis/none.dev/v1/things")
        with pytest.raises(errors.BadRequest):
            client.request("POST", paths.configmaps(ns), body=b"{")
        with pytest.raises(errors.BadRequest):
            server.make(paths.configmaps(ns), "c", metadata={"namespace": "other"})
        with pytest.raises(errors.BadRequest):
            server.make(paths.gpuquotas(ns), "q", spec={})  # which kind it is

    def test_a_name_can_be_generated(self, client, ns):
        configmap = [client.create(paths.configmaps(ns), {"metadata": {"generateName": "a-"}}) for _ in range(2)]
        assert len({listed["metadata"]["name"] for listed in configmap}) == 2
        assert all(listed["metadata"]["name"].startswith("a-") for listed in configmap)

    def test_the_generation_of_our_kinds_counts_what_is_wanted(self, client, card):
        path = paths.extendedresources(card["metadata"]["name"])
        assert card["metadata"]["generation"] == 1
        assert client.patch(path, {"metadata": {"labels": {"a": "b"}}})["metadata"]["generation"] == 1
        assert client.patch(f"{path}/status", {"status": {"health": "Healthy"}})["metadata"]["generation"] == 1
        assert client.patch(path, {"spec": {"unschedulable": True}})["metadata"]["generation"] == 2

    def test_a_write_that_changes_nothing_is_none(self, server, client, ns, card):
        configmap = server.make(paths.configmaps(ns), "a", data={"x": "1"})
        path = paths.configmaps(ns, "a")
        assert client.patch(path, {"data": {"x": "1"}}) == configmap
        assert client.update(path, configmap) == configmap
        status_path = paths.extendedresources(card["metadata"]["name"], "status")
        first = client.patch(status_path, {"status": {"health": "Healthy"}})
        assert client.patch(status_path, {"status": {"health": "Healthy"}}) == first
        server.make(paths.configmaps(ns), "end")
        assert server.watched(paths.configmaps(ns), configmap) == []

    def test_dry_runs_answer_and_change_nothing(self, server, client, ns, card):
        query = {"dryRun": "All"}
        configmap = {"metadata": {"name": "a"}}
        assert client.create(paths.configmaps(ns), configmap, query=query)["metadata"]["name"] == "a"
        with pytest.raises(errors.NotFound):
            client.get(paths.configmaps(ns, "a"))
        path = paths.extendedresources(card["metadata"]["name"])
        shown = client.patch(path, {"spec": {"unschedulable": True}}, query=query)
        assert shown["spec"]["unschedulable"]
        assert client.get(path) == card
        server.make(paths.configmaps(ns), "a")
        with pytest.raises(errors.AlreadyExists):
            client.create(paths.configmaps(ns), configmap, query=query)

    def test_a_deletion_can_have_preconditions(self, server, client, ns):
        configmap = server.make(paths.configmaps(ns), "a")
        path = paths.configmaps(ns, "a")
        for stale in ({"uid": "another"}, {"uid": configmap["metadata"]["uid"], "resourceVersion": "1"}):
            with pytest.raises(errors.Conflict):
                client.delete(path, {"preconditions": stale})
        client.delete(path, {"preconditions": {key: configmap["metadata"][key] for key in ("uid", "resourceVersion")}})
        with pytest.raises(errors.NotFound):
            client.get(path)

    def test_a_collection_is_deleted_by_selector_and_in_pages(self, server, client, ns):
        for name in "abcde":
            server.make(paths.configmaps(ns), name, metadata={"labels": {"mine": str(name != "c").lower()}})
        query, pages = {"labelSelector": "mine=true", "limit": "3"}, []
        for _ in range(2):
            page = client.delete(paths.configmaps(ns), query=query)
            pages.append([listed["metadata"]["name"] for listed in page["items"]])
            query["continue"] = page["metadata"].get("continue", "")
        assert (pages, query["continue"]) == ([["a", "b", "d"], ["e"]], "")
        remaining = [listed["metadata"]["name"] for listed in client.get(paths.configmaps(ns))["items"]]
        assert [name for name in remaining if len(name) == 1] == ["c"]  # Kubernetes puts one of its own there


class TestWrites:
    def test_an_update_of_an_old_version_is_a_conflict(self, server, client, ns):
        secret = server.make(paths.secrets(ns), "a", data={"x": "MQ=="})
        path = paths.secrets(ns, "a")
        now = client.update(path, secret | {"data": {"x": "Mg=="}})
        assert version(now) > version(secret)
        with pytest.raises(errors.Conflict) as caught:
            client.update(path, secret | {"data": {"x": "Mw=="}})
        assert not isinstance(caught.value, errors.AlreadyExists)
        with pytest.raises(errors.Conflict):
            client.update(path, {"metadata": {"name": "a", "uid": "another"}})
        # Who names no version overwrites, but for Leases and our kinds.
        assert "data" not in client.update(path, {"metadata": {"name": "a"}})
        server.make(paths.leases(ns), "l", spec={"holderIdentity": "me"})
        with pytest.raises(errors.Invalid):
            client.update(paths.leases(ns, "l"), {"metadata": {"name": "l"}, "spec": {"holderIdentity": "you"}})

    def test_an_update_of_what_is_not_there(self, client, ns):
        with pytest.raises(errors.NotFound):
            client.update(paths.secrets(ns, "l"), {"metadata": {"name": "l", "resourceVersion": "7"}})
        # It makes a Lease, but not one that had been another.
        lease = {"metadata": {"name": "l", "resourceVersion": "7"}, "spec": {"holderIdentity": "me"}}
        with pytest.raises(errors.Conflict):
            client.update(paths.leases(ns, "l"), lease | {"metadata": lease["metadata"] | {"uid": "another"}})
        assert client.update(paths.leases(ns, "l"), lease)["metadata"]["uid"]
        assert client.get(paths.leases(ns, "l"))["spec"] == lease["spec"]

    def test_a_merge_patch(self, server, client, ns):
        server.make(paths.configmaps(ns), "a", data={"x": "1", "y": "2"}, metadata={"labels": {"a": "b"}})
        path = paths.configmaps(ns, "a")
        now = client.patch(path, {"data": {"x": None, "z": "3"}, "metadata": {"labels": {"c": "d"}}})
        assert now["data"] == {"y": "2", "z": "3"}
        assert now["metadata"]["labels"] == {"a": "b", "c": "d"}
        assert client.patch(path, {"metadata": {"labels": None}})["metadata"].get("labels") is None

    def test_a_patch_that_is_meant_for_another_object_or_version(self, server, client, ns, card):
        written = {
            paths.pods(ns, "p"): {"labels": {"a": "b"}},
            paths.pods(ns, "p", "status"): {"labels": {"a": "b"}},
            paths.extendedresources(card["metadata"]["name"]): {"labels": {"a": "b"}},
        }
        created = pod(server, ns)
        for path, change in written.items():
            with pytest.raises(errors.Conflict):
                client.patch(path, {"metadata": change | {"resourceVersion": "1"}})
            with pytest.raises(errors.Conflict):
                client.patch(path, {"metadata": change | {"resourceVersion": "1", "uid": "another"}})
            with pytest.raises(errors.Invalid, match="field is immutable"):
                client.patch(path, {"metadata": change | {"uid": "another"}})
        precondition = {key: created["metadata"][key] for key in ("uid", "resourceVersion")}
        assert client.patch(paths.pods(ns, "p"), {"metadata": precondition | {"labels": {"a": "b"}}})["metadata"][
            "labels"
        ]
        # A status of our kinds takes nothing of the metadata, so it does not see whom it is meant for.
        path = paths.extendedresources(card["metadata"]["name"], "status")
        client.patch(path, {"metadata": {"uid": "another"}, "status": {"health": "Healthy"}})
        with pytest.raises(errors.Conflict):
            client.patch(path, {"metadata": {"resourceVersion": "1"}, "status": {"health": "Unhealthy"}})

    def test_a_strategic_merge_patch(self, server, client, ns):
        pod(server, ns, schedulingGates=[{"name": "a.b/c"}, {"name": "d.e/f"}])
        gone = {"spec": {"schedulingGates": [{"name": "a.b/c", "$patch": "delete"}]}}
        for _ in range(2):
            now = client.patch(paths.pods(ns, "p"), gone, "strategic")
            assert now["spec"]["schedulingGates"] == [{"name": "d.e/f"}]
        node = f"n{next(_numbers)}"
        server.make(paths.nodes(), node, status={"capacity": {"a.b/c": "1", "cpu": "8"}})
        change = {"status": {"capacity": {"a.b/c": None, "d.e/f": "2"}, "allocatable": {"d.e/f": "2"}}}
        now = client.patch(paths.nodes(node, "status"), change, "strategic")
        assert now["status"]["capacity"] == {"cpu": "8", "d.e/f": "2"}

    def test_our_kinds_know_no_strategic_merge_patch(self, client, card):
        with pytest.raises(errors.KubeError) as caught:
            client.patch(paths.extendedresources(card["metadata"]["name"]), {"spec": {"index": 1}}, "strategic")
        assert caught.value.status == 415

    def test_a_json_patch_does_all_or_nothing(self, server, client, ns):
        configmap = server.make(paths.configmaps(ns), "a", data={"x": "1"})
        path = paths.configmaps(ns, "a")
        test = {"op": "test", "path": "/metadata/resourceVersion"}
        change = [{"op": "replace", "path": "/data/x", "value": "2"}]
        with pytest.raises(errors.Invalid):
            client.patch(path, [*change, test | {"value": "1"}], "json")
        assert client.get(path) == configmap
        now = client.patch(path, [test | {"value": configmap["metadata"]["resourceVersion"]}, *change], "json")
        assert now["data"] == {"x": "2"}
        with pytest.raises(errors.Invalid):
            client.patch(path, [{"op": "remove", "path": "/data/y"}], "json")


class TestStatuses:
    def test_of_our_kinds(self, server, client, card):
        path = paths.extendedresources(card["metadata"]["name"])
        change = {"metadata": {"labels": {"a": "b"}}, "spec": {"index": 7}, "status": {"health": "Healthy"}}
        now = client.patch(f"{path}/status", change)
        assert (now["spec"]["index"], now["status"]["health"]) == (0, "Healthy")
        assert "labels" not in now["metadata"]
        now = client.patch(path, change | {"status": {"health": "Unhealthy"}})
        assert (now["spec"]["index"], now["status"]["health"]) == (7, "Healthy")
        now = client.update(f"{path}/status", now | {"spec": {}, "status": {"health": "Unhealthy"}})
        assert (now["spec"]["index"], now["status"]["health"]) == (7, "Unhealthy")
        assert client.get(f"{path}/status") == client.get(path) == now
        with pytest.raises(errors.Conflict):
            client.update(f"{path}/status", now | {"metadata": now["metadata"] | {"uid": "another"}})

    def test_is_not_made_with_the_object(self, server, client, ns):
        spec = {"node": "n1", "index": 0, "uuid": "u", "model": "K80", "memoryMiB": 11441}
        spec["uuid"] = name = f"card-{next(_numbers)}"
        status = {"health": "Healthy"}
        created = server.make(paths.extendedresources(), name, spec=spec, status=status, **of_kind("ExtendedResource"))
        assert "status" not in created
        assert pod(server, ns)["status"]["phase"] == "Pending"
        node = f"n{next(_numbers)}"
        assert server.make(paths.nodes(), node, status={"capacity": {"cpu": "8"}})["status"]["capacity"] == {"cpu": "8"}

    def test_of_pods_and_nodes(self, server, client, ns):
        pod(server, ns)
        now = client.patch(paths.pods(ns, "p", "status"), {"status": {"nominatedNodeName": "n1"}})
        assert now["status"]["nominatedNodeName"] == "n1"
        now = client.patch(paths.pods(ns, "p", "status"), {"metadata": {"labels": {"c": "d"}}})
        assert now["metadata"]["labels"] == {"c": "d"}
        now = client.patch(
            paths.pods(ns, "p"), {"status": {"nominatedNodeName": "n2"}, "metadata": {"labels": {"a": "b"}}}
        )
        assert (now["status"]["nominatedNodeName"], now["metadata"]["labels"]) == ("n1", {"a": "b", "c": "d"})
        name = f"n{next(_numbers)}"
        server.make(paths.nodes(), name)
        now = client.patch(paths.nodes(name), {"status": {"capacity": {"cpu": "8"}}})
        assert "capacity" not in now.get("status", {})

    def test_is_not_everywhere(self, server, client, ns):
        server.make(paths.configmaps(ns), "a")
        with pytest.raises(errors.NotFound):
            client.patch(f"{paths.configmaps(ns, 'a')}/status", {"status": {}})


class TestManagers:
    def managers(self, client, path) -> dict[tuple[str, str], str]:
        return {
            (entry["manager"], entry.get("subresource", "")): json.dumps(entry["fieldsV1"]).replace('".": {}, ', "")
            for entry in client.get(path, managed_fields=True)["metadata"]["managedFields"]
        }

    def test_who_wrote_a_field_last_has_it(self, server, client, ns):
        pod(server, ns)
        path = paths.pods(ns, "p", "status")
        named = '{"f:status": {"f:nominatedNodeName": {}}}'

        def nominate(node: str | None, manager: str) -> dict[tuple[str, str], str]:
            client.patch(path, {"status": {"nominatedNodeName": node}}, "merge", manager)
            return self.managers(client, paths.pods(ns, "p"))

        assert nominate("n1", "one")["one", "status"] == named
        whole = client.get(paths.pods(ns, "p"), managed_fields=True)
        assert whole["metadata"]["managedFields"][-1]["operation"] == "Update"
        assert ("two", "status") not in nominate("n1", "two")  # it has changed nothing
        managers = nominate("n2", "two")
        assert managers["two", "status"] == named
        assert ("one", "status") not in managers
        assert not {("one", "status"), ("two", "status")} & nominate(None, "one").keys()

    def test_without_a_name_it_is_the_program(self, server, client, ns):
        path = paths.configmaps(ns, "a")
        server.make(paths.configmaps(ns), "a", data={"x": "1"})
        assert self.managers(client, path) == {("cardwise", ""): '{"f:data": {"f:x": {}}}'}
        client.patch(path, {"data": {"y": "1"}}, "merge", "other")
        assert self.managers(client, path)["other", ""] == '{"f:data": {"f:y": {}}}'


class TestLists:
    def test_pages_are_one_snapshot(self, server, client, ns):
        for name in "dabce":
            server.make(paths.configmaps(ns), name)
        pages = client.list_pages(paths.configmaps(ns), limit=2)
        seen = [json.loads(next(pages))]
        client.delete(paths.configmaps(ns, "c"))
        server.make(paths.configmaps(ns), "f")
        seen += [json.loads(page) for page in pages]
        assert [[listed["metadata"]["name"] for listed in page["items"]] for page in seen] == [
            ["a", "b"],
            ["c", "d"],
            ["e"],
        ]
        assert len({page["metadata"]["resourceVersion"] for page in seen}) == 1
        (whole,) = client.list_pages(paths.configmaps(ns), limit=0)
        document = json.loads(whole)
        assert [listed["metadata"]["name"] for listed in document["items"]] == ["a", "b", "d", "e", "f"]
        assert document["kind"] == "ConfigMapList"
        assert version(document) > version(seen[0])

    def test_a_page_after_the_history_was_forgotten_is_gone(self, server, client, ns):
        for name in "abc":
            server.make(paths.secrets(ns), name)
        pages = client.list_pages(paths.secrets(ns), limit=2)
        next(pages)
        server.make(paths.secrets(ns), "d")
        server.compact()
        with pytest.raises(errors.Gone):
            next(pages)

    @pytest.mark.parametrize(
        ("query", "expected"),
        [
            ("a=1", "x"), ("a==1", "x"), ("a!=1", "yz"), ("a", "xy"), ("!a", "z"), ("a in (1, 2)", "xy"),
            ("a notin (1)", "yz"), ("a in (1,2),b=1", "y"), ("a,b", "y"), ("", "xyz"),
        ],
    )  # fmt: skip
    def test_by_labels(self, server, client, ns, query, expected):
        for name, labels in {"x": {"a": "1"}, "y": {"a": "2", "b": "1"}, "z": {"c": ""}}.items():
            server.make(paths.configmaps(ns), name, metadata={"labels": labels})
        listed_pods = client.get(paths.configmaps(ns), {"labelSelector": query})["items"]
        assert "".join(configmap["metadata"]["name"] for configmap in listed_pods) == expected

    def test_by_fields(self, server, client, ns):
        pod(server, ns, "a", node="n1")
        pod(server, ns, "b")
        client.patch(paths.pods(ns, "b", "status"), {"status": {"phase": "Failed"}})

        def select_names(query: str, path: str = paths.pods(ns)) -> str:
            return "".join(
                pod_json["metadata"]["name"] for pod_json in client.get(path, {"fieldSelector": query})["items"]
            )

        assert select_names("metadata.name=b") == "b"
        assert select_names("spec.nodeName=n1") == "a"
        assert select_names("spec.nodeName=") == "b"
        assert select_names("status.phase!=Failed") == "a"
        assert select_names(f"metadata.namespace={ns},spec.nodeName!=n1", paths.pods()) == "b"
        with pytest.raises(errors.BadRequest, match="field label not supported"):
            select_names("spec.priorityClassName=high")
        event = {"involvedObject": {"namespace": ns, "name": "a", "kind": "Pod"}, "reason": "R", "type": "Normal"}
        server.make(paths.events(ns), "e", **event)
        assert select_names("involvedObject.name=a", paths.events(ns)) == "e"
        assert select_names("involvedObject.name=b", paths.events(ns)) == ""
        assert select_names("involvedObject.kind=Pod", paths.events(ns)) == "e"
        assert select_names("involvedObject.kind=Node", paths.events(ns)) == ""


class TestWatches:
    def test_tell_what_happened_since_a_version(self, server, client, ns):
        before = server.make(paths.configmaps(ns), "a")
        server.make(paths.configmaps(ns), "b", metadata={"labels": {"x": "1"}})
        client.patch(paths.configmaps(ns, "a"), {"data": {"x": "1"}})
        client.delete(paths.configmaps(ns, "a"))
        server.make(paths.secrets(ns), "s")
        server.make(paths.configmaps("default"), f"other-{ns}")
        server.make(paths.configmaps(ns), "end")
        expected = [("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "a")]
        assert server.watched(paths.configmaps(ns), before) == expected
        assert server.watched(paths.configmaps(), before) == [*expected, ("ADDED", f"other-{ns}")]

    def test_what_was_deleted_has_the_version_of_the_deletion(self, server, client, ns):
        configmap = server.make(paths.configmaps(ns), "a", data={"x": "1"})
        client.delete(paths.configmaps(ns, "a"))
        watch = client.watch(paths.configmaps(ns), resource_version=configmap["metadata"]["resourceVersion"])
        event = json.loads(next(iter(watch)))
        watch.close()
        assert (event["type"], event["object"]["data"]) == ("DELETED", {"x": "1"})
        assert version(event["object"]) > version(configmap)

    def test_what_comes_into_the_selection_is_added_and_what_leaves_is_deleted(self, server, client, ns):
        before = server.make(paths.configmaps(ns), "a")
        for labels in ({"x": "1"}, {"y": "1"}, {"x": None}, {"x": "1"}):
            client.patch(paths.configmaps(ns, "a"), {"metadata": {"labels": labels}})
        client.delete(paths.configmaps(ns, "a"))
        server.make(paths.configmaps(ns), "b")
        server.make(paths.configmaps(ns), "end", metadata={"labels": {"x": "1"}})
        expected = server.watched(paths.configmaps(ns), before, labelSelector="x=1")
        assert [kind for kind, _ in expected] == ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
        first = pod(server, ns, "p")
        bind(server, first, "n1")
        pod(server, ns, "end", node="n1")
        assert server.watched(paths.pods(ns), first, fieldSelector="spec.nodeName=n1") == [("ADDED", "p")]

    def test_end_after_their_time_with_a_bookmark_before(self, server, client, ns):
        before = client.get(paths.configmaps(ns))["metadata"]["resourceVersion"]
        server.make(paths.configmaps(ns), "a")
        watch = client.watch(paths.configmaps(ns), resource_version=before, timeout_seconds=8)
        # A watch gets no bookmark where nothing was written since it began.
        other = server.make(paths.configmaps("default"), f"other-{ns}")
        server.elapse(8)
        first, *bookmarks = [json.loads(line) for line in watch]
        assert (first["type"], {event["type"] for event in bookmarks}) == ("ADDED", {"BOOKMARK"})
        assert version(bookmarks[-1]["object"]) >= version(other)

    def test_of_a_kind_without_events_end_without_an_event(self, server, client, ns):
        """A bookmark may come, and need not: the real one sends it if etcd has meanwhile said how far it is."""
        since = server.make(paths.configmaps(ns), "a")["metadata"]["resourceVersion"]
        watch = client.watch(paths.jobs(ns), resource_version=since, timeout_seconds=8)
        server.make(paths.configmaps(ns), "b")
        server.elapse(8)
        assert {json.loads(line)["type"] for line in watch} <= {"BOOKMARK"}

    def test_from_a_version_that_was_forgotten_are_gone(self, server, client, ns):
        before = client.get(paths.secrets(ns))["metadata"]["resourceVersion"]
        last = server.make(paths.secrets(ns), "a")
        server.make(paths.secrets(ns), "end")
        server.compact()
        assert server.watched(paths.secrets(ns), last) == []  # of the last write it still knows
        event = json.loads(next(iter(client.watch(paths.secrets(ns), resource_version=before, timeout_seconds=10))))
        assert event["type"] == "ERROR"
        assert isinstance(errors.from_status(json.dumps(event["object"]).encode()), errors.Gone)

    def test_of_the_future_wait_for_it(self, server, client, ns):
        version = int(server.make(paths.configmaps(ns), "a")["metadata"]["resourceVersion"])
        watch = client.watch(paths.configmaps(ns), resource_version=str(version + 1000), timeout_seconds=1)
        server.make(paths.configmaps(ns), "b")
        server.elapse(1)
        assert list(watch) == []


class TestPods:
    def test_a_binding_writes_node_and_annotations_at_once(self, server, client, ns):
        created = pod(server, ns, metadata={"annotations": {"kept": "yes"}})
        bind(server, created, "n1", uid=created["metadata"]["uid"], annotations={"cardwise.dev/assignment": "x"})
        bound = client.get(paths.pods(ns, "p"))
        assert bound["spec"]["nodeName"] == "n1"
        assert bound["metadata"]["annotations"] == {"kept": "yes", "cardwise.dev/assignment": "x"}
        server.make(paths.pods(ns), "end", spec=created["spec"])
        assert server.watched(paths.pods(ns), created) == [("MODIFIED", "p")]

    def test_a_binding_is_refused(self, server, client, ns):
        created = pod(server, ns)
        with pytest.raises(errors.Conflict):
            bind(server, created, uid="another")
        with pytest.raises(errors.Conflict):
            bind(server, created, resourceVersion="1")
        with pytest.raises(errors.NotFound):
            bind(server, {"metadata": {"name": "q", "namespace": ns}})
        with pytest.raises(errors.Conflict, match="schedulingGates"):
            bind(server, pod(server, ns, "gated", schedulingGates=[{"name": "a.b/c"}]))
        bind(server, created)
        with pytest.raises(errors.Conflict, match="already assigned"):
            bind(server, created)

    def test_a_deletion_gives_time_where_a_kubelet_is_to_end_it(self, server, client, ns):
        pod(server, ns, "waiting")
        pod(server, ns, "bound", node="n1", terminationGracePeriodSeconds=50)
        pod(server, ns, "ended", node="n1")
        client.patch(paths.pods(ns, "ended", "status"), {"status": {"phase": "Failed"}})
        for name in ("waiting", "ended"):
            client.delete(paths.pods(ns, name))
            with pytest.raises(errors.NotFound):
                client.get(paths.pods(ns, name))
        path = paths.pods(ns, "bound")
        ending = client.delete(path)
        assert ending["metadata"]["deletionGracePeriodSeconds"] == 50
        assert ending["metadata"]["deletionTimestamp"]
        assert client.get(path)["metadata"]["deletionTimestamp"] == ending["metadata"]["deletionTimestamp"]
        assert client.delete(path, {"gracePeriodSeconds": 20})["metadata"]["deletionGracePeriodSeconds"] == 20
        assert client.delete(path, {"gracePeriodSeconds": 40})["metadata"]["deletionGracePeriodSeconds"] == 20
        with pytest.raises(errors.Conflict):
            bind(server, ending)
        client.delete(path, {"gracePeriodSeconds": 0})
        with pytest.raises(errors.NotFound):
            client.get(path)

    def test_an_eviction_deletes(self, server, client, ns):
        created = pod(server, ns, node="n1")
        uid = created["metadata"]["uid"]
        with pytest.raises(errors.Conflict):  # of a pod that does not run the real one says so after ten seconds
            evict(client, ns, "p", "another")
        created = client.patch(paths.pods(ns, "p", "status"), {"status": ready()})
        with pytest.raises(errors.Conflict):
            evict(client, ns, "p", "another")
        evict(client, ns, "p", uid, dry_run=True)
        assert client.get(paths.pods(ns, "p")) == created
        evict(client, ns, "p", uid, grace=7)
        assert client.get(paths.pods(ns, "p"))["metadata"]["deletionGracePeriodSeconds"] == 7
        evict(client, ns, "p", uid, grace=0)
        with pytest.raises(errors.NotFound):
            evict(client, ns, "p", uid)

    def test_an_eviction_is_held_back_by_a_budget(self, server, client, ns):
        for name in "abc":
            pod(server, ns, name, node="n1", metadata={"labels": {"app": "web"}})
        for name in "ab":
            client.patch(paths.pods(ns, name, "status"), {"status": ready()}, "strategic")
        budget = {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}
        server.make(paths.poddisruptionbudgets(ns), "web", spec=budget)
        path = paths.poddisruptionbudgets(ns, "web")
        status = {"observedGeneration": 1, "disruptionsAllowed": 1, "currentHealthy": 2, "desiredHealthy": 1}
        client.patch(f"{path}/status", {"status": status | {"expectedPods": 2}})
        uids = {name: client.get(paths.pods(ns, name))["metadata"]["uid"] for name in "abc"}
        evict(client, ns, "a", uids["a"], grace=0, dry_run=True)
        evict(client, ns, "a", uids["a"], grace=0)
        assert client.get(path)["status"]["disruptionsAllowed"] == 0
        with pytest.raises(errors.TooManyRequests, match="disruption budget"):
            evict(client, ns, "b", uids["b"])
        with pytest.raises(errors.TooManyRequests):
            evict(client, ns, "b", uids["b"], dry_run=True)
        evict(client, ns, "c", uids["c"], grace=0)  # it does not run, so it counts for nobody

    def test_no_pod_is_evicted_that_two_budgets_cover(self, server, client, ns):
        uid = pod(server, ns, node="n1", metadata={"labels": {"app": "web"}})["metadata"]["uid"]
        client.patch(paths.pods(ns, "p", "status"), {"status": ready()}, "strategic")
        for name in ("one", "other"):
            budget = {"minAvailable": 0, "selector": {"matchLabels": {"app": "web"}}}
            server.make(paths.poddisruptionbudgets(ns), name, spec=budget)
            status = {"observedGeneration": 1, "disruptionsAllowed": 1, "currentHealthy": 1, "desiredHealthy": 0}
            path = paths.poddisruptionbudgets(ns, name)
            client.patch(f"{path}/status", {"status": status | {"expectedPods": 1}})
        for dry in (True, False):
            with pytest.raises(errors.ServerError, match="more than one PodDisruptionBudget"):
                evict(client, ns, "p", uid, dry_run=dry)


def ready() -> Json:
    return {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


def test_what_is_no_object(client):
    assert client.get("/version")["major"] == "1"
    assert client.request("GET", "/readyz") == b"ok"
    assert client.fetch_server_time() is not None
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    assert client.create(paths.selfsubjectreviews(), review)["status"]["userInfo"]["username"]
