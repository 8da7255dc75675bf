"""Where a pod may run. Only the scheduler may choose the node. Nodes with cards require tolerations of their taints,
and the RuntimeClass of NVIDIA's runtime.

Nodes with cards often have a taint that keeps other pods away. Kubernetes' ExtendedResourceToleration adds tolerations
for taints whose key is a requested resource. That plugin does not help here, because these taints have NVIDIA's
resource names.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Final

from cardwise.core.api import lookalikes, names
from cardwise.core.api.request import PodRequest
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube.pods.nodeconstraints import Taint, Toleration
from webhook.cluster.offers import NodeOffers
from webhook.pods import capacity
from webhook.pods.context import DEFAULT_SCHEDULER, Context
from webhook.pods.pod import PodUnderReview

_SCHEDULER_PLACES_TEXT: Final = "the scheduler must place a pod that requests a GPU share"
_COPY_ANNOTATIONS: Final = (names.ASSIGNMENT, names.IDX, names.GPUSHARE_ALLOCATION)
_MAX_SHOWN_KEYS: Final = 4  # maximum number of keys of a node selector in a warning
_TAINT_PATTERN: Final = re.compile(r"(?P<key>[^=:\s]+)(=(?P<value>[^=:\s]*))?:(?P<effect>NoSchedule|NoExecute)")


def mutate_copies(pod: PodUnderReview, context: Context) -> None:
    """Remove the placement of a copy of a placed pod, with a warning.

    A node name that the extender did not write is refused later. Raises InvalidRequest.
    """
    if not pod.spec.get("nodeName"):
        return
    is_copy = any(key in pod.annotations for key in _COPY_ANNOTATIONS) and pod.read_request() is not None
    is_gang_copy = pod.gang is not None and names.GANG in pod.labels
    if not is_copy and not is_gang_copy:
        return
    del pod.spec["nodeName"]
    pod.metadata.pop("resourceVersion", None)
    pod.warnings.append(
        "spec.nodeName: removed, because the pod is a copy of a placed pod; the scheduler places it again"
    )


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Add tolerations and the RuntimeClass of the settings to a pod that requests cards.

    Also assign the scheduler of the settings to a pod that requests cards or devices or is in a gang, and names none.
    """
    if pod.cards:
        tolerations = add_tolerations(pod.spec.get("tolerations") or [], context.settings.tolerated)
        if tolerations is not None:
            pod.spec["tolerations"] = tolerations
        if context.settings.runtime_class and not pod.spec.get("runtimeClassName"):
            pod.spec["runtimeClassName"] = context.settings.runtime_class
    scheduler = context.settings.scheduler
    is_ours = pod.request is not None or pod.gang is not None
    if scheduler and is_ours and (pod.spec.get("schedulerName") or DEFAULT_SCHEDULER) == DEFAULT_SCHEDULER:
        pod.spec["schedulerName"] = scheduler


def validate_node_name(pod: PodUnderReview, context: Context) -> None:
    """Refuse a pod that requests cards or devices and names its node. Raises InvalidRequest."""
    if pod.request is not None and pod.spec.get("nodeName"):
        remedy = "use spec.nodeSelector or spec.affinity.nodeAffinity instead"
        raise InvalidRequest("spec.nodeName", _SCHEDULER_PLACES_TEXT, remedy)


def validate(pod: PodUnderReview, context: Context) -> None:
    """Warn about schedulers that do not call Cardwise, and about scheduling gates of other controllers. Also warn if
    the selected nodes have no GPUs or are too small for the pod. Raises KubeError.
    """
    if pod.request is not None:
        # Every scheduler obeys allocated claims.
        _warn_scheduler(pod, () if context.settings.claims else context.settings.gang_schedulers)
        _warn_nodes(pod, pod.request, context)


