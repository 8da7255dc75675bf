"""The name of one pod: enough to write to the pod, or to name it."""

from typing import NamedTuple


class PodRef(NamedTuple):
    """`uid` tells this pod from a later one with the same name."""

    uid: str
    namespace: str
    name: str

    @property
    def pod(self) -> str:
        """As "namespace/name", for the log."""
        return f"{self.namespace}/{self.name}"
