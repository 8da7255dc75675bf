"""What the chart's roles let each part do, as the real API server judges it; docs/security.md has it in words.

That each part can do its work with them is what all other tests of this folder show: the parts run with these accounts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cardwise.core import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from tests.cluster import Cluster, binaries, processes
from tests.cluster.parts import CHART
from tests.integration.sharing import Space, workload

pytestmark = [pytest.mark.cluster("nodes"), pytest.mark.node, pytest.mark.timeout(180)]

REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
ADMISSION = "admissionregistration.k8s.io"
OWN = names.NAMESPACE
HOOKS = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")

# A right: verb, group, resource with its subresource, and where: "" for all namespaces, or "namespace/name".
Right = tuple[str, str, str, str]

MAY: dict[str, list[Right]] = {
    "webhook": [
        ("list", "", "pods", ""),
        ("watch", "", "namespaces", ""),
        ("list", names.GROUP, "gpuquotas", ""),
        ("patch", ADMISSION, HOOKS[0], "/cardwise"),
        ("get", "", "secrets", f"{OWN}/cardwise-webhook-tls"),
    ],
    "extender": [
        ("create", "", "pods/binding", ""),
        ("create", "", "pods/eviction", ""),
        ("patch", names.GROUP, "gpuquotas/status", ""),
        ("create", names.GROUP, "podgroups", ""),
        ("update", "coordination.k8s.io", "leases", f"{OWN}/{names.LEASE}"),
    ],
    "deviceplugin": [
        ("patch", "", "nodes/status", ""),
        ("patch", "", "pods", ""),
        ("create", names.GROUP, "extendedresources", ""),
        ("patch", names.GROUP, "extendedresources/status", ""),
    ],
    "mps": [
        ("list", "", "pods", ""),
        ("patch", names.GROUP, "extendedresources/status", ""),
        ("create", "", "events", ""),
    ],
}

NOBODY: list[Right] = [
    ("create", "", "pods", ""),
    ("delete", "", "pods", ""),
    ("create", "", "pods/exec", ""),
    ("list", "", "secrets", ""),
    ("get", "", "secrets", ""),
    ("get", "", "secrets", "kube-system/other"),
    ("get", "", "configmaps", "kube-system/other"),
    ("create", "", "serviceaccounts/token", ""),
    ("impersonate", "", "users", ""),
    ("delete", "", "nodes", ""),
    ("get", "", "nodes/proxy", ""),
    ("patch", "", "namespaces", ""),
    ("patch", "", "resourcequotas", ""),
    ("patch", names.GROUP, "gpuquotas", ""),
    ("update", names.GROUP, "gpuquotas", ""),
    ("update", "apiextensions.k8s.io", "customresourcedefinitions", ""),
    ("patch", ADMISSION, "validatingadmissionpolicies", ""),
    ("delete", ADMISSION, "validatingadmissionpolicies", ""),
    ("create", ADMISSION, HOOKS[0], ""),
    ("patch", ADMISSION, HOOKS[0], "/of-somebody-else"),
    ("delete", ADMISSION, HOOKS[1], "/cardwise"),
    ("bind", "rbac.authorization.k8s.io", "clusterroles", ""),
    ("update", "rbac.authorization.k8s.io", "clusterroles", ""),
    ("create", "rbac.authorization.k8s.io", "clusterrolebindings", ""),
    ("create", "apps", "daemonsets", ""),
]

MAY_NOT: dict[str, list[Right]] = {
    "webhook": [
        ("patch", "", "pods", ""),
        ("create", "", "pods/binding", ""),
        ("create", "", "pods/eviction", ""),
        ("patch", "", "nodes", ""),
        ("patch", names.GROUP, "extendedresources/status", ""),
        ("patch", names.GROUP, "resourceclasses", ""),
        ("update", "coordination.k8s.io", "leases", ""),
        ("get", "", "secrets", f"{OWN}/cardwise-extender-tls"),
    ],
    "extender": [
        ("update", "", "pods/status", ""),
        ("patch", "", "nodes/status", ""),
        ("patch", names.GROUP, "extendedresources", ""),
        ("update", "coordination.k8s.io", "leases", "kube-system/kube-scheduler"),
        ("patch", ADMISSION, HOOKS[0], "/cardwise"),
        ("get", "", "secrets", f"{OWN}/cardwise-webhook-tls"),
    ],
    "deviceplugin": [
        ("create", "", "pods/binding", ""),
        ("create", "", "pods/eviction", ""),
        ("patch", names.GROUP, "resourceclasses", ""),
        ("get", names.GROUP, "gpuquotas", ""),
        ("patch", names.GROUP, "gpuquotas/status", ""),
        ("get", "", "namespaces", ""),
        ("get", "", "secrets", f"{OWN}/cardwise-extender-tls"),
    ],
    "mps": [
        ("patch", "", "pods", ""),
        ("get", "", "nodes", ""),
        ("patch", "", "nodes", ""),
        ("patch", "", "nodes/status", ""),
        ("create", "", "pods/binding", ""),
        ("create", "", "pods/eviction", ""),
        ("create", names.GROUP, "extendedresources", ""),
        ("patch", names.GROUP, "extendedresources", ""),
    ],
}


@contextmanager
def rendered(cluster: Cluster, template: str, *settings: str) -> Iterator[None]:
    """With a template of the chart that the test cluster goes without."""
    helm = str(binaries.helm(print) / "helm")
    flags = [flag for each in settings for flag in ("--set", each)]
    chart = ["template", "cardwise", str(CHART), "-n", OWN, "--kube-version", binaries.KUBERNETES]
    objects = processes.run([helm, *chart, "-s", f"templates/{template}", *flags])
    cluster.apply(objects)
    try:
        yield
    finally:
        cluster.kubectl("delete", "-f", "-", stdin=objects)


@pytest.fixture(scope="module")
def accounts(cluster: Cluster) -> Iterator[Cluster]:
    """All parts' accounts; the test cluster itself runs no MPS manager."""
    with rendered(cluster, "mps/rbac.yaml", "mps.enabled=true"):
        cluster.wait(lambda: allowed(cluster, "mps", MAY["mps"][0]), "the new role is known", 60)
        yield cluster


