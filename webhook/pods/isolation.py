"""The MPS mode of a pod: what the pod requests, its default, and refusals of modes that no node provides.

The webhook writes the mode into an annotation of the pod. Extender, device plugin and MPS manager read the mode only
there. A policy forbids later changes of the annotation, because the mode of the card was set for this pod.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from cardwise.core.api import mps, names
from cardwise.core.api.mps import DaemonScope, Mode, SmPercent
from cardwise.core.api.request import PodRequest
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview
from webhook.pods.refusals import collect_warnings

Scopes = Callable[[], frozenset[str]]
"""The scopes of the MPS managers of the cluster; empty if there is none."""

FIELD: Final = f"metadata.annotations[{names.MPS}]"
PERCENT_FIELD: Final = f"metadata.annotations[{names.SM_PERCENT}]"


def check(text: str, field: str = FIELD) -> Mode:
    """Parse an MPS mode. Raises InvalidRequest."""
    try:
        return Mode(text)
    except ValueError:
        raise InvalidRequest(
            field, f"{quote_text(text)} is not a mode of MPS", f"write one of: {', '.join(Mode)}"
        ) from None


def mode_of(annotations: Mapping[str, str]) -> Mode:
    """The MPS mode of a pod that has passed `mutate`, from its annotations. Raises InvalidRequest."""
    text = annotations.get(names.MPS)
    return Mode.OFF if text is None else check(text)


def check_percent(text: str, field: str = PERCENT_FIELD) -> SmPercent:
    """Check the source of the percentage of the SMs. Raises InvalidRequest."""
    try:
        return SmPercent(text)
    except ValueError:
        remedy = f"write one of: {', '.join(SmPercent)}"
        raise InvalidRequest(field, f"{quote_text(text)} is not a source for the percentage", remedy) from None


def min_mode(pod_request: PodRequest, setting: Mode, namespace: str) -> Mode:
    """The weakest mode that the pod may have: the stricter one of `setting` and `namespace`. Raises InvalidRequest.

    A pod with only whole cards may have any mode, because it shares no card.
    """
    if all(container.whole for container in pod_request.containers):
        return Mode.OFF
    return max(setting, check(namespace or Mode.OFF, names.MIN_MPS), key=lambda mode: mode.isolation)


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Annotate the mode of a pod that requests cards, and the source of its percentage of the SMs.

    Raises InvalidRequest.
    """
    if not pod.cards or pod.request is None:
        return
    settings, annotations = context.settings, pod.annotations
    percent = SmPercent(pod.defaults.sm_percent or settings.sm_percent)
    bound = min_mode(pod.request, settings.min_mps, context.defaults.min_mps if context.defaults is not None else "")
    default = Mode(pod.defaults.mps or settings.mps)
    added: dict[str, str] = {}
    if names.MPS in annotations:
        mode = check(annotations[names.MPS])
    else:
        applicable_mode = _applicable_mode(pod.request, default, context.cluster.mps_scopes)
        mode = max(applicable_mode, bound, key=lambda mode: mode.isolation)
        added[names.MPS] = str(mode)
    pod.mode = mode
    if names.SM_PERCENT in annotations:
        check_percent(annotations[names.SM_PERCENT])
    elif percent is SmPercent.MEMORY and mode.uses_mps:
        added[names.SM_PERCENT] = str(percent)
    if added:
        pod.annotations = annotations | added


def _applicable_mode(pod_request: PodRequest, default: Mode, scopes: Scopes) -> Mode:
    """The default mode; `off` for a pod with several cards in a container if no MPS daemon serves several cards."""
    if default is Mode.PREFERRED and _multi_card_container(pod_request) and DaemonScope.NODE not in scopes():
        return Mode.OFF
    return default


def validate(pod: PodUnderReview, context: Context) -> None:
    """Refuse a weaker mode than the administrators allow, and a mode that no existing node can provide. Raises
    InvalidRequest.
    """
    if not pod.cards or (pod_request := pod.request) is None:
        return
    mode = mode_of(pod.annotations)
    min_mps = context.defaults.min_mps if context.defaults is not None else ""
    bound = min_mode(pod_request, context.settings.min_mps, min_mps)
    if mode.isolation < bound.isolation:
        problem = f"{mode} is less than the {bound} that the administrators require of pods that share GPUs here"
        raise InvalidRequest(FIELD, problem, f"write {bound}, or remove the annotation")
    pod.warnings += collect_warnings(
        context.settings.oversize,
        lambda: _check_daemons(mode, pod_request, context.cluster.mps_scopes()),
        "a daemon serves several GPUs",
    )


def _check_daemons(mode: Mode, pod_request: PodRequest, scopes: Collection[str]) -> tuple[str, ...]:
    """Warnings about the mode, by the scopes of the MPS daemons. Raises InvalidRequest."""
    if mode is Mode.OFF:
        return ()
    if not scopes:
        waiting_note = f"{FIELD}: no node has an MPS manager now; the pod waits until a node has one"
        return (waiting_note, *_warn_small_limits(pod_request)) if mode is Mode.REQUIRED else ()
    container_name = _multi_card_container(pod_request)
    if not container_name or DaemonScope.NODE in scopes:
        return _warn_small_limits(pod_request)
    problem = f"container {container_name} has several GPUs, and on every node each MPS daemon serves a single GPU"
    if mode is Mode.REQUIRED:
        remedy = f"write {Mode.OFF}, request one GPU in each container, or have cardwise-mps run with --scope=node"
        raise InvalidRequest(FIELD, problem, remedy)
    remedy = f"write {Mode.OFF}, or request one GPU in each container"
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
