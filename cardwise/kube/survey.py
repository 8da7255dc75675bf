"""One look at the whole cluster: cards, who holds what, and the nodes' addresses, from three consistent lists.

For programs that look once (the CLI, the demo). The extender keeps the same picture alive with reflectors, and decodes
cards by the same function.
"""

from dataclasses import dataclass, field
from sys import intern
from typing import TypeVar

import msgspec

from cardwise.core import assignment, names, request
from cardwise.core.cards import Card
from cardwise.core.ledger import Holding, Ledger
from cardwise.core.quantity import MiB, Percent
from cardwise.kube import paths, wire
from cardwise.kube.client import KubeClient

_T = TypeVar("_T")


@dataclass(slots=True)
class Survey:
    """`ledger` knows nodes with cards; `addresses` are their InternalIPs; `problems` are pods that cannot be read."""

    ledger: Ledger = field(default_factory=Ledger)
    addresses: dict[str, str] = field(default_factory=dict)
    cards: list[wire.ExtendedResource] = field(default_factory=list)
    waiting: list[tuple[str, str, request.PodRequest]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class _Container(msgspec.Struct, rename="camel"):
    name: str = ""
    resources: dict[str, dict[str, str | int]] = {}
    restart_policy: str = ""


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    containers: list[_Container] = []
    init_containers: list[_Container] = []


class _Pod(msgspec.Struct):
    metadata: wire.ObjectMeta
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: wire.PodStatusHead = msgspec.field(default_factory=wire.PodStatusHead)


def take(client: KubeClient) -> Survey:
    """Reads nodes, ExtendedResources and pods. Raises `KubeError`."""
    survey = Survey()
    for page in client.list_pages(paths.nodes()):
        for node in _items(page, wire.Node):
            internal = [a.address for a in node.status.addresses or () if a.type == "InternalIP"]
            survey.addresses[node.metadata.name] = internal[0] if internal else "unknown"
    for page in client.list_pages(paths.extendedresources()):
        survey.cards += _items(page, wire.ExtendedResource)
    by_node: dict[str, list[Card]] = {}
    for resource in survey.cards:
        by_node.setdefault(resource.spec.node, []).append(card_of(resource))
    for name, cards in by_node.items():
        survey.ledger.set_cards(name, cards)
    for page in client.list_pages(paths.pods()):
        for pod in _items(page, _Pod):
            _add_pod(survey, pod)
    _add_held(survey)
    return survey


def card_of(resource: wire.ExtendedResource) -> Card:
    """The card that an ExtendedResource describes; before the first report nobody knows what is held on it."""
    return Card(
        index=resource.spec.index,
        uuid=intern(resource.spec.uuid),
        mem=MiB(resource.spec.memory_mib),
        model=intern(resource.spec.model),
        healthy=resource.status.health == "Healthy",
    )


def _items(page: bytes, kind: type[_T]) -> list[_T]:
    return [msgspec.json.decode(raw, type=kind) for raw in msgspec.json.decode(page, type=wire.List).items or ()]


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
    except (assignment.InvalidAssignment, request.InvalidRequest) as error:
        survey.problems.append(f"{where}: {error}")
        return
    if asked is not None:
        survey.waiting.append((meta.namespace, meta.name, asked))


def _add_held(survey: Survey) -> None:
    """Shares whose pod object is gone: one holding per pod, over all the cards that report it."""
    shares: dict[str, list[assignment.CardShare]] = {}
    pods: dict[str, tuple[wire.HeldShare, str]] = {}
    for resource in survey.cards:
        spec = resource.spec
        for held in resource.status.held or ():
            share = assignment.CardShare(
                spec.index, spec.uuid, MiB(held.memory_mib), Percent(held.core_percent), MiB(spec.memory_mib)
            )
            shares.setdefault(held.pod_uid, []).append(share)
            pods[held.pod_uid] = (held, spec.node)
    for uid, of_pod in shares.items():
        held, node = pods[uid]
        if survey.ledger.holding(uid) is None:
            assigned = assignment.Assignment({"held": tuple(of_pod)})
            survey.ledger.hold(Holding(uid, held.namespace, held.name, node, assigned, mark="held"))
