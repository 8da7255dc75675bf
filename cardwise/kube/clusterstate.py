"""Reads the whole cluster once: cards, devices, classes, holdings and quotas, each from a consistent list.

The command line and the demo use this. The extender keeps the same data up to date with reflectors instead, and decodes
cards and devices with the functions of this module.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from cardwise.core.api import assignment, classes, names, quotas, request
from cardwise.core.api.cardlimits import CardLimits
from cardwise.core.api.cards import Card
from cardwise.core.api.classes import Classifier, ResourceClass
from cardwise.core.api.mpsprofile import CLIENT_WITH_UNKNOWN_SETTINGS, reported_only_client
from cardwise.core.api.quotas import GPUQuota, Headroom
from cardwise.core.placement.devices import Device
from cardwise.core.placement.holding import REPORTED_PHASE, Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB, Percent
from cardwise.kube import errors, paths, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.objects import extendedresources, gpuquotas, resourceclasses
from cardwise.kube.objects.extendedresources import Allocated, ContainerShare, ExtendedResource, ExtendedResourceSpec
from cardwise.kube.objects.meta import ObjectMeta
from cardwise.kube.objects.nodes import Node
from cardwise.kube.objects.pods import Pod, mps_client_of_pod
from cardwise.kube.objects.unreadable import Unreadable

_DEFAULT_CARD_LIMITS = CardLimits()
_NOTHING_ALLOCATED = Allocated()
OTHER_NAMESPACES = "other namespaces"  # the namespace that is shown for pods that the user may not read


@dataclass(slots=True)
class ClusterState:
    """The state of the cluster.

    ledger: the nodes with cards or devices, and the holdings of pods.
    addresses: the InternalIPs of nodes, by name.
    resources: the ExtendedResources of cards and devices.
    classes: the ResourceClasses, by name.
    waiting: namespace, name and request of each pending pod.
    problems: the pods, classes and quotas that cannot be parsed, one line each.
    partial: which parts are incomplete, because the user lacks the right to read all pods; "" if nothing is.
    """

    ledger: Ledger = field(default_factory=Ledger)
    addresses: dict[str, str] = field(default_factory=dict)
    resources: list[ExtendedResource] = field(default_factory=list)
    classes: dict[str, ResourceClass] = field(default_factory=dict)
    quotas: list[GPUQuota] = field(default_factory=list)
    waiting: list[tuple[str, str, request.PodRequest]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    partial: str = ""

    def missing_class(self, name: str) -> str | None:
        """Why no card can be in the class, for users; None if cards can be in it."""
        if name in self.classes or name in self._automatic_classes():
            return None
        broken = any(problem.startswith(f"ResourceClass {name}: ") for problem in self.problems)
        return "unreadable class" if broken else "no such class"

    def _automatic_classes(self) -> set[str]:
        """The automatic classes of the cards' models, which exist even without an object."""
        return {
            classes.name_of_model(resource.spec.model)
            for resource in self.resources
            if resource.spec.model and not extendedresources.is_other_device(resource)
        }

    def quota_headroom(self, namespace: str) -> list[tuple[GPUQuota, Headroom]]:
        """The headroom of each entry of the namespace's GPUQuotas, with its GPUQuota."""
        return [
            (quota, quotas.headroom(entry, self.ledger.used_amounts(namespace, entry)))
            for quota in self.quotas
            if quota.namespace == namespace
            for entry in quota.entries
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeQuota:
    """The amounts of Cardwise's resources in a ResourceQuota, as Kubernetes prints them."""

    namespace: str
    name: str
    hard: Mapping[str, str]
    used: Mapping[str, str]


class _Amounts(msgspec.Struct):
    hard: dict[str, str] = {}
    used: dict[str, str] = {}


class _ResourceQuota(msgspec.Struct):
    metadata: ObjectMeta
    spec: _Amounts = msgspec.field(default_factory=_Amounts)
    status: _Amounts = msgspec.field(default_factory=_Amounts)


def read_cluster_state(
    client: KubeClient,
    *,
    namespace: str = "",
    addresses: bool = True,
    own_namespace: str = "",
    with_unknown_holders: bool = False,
    limits: CardLimits = _DEFAULT_CARD_LIMITS,
) -> ClusterState:
    """Read ExtendedResources, ResourceClasses, GPUQuotas, pods, and nodes for their addresses. Raises `KubeError`.

    namespace: read only the pods and quotas of this namespace, which needs fewer permissions; "" for all. With a
        namespace, its holdings are complete, but the free amounts of cards are too high.
    addresses: read the addresses of nodes.
    own_namespace: used if the user lacks the right to read all pods. The pods of this namespace are read; the other
        holdings are derived from the statuses of cards and devices; "" to raise `Forbidden` instead.
    with_unknown_holders: also count allocations in these statuses that no pod explains: the extender keeps the share of
        a deleted pod until the node reports.
    limits: the extender's limits per card.
    """
    cluster_state = ClusterState(Ledger(kept_back=limits.kept_back, max_clients=limits.max_clients, core=limits.core))
    if addresses:
        cluster_state.addresses = _list_addresses(client, own_namespace=own_namespace)
    cluster_state.resources = list(client.list_as(paths.extendedresources(), wire.ListOf[ExtendedResource]))
    # Invalid objects are only named, as in the extender.
    for manifest in client.list_objects(paths.resourceclasses()):
        class_record = resourceclasses.record_of(manifest)
        if isinstance(class_record.parsed, Unreadable):
            cluster_state.problems.append(f"ResourceClass {class_record.name}: {class_record.parsed.problem}")
        else:
            cluster_state.classes[class_record.name] = class_record.parsed
    for manifest in client.list_objects(paths.gpuquotas(namespace)):
        quota_record = gpuquotas.record_of(manifest)
        if isinstance(quota_record.parsed, Unreadable):
            cluster_state.problems.append(f"GPUQuota {quota_record.key}: {quota_record.parsed.problem}")
        else:
            cluster_state.quotas.append(quota_record.parsed)
    classifier = Classifier(cluster_state.classes.values())
    cards: dict[str, list[Card]] = {}
    devices: dict[str, list[Device]] = {}
    for resource in cluster_state.resources:
        if extendedresources.is_other_device(resource):
            devices.setdefault(resource.spec.node, []).append(extendedresources.device_of(resource, classifier))
        else:
            cards.setdefault(resource.spec.node, []).append(extendedresources.card_of(resource, classifier))
    for name, cards_of_node in cards.items():
        cluster_state.ledger.set_cards(name, cards_of_node)
    for name, devices_of_node in devices.items():
        cluster_state.ledger.set_other_devices(name, devices_of_node)
    try:
        for pod in client.list_as(paths.pods(namespace), wire.ListOf[Pod]):
            _add_pod(cluster_state, pod)
    except errors.Forbidden:
        if not own_namespace:
            raise
        cluster_state.partial = (
            "you may not read the pods of all namespaces: the shares of other namespaces are read from the GPUs' "
            "statuses, some seconds old and without names"
        )
        _add_permitted_pods(cluster_state, client, own_namespace)
    _add_reported_shares(cluster_state)
    if cluster_state.partial or with_unknown_holders:
        _add_unknown_holders(cluster_state)
    return cluster_state


def _list_addresses(client: KubeClient, *, own_namespace: str) -> dict[str, str]:
    """The addresses of nodes. If the user may not read nodes, returns {} when `own_namespace` is set, and raises
    Forbidden otherwise.
    """
    addresses = {}
    try:
        for node in client.list_as(paths.nodes(), wire.ListOf[Node]):
            internal = [a.address for a in node.status.addresses or () if a.type == "InternalIP"]
            addresses[node.metadata.name] = internal[0] if internal else "unknown"
    except errors.Forbidden:
        if not own_namespace:
            raise
    return addresses


def _add_permitted_pods(cluster_state: ClusterState, client: KubeClient, namespace: str) -> None:
    """Add the pods of the namespace; none if the user may not read them."""
    with suppress(errors.Forbidden):
        for pod in client.list_as(paths.pods(namespace), wire.ListOf[Pod]):
            _add_pod(cluster_state, pod)


def read_own_ledger(client: KubeClient, namespace: str) -> Ledger:
    """A ledger with the holdings of the namespace's pods, but without cards, for users who lack the right to read
    cards. Raises `KubeError`.
    """
    cluster_state = ClusterState()
    for pod in client.list_as(paths.pods(namespace), wire.ListOf[Pod]):
        _add_pod(cluster_state, pod)
    return cluster_state.ledger


def list_native_quotas(client: KubeClient, namespace: str) -> list[NativeQuota]:
    """The ResourceQuotas that limit resources of Cardwise, of one namespace ("": of all). Raises `KubeError`."""
    native = []
    for quota in client.list_as(paths.namespaced("/api/v1", "resourcequotas", namespace), wire.ListOf[_ResourceQuota]):
        hard = {key: amount for key, amount in quota.spec.hard.items() if _is_own_resource(key)}
        if hard:
            used = {key: quota.status.used[key] for key in hard if key in quota.status.used}
            meta = quota.metadata
            native.append(NativeQuota(namespace=meta.namespace, name=meta.name, hard=hard, used=used))
    return native


def _is_own_resource(key: str) -> bool:
    resource = key.removeprefix("requests.")
    return resource in names.REQUESTED or resource.startswith(names.CLASS_PREFIX)


def _add_pod(cluster_state: ClusterState, pod: Pod) -> None:
    meta = pod.metadata
    if pod.finished or pod.static:
        return
    try:
        if pod.spec.node_name:
            assigned = assignment.decode(meta.annotations)
            if assigned is not None:
                mps_client = mps_client_of_pod(meta, pod.spec, assigned.containers)
                holding = Holding(
                    meta.uid, meta.namespace, meta.name, pod.spec.node_name, assigned, mps_client=mps_client
                )
                cluster_state.ledger.set_holding(holding)
            return
        pod_request = request.parse_mutated(pod.to_json())
    except (assignment.InvalidAssignment, InvalidRequest) as error:
        cluster_state.problems.append(f"{pod.full_name}: {error}")
        return
    if pod_request is not None:
        cluster_state.waiting.append((meta.namespace, meta.name, pod_request))


def _add_reported_shares(cluster_state: ClusterState) -> None:
    """Add the shares that nodes report for deleted pods: one holding for each pod and node.

    As in the extender, quotas count such a pod only if the card's status lists the pod as terminating.
    """
    shares: dict[tuple[str, str], list[assignment.CardShare]] = {}
    devices: dict[tuple[str, str], list[assignment.AssignedDevice]] = {}
    pods: dict[tuple[str, str], ContainerShare] = {}
    terminating_pods: set[tuple[str, str]] = set()
    for resource in cluster_state.resources:
        spec = resource.spec
        terminating_pods |= {(share.uid, spec.node) for share in extendedresources.terminating_shares(resource)}
        for reported_share in extendedresources.reported_shares(resource):
            key = reported_share.uid, spec.node
            pods[key] = reported_share
            if extendedresources.is_other_device(resource):
                # The class of the request is unknown, and nothing depends on it.
                devices.setdefault(key, []).append(assignment.AssignedDevice("", spec.uuid))
            else:
                shares.setdefault(key, []).append(_reported_share(reported_share, spec))
    for key, reported_share in pods.items():
        uid, node = key
        existing = cluster_state.ledger.holding(uid)
        if existing is not None and existing.node == node and existing.assignment.is_gpushare:
            continue  # gpushare's annotations have no UUIDs, so the cards cannot be compared
        reported = assignment.Assignment(
            {"reported": tuple(shares[key])} if key in shares else {},
            {"reported": tuple(devices[key])} if key in devices else {},
        )
        # If the pod still exists (perhaps with the former name of the node), its own holding is counted already.
        assigned = reported.excess_over(existing.assignment) if existing is not None else reported
        if assigned is None:
            continue
        is_terminating = key in terminating_pods and existing is None
        name = uid if is_terminating else f"{node}/{uid}"
        cluster_state.ledger.set_holding(
            Holding(
                name,
                reported_share.namespace,
                reported_share.name,
                node,
                assigned,
                REPORTED_PHASE,
                reported_only_client(reported_share.namespace),
                charged=is_terminating,
            )
        )


def _add_unknown_holders(cluster_state: ClusterState) -> None:
    """Add a holding of an unknown pod for each card or device with an allocation that no known pod explains."""
    known_shares: dict[str, list[assignment.CardShare]] = {}
    held_uuids: set[str] = set()
    for holding in cluster_state.ledger.holdings():
        node = cluster_state.ledger.node(holding.node)
        for share in holding.assignment.shares():
            position = node.position(share) if node is not None and not share.uuid else None
            if node is not None and position is not None:
                known_shares.setdefault(node.cards[position].uuid, []).append(share)
            elif share.uuid:
                known_shares.setdefault(share.uuid, []).append(share)  # even if another node has the card now
        held_uuids |= {device.uuid for device in holding.assignment.non_gpu_devices()}
    for resource in cluster_state.resources:
        spec, allocated = resource.spec, resource.status.allocated or _NOTHING_ALLOCATED
        if extendedresources.is_other_device(resource):
            free = not allocated.shares or spec.uuid in held_uuids
            assigned = assignment.Assignment({}, {} if free else {"pod": (assignment.AssignedDevice("", spec.uuid),)})
        else:
            assigned = assignment.Assignment(_remaining_shares(spec, allocated, known_shares.get(spec.uuid, [])))
        if assigned.containers or assigned.devices:
            unknown_holder = Holding(
                f"others-{spec.uuid}",
                OTHER_NAMESPACES,
                "pods",
                spec.node,
                assigned,
                mps_client=CLIENT_WITH_UNKNOWN_SETTINGS,
            )
            cluster_state.ledger.set_holding(unknown_holder)


def _remaining_shares(
    spec: ExtendedResourceSpec, allocated: Allocated, known_shares: Sequence[assignment.CardShare]
) -> dict[str, tuple[assignment.CardShare, ...]]:
    """The allocated shares that no known pod explains. The first share has all their MiB and percent."""
    mem = max(0, (allocated.memory_mib or 0) - sum(share.mem for share in known_shares))
    core = max(0, (allocated.core_percent or 0) - sum(share.core for share in known_shares))
    shares = max(int(mem > 0), (allocated.shares or 0) - len(known_shares))
    total, is_whole = MiB(spec.memory_mib), bool(allocated.whole) and not known_shares
    first_share = assignment.CardShare(spec.index, spec.uuid, MiB(mem), Percent(core), total, is_whole)
    empty_share = assignment.CardShare(spec.index, spec.uuid, MiB(0), Percent(0), total)
    return {"pod": (first_share, *[empty_share] * (shares - 1))} if shares else {}


def _reported_share(share: ContainerShare, spec: ExtendedResourceSpec) -> assignment.CardShare:
    return assignment.CardShare(
        spec.index,
        spec.uuid,
        MiB(share.mem),
        Percent(share.core),
        MiB(spec.memory_mib),
        share.whole,
    )
