"""The script at the end of `helm uninstall`: removes what Cardwise's parts created and Helm does not know.

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

COMPONENT = "app.kubernetes.io/component"
CENTRAL = ("webhook", "extender")  # may write about any node; the others write about their own node
COMPONENTS = f"app.kubernetes.io/name=cardwise,{COMPONENT} in (webhook,extender,deviceplugin,mps)"
AUTOMATIC = f"{names.AUTO_LABEL}=true"  # objects that the extender created
CAPACITIES = {names.GPU_MEM, names.GPU_COUNT, names.GPU_CORE, *names.OWN_RESOURCES}
WRITTEN_LABEL = f"{names.GROUP}/{names.ACCELERATOR}"  # annotation: the label `accelerator` that the device plugin wrote
TEST = "cardwise-test"  # the pod of the last `helm test`
PATIENCE = 100.0  # seconds for Cardwise's pods to end: a running part would write everything again
PAGE = 500  # objects


def list_parts(client: KubeClient, namespace: str) -> list[dict[str, Any]]:
    """Cardwise's pods that still exist."""
    return list(client.list_objects(paths.pods(namespace), {"labelSelector": COMPONENTS}))


def ready_nodes(client: KubeClient) -> set[str]:
    """The nodes that are Ready, so that their kubelets can end pods."""
    return {
        node["metadata"]["name"]
        for node in client.list_objects(paths.nodes())
        for condition in (node.get("status") or {}).get("conditions") or ()
        if (condition["type"], condition["status"]) == ("Ready", "True")
    }


def wait_for_parts(client: KubeClient, namespace: str) -> bool:
    """Wait until Cardwise's pods have ended. Returns False if a pod on a Ready node still runs after `PATIENCE`.

    A pod on a node that is not Ready stays until the node is back or deleted, which may be never. The cleanup does not
    wait for such a pod: deleting the release takes away the pod's rights to write. Of such pods it waits only for those
    of webhook and extender, because their last writes may be about any node.
    """
    until = time.monotonic() + PATIENCE
    while remaining := list_parts(client, namespace):
        ready = ready_nodes(client)
        dead = [pod for pod in remaining if pod["spec"].get("nodeName", "") not in {"", *ready}]
        living = [pod["metadata"]["name"] for pod in remaining if pod not in dead]
        late = time.monotonic() > until
        if late and living:
            print(
                f"these pods still run and would write everything again: {', '.join(living)}; run this again once they "
                "are gone"
            )
            return False
        if not living and (late or not any(pod["metadata"]["labels"][COMPONENT] in CENTRAL for pod in dead)):
            nodes = sorted({pod["spec"]["nodeName"] for pod in dead})
            print(f"these nodes do not answer, so Cardwise's pods there have not ended: {', '.join(nodes)}")
            return True
        time.sleep(1.0)
    return True


def is_own_resource(resource: str) -> bool:
    """Whether Cardwise offers the resource on nodes."""
    return resource in CAPACITIES or bool(names.class_of(resource))


def clean_node(client: KubeClient, node: dict[str, Any]) -> None:
    """Remove Cardwise's resources, label and annotations from a node."""
    metadata, status = node["metadata"], node.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    own_annotations = {key: None for key in annotations if key.startswith(f"{names.GROUP}/")}
    change: dict[str, Any] = {"annotations": own_annotations} if own_annotations else {}
    if labels.get(names.ACCELERATOR, "") == annotations.get(WRITTEN_LABEL):
        change["labels"] = {names.ACCELERATOR: None}
    if change:
        client.patch(paths.nodes(metadata["name"]), {"metadata": change}, "merge")
    removed = {
        kind: {key: None for key in status.get(kind) or {} if is_own_resource(key)}
        for kind in ("capacity", "allocatable")
    }
    if any(removed.values()):
        client.patch(paths.nodes(metadata["name"], "status"), {"status": removed}, "merge")
        print(f"node {metadata['name']}: removed {', '.join(sorted(removed['capacity']))}")


def delete_all(client: KubeClient, path: str, selector: str = "") -> None:
    """Delete all objects of a kind, `PAGE` of them per request: a request takes the API server some seconds.

    Does nothing if the kind's CustomResourceDefinition is deleted.

    path: the path of the kind.
    selector: deletes only objects with these labels.
    """
    query = {"labelSelector": selector, "limit": str(PAGE)}
    with contextlib.suppress(errors.NotFound):
        while True:
            page = client.delete(path, query=query, timeout=60.0)
            if page["items"]:
                print(f"deleted {len(page['items'])} of {path}")
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return


def podgroup_namespaces(client: KubeClient) -> list[str]:
    """The namespaces with automatic PodGroups; none if the CustomResourceDefinition is deleted."""
    with contextlib.suppress(errors.NotFound):
        groups = client.list_objects(paths.podgroups(), {"labelSelector": AUTOMATIC})
        return sorted({group["metadata"]["namespace"] for group in groups})
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
        with contextlib.suppress(errors.NotFound):  # it may be deleted meanwhile
            clean_node(client, node)
    delete_all(client, paths.extendedresources())
    delete_all(client, paths.resourceclasses(), AUTOMATIC)
    for namespace in podgroup_namespaces(client):
        delete_all(client, paths.podgroups(namespace), AUTOMATIC)
    for secret in arguments.secret:
        delete_object(client, paths.secrets(arguments.namespace, secret))
    delete_object(client, paths.leases(arguments.namespace, names.LEASE))
    delete_object(client, paths.configmaps(arguments.namespace, names.WORKLOAD))
    delete_object(client, paths.pods(arguments.namespace, TEST))


if __name__ == "__main__":
    main()
