"""Reads the gangs of the cluster from their PodGroups, whose status the extender writes, and from their pods.

Members are counted by the pods, so the count is right even if no extender runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cardwise.core.api import names
from cardwise.core.gangs import gangs
from cardwise.core.values.decoded import Json, labels_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

UNKNOWN_PHASE = "Unknown"
_NO_STATUS = "the extender has not reported on this gang yet"
_NO_MINIMUM = f"no PodGroup that the extender knows and no annotation {names.GROUP_NUM} says how many pods it needs"


@dataclass(frozen=True, slots=True)
class NodeReservation:
    """The cards that are reserved for a planned gang on one node, and the number of members that will use them."""

    node: str
    members: int
    cards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GangView:
    """A gang.

    minimum: number of members that the gang needs; 0 if unknown.
    members: names of the gang's pods, without failed and deleted pods.
    bound: names of the members that are bound to a node.
    waiting_for: names of the planned pods that still await kube-scheduler's call of the extender.
    reserved: the cards that are reserved for the gang, by node.
    since: when the gang's phase last changed.
    """

    namespace: str
    name: str
    phase: str
    reason: str
    minimum: int
    members: tuple[str, ...]
    bound: tuple[str, ...]
    waiting_for: tuple[str, ...]
    reserved: tuple[NodeReservation, ...]
    created: str
    since: str

    @property
    def cards(self) -> int:
        """The number of cards that are reserved for the gang."""
        return sum(reservation.cards for reservation in self.reserved)

    @property
    def waiting(self) -> frozenset[str]:
        """The gang's pods without a node."""
        return frozenset(self.members) - frozenset(self.bound)


def list_gangs(client: KubeClient, namespace: str = "", name: str = "") -> list[GangView]:
    """List the gangs of a namespace ("": of all namespaces); with `name`, only the gang with this name.

    Raises `KubeError`.
    """
    groups = {_namespaced_name(group): group for group in _list_groups(client, namespace)}
    pods: dict[tuple[str, str], list[Json]] = {}
    selector = paths.label_query(names.GANG, name) if name else {"labelSelector": names.GANG}
    for pod in client.list_objects(paths.pods(namespace), selector):
        pods.setdefault((pod["metadata"]["namespace"], _gang_name(pod) or ""), []).append(pod)
    keys = sorted(groups.keys() | {key for key, members in pods.items() if not _has_no_minimum(members)})
    return [_view_gang(key, groups.get(key, {}), pods.get(key, [])) for key in keys if name in ("", key[1])]


def gang_of_pod(client: KubeClient, pod: Json) -> GangView | None:
    """The gang of the pod; None if the pod is in no gang. Raises `KubeError`."""
    name = _gang_name(pod)
    return next(iter(list_gangs(client, pod["metadata"]["namespace"], name)), None) if name else None


def reserving_gangs(client: KubeClient) -> list[GangView]:
    """List the gangs with reserved cards; [] if PodGroups may not be read, or do not exist."""
    try:
        return [
            view
            for group in _list_groups(client, "")
            if (view := _view_gang(_namespaced_name(group), group, [])).reserved
        ]
    except errors.Forbidden:
        return []


def _gang_name(pod: Json) -> str | None:
    """The name of the pod's gang; None if the pod is in no gang."""
    return labels_of(pod).get(names.GANG) or None


def _list_groups(client: KubeClient, namespace: str) -> Iterator[Json]:
    return client.list_objects(paths.podgroups(namespace))


def _namespaced_name(manifest: Json) -> tuple[str, str]:
    return manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _view_gang(key: tuple[str, str], group: Json, pods: Sequence[Json]) -> GangView:
    status = group.get("status") or {}
    counted_pods = [pod for pod in pods if _counts_as_member(pod)]
    created = [manifest["metadata"].get("creationTimestamp") or "" for manifest in (group or {"metadata": {}}, *pods)]
    has_status = bool(status.get("phase"))
    minimum = status.get("minMember") or (group.get("spec") or {}).get("minMember") or _requested_minimum(counted_pods)
    # The extender does not report on a gang whose minimum is unknown.
    reason_without_status = _NO_STATUS if minimum else _NO_MINIMUM
    return GangView(
        namespace=key[0],
        name=key[1],
        phase=status["phase"] if has_status else UNKNOWN_PHASE,
        reason=(status.get("reason") or "") if has_status else reason_without_status,
        minimum=minimum,
        members=tuple(sorted(_pod_names(counted_pods))),
        bound=tuple(sorted(_pod_names(pod for pod in counted_pods if (pod.get("spec") or {}).get("nodeName")))),
        waiting_for=tuple(status.get("waitingFor") or ()),
        reserved=tuple(
            NodeReservation(reservation["node"], reservation.get("members", 0), reservation.get("gpus", 0))
            for reservation in status.get("reserved") or ()
        ),
        created=min(filter(None, created), default=""),
        since=status.get("lastTransitionTime") or "",
    )


def _counts_as_member(pod: Json) -> bool:
    """Whether the extender counts the pod as a member: the pod is not being deleted, and has not failed."""
    return not pod["metadata"].get("deletionTimestamp") and (pod.get("status") or {}).get("phase") != "Failed"


def _has_no_minimum(pods: Sequence[Json]) -> bool:
    """Whether the pods are in a PodGroup of Kubernetes without a minimum.

    Such pods have no gate, and the extender creates no PodGroup for them.
    """
    return all((pod.get("spec") or {}).get("schedulingGroup") and not gangs.is_gated(pod) for pod in pods)


def _pod_names(pods: Iterator[Json] | Sequence[Json]) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods]


def _requested_minimum(pods: Sequence[Json]) -> int:
    """The minimum that the pods request, if neither status nor spec has one."""
    minimums = []
    for pod in pods:
        try:
            member = gangs.membership(pod)
        except InvalidRequest:
            continue  # the pod was created while the webhook did not run
        minimums.append(member.minimum or 0 if member is not None else 0)
    return max(minimums, default=0)
