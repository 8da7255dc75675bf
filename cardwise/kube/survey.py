"""Reads the whole cluster once: cards, devices and classes, who holds what, quotas, each from a consistent list.

For programs that look once (the CLI, the demo). The extender keeps the same picture alive with reflectors, and decodes
cards and devices by the same functions.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import TypeVar

import msgspec

from cardwise.core.api import assignment, classes, names, quotas, request
from cardwise.core.api.cardlimits import CardLimits
from cardwise.core.api.cards import FULL_CORE, Card
from cardwise.core.api.classes import Classifier, ResourceClass
from cardwise.core.api.mpsprofile import SILENT, UNKNOWN
from cardwise.core.api.quotas import GPUQuota, Headroom
from cardwise.core.placement.devices import Device
from cardwise.core.placement.holding import REPORTED, Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MOST_MIB, MiB, Percent
from cardwise.kube import errors, mpsread, paths, wire
from cardwise.kube.client import KubeClient

_T = TypeVar("_T")

MAX_CARDS_PER_NODE = 256  # cards and devices of one node that count: a hostile node may invent more
MAX_REPORTED_PER_CARD = 512  # shares that a node is believed about one card: far above what pods fit on a node
_UID = re.compile(names.POD_UID)
_NO_CLASSES: frozenset[str] = frozenset()  # one for tens of thousands of cards: Python makes a new one each time
_NO_LIMITS = CardLimits()
OTHERS = "other namespaces"  # stands for the namespace of pods that may not be read


@dataclass(slots=True)
class Survey:
    """`ledger` knows nodes with cards or devices; `addresses` are their InternalIPs; `classes` are by name.

    `resources` are the cards and the devices. `problems` are the pods, classes and quotas that cannot be read, and
    `partial` says, where not all pods may be read, what is less exact for it.
    """

    ledger: Ledger = field(default_factory=Ledger)
    addresses: dict[str, str] = field(default_factory=dict)
    resources: list[wire.ExtendedResource] = field(default_factory=list)
    classes: dict[str, ResourceClass] = field(default_factory=dict)
    quotas: list[GPUQuota] = field(default_factory=list)
    waiting: list[tuple[str, str, request.PodRequest]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    partial: str = ""

    def missing_class(self, name: str) -> str:
        """Two words for users where no card can ever be in the class, so that it limits nothing; else ""."""
        if name in self.classes or name in self._automatic_classes():
            return ""
        broken = any(problem.startswith(f"ResourceClass {name}: ") for problem in self.problems)
        return "unreadable class" if broken else "no such class"

    def _automatic_classes(self) -> set[str]:
        """The classes that cards are in by their models, though there may be no object of that name."""
        return {
            classes.name_of_model(resource.spec.model)
            for resource in self.resources
            if resource.spec.model and not is_other_device(resource)
        }

    def quota_headroom(self, namespace: str) -> list[tuple[GPUQuota, Headroom]]:
        """What each entry of the namespace's GPUQuotas leaves, and whose it is."""
        return [
            (quota, quotas.headroom(entry, self.ledger.used(namespace, entry)))
            for quota in self.quotas
            if quota.namespace == namespace
            for entry in quota.entries
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeQuota:
    """The amounts of a ResourceQuota that concern our resources, as Kubernetes prints them."""

    namespace: str
    name: str
    hard: Mapping[str, str]
    used: Mapping[str, str]


class _Resources(msgspec.Struct):
    limits: dict[str, str | int] = {}
    requests: dict[str, str | int] = {}


class _Container(msgspec.Struct, rename="camel"):
    name: str = ""
    resources: _Resources = msgspec.field(default_factory=_Resources)
    restart_policy: str = ""
    security_context: wire.RunAs | None = None


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    containers: list[_Container] = []
    init_containers: list[_Container] = []
    security_context: wire.RunAs | None = None
    host_users: bool | None = None


class _Pod(msgspec.Struct):
    metadata: wire.ObjectMeta
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: wire.PodStatusHead = msgspec.field(default_factory=wire.PodStatusHead)


class _Allocated(msgspec.Struct, rename="camel"):
    memory_mib: int = msgspec.field(default=0, name="memoryMiB")
    core_percent: int = 0
    shares: int = 0
    whole: bool = False


class _Status(wire.ExtendedResourceStatus, rename="camel"):
    """With what the extender writes."""

    allocated: _Allocated = msgspec.field(default_factory=_Allocated)


class _Resource(wire.ExtendedResource):
    status: _Status = msgspec.field(default_factory=_Status)


class _Amounts(msgspec.Struct):
    hard: dict[str, str] = {}
    used: dict[str, str] = {}


class _ResourceQuota(msgspec.Struct):
    metadata: wire.ObjectMeta
    spec: _Amounts = msgspec.field(default_factory=_Amounts)
    status: _Amounts = msgspec.field(default_factory=_Amounts)


def take_survey(
    client: KubeClient,
    *,
    namespace: str = "",
    addresses: bool = True,
    own: str = "",
    beyond: bool = False,
    limits: CardLimits = _NO_LIMITS,
) -> Survey:
    """Reads ExtendedResources, ResourceClasses, GPUQuotas and pods, and nodes for their addresses. Raises `KubeError`.

    With a namespace, pods and quotas of no other are read, which takes fewer rights: what that namespace holds is
    whole then, what is free is not. With `own`, where pods of all namespaces may not be read those of this one are,
    and what the others hold is taken from the statuses of cards and devices. With `beyond` what these say beyond the
    pods that are there counts as well: the extender keeps the share of one that vanished until its node is heard.
    `limits`: what the extender gives of a card at most.
    """
    survey = Survey(Ledger(kept_back=limits.kept_back, max_clients=limits.max_clients, core=limits.core))
    if addresses:
        survey.addresses = _list_addresses(client, own=own)
    resources = list(client.list_as(paths.extendedresources(), wire.ListOf[_Resource]))
    survey.resources += resources
    # A cluster that has only ExtendedResources, an older installation, has no types and no quotas.
    resource_classes = _parse_objects(
        survey, "ResourceClass", _list_known_kind(client, paths.resourceclasses()), classes.parse
    )
    survey.classes = {resource_class.name: resource_class for resource_class in resource_classes}
    survey.quotas = list(
        _parse_objects(survey, "GPUQuota", _list_known_kind(client, paths.gpuquotas(namespace)), quotas.parse)
    )
    classifier = Classifier(survey.classes.values())
    cards: dict[str, list[Card]] = {}
    devices: dict[str, list[Device]] = {}
    for resource in survey.resources:
        if is_other_device(resource):
            devices.setdefault(resource.spec.node, []).append(device_of(resource, classifier))
        else:
            cards.setdefault(resource.spec.node, []).append(card_of(resource, classifier))
    for name, cards_of_node in cards.items():
        survey.ledger.set_cards(name, cards_of_node)
    for name, devices_of_node in devices.items():
        survey.ledger.set_devices(name, devices_of_node)
    try:
        pods = list(client.list_as(paths.pods(namespace), wire.ListOf[_Pod]))
    except errors.Forbidden:
        if not own:
            raise
        survey.partial = (
            "you may not read the pods of all namespaces: what others hold is as the cards' statuses say, some seconds "
            "old and without names"
        )
        pods = _list_permitted_pods(client, own)
    for pod in pods:
        _add_pod(survey, pod)
    _add_reported_shares(survey)
    if survey.partial or beyond:
        _add_unknown_holders(survey, resources)
    return survey


def _list_addresses(client: KubeClient, *, own: str) -> dict[str, str]:
    """The addresses of nodes; with `own`, none if they may not be read."""
    addresses = {}
    try:
        for node in client.list_as(paths.nodes(), wire.ListOf[wire.Node]):
            internal = [a.address for a in node.status.addresses or () if a.type == "InternalIP"]
            addresses[node.metadata.name] = internal[0] if internal else "unknown"
    except errors.Forbidden:
        if not own:
            raise
    return addresses


def _list_permitted_pods(client: KubeClient, namespace: str) -> list[_Pod]:
    """The pods of the namespace; none if these may not be read either."""
    try:
        return list(client.list_as(paths.pods(namespace), wire.ListOf[_Pod]))
    except errors.Forbidden:
        return []


def read_own_ledger(client: KubeClient, namespace: str) -> Ledger:
    """What pods of the namespace hold by their annotations, for a user who may read no card. Raises `KubeError`."""
    survey = Survey()
    for pod in client.list_as(paths.pods(namespace), wire.ListOf[_Pod]):
        _add_pod(survey, pod)
    return survey.ledger


def list_native_quotas(client: KubeClient, namespace: str) -> list[NativeQuota]:
    """The ResourceQuotas of a namespace, or of all, that limit resources of ours. Raises `KubeError`."""
    quotas_found = []
    for quota in client.list_as(paths.namespaced("/api/v1", "resourcequotas", namespace), wire.ListOf[_ResourceQuota]):
        hard = {key: amount for key, amount in quota.spec.hard.items() if _is_own_resource(key)}
        if hard:
            used = {key: quota.status.used[key] for key in hard if key in quota.status.used}
            meta = quota.metadata
            quotas_found.append(NativeQuota(namespace=meta.namespace, name=meta.name, hard=hard, used=used))
    return quotas_found


def is_other_device(resource: wire.ExtendedResource) -> bool:
    """Whether it is a device that is no GPU."""
    return resource.spec.kind != classes.KIND


def labels_of(resource: wire.ExtendedResource) -> dict[str, str]:
    """What selectors see of a card or a device: what its node says of it, and what people have put on its object."""
    spec = resource.spec
    return classes.labels(
        node=spec.node,
        index=spec.index,
        uuid=spec.uuid,
        model=spec.model,
        memory=MiB(spec.memory_mib),
        properties=spec.properties,
        own=resource.metadata.labels,
        kind=spec.kind,
    )


def card_of(resource: wire.ExtendedResource, classifier: Classifier | None = None) -> Card:
    """The card that an ExtendedResource describes; before the first report nobody knows what is held on it.

    Without a classifier it is in no class.
    """
    spec = resource.spec
    of = _NO_CLASSES
    if classifier is not None:
        of = classifier.classes_of(labels_of(resource))
    return Card(
        index=spec.index,
        uuid=intern(spec.uuid),
        mem=quantity.size(max(0, min(spec.memory_mib, MOST_MIB))),  # in older clusters the schema knows no maximum
        model=intern(spec.model),
        healthy=resource.status.health == "Healthy",
        cordoned=spec.unschedulable,
        classes=of,
        priority=classifier.priority_of(of) if classifier is not None else 0,
        mps=mpsread.mps_of_card(resource.status.mps),
    )


def device_of(resource: wire.ExtendedResource, classifier: Classifier | None = None) -> Device:
    """As `card_of`, of an ExtendedResource that is no GPU."""
    spec = resource.spec
    return Device(
        uuid=intern(spec.uuid),
        kind=intern(spec.kind),
        index=spec.index,
        model=intern(spec.model),
        healthy=resource.status.health == "Healthy",
        cordoned=spec.unschedulable,
        classes=classifier.classes_of(labels_of(resource)) if classifier is not None else _NO_CLASSES,
    )


def is_whole_card(held: wire.ContainerShare, mem: int) -> bool:
    """Whether what is held of a card of `mem` MiB was asked for as a whole card; as it looks where nobody says."""
    return held.whole or (not held.container and held.core_percent >= FULL_CORE and held.memory_mib >= mem)


def is_uid(uid: str) -> bool:
    """Whether a pod may have this UID. Keys of the ledger that are not pods' UIDs contain a "/"."""
    return _UID.fullmatch(uid) is not None


def plausible_shares(resource: wire.ExtendedResource) -> Iterator[wire.ContainerShare]:
    """What the node says is held of its card, as far as the card goes; see `extender/cache/reservations.py`."""
    remaining = resource.spec.memory_mib
    for held in (resource.status.reported or ())[:MAX_REPORTED_PER_CARD]:
        if held.memory_mib >= 0 and 0 <= held.core_percent <= FULL_CORE and is_uid(held.pod_uid):
            mem = min(held.memory_mib, remaining)
            remaining -= mem
            yield held if mem == held.memory_mib else msgspec.structs.replace(held, memory_mib=mem)


def _list_known_kind(client: KubeClient, path: str) -> Iterator[Json]:
    """Nothing where the cluster does not know the kind."""
    try:
        yield from client.list_objects(path)
    except errors.NotFound:
        return


def _parse_objects(survey: Survey, kind: str, objects: Iterator[Json], parse: Callable[[Json], _T]) -> Iterator[_T]:
    """Those that can be read; the others are problems, and count for nothing as they do for the extender."""
    for manifest in objects:
        try:
            yield parse(manifest)
        except InvalidRequest as error:
            meta = manifest.get("metadata") or {}
            name = "/".join(filter(None, (meta.get("namespace"), meta.get("name"))))
            survey.problems.append(f"{kind} {name}: {error}")


def _is_own_resource(key: str) -> bool:
    resource = key.removeprefix("requests.")
    return resource in names.REQUESTED or resource.startswith(names.CLASS_PREFIX)


def _add_pod(survey: Survey, pod: _Pod) -> None:
    meta = pod.metadata
    if pod.status.phase in names.FINISHED_PHASES:
        return
    pod_name = f"{meta.namespace}/{meta.name}"
    try:
        if names.MIRROR in meta.annotations:
            return  # a static pod: placed by nobody, so it has no assignment whatever it says
        if pod.spec.node_name:
            assigned = assignment.decode(meta.annotations)
            if assigned is not None:
                mps_client = mpsread.mps_client_of_pod(meta.annotations, pod.spec, assigned.containers)
                holding = Holding(
                    meta.uid, meta.namespace, meta.name, pod.spec.node_name, assigned, mps_client=mps_client
                )
                survey.ledger.set_holding(holding)
            return
        pod_request = request.parse_mutated(msgspec.to_builtins(pod))
    except (assignment.InvalidAssignment, InvalidRequest) as error:
        survey.problems.append(f"{pod_name}: {error}")
        return
    if pod_request is not None:
        survey.waiting.append((meta.namespace, meta.name, pod_request))


def _add_reported_shares(survey: Survey) -> None:
    """What nodes say is held of pods whose object is gone: one holding per pod and node, over all that reports it.

    Quotas count those that the extender has seen vanish there, as for the extender itself.
    """
    shares: dict[tuple[str, str], list[assignment.CardShare]] = {}
    devices: dict[tuple[str, str], list[assignment.DeviceShare]] = {}
    pods: dict[tuple[str, str], wire.ContainerShare] = {}
    known: set[tuple[str, str]] = set()
    for resource in survey.resources:
        spec = resource.spec
        known |= {(share.pod_uid, spec.node) for share in resource.status.terminating or ()}
        for held in plausible_shares(resource):
            key = held.pod_uid, spec.node
            pods[key] = held
            if is_other_device(resource):
                # By which of its classes it was asked for, nobody tells and nothing depends on.
                devices.setdefault(key, []).append(assignment.DeviceShare("", spec.uuid))
            else:
                shares.setdefault(key, []).append(_reported_share(held, spec))
    for key, held in pods.items():
        uid, node = key
        there = survey.ledger.holding(uid)
        if there is not None and there.node == node and there.assignment.is_legacy:
            continue  # its cards have no UUIDs
        reported = assignment.Assignment(
            {"reported": tuple(shares[key])} if key in shares else {},
            {"reported": tuple(devices[key])} if key in devices else {},
        )
        # A pod that is there, perhaps under the node's former name, holds its cards already.
        assigned = reported.excess_over(there.assignment) if there is not None else reported
        if assigned is None:
            continue
        sure = key in known and there is None
        name = uid if sure else f"{node}/{uid}"
        survey.ledger.set_holding(
            Holding(name, held.namespace, held.name, node, assigned, REPORTED, UNKNOWN, charged=sure)
        )


def _add_unknown_holders(survey: Survey, resources: Iterable[_Resource]) -> None:
    """What is allocated beyond the pods that are known: one holding without a name per card or device."""
    known: dict[str, list[assignment.CardShare]] = {}
    held_uuids: set[str] = set()
    for holding in survey.ledger.holdings():
        node = survey.ledger.node(holding.node)
        for share in holding.assignment.shares():
            position = node.position(share) if node is not None and not share.uuid else None
            if node is not None and position is not None:
                known.setdefault(node.cards[position].uuid, []).append(share)
            elif share.uuid:
                known.setdefault(share.uuid, []).append(share)  # on whichever node the card is now
        held_uuids |= {device.uuid for device in holding.assignment.device_shares()}
    for resource in resources:
        spec, allocated = resource.spec, resource.status.allocated
        if is_other_device(resource):
            free = not allocated.shares or spec.uuid in held_uuids
            assigned = assignment.Assignment({}, {} if free else {"pod": (assignment.DeviceShare("", spec.uuid),)})
        else:
            assigned = assignment.Assignment(_remaining_shares(spec, allocated, known.get(spec.uuid, [])))
        if assigned.containers or assigned.devices:
            others = Holding(f"others-{spec.uuid}", OTHERS, "pods", spec.node, assigned, mps_client=SILENT)
            survey.ledger.set_holding(others)


def _remaining_shares(
    spec: wire.ExtendedResourceSpec, allocated: _Allocated, known: Sequence[assignment.CardShare]
) -> dict[str, tuple[assignment.CardShare, ...]]:
    """As many shares as are not known, of which the first stands for all their memory."""
    mem = max(0, allocated.memory_mib - sum(share.mem for share in known))
    core = max(0, allocated.core_percent - sum(share.core for share in known))
    shares = max(int(mem > 0), allocated.shares - len(known))
    total, whole = MiB(spec.memory_mib), allocated.whole and not known
    first = assignment.CardShare(spec.index, spec.uuid, MiB(mem), Percent(core), total, whole)
    further = assignment.CardShare(spec.index, spec.uuid, MiB(0), Percent(0), total)
    return {"pod": (first, *[further] * (shares - 1))} if shares else {}


def _reported_share(held: wire.ContainerShare, spec: wire.ExtendedResourceSpec) -> assignment.CardShare:
    return assignment.CardShare(
        spec.index,
        spec.uuid,
        MiB(held.memory_mib),
        Percent(held.core_percent),
        MiB(spec.memory_mib),
        is_whole_card(held, spec.memory_mib),
    )
