"""Whether the API server calls the webhook for a namespace, and whether an extender is leader.

Reads the objects that the API server and the extenders use themselves: the webhook's configuration and the Lease.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.core.values.timestamps import parse_timestamp
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

# The name of the matchCondition with the CEL expression !(request.namespace in ['kube-system', ...]).
_EXEMPTION_CONDITION: Final = "not-exempt"
_EXEMPT_OPTION: Final = "--exempt-namespaces="  # an option of the webhook, which the chart writes
WEBHOOK: Final = "cardwise-webhook"  # the webhook's Deployment in the chart
_QUOTED_NAME: Final = re.compile("'([^']*)'")
_LEADERLESS_SECONDS: Final = 60.0  # time without a renewal of the Lease; another extender takes over much sooner


@dataclass(frozen=True, slots=True)
class Webhook:
    """The registration of the webhook.

    registered_at: when the webhook's configuration was created; None if the webhook is not registered.
    exempt_namespaces: the namespaces whose pods the API server does not send to the webhook. Before the registration of
        the webhook: the namespaces that will be exempt.
    """

    registered_at: datetime | None = None
    exempt_namespaces: frozenset[str] = frozenset()


def read_webhook(client: KubeClient, namespace: str) -> Webhook | None:
    """Read the webhook's registration; None if reading its configuration is forbidden. `namespace`: the namespace of
    Cardwise.
    """
    try:
        configuration = client.get(paths.mutatingwebhookconfigurations(names.WEBHOOK_CONFIGURATION))
    except errors.NotFound:
        return Webhook(exempt_namespaces=planned_exempt_namespaces(_list_deployments(client, namespace), namespace))
    except errors.Forbidden:
        return None
    registered_at = parse_timestamp(configuration["metadata"].get("creationTimestamp"))
    return Webhook(registered_at, exempt_namespaces(configuration))


def exempt_namespaces(configuration: Json) -> frozenset[str]:
    """The namespaces that a webhook configuration of the chart leaves out (webhook.exemptNamespaces)."""
    conditions = (
        condition for hook in configuration.get("webhooks") or () for condition in hook.get("matchConditions") or ()
    )
    text = next(
        (
            condition.get("expression") or ""
            for condition in conditions
            if condition.get("name") == _EXEMPTION_CONDITION
        ),
        "",
    )
    return frozenset(_QUOTED_NAME.findall(text))


def planned_exempt_namespaces(deployments: Iterable[Json], namespace: str) -> frozenset[str]:
    """The namespaces that will be exempt once the webhook is registered, by the arguments of its Deployment.

    Without a Deployment, returns the chart's default. `namespace`: the namespace of Cardwise.
    """
    for deployment in deployments:
        if (deployment["metadata"]["namespace"], deployment["metadata"]["name"]) == (namespace, WEBHOOK):
            containers = deployment["spec"]["template"]["spec"]["containers"]
            arguments = (str(argument) for container in containers for argument in container.get("args") or ())
            for argument in arguments:
                if argument.startswith(_EXEMPT_OPTION):
                    return frozenset(argument.removeprefix(_EXEMPT_OPTION).split(","))
    return frozenset({"kube-system", names.NAMESPACE, namespace})


def _list_deployments(client: KubeClient, namespace: str) -> list[Json]:
    """List the Deployments of the namespace; [] if they may not be read."""
    try:
        return list(client.list_objects(paths.namespaced("/apis/apps/v1", "deployments", namespace)))
    except errors.Forbidden:
        return []


def leaderless_seconds(client: KubeClient, namespace: str) -> float | None:
    """The seconds without a leading extender; None if an extender is leader, or if it is unknown.

    Infinite if there is no Lease, because an extender never became leader or Cardwise was uninstalled. `namespace`: the
    namespace of Cardwise.
    """
    try:
        lease = client.get(paths.leases(namespace, names.LEASE), managed_fields=True)
    except errors.NotFound:
        return math.inf
    except errors.Forbidden:
        return None
    age = lease_age(lease, client.fetch_server_time())
    return age if age is not None and age > _LEADERLESS_SECONDS else None


def lease_age(lease: Json, now: datetime | None) -> float | None:
    """Seconds since the Lease was renewed; None if unknown. `now`: the time by the API server's clock.

    Uses the API server's record of the last write, whose time is by the API server's own clock. Without this record,
    uses the renewal time that the holder has written, although the holder's clock may be wrong.
    """
    renewed = last_write(lease) or _renew_time(lease)
    if renewed is None:
        return None
    return (now - renewed).total_seconds() if now is not None else 0.0


def last_write(manifest: Json) -> datetime | None:
    """When the API server accepted the last write of the object, by its own clock; None if it is not recorded."""
    entries = (manifest.get("metadata") or {}).get("managedFields") or ()
    times = (parse_timestamp(entry.get("time")) for entry in entries)
    return max((time for time in times if time is not None), default=None)


def _renew_time(lease: Json) -> datetime | None:
    """The renewal time that the Lease's holder wrote; None if it is missing or invalid."""
    return parse_timestamp((lease.get("spec") or {}).get("renewTime"))