def _warn_scheduler(pod: PodUnderReview, schedulers: Collection[str]) -> None:
    """Warn about a scheduler that does not call Cardwise, and about scheduling gates of other controllers."""
    scheduler = pod.spec.get("schedulerName") or DEFAULT_SCHEDULER
    if schedulers and scheduler not in schedulers:
        own_scheduler = DEFAULT_SCHEDULER if DEFAULT_SCHEDULER in schedulers else min(schedulers)
        pod.warnings.append(
            f"spec.schedulerName: {scheduler} does not call Cardwise, so the pod waits and never gets a GPU; remove "
            f"the field, or write {own_scheduler}"
        )
    pod.warnings += [
        f"spec.schedulingGates[{gate['name']}]: the pod waits until this gate is removed{_remover_suffix(gate['name'])}"
        for gate in pod.spec.get("schedulingGates") or ()
        if gate.get("name") not in (None, "", names.GANG, names.ALLOCATION_GATE)
    ]


def _remover_suffix(gate: str) -> str:
    return ", by Kueue" if gate.startswith("kueue.x-k8s.io/") else ""


def _warn_nodes(pod: PodUnderReview, pod_request: PodRequest, context: Context) -> None:
    """Warn about a node selector or affinity that matches no node with GPUs, or only nodes on which the pod does not
    fit.

    Raises KubeError.
    """
    offers = context.cluster.offers()
    if offers is None:
        return
    selector, admitting = pod.spec.get("nodeSelector") or {}, offers.admitting_nodes(pod.manifest)
    if unmatched := offers.unmatched_entries(selector):
        shown_labels = ", ".join(unmatched[:_MAX_SHOWN_KEYS])
        pod.warnings.append(
            f"spec.nodeSelector: no node with GPUs has {shown_labels} now; the pod waits until one does"
            f"{_node_label_suffix(selector, unmatched, offers)}"
        )
    elif admitting is not None and not admitting:
        field = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
        pod.warnings.append(f"{field}: no node with GPUs matches it now; the pod waits until one does")
    if not pod.warnings:
        pod.warnings += capacity.check_nodes(pod_request, context.cluster, admitting)


def toleration_of_taint(text: str) -> Json:
    """The toleration of `KEY:EFFECT`, with any value, or of `KEY=VALUE:EFFECT`. Raises ValueError."""
    match = _TAINT_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a taint; write KEY:EFFECT or KEY=VALUE:EFFECT, as nvidia.com/gpu:NoSchedule")
    key, taint_value, effect = match["key"], match["value"], match["effect"]
    matching = {"operator": "Exists"} if taint_value is None else {"operator": "Equal", "value": taint_value}
    return {"key": key, **matching, "effect": effect}


def add_tolerations(own_tolerations: list[Json], added: Iterable[Json]) -> list[Json] | None:
    """The tolerations of a pod and those of `added` that it does not have yet; None if it has all."""
    missing = [
        toleration
        for toleration in added
        if not any(_covers_toleration(existing, toleration) for existing in own_tolerations)
    ]
    return [*own_tolerations, *missing] if missing else None


def keep_added_tolerations(spec: Json, stored: Json, added: Iterable[Json]) -> Json:
    """The spec of an update, with the tolerations that `mutate` added at creation, because Kubernetes forbids
    removing tolerations.
    """
    stored_tolerations = stored.get("tolerations") or ()
    tolerations = add_tolerations(
        spec.get("tolerations") or [], [toleration for toleration in added if toleration in stored_tolerations]
    )
    return spec if tolerations is None else spec | {"tolerations": tolerations}


def _covers_toleration(existing: Json, added: Json) -> bool:
    matches_any = existing.get("operator") == "Exists" or added["operator"] == "Equal"
    return matches_any and Toleration.from_json(existing).tolerates(Taint.from_json(added))


def _node_label_suffix(selector: Mapping[str, str], unmatched: Collection[str], offers: NodeOffers) -> str:
    """A hint about the label that was probably meant by a node selector's entry which no node with GPUs has, as
    the end of a sentence; empty if unknown.
    """
    label_values = offers.label_values()
    for key, label_value in islice(selector.items(), _MAX_SHOWN_KEYS):
        if f"{key}={label_value}" not in unmatched or label_value in label_values.get(key, ()):
            continue
        if suggested_name := lookalikes.suggest_node_label(key, label_value, label_values):
            return f"; did you mean {suggested_name}?"
        label = lookalikes.suggest_card_label(key) or key
        if key not in label_values and label in lookalikes.CARD_LABEL_KEYS:
            return f"; nodes have no label {label}: to choose a GPU by its {label}, request a ResourceClass"
    return ""
