"""`cardwise gangs`, and what `explain` and `inspect` say of gangs: from PodGroups, whose status the extender writes.

How many members are there is counted from the pods themselves, so that it is right also where no extender runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cardwise.cli.render import tables
from cardwise.core.api import names
from cardwise.core.gangs import gangs
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, labels_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

_UNKNOWN = "Unknown"
_UNTOLD = "no extender has told of it"
_FEW = 5  # pods that a line names


@dataclass(frozen=True, slots=True)
class NodeHold:
    """What a gang that is planned holds on one node, for so many of its members."""

    node: str
    members: int
    cards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GangView:
    """A gang. `members` are the names of its pods that count, `bound` of those with a node; `minimum` 0: unknown."""

    namespace: str
    name: str
    phase: str
    reason: str
    minimum: int
    members: tuple[str, ...]
    bound: tuple[str, ...]
    waiting_for: tuple[str, ...]
    held: tuple[NodeHold, ...]
    created: str
    since: str

    @property
    def cards(self) -> int:
        """Cards that are held for it."""
        return sum(held.cards for held in self.held)


def views(client: KubeClient, namespace: str = "", name: str = "") -> list[GangView]:
    """The gangs of a namespace or of all, or the one of that name. Raises `KubeError`."""
    groups = {_key(group): group for group in _groups(client, namespace)}
    pods: dict[tuple[str, str], list[Json]] = {}
    selector = {"labelSelector": f"{names.GANG}={name}" if name else names.GANG}
    for pod in client.objects(paths.pods(namespace), selector):
        pods.setdefault((pod["metadata"]["namespace"], _gang_of(pod)), []).append(pod)
    found = sorted(groups.keys() | {key for key, members in pods.items() if not _is_basic(members)})
    return [_view(key, groups.get(key, {}), pods.get(key, [])) for key in found if name in ("", key[1])]


@dataclass(frozen=True, slots=True)
class OfPod:
    """What `explain` tells of the gang of a pod, and the names of its pods without a node, and of those with one; empty
    for one in none.
    """

    lines: tuple[str, ...] = ()
    waiting: frozenset[str] = frozenset()
    bound: frozenset[str] = frozenset()


def of_pod(client: KubeClient, pod: Json) -> OfPod:
    """Raises `KubeError`."""
    name = _gang_of(pod)
    seen = views(client, pod["metadata"]["namespace"], name) if name else []
    waiting = frozenset(member for view in seen for member in view.members if member not in view.bound)
    bound = frozenset(member for view in seen for member in view.bound)
    return OfPod(tuple(line for view in seen for line in sentences(view)), waiting, bound)


def holds(client: KubeClient) -> list[GangView]:
    """The gangs for which cards are held; none where PodGroups are not ours to read, or are not known."""
    try:
        return [view for group in _groups(client, "") if (view := _view(_key(group), group, [])).held]
    except errors.Forbidden:
        return []


def _gang_of(pod: Json) -> str:
    return str(labels_of(pod).get(names.GANG) or "")


def _groups(client: KubeClient, namespace: str) -> Iterator[Json]:
    try:
        yield from client.objects(paths.podgroups(namespace))
    except errors.NotFound:
        return  # an older installation knows no PodGroups


def _key(obj: Json) -> tuple[str, str]:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def _view(key: tuple[str, str], group: Json, pods: Sequence[Json]) -> GangView:
    status = group.get("status") or {}
    there = [pod for pod in pods if _is_there(pod)]
    created = [obj["metadata"].get("creationTimestamp") or "" for obj in (group or {"metadata": {}}, *pods)]
    told = bool(status.get("phase"))
    return GangView(
        namespace=key[0],
        name=key[1],
        phase=status["phase"] if told else _UNKNOWN,
        reason=(status.get("reason") or "") if told else _UNTOLD,
        minimum=status.get("minMember") or (group.get("spec") or {}).get("minMember") or _minimum(there),
        members=tuple(sorted(_names(there))),
        bound=tuple(sorted(_names(pod for pod in there if (pod.get("spec") or {}).get("nodeName")))),
        waiting_for=tuple(status.get("waitingFor") or ()),
        held=tuple(
            NodeHold(one["node"], one.get("members", 0), one.get("cards", 0)) for one in status.get("held") or ()
        ),
        created=min(filter(None, created), default=""),
        since=status.get("since") or "",
    )


def _is_there(pod: Json) -> bool:
    """As the extender counts: it is not being deleted and has not failed."""
    return not pod["metadata"].get("deletionTimestamp") and (pod.get("status") or {}).get("phase") != "Failed"


def _is_basic(pods: Sequence[Json]) -> bool:
    """Whether the PodGroup of Kubernetes that they name has no minimum: the extender has let them go, and keeps no
    PodGroup of its own for them.
    """
    return all((pod.get("spec") or {}).get("schedulingGroup") and not gangs.gated(pod) for pod in pods)


def _names(pods: Iterator[Json] | Sequence[Json]) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods]


def _minimum(pods: Sequence[Json]) -> int:
    """What the pods say, where nobody else does."""
    said = []
    for pod in pods:
        try:
            member = gangs.membership(pod)
        except InvalidRequest:
            continue  # made while nobody checked
        said.append(member.minimum or 0 if member is not None else 0)
    return max(said, default=0)


def table(seen: Sequence[GangView], now: datetime, *, wide: bool = False) -> str:
    """One row for each; wide, also the pods that it waits for and the nodes on which it holds cards."""
    more = ["WAITING-FOR", "HELD-ON"] if wide else []
    rows = [["NAMESPACE", "NAME", "PHASE", "MEMBERS/MIN", "BOUND", "CARDS-HELD", "AGE", *more, "REASON"]]
    for view in seen:
        counts = [f"{len(view.members)}/{view.minimum or '?'}", str(len(view.bound)), str(view.cards)]
        where = ",".join(f"{held.node}:{held.cards}" for held in view.held)
        row = [view.namespace, view.name, view.phase, *counts, age(view.created, now)]
        rows.append([*row, *([wording.few(view.waiting_for, _FEW) or "-", where or "-"] if wide else []), view.reason])
    return tables.aligned(rows)


def holds_table(seen: Sequence[GangView], only: str | None) -> str:
    """What is held for gangs, by node; "" where nothing is."""
    rows = [["GANG", "NAMESPACE", "NODE", "MEMBERS", "CARDS"]]
    rows += [
        [view.name, view.namespace, held.node, str(held.members), str(held.cards)]
        for view in seen
        for held in view.held
        if only in (None, held.node)
    ]
    return f"\nHeld for gangs that are not bound yet:\n{tables.aligned(rows)}" if len(rows) > 1 else ""


def as_json(seen: Sequence[GangView]) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "gangs": [
            {
                "namespace": view.namespace,
                "name": view.name,
                "phase": view.phase,
                "reason": view.reason,
                "minMember": view.minimum,
                "members": list(view.members),
                "bound": list(view.bound),
                "waitingFor": list(view.waiting_for),
                "cardsHeld": view.cards,
                "held": [{"node": held.node, "members": held.members, "cards": held.cards} for held in view.held],
                "created": view.created,
                "since": view.since,
            }
            for view in seen
        ]
    }


def sentences(view: GangView) -> list[str]:
    """How far it is, and who is missing."""
    since = f" since {view.since}" if view.since else ""
    there = f"{len(view.members)} are there, {len(view.bound)} have a node"
    lines = [f"Its gang {view.name} needs {view.minimum or '?'} pods: {there} ({view.phase}{since})."]
    if not view.minimum:
        lines.append(
            f"Nobody says how many, so it waits for ever: make a PodGroup {view.name} with spec.minMember, or create "
            f"its pods again with the annotation {names.GROUP_NUM}."
        )
    missing = view.minimum - len(view.members)
    if missing > 0:
        there = wording.few(view.members, _FEW) or "none"
        lines.append(f"{missing} more must be created before any of them is scheduled; there are {there}.")
    elif len(view.bound) < view.minimum and view.waiting_for:
        lines.append(f"It fits, and waits for {wording.few(view.waiting_for, _FEW)} to be scheduled.")
    if view.held:
        on = ", ".join(f"{held.node} ({held.cards})" for held in view.held)
        lines.append(f"Cards held for it: {view.cards}, on {on}.")
    if view.reason:
        lines.append(f"Last said of it: {view.reason}.")
    return lines


def age(created: str, now: datetime) -> str:
    """As of `tables.age`."""
    try:
        return tables.age((now - datetime.fromisoformat(created).astimezone(UTC)).total_seconds())
    except ValueError:
        return "-"
