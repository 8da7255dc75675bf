"""Reads the cards and their use for `cardwise top`: all cards, but pods and measured use only for the shown nodes.

A big cluster has 40,000 cards and 60,000 pods. So one request reads all cards from the API server's cache, and pods are
read for the shown nodes only. The MPS managers measure the memory that pods really use.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from cardwise.cli.cluster import nodestates
from cardwise.core.api import assignment, classes, names, sharing
from cardwise.core.api.assignment import CardShare
from cardwise.core.values import wording
from cardwise.kube import errors, paths, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.objects.extendedresources import Allocated, ExtendedResource, IsolationStatus
from cardwise.kube.objects.pods import Pod

_CACHED_LIST_QUERY = {"resourceVersion": "0"}  # the query that reads from the API server's cache, which spares etcd
_MAX_PARALLEL_REQUESTS = 8  # maximum number of requests at the same time
_MAX_NODES_READ_SINGLY = 64  # maximum number of nodes whose pods are listed one by one; for more, one request lists all
_PROXY_SECONDS = 2.0  # maximum time of a request to a manager: a hanging manager must not delay the screen
_USED_METRIC, _METRICS_PORT = "cardwise_container_gpu_memory_used_bytes", 9400
_MANAGER_SELECTOR = "app.kubernetes.io/name=cardwise,app.kubernetes.io/component=mps"
_BYTES_PER_MIB = 1024 * 1024
_MAX_USED_BYTES = 2**63
_MAX_LINE_LENGTH = 4096  # characters of a sample; the parser takes minutes for some lines of a megabyte
_NOTHING_ALLOCATED = Allocated()


@dataclass(frozen=True, slots=True)
class UnreadableUse:
    """The use on a node could not be read. `problem`: why."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A pod that holds a share of a card.

    granted: MiB of the pod's share.
    used: MiB that the pod uses; None if they were not measured.
    terminating: whether the pod object is deleted while its containers may still run.
    exclusive: whether the pod shares cards with pods of its namespace only.
    """

    namespace: str
    name: str
    granted: int
    used: int | None = None
    terminating: bool = False
    exclusive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUsage:
    """A card and its use.

    total, granted: MiB.
    core: granted percent of SMs.
    pods: number of pods with a share.
    whole: whether a pod holds the whole card.
    mps: its MPS state; "" without a manager.
    isolation: what limits the shares on it; None if its node has not reported it.
    holders: None if pods may not be read.

    granted, core and pods are None until the extender has reported them.
    """

    node: str
    index: int
    uuid: str
    model: str
    total: int
    granted: int | None
    core: int | None
    pods: int | None
    whole: bool = False
    healthy: bool = True
    reason: str = ""
    cordoned: bool = False
    mps: str = ""
    isolation: IsolationStatus | None = None
    holders: tuple[Holder, ...] | None = None

    @property
    def only_namespace(self) -> str | None:
        """The namespace whose pods alone may share the card, as a holder demands; None if no known holder does."""
        exclusive = [holder.namespace for holder in self.holders or () if holder.exclusive]
        return exclusive[0] if exclusive and not self.whole else None

    @property
    def used(self) -> int | None:
        """The MiB that all measured holders use together; None if no holder is measured."""
        measured = [holder.used for holder in self.holders or () if holder.used is not None]
        return sum(measured) if measured else None


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """A node and its cards, by index. `unschedulable_reason`: why it takes no new pods; "" if it takes pods."""

    name: str
    cards: tuple[CardUsage, ...]
    unschedulable_reason: str = ""

    @property
    def granted_fraction(self) -> float:
        """The granted fraction of its GPU memory, from 0 to 1."""
        return sum_granted_mib(self.cards) / max(1, sum(card.total for card in self.cards))


def group_by_node(cards: Iterable[CardUsage]) -> list[NodeUsage]:
    """Group cards by node, and sort the nodes by their granted fraction, the largest first."""
    cards_by_node: dict[str, list[CardUsage]] = {}
    for card in cards:
        cards_by_node.setdefault(card.node, []).append(card)
    nodes = [
        NodeUsage(name, tuple(sorted(node_cards, key=lambda card: card.index)))
        for name, node_cards in cards_by_node.items()
    ]
    return sorted(nodes, key=lambda node: (-node.granted_fraction, node.name))


def sum_granted_mib(cards: Iterable[CardUsage]) -> int:
    """The granted MiB of all these cards, as far as they are known."""
    return sum(card.granted or 0 for card in cards)


def read_cards(client: KubeClient, nodes: Collection[str] = ()) -> list[CardUsage]:
    """Read all cards, or only those of `nodes`. Raises `KubeError`."""
    query = dict(_CACHED_LIST_QUERY)
    if nodes:
        query |= paths.label_in_query(names.NODE_LABEL, sorted(nodes))
    resources = client.list_as(paths.extendedresources(), wire.ListOf[ExtendedResource], query, 0)
    # The query is by label, but the card of another node can have the same label.
    return [
        _card_usage(resource)
        for resource in resources
        if resource.spec.kind == classes.GPU_KIND and (not nodes or resource.spec.node in nodes)
    ]


def _card_usage(resource: ExtendedResource) -> CardUsage:
    spec, status = resource.spec, resource.status
    allocated = status.allocated or _NOTHING_ALLOCATED
    terminating = tuple([
        Holder(namespace=share.namespace, name=share.name, granted=share.mem, terminating=True)
        for share in status.reported or ()
    ])  # fmt: skip
    return CardUsage(
        node=spec.node,
        index=spec.index,
        uuid=spec.uuid,
        model=spec.model,
        total=spec.memory_mib,
        granted=allocated.memory_mib,
        core=allocated.core_percent,
        pods=allocated.pods,
        whole=bool(allocated.whole),
        healthy=status.health == "Healthy",
        reason=status.reason,
        cordoned=spec.unschedulable,
        mps=status.mps.state if status.mps is not None else "",
        isolation=status.isolation,
        holders=terminating,
    )


@dataclass(slots=True)
class UsageDetails:
    """The holders of cards, the memory they use, and the states of the nodes.

    holders: the holders of each card, by UUID; their measured memory is in `used_mib`.
    only_own_pods: whether the holders are the pods of one namespace only.
    used_mib: measured GPU memory in MiB, by namespace, pod and UUID.
    unschedulable_reasons: by node, why the node takes no new pods.
    notes: the reads that failed, and the nodes that take no new pods.
    """

    holders: dict[str, list[Holder]] | None = None
    only_own_pods: bool = False
    used_mib: dict[tuple[str, str, str], int] = field(default_factory=dict)
    unschedulable_reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def with_holders(self, card: CardUsage) -> CardUsage:
        """The card with its holders and their use."""
        terminating_holders = card.holders or ()
        if self.holders is None:
            return replace(card, holders=None)
        bound_holders = self.holders.get(card.uuid, []) + self.holders.get(_card_position(card.node, card.index), [])
        bound_names = {(holder.namespace, holder.name) for holder in bound_holders}
        all_holders = [
            *bound_holders,
            *(holder for holder in terminating_holders if (holder.namespace, holder.name) not in bound_names),
        ]
        holders = [
            replace(holder, used=self.used_mib.get((holder.namespace, holder.name, card.uuid)))
            for holder in sorted(all_holders, key=lambda holder: (-holder.granted, holder.namespace, holder.name))
        ]
        # The extender has not reported on this card yet.
        granted = (
            sum(holder.granted for holder in holders)
            if card.granted is None and not self.only_own_pods
            else card.granted
        )
        return replace(card, holders=tuple(holders), granted=granted)


def read_details(client: KubeClient, nodes: Sequence[str], cardwise_namespace: str = names.NAMESPACE) -> UsageDetails:
    """Read the holders of cards on these nodes, and their measured use. Raises `KubeError`."""
    details = UsageDetails()
    with ThreadPoolExecutor(_MAX_PARALLEL_REQUESTS) as pool:
        usage_future = pool.submit(_measure_usage, client, nodes, cardwise_namespace, details.notes)
        reasons_future = pool.submit(nodestates.read_unschedulable_reasons, client, nodes)
        try:
            details.holders = _group_holders(
                pod for node_pods in pool.map(partial(_list_pods, client), _nodes_to_query(nodes)) for pod in node_pods
            )
        except errors.Forbidden:
            details.only_own_pods = True
            details.holders = _read_own_holders(client, nodes)
            shown_note = (
                "the holders are not shown" if details.holders is None else "only your own pods are shown as holders"
            )
            details.notes.append(f"you may not read the pods of all namespaces: {shown_note}")
        details.used_mib = usage_future.result()
        details.unschedulable_reasons = reasons_future.result()
        details.notes += nodestates.describe_unschedulable(details.unschedulable_reasons)
    return details


def _nodes_to_query(nodes: Sequence[str]) -> Sequence[str]:
    """The nodes whose pods are listed one by one, by an index of the API server; [""] if they are too many.

    [""] means one request for the pods of all nodes.
    """
    return nodes if len(nodes) <= _MAX_NODES_READ_SINGLY else [""]


def _list_pods(client: KubeClient, node: str) -> list[Pod]:
    """List the pods of a node; "" for all nodes."""
    query = _CACHED_LIST_QUERY | (paths.field_query("spec.nodeName", node) if node else {})
    return list(client.list_as(paths.pods(), wire.ListOf[Pod], query, 0))


def _read_own_holders(client: KubeClient, nodes: Collection[str]) -> dict[str, list[Holder]] | None:
    """Read the holders in the user's namespace; None if the pods of this namespace may not be read either."""
    try:
        pods = list(client.list_as(paths.pods(client.namespace), wire.ListOf[Pod], _CACHED_LIST_QUERY, 0))
    except errors.Forbidden:
        return None
    return _group_holders(pod for pod in pods if pod.spec.node_name in nodes)


