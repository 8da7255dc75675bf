"""What each page shows, as plain values for the templates."""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

from cardwise.cli.cluster import podevents, workloads
from cardwise.cli.cluster.podgroups import GangView
from cardwise.cli.render import tables
from cardwise.core.api import quotas
from cardwise.core.placement import totals
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.placement.totals import EntryView
from cardwise.core.values.decoded import Json
from cardwise.core.values.timestamps import LATEST, parse_timestamp
from cardwise.kube.clusterstate import OTHER_NAMESPACES, ClusterState
from cardwise.kube.objects.extendedresources import ExtendedResourceStatus
from cardwise.web.snapshot import Snapshot

BAR_WIDTH: Final = 1000  # units of a bar's width; a bar is drawn as wide as there is place
_COLORS: Final = 8  # colours of namespaces in static/style.css
_OTHERS_COLOR: Final = "others"
_NO_STATUS: Final = ExtendedResourceStatus()


class Filters(NamedTuple):
    """The nodes, classes and namespaces that a page shows; "" for all.

    node: a part of the node's name.
    label: a label of the node, as KEY or KEY=VALUE.
    """

    node: str = ""
    resource_class: str = ""
    namespace: str = ""
    label: str = ""


class ShareView(NamedTuple):
    """A pod's share of a card.

    start, width: its place in the bar.
    used: measured MiB; None if unknown.
    used_width: the part of `width` that is used.
    has_page: whether the pod may be read, so that it has a page.
    """

    namespace: str
    pod: str
    mem: int
    core: int
    start: int
    width: int
    used: int | None
    used_width: int
    color: str
    has_page: bool

    @property
    def label(self) -> str:
        """The share in words."""
        used = f", {self.used} MiB used" if self.used is not None else ""
        core = f", {self.core} % of the SMs" if self.core else ""
        owner = f"{self.namespace}/{self.pod}" if self.has_page else OTHER_NAMESPACES
        return f"{owner}: {self.mem} MiB{core}{used}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """A GPU. granted, total: MiB. problem: why it takes no new pods; "" if it does. tiers: what limits its shares.

    only_namespace: the namespace whose pods alone may share it; None if no pod on it demands that.
    """

    index: int
    uuid: str
    model: str
    classes: tuple[str, ...]
    granted: int
    total: int
    problem: str
    only_namespace: str | None
    tiers: str
    shares: tuple[ShareView, ...]


class NodeGpus(NamedTuple):
    """A node with GPUs. problem: why it takes no new pods; "" if it does. models: the models of its GPUs."""

    name: str
    models: str
    problem: str
    gpus: tuple[GpuView, ...]

    @property
    def granted(self) -> int:
        """Granted MiB on all its GPUs."""
        return sum(gpu.granted for gpu in self.gpus)

    @property
    def total(self) -> int:
        """MiB of all its GPUs."""
        return sum(gpu.total for gpu in self.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The sums of the shown GPUs; amounts in MiB."""

    nodes: int
    gpus: int
    empty: int
    closed: int
    granted: int
    total: int

    @property
    def percent(self) -> int:
        """Granted percent of all memory."""
        return 100 * self.granted // self.total if self.total else 0


def list_nodes(snapshot: Snapshot, filters: Filters) -> list[NodeGpus]:
    """The nodes with GPUs that the filters select, by name."""
    cluster = snapshot.cluster
    if cluster is None:
        return []
    statuses = {resource.spec.uuid: resource.status for resource in cluster.resources}
    nodes = (
        _view_node(snapshot, cluster, state, statuses, filters)
        for state in cluster.ledger.nodes()
        if state.cards
        and filters.node in state.name
        and _has_label(snapshot.node_labels.get(state.name, {}), filters.label)
    )
    return sorted((node for node in nodes if node.gpus), key=lambda node: node.name)


def _has_label(labels: Mapping[str, str], wanted: str) -> bool:
    key, equals, content = wanted.partition("=")
    return not wanted or (key in labels and (not equals or labels[key] == content))


