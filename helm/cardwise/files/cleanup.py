"""The script at the end of `helm uninstall`: removes what Cardwise's components created besides Helm's objects.

Runs in Cardwise's image, and may run again at any time. Running pods keep their GPUs. ResourceClasses and GPUQuotas
that people created stay, with their CustomResourceDefinitions. The script does not wait for nodes that do not answer,
and prints their names.
"""

import argparse
import contextlib
import sys
import time
from typing import Any

from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

COMPONENT_LABEL = "app.kubernetes.io/component"
CENTRAL_COMPONENTS = (
    "webhook",
    "extender",
)  # components that write about all nodes; the others write only about their own node
PARTS_SELECTOR = f"app.kubernetes.io/name=cardwise,{COMPONENT_LABEL} in (webhook,extender,deviceplugin,mps)"
AUTOMATIC_SELECTOR = f"{names.AUTO_LABEL}=true"  # objects that the extender created
OWN_CAPACITIES = {names.GPU_MEM, names.GPU_COUNT, names.GPU_CORE, *names.OWN_RESOURCES}
# The annotation of a node that contains the value of the label `accelerator` that the device plugin has set.
RECORDED_LABEL_ANNOTATION = f"{names.GROUP}/{names.ACCELERATOR}"
TEST_POD = "cardwise-test"  # the pod of the last `helm test`
END_TIMEOUT_SECONDS = 100.0  # for the end of Cardwise's pods: a running component would create its objects again
PAGE_SIZE = 500  # objects deleted by one request


def list_parts(client: KubeClient, namespace: str) -> list[dict[str, Any]]:
    """Return Cardwise's pods that still exist."""
    return list(client.list_objects(paths.pods(namespace), {"labelSelector": PARTS_SELECTOR}))


def list_ready_nodes(client: KubeClient) -> set[str]:
    """Return the nodes that are Ready, whose kubelets can end pods."""
    return {
        node["metadata"]["name"]
        for node in client.list_objects(paths.nodes())
        for condition in (node.get("status") or {}).get("conditions") or ()
        if (condition["type"], condition["status"]) == ("Ready", "True")
    }


def wait_for_parts(client: KubeClient, namespace: str) -> bool:
    """Wait until Cardwise's pods have ended. Returns False if a pod on a Ready node does not end in time.

    A pod on a node that is not Ready stays until the node is back or deleted, which may be never. The cleanup does not
    wait for such a pod, whose rights end with the release. The exceptions are pods of the webhook and the extender: it
    waits for them even there, because their last writes may be about any node.
    """
    deadline = time.monotonic() + END_TIMEOUT_SECONDS
    while remaining_pods := list_parts(client, namespace):
        ready = list_ready_nodes(client)
        unreachable_pods = [pod for pod in remaining_pods if pod["spec"].get("nodeName", "") not in {"", *ready}]
        running_names = [pod["metadata"]["name"] for pod in remaining_pods if pod not in unreachable_pods]
        is_late = time.monotonic() > deadline
        if is_late and running_names:
            print(
                f"these pods still run and would write everything again: {', '.join(running_names)}; run this again "
                "once they "
                "are gone"
            )
            return False
        if not running_names and (
            is_late
            or not any(pod["metadata"]["labels"][COMPONENT_LABEL] in CENTRAL_COMPONENTS for pod in unreachable_pods)
        ):
            nodes = sorted({pod["spec"]["nodeName"] for pod in unreachable_pods})
            print(f"these nodes do not answer, so Cardwise's pods there have not ended: {', '.join(nodes)}")
            return True
        time.sleep(1.0)
    return True


def is_own_resource(resource: str) -> bool:
    """Whether Cardwise offers the resource on nodes."""
    return resource in OWN_CAPACITIES or bool(names.class_of(resource))


def clean_node(client: KubeClient, node: dict[str, Any]) -> None:
    """Remove Cardwise's resources, label and annotations from a node."""
    metadata, status = node["metadata"], node.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    own_annotations = {key: None for key in annotations if key.startswith(f"{names.GROUP}/")}
    metadata_change: dict[str, Any] = {"annotations": own_annotations} if own_annotations else {}
    if labels.get(names.ACCELERATOR, "") == annotations.get(RECORDED_LABEL_ANNOTATION):
        metadata_change["labels"] = {names.ACCELERATOR: None}
    if metadata_change:
        client.patch(paths.nodes(metadata["name"]), {"metadata": metadata_change}, "merge")
    removed = {
        kind: {key: None for key in status.get(kind) or {} if is_own_resource(key)}
        for kind in ("capacity", "allocatable")
    }
    if any(removed.values()):
        client.patch(paths.nodes(metadata["name"], "status"), {"status": removed}, "merge")
        print(f"node {metadata['name']}: removed {', '.join(sorted(removed['capacity']))}")


def delete_all(client: KubeClient, path: str, selector: str = "") -> None:
    """Delete all objects of a kind, `PAGE_SIZE` of them per request, which takes the API server some seconds.

    Does nothing if the kind's CustomResourceDefinition is deleted.

    path: the path of the kind.
    selector: a label selector of the objects to delete; "" for all objects.
    """
    query = {"labelSelector": selector, "limit": str(PAGE_SIZE)}
    with contextlib.suppress(errors.NotFound):
        while True:
            page = client.delete(path, query=query, timeout=60.0)
            if page["items"]:
                print(f"deleted {len(page['items'])} of {path}")
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return


def list_podgroup_namespaces(client: KubeClient) -> list[str]:
    """Return the namespaces with automatic PodGroups; none if the CustomResourceDefinition is deleted."""
    with contextlib.suppress(errors.NotFound):
        podgroups = client.list_objects(paths.podgroups(), {"labelSelector": AUTOMATIC_SELECTOR})
        return sorted({podgroup["metadata"]["namespace"] for podgroup in podgroups})
    return []


def delete_object(client: KubeClient, path: str) -> None:
    """Delete one object, if it exists."""
    with contextlib.suppress(errors.NotFound):
        client.delete(path)
        print(f"deleted {path}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--secret", action="append", default=[])
    arguments = parser.parse_args()
    client = KubeClient.load(None)
    if not wait_for_parts(client, arguments.namespace):
        sys.exit(1)
    for node in client.list_objects(paths.nodes()):
        with contextlib.suppress(errors.NotFound):  # the node may be deleted meanwhile
            clean_node(client, node)
    delete_all(client, paths.extendedresources())
    delete_all(client, paths.resourceclasses(), AUTOMATIC_SELECTOR)
    for namespace in list_podgroup_namespaces(client):
        delete_all(client, paths.podgroups(namespace), AUTOMATIC_SELECTOR)
    for secret in arguments.secret:
        delete_object(client, paths.secrets(arguments.namespace, secret))
    delete_object(client, paths.leases(arguments.namespace, names.LEASE))
    delete_object(client, paths.configmaps(arguments.namespace, names.WORKLOAD))
    delete_object(client, paths.pods(arguments.namespace, TEST_POD))


if __name__ == "__main__":
    main()
