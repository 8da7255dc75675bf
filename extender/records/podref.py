"""The name of one pod: enough to write to the pod, or to name it."""

from typing import NamedTuple

from cardwise.kube.events import ObjectRef


class PodRef(NamedTuple):
    """`uid` tells this pod from a later one with the same name."""

    uid: str
    namespace: str
    name: str

    @property
    def pod(self) -> str:
        """As "namespace/name", for the log."""
        return f"{self.namespace}/{self.name}"

    @property
    def about(self) -> ObjectRef:
        """What an event on the pod names."""
        return ObjectRef.pod(self.namespace, self.name, self.uid)
