"""Whether the cluster serves the PodGroups of Kubernetes.

Where it does not (before 1.37, or without the feature gate GenericWorkload), the API server drops the field
`spec.schedulingGroup` of a pod, but only after the mutating webhooks have seen it. It is asked when a pod names one.
"""

from typing import Final

from cardwise.clock import Clock
from cardwise.core.gangs.gangs import Foreign
from cardwise.kube import errors
from cardwise.kube.client import KubeClient

PATH: Final = f"/apis/{Foreign.KUBERNETES}/v1beta1"
_TRUSTED = 30.0  # seconds


class PodGroups:
    """Methods may be called from any thread."""

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._known = float("-inf"), False  # until when, and what

    def served(self) -> bool:
        """Whether the API is served, by discovery, which all known users may ask. Raises KubeError."""
        until, found = self._known
        if self._clock.now() >= until:
            found = self._ask()
            self._known = self._clock.now() + _TRUSTED, found
        return found

    def _ask(self) -> bool:
        try:
            resources = self._client.get(PATH, timeout=2.0).get("resources") or ()
        except errors.NotFound:
            return False
        return any(one.get("name") == "podgroups" for one in resources)
