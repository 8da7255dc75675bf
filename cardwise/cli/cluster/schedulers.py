"""The chart's own kube-scheduler (`scheduler.mode=own`): whether it is there, by its Deployment.

The webhook writes its name into pods, where nobody can change it. So these pods wait for ever once it has gone: after
an uninstallation, in another mode, or under another name.
"""

from collections.abc import Iterable
from typing import Final

from cardwise.core.api import names
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

_DEPLOYMENTS: Final = paths.namespaced("/apis/apps/v1", "deployments")


def take(client: KubeClient) -> frozenset[str] | None:
    """As `named`; None where Deployments of all namespaces may not be read."""
    try:
        return named(client.objects(_DEPLOYMENTS, {"fieldSelector": f"metadata.name={names.SCHEDULER}"}))
    except errors.Forbidden:
        return None


def named(deployments: Iterable[Json]) -> frozenset[str]:
    """The `spec.schedulerName` of the pods that it places; empty where its Deployment is not among these."""
    ours = (one for one in deployments if one["metadata"]["name"] == names.SCHEDULER)
    return frozenset(annotations_of(one).get(names.SCHEDULER_NAME, names.SCHEDULER) for one in ours)
