"""Evicts a pod by the Eviction API, as disruption budgets allow."""

from cardwise.kube import paths
from cardwise.kube.client import KubeClient

# Of a pod of another UID that does not run, the API server says so after ten seconds only.
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
    """The pod of this UID only. Raises KubeError: TooManyRequests while a disruption budget holds it back, NotFound or
    Conflict where it is gone. `version`: only if it is still this one, else Conflict. `grace`: seconds that it gets to
    end, None as the pod says.
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
