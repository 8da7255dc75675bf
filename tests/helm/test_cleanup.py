"""What `helm uninstall` takes away, what it leaves because others wrote it, and for whom it waits."""

import sys
from unittest.mock import patch

import pytest

from cardwise.core.api import names
from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from tests import build
from tests.cli.clusters import card
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock
from tests.helm.scripts import load

cleanup = load("cleanup")


def cleaned(labels, annotations, **amounts):
    """The node afterwards."""
    api = ApiServer(FakeClock())
    manifest = build.node(labels=labels, status={"capacity": amounts, "allocatable": dict(amounts)})
    manifest["metadata"]["annotations"] = annotations
    node = api.write_object(paths.nodes(), manifest)
    cleanup.clean_node(api.client(), node)
    return api.get(paths.nodes("n1"))


@pytest.mark.parametrize(("now", "remaining"), [("ours", {}), ("theirs", {names.ACCELERATOR: "theirs"})])
def test_the_label_of_the_model_goes_unless_somebody_has_changed_it(now, remaining):
    node = cleaned(
        {names.ACCELERATOR: now}, {cleanup.RECORDED_LABEL_ANNOTATION: "ours", names.REQUEUE: "1", "example.com/x": "y"}
    )
    assert node["metadata"].get("labels", {}) == remaining
    assert node["metadata"]["annotations"] == {"example.com/x": "y"}


def test_a_label_that_we_never_wrote_stays():
    assert cleaned({names.ACCELERATOR: "theirs"}, {})["metadata"]["labels"] == {names.ACCELERATOR: "theirs"}


def test_our_capacities_go_and_no_others():
    ours = {names.GPU_MEM: "1", names.SHARE: "1", f"{names.CLASS_PREFIX}a100": "1"}
    node = cleaned({}, {}, **ours, cpu="4", **{names.NVIDIA_GPU: "1"})
    for kind in ("capacity", "allocatable"):
        assert node["status"][kind] == {"cpu": "4", names.NVIDIA_GPU: "1"}


def node(name: str, *, ready: str = "True") -> dict:
    offered = {names.SHARE: "1"}
    conditions = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}]
    return build.node(name, status={"conditions": conditions, "capacity": offered, "allocatable": offered})


def part(component: str, on: str) -> dict:
    labels = {"app.kubernetes.io/name": "cardwise", "app.kubernetes.io/component": component}
    metadata = {"name": f"{component}-{on}", "namespace": names.NAMESPACE, "labels": labels}
    return {"metadata": metadata, "spec": {"nodeName": on}}


@pytest.fixture
def api() -> ApiServer:
    """Of n1, n2 and n3 the kubelet of n2 does not answer any more; each has a card."""
    server = ApiServer(FakeClock())
    for name, ready in (("n1", "True"), ("n2", "Unknown"), ("n3", "True")):
        server.write_object(paths.nodes(), node(name, ready=ready))
        server.write_object(paths.extendedresources(), card(name, 0))
    server.write_object(paths.secrets(), {"metadata": {"name": "tls", "namespace": names.NAMESPACE}})
    return server


def uninstalled(api: ApiServer) -> float:
    """The seconds that the Job takes. Raises SystemExit where it fails."""
    begun = api.clock.now()
    with (
        patch.object(KubeClient, "load", lambda *_: api.client()),
        patch.object(cleanup.time, "monotonic", api.clock.now),
        patch.object(cleanup.time, "sleep", api.clock.sleep),
        patch.object(sys, "argv", ["cleanup.py", f"--namespace={names.NAMESPACE}", "--secret=tls"]),
    ):
        cleanup.main()
    return api.clock.now() - begun


def count_leftovers(api: ApiServer) -> int:
    """How many things of ours are there."""
    capacities = [node_manifest["status"]["capacity"] for node_manifest in api.all(paths.nodes())]
    return sum(map(len, capacities)) + len(api.all(paths.extendedresources())) + len(api.all(paths.secrets()))


def test_a_dead_node_keeps_nothing_from_being_cleaned_and_is_named(api, capsys):
    api.write_object(paths.pods(), part("deviceplugin", "n2"))
    api.write_object(paths.pods(), part("mps", "n1"))
    with pytest.raises(SystemExit):
        uninstalled(api)
    assert count_leftovers(api) == 7, "the pod on n1 could write all of it again"
    assert "these pods still run" in (output := capsys.readouterr().out)
    assert ("mps-n1" in output, "deviceplugin-n2" in output) == (True, False)
    api.remove(paths.pods(names.NAMESPACE, "mps-n1"))
    assert uninstalled(api) < cleanup.END_TIMEOUT_SECONDS
    assert count_leftovers(api) == 0
    assert "these nodes do not answer, so Cardwise's pods there have not ended: n2\n" in capsys.readouterr().out


def test_a_node_that_is_gone_is_not_waited_for(api, capsys):
    api.write_object(paths.pods(), part("deviceplugin", "n4"))
    assert uninstalled(api) < cleanup.END_TIMEOUT_SECONDS
    assert (count_leftovers(api), "not ended: n4\n" in capsys.readouterr().out) == (0, True)


def test_podgroups_of_the_extender_go_in_all_namespaces_and_those_of_people_stay(api):
    for namespace, name, labels in (
        ("a", "auto", {names.AUTO_LABEL: "true"}),
        ("b", "auto", {names.AUTO_LABEL: "true"}),
        ("b", "by-hand", {}),
        ("c", "taken-over", {names.AUTO_LABEL: "false"}),
    ):
        metadata = {"namespace": namespace, "name": name, "labels": labels}
        api.write_object(paths.podgroups(), {"metadata": metadata})
    uninstalled(api)
    assert sorted(group["metadata"]["name"] for group in api.all(paths.podgroups())) == ["by-hand", "taken-over"]


@pytest.mark.parametrize("component", ["webhook", "extender"])
def test_a_part_of_the_whole_cluster_on_a_dead_node_is_given_time(api, component):
    api.write_object(paths.pods(), part(component, "n2"))
    assert uninstalled(api) > cleanup.END_TIMEOUT_SECONDS
    assert count_leftovers(api) == 0


def test_thousands_of_cards_take_few_requests(api):
    for index in range(1200):
        api.write_object(paths.extendedresources(), card("n1", index))
    api.write_object(paths.resourceclasses(), {"metadata": {"name": "auto", "labels": {names.AUTO_LABEL: "true"}}})
    api.write_object(paths.resourceclasses(), {"metadata": {"name": "by-hand"}})
    api.write_object(
        paths.resourceclasses(), {"metadata": {"name": "taken-over", "labels": {names.AUTO_LABEL: "false"}}}
    )
    uninstalled(api)
    assert count_leftovers(api) == 0
    assert len(api.sent("delete", f"{paths.extendedresources()}*")) < 10
    assert [resource_class["metadata"]["name"] for resource_class in api.all(paths.resourceclasses())] == [
        "by-hand",
        "taken-over",
    ]


def test_nodes_are_read_in_pages(api):
    uninstalled(api)
    assert all("limit" in call.query for call in api.sent("list", paths.nodes()))
