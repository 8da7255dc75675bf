"""Evicts a pod by the Eviction API, if the pod's disruption budgets allow the eviction."""

from cardwise.kube import paths
from cardwise.kube.client import KubeClient

# Seconds. If a pod with this name but another UID does not run, the API server responds only after ten seconds.
_TIMEOUT = 15.0


def evict(
    client: KubeClient,
    namespace: str,
    name: str,
    uid: str,
    *,
    version: str = "",
    dry_run: bool = False,
    grace: int | None = None,
) -> None:
    """Evict the pod if its UID is still the same. Raises KubeError: TooManyRequests if a disruption budget does not
    allow the eviction, NotFound or Conflict if the pod is gone.

    version: evict the pod only if it has this resourceVersion, else raise Conflict; "" for any version.
    grace: the grace period in seconds; None for the pod's own.
    """
    options: dict[str, object] = {"dryRun": ["All"]} if dry_run else {}
    if grace is not None:
        options["gracePeriodSeconds"] = grace
    preconditions = {"uid": uid} | ({"resourceVersion": version} if version else {})
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": options | {"preconditions": preconditions},
    }
    client.create(paths.pods(namespace, name, "eviction"), eviction, timeout=_TIMEOUT)
