"""A reflector of the pods bound to one node."""

from typing import Generic, TypeVar

from cardwise.clock import SYSTEM, Clock
from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from cardwise.kube.watch.reflector import Handler, Project, Reflector

T = TypeVar("T")


class NodePods(Generic[T]):
    """The pods of one node, by UID.

    project: turns a pod's JSON into its UID and the value to keep.
    handler: is called for each change.
    """

    def __init__(
        self, client: KubeClient, node: str, project: Project[T], handler: Handler[T], clock: Clock = SYSTEM
    ) -> None:
        query = paths.field_query("spec.nodeName", node)
        self._reflector: Reflector[T] = Reflector(
            client, paths.pods(), project, handler, query=query, name="pods", clock=clock
        )

    @property
    def synced(self) -> bool:
        return self._reflector.synced.is_set()

    def start(self) -> None:
        self._reflector.start()

    def stop(self) -> None:
        self._reflector.stop()

    def list_pods(self) -> list[T]:
        return list(self._reflector.store.snapshot().values())

    def find_pod(self, uid: str) -> T | None:
        """The pod with this UID, as last observed; None if the node has no such pod. Sends no request."""
        return self._reflector.store.get(uid)