def _group_holders(pods: Iterable[Pod]) -> dict[str, list[Holder]]:
    """Group pods by their card: by the card's UUID, or by its position for gpushare's pods, which name no UUID."""
    holders: dict[str, list[Holder]] = defaultdict(list)
    for pod in pods:
        meta = pod.metadata
        if pod.finished or pod.static:
            continue
        try:
            pod_assignment = assignment.decode(meta.annotations)
        except assignment.InvalidAssignment:
            continue  # the pod's share is unknown; `cardwise inspect` prints a warning
        shares = _sum_by_card(pod.spec.node_name, pod_assignment.shares() if pod_assignment is not None else ())
        exclusive = sharing.tenant_of(meta.annotations, meta.namespace).exclusive
        for card, granted in shares.items():
            holders[card].append(Holder(namespace=meta.namespace, name=meta.name, granted=granted, exclusive=exclusive))
    return holders


def _sum_by_card(node: str, shares: Iterable[CardShare]) -> dict[str, int]:
    mib_by_card: dict[str, int] = defaultdict(int)
    for share in shares:
        mib_by_card[share.uuid or _card_position(node, share.index)] += share.mem
    return mib_by_card


def _card_position(node: str, index: int) -> str:
    return f"{node}/{index}"


def _measure_usage(
    client: KubeClient, nodes: Sequence[str], cardwise_namespace: str, notes: list[str]
) -> dict[tuple[str, str, str], int]:
    """Read the MiB that the MPS managers of these nodes measure; {} without managers, or without the right to read."""
    try:
        managers = list_manager_pods(client, cardwise_namespace)
    except errors.KubeError as error:
        notes.append(
            f"usage not measured: the MPS managers cannot be listed in namespace {cardwise_namespace}: "
            f"{error.message or error.reason}"
        )
        return {}
    queried_managers = [managers[node] for node in nodes if node in managers]
    if not queried_managers:
        notes.append(f"usage not measured: namespace {cardwise_namespace} has no pod of an MPS manager on these nodes")
        return {}
    usage: dict[tuple[str, str, str], int] = {}
    problem = ""
    with ThreadPoolExecutor(_MAX_PARALLEL_REQUESTS) as pool:
        for response in pool.map(lambda name: _read_manager_usage(client, cardwise_namespace, name), queried_managers):
            if isinstance(response, UnreadableUse):
                problem = response.problem
            else:
                usage |= response
    if problem:
        notes.append(f"usage is unknown for some nodes: {problem}")
    return usage