def _view_node(
    snapshot: Snapshot,
    cluster: ClusterState,
    state: NodeState,
    statuses: Mapping[str, ExtendedResourceStatus],
    filters: Filters,
) -> NodeGpus:
    shares: dict[int, dict[str, ShareView]] = defaultdict(dict)
    for holding in cluster.ledger.holdings(state.name):
        for share in holding.assignment.shares():
            position = state.position(share)
            if position is None:
                continue
            card = state.cards[position]
            former = shares[position].get(holding.uid)  # several containers of the pod may share the GPU
            mem, core = share.mem + (former.mem if former else 0), share.core + (former.core if former else 0)
            used = snapshot.used_mib.get((holding.namespace, holding.name, card.uuid))
            shares[position][holding.uid] = _view_share(holding, mem, core, used, card.mem)
    gpus, namespaces = [], totals.only_namespaces(cluster.ledger, state)
    for position, card in enumerate(state.cards):
        placed = tuple(_place_side_by_side(shares[position].values()))
        if filters.resource_class and filters.resource_class not in card.classes:
            continue
        if filters.namespace and all(share.namespace != filters.namespace for share in placed):
            continue
        status = statuses.get(card.uuid, _NO_STATUS)
        unhealthy = f"unhealthy{f': {status.reason}' if status.reason else ''}" if not card.healthy else ""
        problem = " and ".join(filter(None, (unhealthy, "cordoned" if card.cordoned else "")))
        tiers = status.isolation
        gpus.append(
            GpuView(
                index=card.index,
                uuid=card.uuid,
                model=card.model or "unknown",
                classes=tuple(sorted(card.classes)),
                granted=state.used[position],
                total=card.mem,
                problem=problem,
                only_namespace=namespaces.get(position),
                tiers=f"memory: {tiers.memory or 'unknown'}, SMs: {tiers.compute or 'unknown'}" if tiers else "",
                shares=placed,
            )
        )
    models = Counter(gpu.model for gpu in gpus)
    return NodeGpus(
        name=state.name,
        models=", ".join(f"{count} × {model}" for model, count in models.items()),  # noqa: RUF001 - a sign of products
        problem=snapshot.node_reasons.get(state.name, ""),
        gpus=tuple(gpus),
    )


