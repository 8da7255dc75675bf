"""Limits how many ExtendedResources of one node a process keeps in memory.

A node may create any number of ExtendedResources, each with up to hundreds of KiB. The limit protects the memory of
processes that keep the cards of all nodes; code that counts cards has limits of its own.
"""

from typing import Generic, Protocol, TypeVar

import structlog

from cardwise.kube.objects.extendedresources import MAX_CARDS_PER_NODE
from cardwise.kube.watch.reflector import Handler, Project

_log = structlog.get_logger(__name__)


class CardOfNode(Protocol):
    """The part of an ExtendedResource that a reflector keeps."""

    @property
    def node(self) -> str: ...


T = TypeVar("T", bound=CardOfNode)


class CardsPerNodeLimiter(Generic[T]):
    """The projection and handler of one reflector. Keeps the first `MAX_CARDS_PER_NODE` objects of each node. When a
    kept object is deleted, an ignored object can be kept from its next event on.

    An object is admitted when it is projected. While the reflector lists, this happens before the object is in the
    store. If the list then fails, the object never gets into the store, and `on_list_failed` undoes the admission.
    """

    def __init__(self, project: Project[T], handler: Handler[T]) -> None:
        self._project = project
        self._handler = handler
        self._node_of: dict[str, str] = {}  # the nodes of the kept objects, by key
        self._keys: dict[str, set[str]] = {}  # the keys of the kept objects, by node
        self._warned: set[str] = set()
        # Admitted objects that are not in the store yet. By key: the node for which the object was kept before; "" if
        # it was not kept.
        self._pending: dict[str, str] = {}

    def project(self, content: bytes) -> tuple[str, T] | None:
        """Project an object for the reflector; None if the node has too many."""
        projected = self._project(content)
        return projected if projected is not None and self._admit_card(projected[0], projected[1].node) else None

    def on_change(self, key: str, old: T | None, new: T) -> None:
        self._pending.pop(key, None)
        self._handler.on_change(key, old, new)

    def on_delete(self, key: str, old: T) -> None:
        self._pending.pop(key, None)
        self._forget_card(key)
        self._handler.on_delete(key, old)

    def on_synced(self) -> None:
        self._pending.clear()
        self._handler.on_synced()

    def on_list_failed(self) -> None:
        """Undo the admissions of a list that failed. A hook of the reflector."""
        for key, node in self._pending.items():
            self._forget_card(key)
            if node:
                self._record_node_of_card(key, node)
        self._pending.clear()

    def _admit_card(self, key: str, node: str) -> bool:
        if self._node_of.get(key) == node:
            return True
        former_node = self._node_of.get(key, "")
        self._forget_card(key)
        is_full = len(self._keys.get(node, ())) >= MAX_CARDS_PER_NODE
        if former_node or not is_full:
            self._pending.setdefault(key, former_node)
        if is_full:
            if node not in self._warned:
                self._warned.add(node)
                _log.warning("ignored ExtendedResources: the node has too many", node=node, limit=MAX_CARDS_PER_NODE)
            return False
        self._record_node_of_card(key, node)
        return True

    def _record_node_of_card(self, key: str, node: str) -> None:
        self._node_of[key] = node
        self._keys.setdefault(node, set()).add(key)

    def _forget_card(self, key: str) -> None:
        node = self._node_of.pop(key, None)
        if node is None:
            return
        self._keys[node].discard(key)
        if not self._keys[node]:
            del self._keys[node]
            self._warned.discard(node)
