"""Limits how many ExtendedResources of one node a process keeps.

A node may create as many as it likes, each with up to hundreds of KiB. What is counted is limited where it is counted;
here is the limit of memory, for the processes that keep the cards of all nodes.
"""

from typing import Generic, Protocol, TypeVar

import structlog

from cardwise.kube.survey import MAX_CARDS_PER_NODE
from cardwise.kube.watch.reflector import Handler, Project

_log = structlog.get_logger(__name__)


class NodeObject(Protocol):
    """A projection of an ExtendedResource."""

    @property
    def node(self) -> str: ...


T = TypeVar("T", bound=NodeObject)


class CardsPerNodeLimit(Generic[T]):
    """Projection and handler of one reflector: the first `MAX_CARDS_PER_NODE` of each node are kept, the others ignored
    until their next event after one of these is gone.

    An object is admitted when it is projected. In a list that is before the store has it, and if the list ends early
    the store never gets it: then `on_list_failed` takes back what was admitted.
    """

    def __init__(self, project: Project[T], handler: Handler[T]) -> None:
        self._project = project
        self._handler = handler
        self._node_of: dict[str, str] = {}  # by key, of those that are kept
        self._keys: dict[str, set[str]] = {}  # the same, by node
        self._warned: set[str] = set()
        # Admissions that the store does not have yet: by key, the node for which it was kept before, "" for none.
        self._pending: dict[str, str] = {}

    def project(self, content: bytes) -> tuple[str, T] | None:
        """As a reflector's projection."""
        projected = self._project(content)
        return projected if projected is not None and self._admit(projected[0], projected[1].node) else None

    def on_change(self, key: str, old: T | None, new: T) -> None:
        self._pending.pop(key, None)
        self._handler.on_change(key, old, new)

    def on_delete(self, key: str, old: T) -> None:
        self._pending.pop(key, None)
        self._forget(key)
        self._handler.on_delete(key, old)

    def on_synced(self) -> None:
        self._pending.clear()
        self._handler.on_synced()

    def on_list_failed(self) -> None:
        """As a reflector's hook."""
        for key, node in self._pending.items():
            self._forget(key)
            if node:
                self._keep(key, node)
        self._pending.clear()

    def _admit(self, key: str, node: str) -> bool:
        if self._node_of.get(key) == node:
            return True
        former_node = self._node_of.get(key, "")
        self._forget(key)
        is_full = len(self._keys.get(node, ())) >= MAX_CARDS_PER_NODE
        if former_node or not is_full:
            self._pending.setdefault(key, former_node)
        if is_full:
            if node not in self._warned:
                self._warned.add(node)
                _log.warning(
                    "too many ExtendedResources on a node; ignored the others", node=node, most=MAX_CARDS_PER_NODE
                )
            return False
        self._keep(key, node)
        return True

    def _keep(self, key: str, node: str) -> None:
        self._node_of[key] = node
        self._keys.setdefault(node, set()).add(key)

    def _forget(self, key: str) -> None:
        node = self._node_of.pop(key, None)
        if node is None:
            return
        self._keys[node].discard(key)
        if not self._keys[node]:
            del self._keys[node]
            self._warned.discard(node)
