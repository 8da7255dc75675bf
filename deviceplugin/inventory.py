"""Keeps the cluster's picture of this node's cards true: node capacities, ExtendedResources, and the wake-up.

Compares what should be (`cards`) with what the API server has, and patches the difference, for as long as it runs: a
kubelet that registers anew zeroes capacities it does not know, and people edit objects.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from cardwise.core import names, quantity
from cardwise.gpus.protocol import GpuCard, Gpus, Health
from cardwise.kube import errors, paths
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient
from cardwise.kube.reflector import Reflector, Woken
from cardwise.kube.wire import ExtendedResource, HeldShare, Node
from deviceplugin import cards as tell
from deviceplugin import metrics
from deviceplugin.access import Access
from deviceplugin.pods import Pods

_log = structlog.get_logger(__name__)

_EVERY_SECONDS = 1.0
_REPEAT_SECONDS = 2.0  # until the reflector shows what we wrote, nothing is written again
_WAKE_DELAY = 0.3  # the extender must have read the news before the scheduler asks it again

_decode_resource = msgspec.json.Decoder(ExtendedResource).decode
_decode_node = msgspec.json.Decoder(Node).decode


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Of the Node object: amounts of our resources."""

    capacity: Mapping[str, str]
    share_allocatable: str


def _project_node(content: bytes) -> tuple[str, NodeFacts]:
    node = _decode_node(content)
    capacity = {name: _plain(node.status.capacity[name]) for name in tell.CAPACITIES if name in node.status.capacity}
    return node.metadata.name, NodeFacts(capacity, node.status.allocatable.get(names.SHARE, ""))


def _plain(amount: str) -> str:
    """The API server prints 40000 as 40k; we compare with what we have written."""
    value, _ = quantity.parse(amount)
    return str(value.numerator) if value.denominator == 1 else amount


def _project_resource(content: bytes) -> tuple[str, ExtendedResource] | None:
    found = _decode_resource(content)
    # Versions change with each of our own writes; equal content must be no change.
    head = msgspec.structs.replace(found.metadata, resource_version="")
    return found.metadata.name, msgspec.structs.replace(found, metadata=head)


