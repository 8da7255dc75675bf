"""ResourceClasses that the watch has not told of yet: a list of them all, at most one a second.

One list answers for every name. So neither a pod with thousands of names nor thousands of pods can make the API server
work, or our threads wait, by how many names that are no class they bring.
"""

import threading
from typing import Any, Final

from cardwise.clock import SYSTEM, Clock
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

_TRUSTED: Final = 1.0  # seconds: of a list, and of the API server's refusal of it
_TIMEOUT: Final = 2.0

Json = dict[str, Any]


class NewClasses:
    """Methods may be called from any thread: while one lists, the others wait for that list."""

    def __init__(self, client: KubeClient, clock: Clock = SYSTEM) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._found: dict[str, Json] | errors.KubeError = {}

    def get(self, name: str) -> Json | None:
        """The class as it was a second ago at most, None where there was none. Raises KubeError."""
        with self._lock:
            if self._clock.now() >= self._until:
                self._found = self._list()
                self._until = self._clock.now() + _TRUSTED
            found = self._found
        if isinstance(found, errors.KubeError):
            raise found
        return found.get(name)

    def _list(self) -> dict[str, Json] | errors.KubeError:
        try:
            items = self._client.get(paths.resourceclasses(), timeout=_TIMEOUT).get("items") or ()
        except errors.NotFound:
            return {}  # their CRD is not installed
        except errors.KubeError as error:
            return error
        return {item["metadata"]["name"]: item for item in items}