def _view_share(holding: Holding, mem: int, core: int, used: int | None, total: int) -> ShareView:
    is_other = holding.namespace == OTHER_NAMESPACES
    width = BAR_WIDTH * mem // total if total else 0
    return ShareView(
        namespace=holding.namespace,
        pod=holding.name_with_phase,
        mem=mem,
        core=core,
        start=0,
        width=width,
        used=used,
        used_width=min(width, BAR_WIDTH * used // total) if used and total else 0,
        color=_OTHERS_COLOR if is_other else color_of(holding.namespace),
        has_page=not is_other and not holding.phase_name,
    )


def color_of(namespace: str) -> str:
    """The CSS class with the colour of a namespace."""
    return f"c{zlib.crc32(namespace.encode()) % _COLORS}"


def _place_side_by_side(shares: Iterable[ShareView]) -> Iterator[ShareView]:
    """The largest first, so that a bar reads as a sum."""
    start = 0
    for share in sorted(shares, key=lambda share: (not share.has_page, -share.mem, share.namespace, share.pod)):
        yield share._replace(start=start)
        start += share.width


def summarize(nodes: Sequence[NodeGpus]) -> Summary:
    """The sums over these nodes."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    return Summary(
        nodes=len(nodes),
        gpus=len(gpus),
        empty=sum(not gpu.shares for gpu in gpus),
        closed=sum(bool(gpu.problem) or bool(node.problem) for node in nodes for gpu in node.gpus),
        granted=sum(gpu.granted for gpu in gpus),
        total=sum(gpu.total for gpu in gpus),
    )


class Legend(NamedTuple):
    """A namespace with shares on the shown GPUs. mem: MiB."""

    namespace: str
    color: str
    mem: int


def list_namespaces(nodes: Sequence[NodeGpus]) -> list[Legend]:
    """The namespaces with shares on these nodes, those with the most memory first; the unreadable ones last."""
    mib: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        for gpu in node.gpus:
            for share in gpu.shares:
                mib[share.namespace, share.color] += share.mem
    legend = [Legend(namespace, color, mem) for (namespace, color), mem in mib.items()]
    return sorted(legend, key=lambda entry: (entry.color == _OTHERS_COLOR, -entry.mem, entry.namespace))


class WaitingPod(NamedTuple):
    """A pod without a node. reason: the message of kube-scheduler."""

    namespace: str
    name: str
    request: str
    age: str
    reason: str


def list_waiting(snapshot: Snapshot, filters: Filters) -> list[WaitingPod]:
    """The pods that request GPUs or devices and have no node, the oldest first."""
    cluster = snapshot.cluster
    requests = {(namespace, name): request for namespace, name, request in (cluster.waiting if cluster else ())}
    pods = []
    for pod in sorted(snapshot.waiting, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or "")):
        metadata = pod["metadata"]
        key = metadata["namespace"], metadata["name"]
        if (cluster is not None and key not in requests) or filters.namespace not in ("", key[0]):
            continue
        request = requests.get(key)
        parts = []
        if request is not None:
            whole = sum(container.cards for container in request.containers if container.whole)
            parts = [f"{request.mem} MiB"] * bool(request.mem) + [f"{whole} whole GPU{'s' * (whole != 1)}"] * bool(
                whole
            )
            parts += [f"{sum(device.count for device in request.devices)} devices"] * bool(request.devices)
        pods.append(
            WaitingPod(
                *key,
                request=", ".join(parts) or "-",
                age=format_age(metadata.get("creationTimestamp"), snapshot.read_at),
                reason=workloads.scheduler_message(pod) or "kube-scheduler has not reported on it yet",
            )
        )
    return pods


def format_age(timestamp: object, now: datetime) -> str:
    """The time since a timestamp, such as 5m; "-" if it is none."""
    time = parse_timestamp(timestamp)
    return "-" if time is None else tables.format_age((now - time).total_seconds())


class Member(NamedTuple):
    """A member of a gang. state: bound, waiting, or missing; then `name` is ""."""

    name: str
    state: str


def list_members(gang: GangView) -> list[Member]:
    """The members of a gang: the bound ones, those that wait, and those that do not exist yet."""
    bound = set(gang.bound)
    members = [Member(name, "bound") for name in gang.bound]
    members += [Member(name, "waiting") for name in gang.members if name not in bound]
    return members + [Member("", "missing")] * (gang.minimum - len(gang.members))


class Limit(NamedTuple):
    """One amount of a quota. width: the used part of the bar; None without a hard limit."""

    title: str
    used: int
    hard: int | None

    @property
    def width(self) -> int | None:
        """The used part of the bar's width; None without a hard limit."""
        return None if self.hard is None else min(BAR_WIDTH, BAR_WIDTH * self.used // max(1, self.hard))


_TITLES: Final = {"shares": "shares", "memoryMiB": "MiB", "gpus": "whole GPUs"}


def list_limits(view: EntryView) -> list[Limit]:
    """The amounts of one entry of a GPUQuota."""
    hard = quotas.to_fields(view.entry)
    return [Limit(_TITLES.get(key, key), used, hard.get(key)) for key, used in quotas.to_fields(view.used).items()]


class Moment(NamedTuple):
    """A moment in a pod's life. reporter: who says it; "" for the pod's own status."""

    time: str
    title: str
    text: str
    is_warning: bool
    reporter: str


def list_moments(pod: Json | None, events: Sequence[podevents.Event]) -> list[Moment]:
    """A pod's life from its manifest and its events, the oldest first. pod: None if it does not exist any more."""
    moments = [
        Moment(event.last_timestamp, event.reason, event.message, event.is_warning, event.reporter) for event in events
    ]
    if pod is not None:
        moments += _moments_of_status(pod)
    return sorted(moments, key=lambda moment: (parse_timestamp(moment.time) or LATEST, moment.title))


def _moments_of_status(pod: Json) -> Iterator[Moment]:
    metadata, status = pod["metadata"], pod.get("status") or {}
    if created := metadata.get("creationTimestamp"):
        yield Moment(str(created), "Created", "", False, "")
    for condition in status.get("conditions") or ():
        if condition.get("status") == "True" and condition.get("type") in ("PodScheduled", "Ready"):
            title = "Bound" if condition["type"] == "PodScheduled" else "Ready"
            place = f"to node {(pod.get('spec') or {}).get('nodeName')}" if title == "Bound" else ""
            yield Moment(str(condition.get("lastTransitionTime") or ""), title, place, False, "")
    for container in status.get("containerStatuses") or ():
        state = container.get("state") or {}
        running, ended = state.get("running") or {}, state.get("terminated") or {}
        started = running.get("startedAt") or ended.get("startedAt")
        if started:
            yield Moment(str(started), "Running", f"container {container.get('name')}", False, "")
        if ended.get("finishedAt"):
            text = f"container {container.get('name')}, exit status {ended.get('exitCode')}"
            yield Moment(str(ended["finishedAt"]), "Ended", text, bool(ended.get("exitCode")), "")
    if metadata.get("deletionTimestamp"):
        yield Moment(workloads.deletion_time(metadata), "Deleted", "", False, "")
