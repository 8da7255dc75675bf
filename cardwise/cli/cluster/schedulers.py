"""The chart's own kube-scheduler (`scheduler.mode=own`): whether its Deployment exists and runs.

The webhook writes its name into pods, where it cannot be changed. So these pods wait for ever once that scheduler is
gone: after an uninstallation, in another mode, or under another name.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from cardwise.core.api import names
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

_APPS: Final = "/apis/apps/v1"


def read_deployments(client: KubeClient, cardwise_namespace: str) -> list[Json] | None:
    """The Deployment of the chart's own kube-scheduler, if it exists; None if Deployments may not be read.

    cardwise_namespace: the namespace of Cardwise. A Deployment with that name in another namespace is a tenant's.
    """
    path = paths.namespaced(_APPS, "deployments", cardwise_namespace)
    try:
        return list(client.list_objects(path, {"fieldSelector": f"metadata.name={names.SCHEDULER}"}))
    except errors.Forbidden:
        return None


def scheduler_names(deployments: Iterable[Json]) -> frozenset[str]:
    """The schedulerName of Cardwise's own kube-scheduler; empty if its Deployment is not in `deployments`."""
    return frozenset(map(_scheduler_name, _select_own(deployments)))


def stopped_scheduler_names(deployments: Iterable[Json]) -> frozenset[str]:
    """As `scheduler_names`, of those Deployments that have no ready pod: nothing is placed."""
    return frozenset(
        _scheduler_name(deployment)
        for deployment in _select_own(deployments)
        if not (deployment.get("status") or {}).get("readyReplicas")
    )


def _select_own(deployments: Iterable[Json]) -> Iterator[Json]:
    return (deployment for deployment in deployments if deployment["metadata"]["name"] == names.SCHEDULER)


def _scheduler_name(deployment: Json) -> str:
    return str(annotations_of(deployment).get(names.SCHEDULER_NAME, names.SCHEDULER))
