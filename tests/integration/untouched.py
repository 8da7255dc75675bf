"""What the files that share a cluster leave as they found it, so that none depends on which came before."""

from collections.abc import Iterator

from cardwise.core.api import names
from cardwise.kube import paths
from tests.cluster import Cluster
from tests.cluster.processes import noted_names, wait_for

RBAC = "/apis/rbac.authorization.k8s.io/v1"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
# Objects without a namespace that a test may make.
KINDS = (
    f"{RBAC}/clusterroles",
    f"{RBAC}/clusterrolebindings",
    f"{ADMISSION}/mutatingwebhookconfigurations",
    f"{ADMISSION}/validatingwebhookconfigurations",
    f"{ADMISSION}/validatingadmissionpolicies",
    f"{ADMISSION}/validatingadmissionpolicybindings",
    "/apis/node.k8s.io/v1/runtimeclasses",
)
RUNS = "runs: "


def state(cluster: Cluster) -> set[str]:
    """What is there, a line each."""
    return set(_lines(cluster))


def leaves_as_found(cluster: Cluster, before: set[str]) -> None:
    """Asserts it, once what a test has deleted is gone. More processes may run: simulated kubelets stay."""
    gone: set[str] = set()
    added: set[str] = set()

    def so() -> bool:
        nonlocal gone, added
        after = state(cluster)
        gone, added = before - after, {line for line in after - before if not line.startswith(RUNS)}
        return not gone and not added

    assert wait_for(so), f"a test left behind {sorted(added)}, and did away with {sorted(gone)}"


def _lines(cluster: Cluster) -> Iterator[str]:
    for name in noted_names(cluster.state_dir):
        if cluster.process(name).is_alive():
            yield f"{RUNS}{name}"
    for path in KINDS:
        for listed_object in cluster.api.get(path)["items"]:
            yield f"{path} {listed_object['metadata']['name']}"
    for node in cluster.api.get(paths.nodes())["items"]:
        spec = node["spec"]
        taints = [
            listed_object
            for listed_object in spec.get("taints", ())
            if not listed_object["key"].startswith("node.kubernetes.io/")
        ]
        yield f"node {node['metadata']['name']}: unschedulable={spec.get('unschedulable', False)} taints={taints}"
    for pod in cluster.api.get(paths.pods())["items"]:
        yield f"pod {pod['metadata']['namespace']}/{pod['metadata']['name']}"
    if cluster.has_parts:
        for device in cluster.api.get(paths.extendedresources())["items"]:
            marked = {key: setting for key, setting in device["spec"].items() if key in ("unschedulable", "cordon")}
            yield f"device {device['metadata']['name']} {marked}"
        for resource_class in cluster.api.get(paths.resourceclasses())["items"]:
            if names.AUTO_LABEL not in resource_class["metadata"].get("labels", {}):
                yield f"class {resource_class['metadata']['name']}"
