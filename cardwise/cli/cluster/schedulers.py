"""The chart's own kube-scheduler (`scheduler.mode=own`): whether its Deployment exists and runs.

The webhook writes this scheduler's name into pods, where the name cannot be changed. So these pods wait for ever if the
scheduler no longer exists: after an uninstallation, or after a change of `scheduler.mode` or of the scheduler's name.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from cardwise.core.api import names
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

_APPS: Final = "/apis/apps/v1"


def read_deployments(client: KubeClient, cardwise_namespace: str) -> list[Json] | None:
    """Read the Deployment of the chart's own kube-scheduler; [] if the Deployment does not exist; None if reading is
    forbidden.

    Only Cardwise's namespace is read: a Deployment with that name in another namespace is a tenant's.
    """
    path = paths.namespaced(_APPS, "deployments", cardwise_namespace)
    try:
        return list(client.list_objects(path, {"fieldSelector": f"metadata.name={names.SCHEDULER}"}))
    except errors.Forbidden:
        return None


def scheduler_names(deployments: Iterable[Json]) -> frozenset[str]:
    """The schedulerName of the chart's own kube-scheduler; empty if its Deployment is not in `deployments`."""
    return frozenset(map(_scheduler_name, _select_own(deployments)))


def stopped_scheduler_names(deployments: Iterable[Json]) -> frozenset[str]:
    """The schedulerName of the chart's own kube-scheduler if none of its pods is ready. Then it places no pods."""
    return frozenset(
        _scheduler_name(deployment)
        for deployment in _select_own(deployments)
        if not (deployment.get("status") or {}).get("readyReplicas")
    )


def _select_own(deployments: Iterable[Json]) -> Iterator[Json]:
    return (deployment for deployment in deployments if deployment["metadata"]["name"] == names.SCHEDULER)


def _scheduler_name(deployment: Json) -> str:
    return str(annotations_of(deployment).get(names.SCHEDULER_NAME, names.SCHEDULER))
