"""The name of one pod: enough to write to it, or to tell of it."""

from typing import NamedTuple


class PodRef(NamedTuple):
    """`uid`: of this pod, not of another that has its name later."""

    uid: str
    namespace: str
    name: str

    @property
    def pod(self) -> str:
        """As lines of the log name it."""
        return f"{self.namespace}/{self.name}"
