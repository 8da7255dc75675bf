"""References to pods, for writes, events and log lines."""

from typing import NamedTuple

from cardwise.kube.events import ObjectRef


class PodRef(NamedTuple):
    """Namespace, name and UID of a pod. The UID distinguishes the pod from a later pod with the same name."""

    uid: str
    namespace: str
    name: str

    @property
    def pod(self) -> str:
        """The pod as "namespace/name", for the log."""
        return f"{self.namespace}/{self.name}"

    @property
    def about(self) -> ObjectRef:
        """The reference to the pod in an event."""
        return ObjectRef.pod(self.namespace, self.name, self.uid)