@pytest.fixture
def restricted(accounts: Cluster) -> Iterator[Cluster]:
    """Under the policy that knows nodes; the parts' own tokens name none here, so they write nothing meanwhile."""
    with rendered(accounts, "policies/deviceplugin.yaml"), acting(accounts, "deviceplugin", "n1") as other:
        accounts.wait(lambda: "n2" in refused(other, paths.nodes("n2"), {}), "the policy acts", 60)
        yield accounts


def user(part: str) -> str:
    return f"system:serviceaccount:{OWN}:cardwise-{part}"


def allowed(cluster: Cluster, part: str, right: Right) -> bool:
    verb, group, resource, where = right
    namespace, _, name = where.partition("/")
    resource, _, sub = resource.partition("/")
    asked = {
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": sub,
        "namespace": namespace,
        "name": name,
    }
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{OWN}", "system:authenticated"]
    spec = {"user": user(part), "groups": groups, "resourceAttributes": asked}
    return bool(cluster.api.create(REVIEWS, {"spec": spec})["status"].get("allowed"))


@contextmanager
def acting(cluster: Cluster, part: str, node: str) -> Iterator[KubeClient]:
    """The part's account as the API server sees it by the token of a pod on that node."""
    client = KubeClient.load(cluster.kubeconfig)
    client._headers[""]["Impersonate-User"] = user(part)
    client._headers[""]["Impersonate-Extra-authentication.kubernetes.io%2fnode-name"] = node
    try:
        yield client
    finally:
        client.close()


def refused(client: KubeClient, path: str, change: object) -> str:
    """What a refused change is told; "" when it is not refused."""
    try:
        client.patch(path, change)
    except errors.KubeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("part", MAY)
def test_each_part_has_what_it_needs(accounts: Cluster, part: str) -> None:
    assert [right for right in MAY[part] if not allowed(accounts, part, right)] == []


@pytest.mark.parametrize("part", MAY)
def test_no_part_has_more(accounts: Cluster, part: str) -> None:
    assert [right for right in (*NOBODY, *MAY_NOT[part]) if allowed(accounts, part, right)] == []


def test_a_part_on_a_node_writes_nothing_about_another(restricted: Cluster) -> None:
    found = restricted.api.get(paths.extendedresources())["items"]
    cards = {card["spec"]["node"]: card["metadata"]["name"] for card in found}
    sick = {"status": {"reason": "said by another"}}
    for part, word in (("deviceplugin", "device plugin"), ("mps", "MPS manager")):
        with acting(restricted, part, "n1") as client:
            told = refused(client, paths.extendedresources(cards["n2"], "status"), sick)
            assert f"the {word} of node n1 may not write what is about node n2" in told
            assert refused(client, paths.extendedresources(cards["n1"], "status"), {"status": {}}) == ""


def test_who_may_patch_pods_cannot_change_a_placement(accounts: Cluster) -> None:
    space = Space(accounts, "placements")
    space.create(workload("steady", gpu_mem=64, node="n1"))
    space.running("steady", timeout=120)
    for part in ("extender", "deviceplugin"):
        with acting(accounts, part, "n1") as client:
            for key in (names.IDX, names.ASSIGNMENT):
                told = refused(client, paths.pods(space.name, "steady"), {"metadata": {"annotations": {key: "7"}}})
                assert f"metadata.annotations[{key}]" in told
    annotations = space.get("steady")["metadata"]["annotations"]
    assert "7" not in (annotations[names.IDX], annotations[names.ASSIGNMENT])
    space.clear()
