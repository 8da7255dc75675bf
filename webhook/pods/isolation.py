"""The isolation that a pod demands: its default, the minimum of its administrators, and refusals of demands that no
node can meet.

The webhook writes the demand into an annotation of the pod. Extender, device plugin and MPS manager read it only there.
A policy forbids later changes of the annotation, because MPS on the card was set for this pod.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from cardwise.core.api import mps, names
from cardwise.core.api.isolation import Isolation, strongest
from cardwise.core.api.mps import DaemonScope, SmPercent
from cardwise.core.api.request import PodRequest
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview
from webhook.pods.refusals import collect_warnings

Scopes = Callable[[], frozenset[str]]
"""The scopes of the MPS managers of the cluster; empty if there is none."""

FIELD: Final = f"metadata.annotations[{names.ISOLATION}]"
PERCENT_FIELD: Final = f"metadata.annotations[{names.SM_PERCENT}]"


def parse_isolation(text: str, field: str = FIELD) -> Isolation:
    """Parse a demand. Raises InvalidRequest."""
    try:
        return Isolation(text)
    except ValueError:
        raise InvalidRequest(
            field, f"{quote_text(text)} is not a tier of isolation", f"write one of: {', '.join(Isolation)}"
        ) from None


def demand_of(annotations: Mapping[str, str]) -> Isolation:
    """What a pod that has passed `mutate` demands, from its annotations. Raises InvalidRequest."""
    text = annotations.get(names.ISOLATION)
    return Isolation.NONE if text is None else parse_isolation(text)


def parse_sm_percent(text: str, field: str = PERCENT_FIELD) -> SmPercent:
    """Parse the source of the percentage of the SMs. Raises InvalidRequest."""
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
    if all(container.whole for container in pod_request.containers):
        return Isolation.NONE
    field = f"namespace {context.namespace}: {FIELD}"
    text = context.defaults.isolation if context.defaults is not None else ""
    return strongest(context.settings.isolation, parse_isolation(text or Isolation.NONE, field))


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Annotate the demand of a pod that requests cards, and the source of its percentage of the SMs.

    A pod that opts out where it may not keeps its annotation, and `validate` refuses it. Raises InvalidRequest.
    """
    if not pod.cards or pod.request is None:
        return
    annotations = pod.annotations
    percent = SmPercent(pod.defaults.sm_percent or context.settings.sm_percent)
    minimum = min_isolation(pod.request, context)
    demand = parse_isolation(annotations.get(names.ISOLATION, Isolation.ADVISORY))
    if demand.uses_mps:
        demand = strongest(_applicable(demand, pod.request, context.cluster.mps_scopes), minimum)
    pod.isolation = demand
    written = {names.ISOLATION: str(demand)}
    if names.SM_PERCENT in annotations:
        parse_sm_percent(annotations[names.SM_PERCENT])
    elif percent is SmPercent.MEMORY and demand.uses_mps:
        written[names.SM_PERCENT] = str(percent)
    if written.items() - annotations.items():
        pod.annotations = annotations | written


def _applicable(demand: Isolation, pod_request: PodRequest, scopes: Scopes) -> Isolation:
    """The demand; `none` instead of `advisory` for a pod with several cards in a container if no MPS daemon serves
    several cards.
    """
    if demand is Isolation.ADVISORY and _multi_card_container(pod_request) and DaemonScope.NODE not in scopes():
        return Isolation.NONE
    return demand


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
    pod.warnings += collect_warnings(
        context.settings.oversize,
        lambda: _check_daemons(demand, minimum, pod_request, context.cluster.mps_scopes()),
        "a daemon serves several GPUs",
    )


def _check_daemons(
    demand: Isolation, minimum: Isolation, pod_request: PodRequest, scopes: Collection[str]
) -> tuple[str, ...]:
    """Warnings about the demand, by the scopes of the MPS daemons. Raises InvalidRequest."""
    if demand is Isolation.NONE:
        return ()
    if not scopes:
        waiting_note = f"{FIELD}: no node has an MPS manager now; the pod waits until a node has one"
        return (waiting_note, *_warn_small_limits(pod_request)) if demand is Isolation.MPS else ()
    container_name = _multi_card_container(pod_request)
    if not container_name or DaemonScope.NODE in scopes:
        return _warn_small_limits(pod_request)
    problem = f"container {container_name} has several GPUs, and on every node each MPS daemon serves a single GPU"
    remedy = "request one GPU in each container, or have cardwise-mps run with --scope=node"
    if minimum is Isolation.NONE:
        remedy = f"write {Isolation.NONE}, {remedy}"
    if demand is Isolation.MPS:
        raise InvalidRequest(FIELD, problem, remedy)
    return (f"{FIELD}: {problem}; the pod can run only on nodes without an MPS manager: {remedy}",)


def _warn_small_limits(pod_request: PodRequest) -> tuple[str, ...]:
    """A warning for each container with a limit in which CUDA may fail to start."""
    return tuple(
        f"{FIELD}: container {container.name or container.key} has {container.mem_per_card} MiB of a GPU, too little "
        f"for programs to start with MPS: CUDA needs up to {mps.MIN_LIMIT} MiB for itself; request more"
        for container in pod_request.containers
        if not container.whole and container.mem_per_card < mps.MIN_LIMIT
    )


def _multi_card_container(pod_request: PodRequest) -> str | None:
    """The name of the first container with several cards; None without one."""
    return next((container.name or container.key for container in pod_request.containers if container.cards > 1), None)