class Inventory:
    """One thread that writes and one that watches the cards. `access` is None until it is known."""

    def __init__(
        self,
        client: KubeClient,
        node: str,
        *,
        gpus: Gpus,
        pods: Pods,
        access: Callable[[], Access | None],
        health: Callable[[list[GpuCard]], Mapping[str, Health]],
        held: Callable[[], Mapping[str, list[HeldShare]]],
        granted: Callable[[], Mapping[str, int]],
    ) -> None:
        self._client = client
        self._node = node
        self._gpus = gpus
        self._pods = pods
        self._access = access
        self._health = health
        self._held = held
        self._granted = granted
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._written: dict[str, float] = {}  # path -> when it was last written
        self._touch_at: float | None = None
        self._last_news: Any = None
        self._settled = threading.Event()
        handler = Woken(self._wake.set)
        self._nodes: Reflector[NodeFacts] = Reflector(
            client, paths.nodes(), _project_node, handler, query={"fieldSelector": f"metadata.name={node}"}, name="node"
        )
        self._resources: Reflector[ExtendedResource] = Reflector(
            client,
            paths.extendedresources(),
            _project_resource,
            handler,
            query={"labelSelector": f"{names.NODE_LABEL}={node}"},
            name="extendedresources",
        )
        self._threads = [
            threading.Thread(target=self._run, name="inventory", daemon=True),
            threading.Thread(target=self._watch_cards, name="cards", daemon=True),
        ]

    def start(self) -> None:
        self._nodes.start()
        self._resources.start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(5.0)
        self._nodes.stop()
        self._resources.stop()

    def wake(self) -> None:
        """Look now: something of ours has changed."""
        self._wake.set()

    @property
    def settled(self) -> bool:
        """Whether the API server has had all of it once."""
        return self._settled.is_set()

    def share_allocatable(self) -> str:
        """The node's allocatable share slots as the kubelet reports them, "" if unknown."""
        facts = self._nodes.store.get(self._node)
        return facts.share_allocatable if facts is not None else ""

    def _watch_cards(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._gpus.wait_change(_EVERY_SECONDS):
                    self._wake.set()
            except Exception:  # noqa: BLE001 - the thread's outermost loop: logged, and it goes on
                metrics.FAILURES.labels("cards").inc()
                _log.exception("the cards are not watched")
                self._stopping.wait(_EVERY_SECONDS)

    def _run(self) -> None:
        backoff = Backoff(initial=0.2, cap=5.0)
        while not self._stopping.is_set():
            self._wake.wait(_EVERY_SECONDS)
            self._wake.clear()
            if self._stopping.is_set():
                return
            try:
                self._reconcile()
                backoff.reset()
            except errors.KubeError as error:
                delay = backoff.next(error.retry_after)
                _log.warning("the cluster was not told of the cards", error=str(error), retry_in=round(delay, 1))
                self._stopping.wait(delay)
            except Exception:  # noqa: BLE001 - the thread's outermost loop: logged, and it goes on
                metrics.FAILURES.labels("inventory").inc()
                _log.exception("the cluster was not told of the cards")
                self._stopping.wait(backoff.next())

    def _reconcile(self) -> None:
        if not (self._nodes.synced.is_set() and self._resources.synced.is_set() and self._pods.synced):
            return
        cards = self._gpus.cards()
        kept, left = self._departed(cards)
        done = self._tell_capacities(cards, kept)
        access = self._access()
        if access is not None:
            done &= self._tell_resources(cards, kept, access)
        for resource in left:
            self._forget(resource)
        self._touch_if_due()
        if done and access is not None:
            self._settled.set()

    def withdraw_slots(self) -> None:
        """The node offers no slots while we are away. The kubelet would say so too, but only at its next round."""
        change = {"status": {"allocatable": {names.SHARE: "0"}}}
        try:
            self._client.patch(paths.nodes(self._node, "status"), change, "strategic", timeout=2.0)
        except errors.KubeError as error:
            _log.info("the node still shows our slots until the kubelet's next report", error=str(error))

    def _departed(self, cards: list[GpuCard]) -> tuple[list[ExtendedResource], list[ExtendedResource]]:
        """Cards that the cluster knows and the machine has no more: those that something still holds, and the rest."""
        here = {card.uuid for card in cards}
        gone = [found for found in self._resources.store.snapshot().values() if found.spec.uuid not in here]
        used = set(self._granted())
        return [one for one in gone if one.spec.uuid in used], [one for one in gone if one.spec.uuid not in used]

    def _tell_capacities(self, cards: list[GpuCard], kept: list[ExtendedResource]) -> bool:
        sizes = [(int(card.memory), card.uuid) for card in cards]
        sizes += [(one.spec.memory_mib, one.spec.uuid) for one in kept]
        wanted = tell.capacities(sizes, self._pods.all())
        facts = self._nodes.store.get(self._node)
        if facts is None:
            _log.warning("no such node yet", node=self._node)
            return False
        if facts.capacity == wanted:
            return True
        # Allocatable too: the kubelet would copy it from capacity, but only at its next round.
        change = {"status": {"capacity": wanted, "allocatable": wanted}}
        if self._may_write(paths.nodes(self._node, "status")):
            self._client.patch(paths.nodes(self._node, "status"), change, "strategic")
            _log.info("node capacities written", **wanted)
        return False

    def _tell_resources(self, cards: list[GpuCard], kept: list[ExtendedResource], access: Access) -> bool:
        health, held = self._health(cards), self._held()
        known = self._resources.store.snapshot()
        done = True
        for card in cards:
            try:
                done &= self._tell_resource(card, known.get(names.extended_resource_name(card.uuid)))
            except (errors.Invalid, errors.BadRequest, errors.Forbidden) as error:
                # One card that the API server does not take must not silence the others.
                _log.error("the ExtendedResource of a card was refused", card=card.uuid, error=str(error))
                done = False
        wanted = tell.statuses(cards, [one.spec.uuid for one in kept], health, str(access), held)
        for uuid, status in wanted.items():
            done &= self._tell_status(names.extended_resource_name(uuid), known, status)
        # What the scheduler cannot see happening, and what can make a parked pod fit.
        news = {uuid: (status["health"], status["held"]) for uuid, status in wanted.items()}
        if news != self._last_news:
            if self._last_news is not None:
                self._touch_at = time.monotonic() + _WAKE_DELAY
            self._last_news = news
        return done

    def _tell_resource(self, card: GpuCard, found: ExtendedResource | None) -> bool:
        wanted = tell.resource(self._node, card)
        if found is not None and tell.spec_of(found) == wanted["spec"]:
            return True
        path = paths.extendedresources(names.extended_resource_name(card.uuid))
        if not self._may_write(path):
            return False
        if found is None:
            try:
                self._client.create(paths.extendedresources(), wanted)
            except errors.AlreadyExists:
                # Without our label: the card came from another node, or somebody took the label away.
                self._client.patch(path, {"metadata": wanted["metadata"], "spec": wanted["spec"]}, "merge")
        else:
            # A merge patch keeps map keys that it does not name.
            old = dict.fromkeys(found.spec.properties) | wanted["spec"]["properties"]
            self._client.patch(path, {"spec": wanted["spec"] | {"properties": old}}, "merge")
        return False

    def _tell_status(self, name: str, known: Mapping[str, ExtendedResource], status: tell.Object) -> bool:
        found = known.get(name)
        if found is not None and tell.status_of(found) == status:
            return True
        path = paths.extendedresources(name, "status")
        # A status that says something new is written at once, the same one again only after a while.
        if self._may_write(f"{path} {msgspec.json.encode(status)!r}"):
            try:
                self._client.patch(path, {"status": status}, "merge")
            except errors.NotFound:
                self._wake_later()
                return False
            told = {"health": status["health"], "reason": status["reason"], "held": len(status["held"])}
            _log.info("card status written", card=name, **told)
        return False

    def _forget(self, resource: ExtendedResource) -> None:
        """A card that left the machine for good."""
        uid = resource.metadata.uid
        try:
            self._client.delete(
                paths.extendedresources(resource.metadata.name), {"preconditions": {"uid": uid}} if uid else None
            )
        except (errors.NotFound, errors.Conflict):
            return
        _log.info("card left the node", card=resource.metadata.name)

    def _touch_if_due(self) -> None:
        if self._touch_at is None:
            return
        if time.monotonic() < self._touch_at:
            self._wake_later()
            return
        change = {"metadata": {"annotations": {names.NODE_CHANGED: str(time.time_ns())}}}
        self._client.patch(paths.nodes(self._node), change, "merge")
        self._touch_at = None  # only now: one that failed is tried again

    def _may_write(self, what: str) -> bool:
        now = time.monotonic()
        if now - self._written.get(what, -_REPEAT_SECONDS) < _REPEAT_SECONDS:
            self._wake_later()
            return False
        if len(self._written) > 1000:
            self._written.clear()
        self._written[what] = now
        return True

    def _wake_later(self) -> None:
        self._stopping.wait(0.1)
        self._wake.set()
