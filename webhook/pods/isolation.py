"""The isolation that a pod demands: the default, the administrators' minimum, and refusals of demands that no node can
meet.

The webhook writes the demand into an annotation of the pod. Extender, device plugin and MPS manager read it only there.
A policy forbids later changes of the annotation, because MPS on the card was set for this pod.
"""

from collections.abc import Mapping
from typing import Final

from cardwise.core.api import mps, names
from cardwise.core.api.isolation import FIELD, KERNEL_MIN_DRIVER, Isolation, parse_isolation, strongest_demand
from cardwise.core.api.mps import DaemonScope, SmPercent
from cardwise.core.api.request import PodRequest
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text
from webhook.pods.context import Context, Lookups
from webhook.pods.pod import PodUnderReview
from webhook.pods.refusals import collect_warnings

PERCENT_FIELD: Final = f"metadata.annotations[{names.SM_PERCENT}]"


def demand_of(annotations: Mapping[str, str]) -> Isolation:
    """The isolation that a pod demands, read from its annotations, after `mutate`. Raises InvalidRequest."""
    text = annotations.get(names.ISOLATION)
    return Isolation.NONE if text is None else parse_isolation(text)


def parse_sm_percent(text: str, field: str = PERCENT_FIELD) -> SmPercent:
    """Parse the annotation that says from what the percentage of the SMs is computed. Raises InvalidRequest."""
    try:
        return SmPercent(text)
    except ValueError:
        remedy = f"write one of: {', '.join(SmPercent)}"
        raise InvalidRequest(field, f"{quote_text(text)} is not a source for the percentage", remedy) from None


def min_isolation(pod_request: PodRequest, context: Context) -> Isolation:
    """The weakest demand that the pod may have: the stronger one of the cluster's and its namespace's. Raises
    InvalidRequest.

    A pod with only whole cards may demand anything, because it shares no card.
    """
    if pod_request.has_whole_cards_only:
        return Isolation.NONE
    field = f"namespace {context.namespace}: {FIELD}"
    text = context.defaults.isolation if context.defaults is not None else ""
    return strongest_demand(context.settings.isolation, parse_isolation(text or Isolation.NONE, field))


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Annotate the demand of a pod that requests cards, and the source of its percentage of the SMs.

    If a pod opts out although its namespace forbids this, the annotation stays, and `validate` refuses the pod. Raises
    InvalidRequest.
    """
    if not pod.cards or pod.request is None:
        return
    annotations = pod.annotations
    percent = SmPercent(pod.defaults.sm_percent or context.settings.sm_percent)
    minimum = min_isolation(pod.request, context)
    demand = parse_isolation(annotations.get(names.ISOLATION, Isolation.ADVISORY))
    if demand.uses_mps:
        demand = strongest_demand(_applicable(demand, pod.request, context.cluster), minimum)
    pod.isolation = demand
    written = {names.ISOLATION: str(demand)}
    if names.SM_PERCENT in annotations:
        parse_sm_percent(annotations[names.SM_PERCENT])
    elif percent is SmPercent.MEMORY and demand.uses_mps:
        written[names.SM_PERCENT] = str(percent)
    if written.items() - annotations.items():
        pod.annotations = annotations | written


def _applicable(demand: Isolation, pod_request: PodRequest, cluster: Lookups) -> Isolation:
    """The demand; `none` instead of `advisory` for a pod with shares of several cards in a container, unless one daemon
    serves all cards on most nodes with MPS.

    With `advisory`, nodes with a daemon for each card are closed to the pod. So a single node, which may report
    anything, must not decide this.
    """
    if demand is not Isolation.ADVISORY or pod_request.has_whole_cards_only or not _multi_card_container(pod_request):
        return demand
    return demand if cluster.do_node_daemons_prevail() else Isolation.NONE


def validate(pod: PodUnderReview, context: Context) -> None:
    """Refuse a weaker demand than the administrators allow, and a demand that no existing node can meet. Raises
    InvalidRequest.
    """
    if not pod.cards or (pod_request := pod.request) is None:
        return
    demand = demand_of(pod.annotations)
    minimum = min_isolation(pod_request, context)
    if demand.strength < minimum.strength:
        problem = f"{demand} is less than the {minimum} that the administrators require of pods that share GPUs here"
        raise InvalidRequest(FIELD, problem, f"write {minimum}, or remove the annotation")
    _check_split_shares(demand, minimum, pod_request)
    pod.warnings += collect_warnings(
        context.settings.oversize,
        lambda: _check_tiers(demand, minimum, pod_request, context.cluster),
        "GPUs of the cluster can meet the demand",
    )


def _check_split_shares(demand: Isolation, minimum: Isolation, pod_request: PodRequest) -> None:
    """Refuse shares of several GPUs that demand the driver's limit, which no node can give. Raises InvalidRequest."""
    name = next((container.name or container.key for container in pod_request.containers if container.is_split), None)
    if demand is Isolation.KERNEL and name is not None:
        problem = f"container {name} has a share of several GPUs, and the driver limits shares of a single GPU only"
        alternative = f", or write {Isolation.MPS}" if minimum is not Isolation.KERNEL else ""
        raise InvalidRequest(FIELD, problem, f"request one GPU in each container{alternative}")


