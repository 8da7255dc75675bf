"""What the webhook knows of the cluster: namespaces that opted in to defaults, and the cards there are.

Fed by reflectors. Nothing here is needed to rewrite a pod that asks for a share, so a stale view refuses nothing.
"""

import threading
from typing import Any

import msgspec
import structlog

from cardwise.core import names
from cardwise.core.quantity import MiB
from cardwise.kube import errors, paths, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.reflector import Reflector, Woken
from webhook import defaults
from webhook.defaults import Defaults
from webhook.validate import Cards

Json = dict[str, Any]

_log = structlog.get_logger(__name__)

_decode_namespace = msgspec.json.Decoder(wire.Namespace).decode
_decode_card = msgspec.json.Decoder(wire.ExtendedResource).decode


class ClusterView:
    """Implements `decisions.View`. Methods may be called from any thread."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._stale = threading.Event()
        self._cards = Cards()
        selector = {"labelSelector": f"{names.DEFAULTS_LABEL}={defaults.ENABLED}"}
        self._namespaces: Reflector[Defaults] = Reflector(
            client, paths.namespaces(), _project_namespace, Woken(), query=selector
        )
        self._cards_known: Reflector[tuple[str, int]] = Reflector(
            client, paths.extendedresources(), _project_card, Woken(self._stale.set)
        )

    def start(self) -> None:
        self._namespaces.start()
        self._cards_known.start()

    def stop(self) -> None:
        self._namespaces.stop()
        self._cards_known.stop()

    def problems(self) -> list[str]:
        """Why the view is not whole yet."""
        reflectors = (self._namespaces, self._cards_known)
        return [f"{reflector.name} are not listed yet" for reflector in reflectors if not reflector.synced.is_set()]

    def defaults(self, namespace: str) -> Defaults | None:
        return self._namespaces.store.get(namespace)

    def fresh_defaults(self, namespace: str) -> Defaults | None:
        known = self._namespaces.store.get(namespace)
        if known is not None:
            return known
        # The API server says that it carries the label, so the watch is behind.
        try:
            return defaults.of(self._client.get(paths.namespaces(namespace), timeout=2.0)["metadata"])
        except errors.NotFound:
            return None

    def cards(self) -> Cards:
        if self._stale.is_set():
            self._stale.clear()
            per_node: dict[str, int] = {}
            largest = 0
            for node, memory in self._cards_known.store.snapshot().values():
                per_node[node] = per_node.get(node, 0) + 1
                largest = max(largest, memory)
            self._cards = Cards(MiB(largest), max(per_node.values(), default=0))
        return self._cards

    def pod(self, namespace: str, name: str) -> Json | None:
        try:
            return self._client.get(paths.pods(namespace, name), timeout=2.0)
        except errors.NotFound:
            return None
        except errors.KubeError as error:
            # As if we were down: others' Bindings must go on (failurePolicy Ignore).
            _log.warning("a Binding passes unseen", namespace=namespace, pod=name, error=str(error))
            return None


def _project_namespace(raw: bytes) -> tuple[str, Defaults]:
    metadata = _decode_namespace(raw).metadata
    annotations = metadata.annotations
    return metadata.name, Defaults(annotations.get(names.DEFAULT_GPU_MEM, ""), annotations.get(names.POLICY, ""))


def _project_card(raw: bytes) -> tuple[str, tuple[str, int]]:
    card = _decode_card(raw)
    return card.metadata.name, (card.spec.node, card.spec.memory_mib)