def list_manager_pods(client: KubeClient, cardwise_namespace: str) -> Mapping[str, str]:
    """List the names of the managers' pods, by node."""
    pods = client.list_as(
        paths.pods(cardwise_namespace), wire.ListOf[Pod], _CACHED_LIST_QUERY | {"labelSelector": _MANAGER_SELECTOR}, 0
    )
    return {pod.spec.node_name: pod.metadata.name for pod in pods if pod.status.phase == "Running"}


def _read_manager_usage(
    client: KubeClient, cardwise_namespace: str, manager: str
) -> dict[tuple[str, str, str], int] | UnreadableUse:
    """Read the metrics of a manager."""
    try:
        return parse_usage(read_manager(client, cardwise_namespace, manager, "/metrics").decode("utf-8", "replace"))
    except errors.KubeError as error:
        return UnreadableUse(error.message or error.reason)
    except ValueError as error:
        problem = wording.quote_text(str(error))
        return UnreadableUse(f"MPS manager {manager} sent unreadable metrics: {problem}")


def read_manager(client: KubeClient, cardwise_namespace: str, manager: str, path: str) -> bytes:
    """Read a page of a manager through the API server's proxy. The user needs the right to get `pods/proxy`.

    Raises KubeError.
    """
    proxied_path = paths.pods(cardwise_namespace, f"{manager}:{_METRICS_PORT}", "proxy", path.removeprefix("/"))
    return client.request("GET", proxied_path, timeout=_PROXY_SECONDS)


def parse_usage(exposition: str) -> dict[tuple[str, str, str], int]:
    """MiB by namespace, pod and card UUID, from the metrics of an MPS manager. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - needed only where a manager runs

    # Not `splitlines`: the text of a label may have other line ends.
    lines = [line for line in exposition.split("\n") if line.startswith(_USED_METRIC)]
    if max(map(len, lines), default=0) > _MAX_LINE_LENGTH:
        raise ValueError(f"a sample has more than {_MAX_LINE_LENGTH} characters")
    try:
        families = list(text_string_to_metric_families("\n".join([*lines, ""])))
    except IndexError:  # the parser's for some malformed lines
        raise ValueError("a sample is malformed") from None
    used_bytes: dict[tuple[str, str, str], int] = defaultdict(int)
    for sample in (sample for family in families for sample in family.samples):
        if not 0 <= sample.value < _MAX_USED_BYTES:  # also NaN
            raise ValueError(f"{sample.value} is not a number of bytes")
        labels = sample.labels
        used_bytes[labels.get("namespace", ""), labels.get("pod", ""), labels.get("UUID", "")] += int(sample.value)
    return {key: amount // _BYTES_PER_MIB for key, amount in used_bytes.items()}
