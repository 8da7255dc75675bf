"""One look at the whole cluster: cards and their classes, who holds what, quotas, each from a consistent list.

For programs that look once (the CLI, the demo). The extender keeps the same picture alive with reflectors, and decodes
cards by the same function.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from sys import intern
from typing import Any, TypeVar

import msgspec

from cardwise.core import assignment, classes, names, quotas, request
from cardwise.core.cards import FULL_CORE, Card
from cardwise.core.classes import Classifier, DeviceClass
from cardwise.core.invalid import InvalidRequest
from cardwise.core.ledger import Holding, Ledger
from cardwise.core.quantity import MiB, Percent
from cardwise.core.quotas import GPUQuota, Room
from cardwise.kube import errors, paths, wire
from cardwise.kube.client import KubeClient

_T = TypeVar("_T")


@dataclass(slots=True)
class Survey:
    """`ledger` knows nodes with cards; `addresses` are their InternalIPs; `classes` are by name.

    `problems` are the pods, classes and quotas that cannot be read.
    """

    ledger: Ledger = field(default_factory=Ledger)
    addresses: dict[str, str] = field(default_factory=dict)
    cards: list[wire.ExtendedResource] = field(default_factory=list)
    classes: dict[str, DeviceClass] = field(default_factory=dict)
    quotas: list[GPUQuota] = field(default_factory=list)
    waiting: list[tuple[str, str, request.PodRequest]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def rooms(self, namespace: str) -> list[tuple[GPUQuota, Room]]:
        """What each entry of the namespace's GPUQuotas leaves, and whose it is."""
        return [
            (quota, quotas.room(entry, self.ledger.used(namespace, entry)))
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


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    containers: list[_Container] = []
    init_containers: list[_Container] = []


class _Pod(msgspec.Struct):
    metadata: wire.ObjectMeta
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: wire.PodStatusHead = msgspec.field(default_factory=wire.PodStatusHead)


class _Amounts(msgspec.Struct):
    hard: dict[str, str] = {}
    used: dict[str, str] = {}


class _ResourceQuota(msgspec.Struct):
    metadata: wire.ObjectMeta
    spec: _Amounts = msgspec.field(default_factory=_Amounts)
    status: _Amounts = msgspec.field(default_factory=_Amounts)


def take(client: KubeClient, *, namespace: str = "", addresses: bool = True) -> Survey:
    """Reads ExtendedResources, ResourceClasses, GPUQuotas and pods, and nodes for their addresses. Raises `KubeError`.

    With a namespace, pods and quotas of no other are read, which takes fewer rights: what that namespace holds is
    whole then, what is free is not.
    """
    survey = Survey()
    if addresses:
        for node in _items(client, paths.nodes(), wire.Node):
            internal = [a.address for a in node.status.addresses or () if a.type == "InternalIP"]
            survey.addresses[node.metadata.name] = internal[0] if internal else "unknown"
    survey.cards += _items(client, paths.extendedresources(), wire.ExtendedResource)
    # A cluster that has only ExtendedResources, an older installation, has no types and no quotas.
    found = _read(survey, "ResourceClass", _ours(client, paths.resourceclasses()), classes.parse)
    survey.classes = {one.name: one for one in found}
    survey.quotas = list(_read(survey, "GPUQuota", _ours(client, paths.gpuquotas(namespace)), quotas.parse))
    classifier = Classifier(survey.classes.values())
    by_node: dict[str, list[Card]] = {}
    for resource in survey.cards:
        by_node.setdefault(resource.spec.node, []).append(card_of(resource, classifier))
    for name, cards in by_node.items():
        survey.ledger.set_cards(name, cards)
    for pod in _items(client, paths.pods(namespace), _Pod):
        _add_pod(survey, pod)
    _add_held(survey)
    return survey


def native_quotas(client: KubeClient, namespace: str = "") -> list[NativeQuota]:
    """The ResourceQuotas of a namespace, or of all, that limit resources of ours. Raises `KubeError`."""
    found = []
    for quota in _items(client, paths.namespaced("/api/v1", "resourcequotas", namespace), _ResourceQuota):
        hard = {key: amount for key, amount in quota.spec.hard.items() if _concerns_us(key)}
        if hard:
            used = {key: quota.status.used[key] for key in hard if key in quota.status.used}
            meta = quota.metadata
            found.append(NativeQuota(namespace=meta.namespace, name=meta.name, hard=hard, used=used))
    return found


def labels_of(resource: wire.ExtendedResource) -> dict[str, str]:
    """What selectors see of a card: what its node says of it, and what people have put on its object."""
    spec = resource.spec
    return classes.labels(
        node=spec.node,
        index=spec.index,
        uuid=spec.uuid,
        model=spec.model,
        memory=MiB(spec.memory_mib),
        properties=spec.properties,
        own=resource.metadata.labels,
    )


def card_of(resource: wire.ExtendedResource, classifier: Classifier | None = None) -> Card:
    """The card that an ExtendedResource describes; before the first report nobody knows what is held on it.

    Without a classifier it is in no class.
    """
    spec = resource.spec
    of: frozenset[str] = frozenset()
    if classifier is not None:
        of = classifier.classes_of(labels_of(resource))
    return Card(
        index=spec.index,
        uuid=intern(spec.uuid),
        mem=MiB(spec.memory_mib),
        model=intern(spec.model),
        healthy=resource.status.health == "Healthy",
        classes=of,
        priority=classifier.priority_of(of) if classifier is not None else 0,
    )


def is_whole(held: wire.HeldShare, mem: int) -> bool:
    """Whether what is held of a card of `mem` MiB was asked for as a whole card; as it looks where nobody says."""
    return held.whole or (not held.container and held.core_percent >= FULL_CORE and held.memory_mib >= mem)


def _items(client: KubeClient, path: str, kind: type[_T]) -> Iterator[_T]:
    """The objects of a list. A missing right is told by what one may not read, and not by the path of the API."""
    try:
        for page in client.list_pages(path):
            for raw in msgspec.json.decode(page, type=wire.List).items or ():
                yield msgspec.json.decode(raw, type=kind)
    except errors.Forbidden as error:
        where = path.split("/")
        of = f"namespace {where[where.index('namespaces') + 1]}" if "namespaces" in where else "the whole cluster"
        said = f"the right to list {where[-1]} in {of} is missing ({error.message})"
        raise errors.Forbidden(error.status, error.reason, said) from error


def _ours(client: KubeClient, path: str) -> Iterator[dict[str, Any]]:
    """As `_items`; nothing where the cluster does not know the kind."""
    try:
        yield from _items(client, path, dict[str, Any])
    except errors.NotFound:
        return


def _read(
    survey: Survey, kind: str, objects: Iterator[dict[str, Any]], parse: Callable[[Mapping[str, Any]], _T]
) -> Iterator[_T]:
    """Those that can be read; the others are problems, and count for nothing as they do for the extender."""
    for obj in objects:
        try:
            yield parse(obj)
        except InvalidRequest as error:
            meta = obj.get("metadata") or {}
            name = "/".join(filter(None, (meta.get("namespace"), meta.get("name"))))
            survey.problems.append(f"{kind} {name}: {error}")


def _concerns_us(key: str) -> bool:
    resource = key.removeprefix("requests.")
    return resource in names.REQUESTED or resource.startswith(names.CLASS_PREFIX)


def _add_pod(survey: Survey, pod: _Pod) -> None:
    meta = pod.metadata
    if pod.status.phase in names.FINISHED_PHASES:
        return
    where = f"{meta.namespace}/{meta.name}"
    try:
        if names.MIRROR in meta.annotations:
            return  # a static pod: placed by nobody, so it has no assignment whatever it says
        if pod.spec.node_name:
            assigned = assignment.decode(meta.annotations)
            if assigned is not None:
                holding = Holding(meta.uid, meta.namespace, meta.name, pod.spec.node_name, assigned)
                survey.ledger.hold(holding)
            return
        asked = request.parse(msgspec.to_builtins(pod))
    except (assignment.InvalidAssignment, InvalidRequest) as error:
        survey.problems.append(f"{where}: {error}")
        return
    if asked is not None:
        survey.waiting.append((meta.namespace, meta.name, asked))


def _add_held(survey: Survey) -> None:
    """Shares whose pod object is gone: one holding per pod, over all its containers and the cards that report it."""
    shares: dict[str, list[assignment.CardShare]] = {}
    pods: dict[str, tuple[wire.HeldShare, str]] = {}
    for resource in survey.cards:
        spec = resource.spec
        for held in resource.status.held or ():
            share = assignment.CardShare(
                spec.index,
                spec.uuid,
                MiB(held.memory_mib),
                Percent(held.core_percent),
                MiB(spec.memory_mib),
                is_whole(held, spec.memory_mib),
            )
            shares.setdefault(held.pod_uid, []).append(share)
            pods[held.pod_uid] = (held, spec.node)
    for uid, of_pod in shares.items():
        held, node = pods[uid]
        if survey.ledger.holding(uid) is None:
            assigned = assignment.Assignment({"held": tuple(of_pod)})
            survey.ledger.hold(Holding(uid, held.namespace, held.name, node, assigned, mark="held"))
