"""Checks for pods that stay pending, because they were created without the webhook, or because they demand a memory
tier that no GPU has.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from cardwise.cli.cluster import installation
from cardwise.cli.doctor import repairs
from cardwise.cli.doctor.facts import Facts, namespaced_name
from cardwise.cli.doctor.finding import Finding, Severity, name_pods
from cardwise.core.api import isolation, names, request
from cardwise.core.api.classes import GPU_KIND
from cardwise.core.api.isolation import Isolation, MemoryTier
from cardwise.core.api.mps import MpsState
from cardwise.core.api.request import NotRewritten
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest

_MAX_LISTED: Final = 3  # maximum number of reasons named in one line
_TIERS_PAGE: Final = "docs/reference/mps-pods.md#the-annotation"


def check_unrewritten_pods(facts: Facts) -> Iterator[Finding]:
    """Find pending pods that the webhook has not rewritten.

    Such pods were created before the installation of the webhook, while its configuration was missing, or in an exempt
    namespace.
    """
    exempt_names = exempt_namespaces(facts)
    unrewritten_pods = [pod for pod in facts.pending_pods if not _is_rewritten(pod)]
    if exempt_pods := [pod for pod in unrewritten_pods if pod["metadata"]["namespace"] in exempt_names]:
        yield _report_exempt(exempt_pods)
    pods = [pod for pod in unrewritten_pods if pod["metadata"]["namespace"] not in exempt_names]
    if not pods:
        return
    is_single = len(pods) == 1
    text = (
        f"{name_pods([namespaced_name(pod) for pod in pods])} "
        f"{'was' if is_single else 'were'} created without the webhook: "
        f"{'it waits' if is_single else 'they wait'} forever"
    )
    yield Finding("webhook", Severity.WARNING, text, f"when the webhook runs: {repairs.recreate_command(pods)}")


def _report_exempt(pods: Sequence[Json]) -> Finding:
    is_single = len(pods) == 1
    text = (
        f"{name_pods([namespaced_name(pod) for pod in pods])} "
        f"{'requests' if is_single else 'request'} GPUs in a namespace that is exempt from the webhook: "
        f"{'it waits' if is_single else 'they wait'} forever"
    )
    remedy = "create such pods in another namespace, or take theirs out of webhook.exemptNamespaces of the chart"
    return Finding("webhook", Severity.WARNING, text, remedy)


def exempt_namespaces(facts: Facts) -> frozenset[str]:
    """Return the namespaces whose pods the API server does not send to the webhook."""
    for configuration in facts.mutating_webhooks:
        if configuration["metadata"]["name"] == names.WEBHOOK_CONFIGURATION:
            return installation.exempt_namespaces(configuration)
    return installation.planned_exempt_namespaces(facts.deployments, facts.cardwise_namespace)


def check_unmet_demands(facts: Facts) -> Iterator[Finding]:
    """Find pending pods that demand a memory tier which no GPU has."""
    statuses = [card.get("status") or {} for card in facts.cards if card["spec"].get("kind", GPU_KIND) == GPU_KIND]
    if not statuses:
        return
    has_kernel_limit = any(_tiers(status).get("memory") == MemoryTier.KERNEL for status in statuses)
    mps_states = [(status.get("mps") or {}).get("state", MpsState.UNAVAILABLE) for status in statuses]
    has_mps = any(state != MpsState.UNAVAILABLE for state in mps_states)
    pods_by_demand: dict[Isolation, list[Json]] = {}
    for pod in facts.pending_pods:
        with suppress(InvalidRequest):
            pod_request = request.parse(pod)
            if pod_request is not None and not isolation.is_met(
                pod_request.isolation,
                whole=pod_request.has_whole_cards_only,
                has_mps=has_mps,
                has_kernel_limit=has_kernel_limit,
            ):
                pods_by_demand.setdefault(pod_request.isolation, []).append(pod)
    reasons = sorted({_tiers(status).get("memoryReason") or "no reason given" for status in statuses})
    for demand, pods in pods_by_demand.items():
        is_single = len(pods) == 1
        text = (
            f"{name_pods([namespaced_name(pod) for pod in pods])} "
            f"{'demands' if is_single else 'demand'} isolation {demand}, which no GPU has "
            f"({wording.enumerate_first([*map(wording.sanitize_message, reasons)], _MAX_LISTED)}): "
            f"{'it waits' if is_single else 'they wait'}"
        )
        remedy = (
            f"see {_TIERS_PAGE} for what a node needs; or demand less: {names.ISOLATION} of the pod and of its "
            "namespace, and webhook.isolation of the chart"
        )
        yield Finding("isolation", Severity.WARNING, text, remedy)


def _tiers(status: Json) -> Json:
    return status.get("isolation") or {}


def _is_rewritten(pod: Json) -> bool:
    """Whether the pod requests no resource of Cardwise, or has the form that the webhook writes."""
    try:
        request.parse_mutated(pod)
    except NotRewritten:
        return False
    except InvalidRequest:
        pass  # the extender reports that the request is invalid
    return True
