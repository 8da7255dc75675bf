"""What `helm uninstall` runs at its end: takes away what Cardwise has written and the chart does not know of.

In the image of the parts. Running pods keep their cards, and classes and quotas that people made stay with their
CustomResourceDefinitions. Can be run again at any time.
"""

import argparse
import contextlib
import sys
import time
from typing import Any

from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

COMPONENTS = "app.kubernetes.io/name=cardwise,app.kubernetes.io/component in (webhook,extender,deviceplugin,mps)"
CAPACITIES = {names.GPU_MEM, names.GPU_COUNT, names.GPU_CORE, *names.OWN_RESOURCES}
NOTED = f"{names.GROUP}/{names.ACCELERATOR}"  # annotation: the label `accelerator` that the device plugin wrote
TEST = "cardwise-test"  # the pod of the last `helm test`
PATIENCE = 100.0  # seconds for our pods to end; they would write everything again


def parts(client: KubeClient, namespace: str) -> list[str]:
    """Pods of ours that still are there."""
    found = client.get(paths.pods(namespace), {"labelSelector": COMPONENTS})["items"]
    return [each["metadata"]["name"] for each in found]


def ended(client: KubeClient, namespace: str) -> bool:
    """Waits until none is."""
    until = time.monotonic() + PATIENCE
    while left := parts(client, namespace):
        if time.monotonic() > until:
            print(f"still there, and would write all of it again: {', '.join(left)}; run this again once they are gone")
            return False
        time.sleep(0.5)
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
    """All objects of a kind of ours. Nothing where the kind has gone with its CustomResourceDefinition."""
    with contextlib.suppress(errors.NotFound):
        for each in client.get(path, {"labelSelector": selector})["items"]:
            delete(client, f"{path}/{each['metadata']['name']}")


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
    if not ended(client, arguments.namespace):
        sys.exit(1)
    for node in client.get(paths.nodes())["items"]:
        clean_node(client, node)
    delete_all(client, paths.extendedresources())
    delete_all(client, paths.resourceclasses(), f"{names.AUTO_LABEL}")
    for secret in arguments.secret:
        delete(client, paths.secrets(arguments.namespace, secret))
    delete(client, paths.leases(arguments.namespace, names.LEASE))
    delete(client, paths.configmaps(arguments.namespace, names.WORKLOAD))
    delete(client, paths.pods(arguments.namespace, TEST))


if __name__ == "__main__":
    main()