def _check_tiers(demand: Isolation, minimum: Isolation, pod_request: PodRequest, cluster: Lookups) -> tuple[str, ...]:
    """Warnings about the demand, by the tiers of the cluster's GPUs. Raises InvalidRequest."""
    if demand is Isolation.NONE or pod_request.has_whole_cards_only:
        return ()
    scopes = cluster.mps_scopes()
    warnings = _warn_small_limits(pod_request) if scopes or demand is Isolation.MPS else ()
    waiting_reason = _find_waiting_reason(demand, pod_request, cluster)
    if waiting_reason is not None:
        warnings = (f"{FIELD}: {waiting_reason}", *warnings)
    container_name = _multi_card_container(pod_request)
    if not scopes or not container_name or cluster.do_node_daemons_prevail():
        return warnings
    if DaemonScope.NODE in scopes:
        problem = f"container {container_name} has several GPUs, and on most nodes each MPS daemon serves a single GPU"
        return (f"{FIELD}: {problem}; the pod can run only on the other nodes", *warnings)
    problem = f"container {container_name} has several GPUs, and on every node each MPS daemon serves a single GPU"
    remedy = "request one GPU in each container, or have cardwise-mps run with --scope=node"
    if minimum is Isolation.NONE:
        remedy = f"write {Isolation.NONE}, {remedy}"
    if demand is Isolation.MPS:
        raise InvalidRequest(FIELD, problem, remedy)
    return (f"{FIELD}: {problem}; the pod can run only on nodes without an MPS manager: {remedy}",)


def _find_waiting_reason(demand: Isolation, pod_request: PodRequest, cluster: Lookups) -> str | None:
    """Why no node can meet the demand now; None if one can."""
    has_kernel_limit = cluster.has_kernel_limit()
    if demand is Isolation.KERNEL and not has_kernel_limit:
        return (
            f"the driver of no node limits memory (driver {KERNEL_MIN_DRIVER} or later does); the pod waits until one "
            "does"
        )
    is_split = any(container.is_split for container in pod_request.containers)
    if demand is Isolation.MPS and not cluster.mps_scopes() and (is_split or not has_kernel_limit):
        return "no node has an MPS manager now; the pod waits until a node has one"
    return None


def _warn_small_limits(pod_request: PodRequest) -> tuple[str, ...]:
    """A warning for each container with a limit in which CUDA may fail to start."""
    return tuple(
        f"{FIELD}: container {container.name or container.key} has {container.mem_per_card} MiB of a GPU, too little "
        f"for programs to start with MPS: CUDA needs up to {mps.MIN_LIMIT_MIB} MiB for itself; request more"
        for container in pod_request.containers
        if not container.whole and container.mem_per_card < mps.MIN_LIMIT_MIB
    )


def _multi_card_container(pod_request: PodRequest) -> str | None:
    """The name of the first container with several cards; None without one."""
    return next((container.name or container.key for container in pod_request.containers if container.cards > 1), None)
