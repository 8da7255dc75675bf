"""What `helm uninstall` runs at its end: takes away what Cardwise has written and the chart does not know of.

In the image of the parts. Running pods keep their cards, and classes and quotas that people made stay with their
CustomResourceDefinitions. Nodes that do not answer keep nothing waiting, and are named. Can be run again at any time.
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
CENTRAL = ("webhook", "extender")  # the others are about their own node only
COMPONENTS = f"app.kubernetes.io/name=cardwise,{COMPONENT} in (webhook,extender,deviceplugin,mps)"
CAPACITIES = {names.GPU_MEM, names.GPU_COUNT, names.GPU_CORE, *names.OWN_RESOURCES}
NOTED = f"{names.GROUP}/{names.ACCELERATOR}"  # annotation: the label `accelerator` that the device plugin wrote
TEST = "cardwise-test"  # the pod of the last `helm test`
PATIENCE = 100.0  # seconds for our pods to end; they would write everything again
PAGE = 500  # objects


def parts(client: KubeClient, namespace: str) -> list[dict[str, Any]]:
    """Pods of ours that still are there."""
    return list(client.objects(paths.pods(namespace), {"labelSelector": COMPONENTS}))


def ready_nodes(client: KubeClient) -> set[str]:
    """The nodes that are Ready: whose kubelets can end a pod."""
    return {
        node["metadata"]["name"]
        for node in client.objects(paths.nodes())
        for condition in (node.get("status") or {}).get("conditions") or ()
        if (condition["type"], condition["status"]) == ("Ready", "True")
    }


def await_end(client: KubeClient, namespace: str) -> bool:
    """Waits until our pods have ended. False where one has not in `PATIENCE` seconds, though its node is Ready.

    A pod on a node that is not Ready stays until the node is back or deleted, which may be never. It keeps nothing
    waiting: the release is gone, and with it all rights to write. Only webhook and extender are given the time there
    too, since their last writes may be about any node.
    """
    until = time.monotonic() + PATIENCE
    while remaining := parts(client, namespace):
        ready = ready_nodes(client)
        dead = [pod for pod in remaining if pod["spec"].get("nodeName", "") not in {"", *ready}]
        living = [pod["metadata"]["name"] for pod in remaining if pod not in dead]
        late = time.monotonic() > until
        if late and living:
            print(
                f"still there, and would write all of it again: {', '.join(living)}; run this again once they are gone"
            )
            return False
        if not living and (late or not any(pod["metadata"]["labels"][COMPONENT] in CENTRAL for pod in dead)):
            nodes = sorted({pod["spec"]["nodeName"] for pod in dead})
            print(f"these nodes do not answer, so our pods there have not ended: {', '.join(nodes)}")
            return True
        time.sleep(1.0)
    return True


def is_ours(resource: str) -> bool:
    return resource in CAPACITIES or bool(names.class_of(resource))


def clean_node(client: KubeClient, node: dict[str, Any]) -> None:
    """Its capacities, and what we wrote into its labels and annotations."""
    metadata, status = node["metadata"], node.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    ours = {key: None for key in annotations if key.startswith(f"{names.GROUP}/")}
    change: dict[str, Any] = {"annotations": ours} if ours else {}
    if labels.get(names.ACCELERATOR, "") == annotations.get(NOTED):
        change["labels"] = {names.ACCELERATOR: None}
    if change:
        client.patch(paths.nodes(metadata["name"]), {"metadata": change}, "merge")
    lists = {
        kind: {key: None for key in status.get(kind) or {} if is_ours(key)} for kind in ("capacity", "allocatable")
    }
    if any(lists.values()):
        client.patch(paths.nodes(metadata["name"], "status"), {"status": lists}, "merge")
        print(f"node {metadata['name']}: took {', '.join(sorted(lists['capacity']))} away")


def delete_all(client: KubeClient, path: str, selector: str = "") -> None:
    """All objects of a kind of ours, `PAGE` of them by one request, which the API server takes some seconds for.

    Nothing where the kind has gone with its CustomResourceDefinition.
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


def delete(client: KubeClient, path: str) -> None:
    with contextlib.suppress(errors.NotFound):
        client.delete(path)
        print(f"deleted {path}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--secret", action="append", default=[])
    arguments = parser.parse_args()
    client = KubeClient.load(None)
    if not await_end(client, arguments.namespace):
        sys.exit(1)
    for node in client.objects(paths.nodes()):
        with contextlib.suppress(errors.NotFound):  # it may go meanwhile
            clean_node(client, node)
    delete_all(client, paths.extendedresources())
    delete_all(client, paths.resourceclasses(), f"{names.AUTO_LABEL}=true")
    for secret in arguments.secret:
        delete(client, paths.secrets(arguments.namespace, secret))
    delete(client, paths.leases(arguments.namespace, names.LEASE))
    delete(client, paths.configmaps(arguments.namespace, names.WORKLOAD))
    delete(client, paths.pods(arguments.namespace, TEST))


if __name__ == "__main__":
    main()
