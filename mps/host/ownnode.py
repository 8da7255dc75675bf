"""Watches this node's Node object: how many GPUs NVIDIA's device plugin offers there."""

from collections.abc import Callable

from cardwise.clock import Clock
from cardwise.core.api import gpunodes
from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from cardwise.kube.objects import nodes
from cardwise.kube.watch.reflector import Reflector, WakeHandler


class OwnNode:
    """The Node object of this node.

    on_change: called from the reflector's thread.
    """

    def __init__(self, client: KubeClient, name: str, on_change: Callable[[], None], clock: Clock) -> None:
        self._name = name
        self._reflector: Reflector[int] = Reflector(
            client,
            paths.nodes(),
            _project,
            WakeHandler(on_change),
            query=paths.field_query("metadata.name", name),
            name="node",
            clock=clock,
        )

    @property
    def synced(self) -> bool:
        return self._reflector.synced.is_set()

    def start(self) -> None:
        self._reflector.start()

    def stop(self) -> None:
        self._reflector.stop()

    def nvidia_gpus(self) -> int:
        """The number of GPUs that NVIDIA's device plugin offers on the node; 0 if the Node object does not exist."""
        return self._reflector.store.get(self._name) or 0


def _project(content: bytes) -> tuple[str, int]:
    node = nodes.decode(content)
    return node.metadata.name, gpunodes.count_nvidia_gpus(node.status.capacity)
