"""Looks up objects that the watch has not shown yet: one list answers for every name for a while.

So any number of unknown names, in one pod or in thousands of pods, costs one list call: nobody can make the API server
work, or our threads wait, by posting them.
"""

import threading
from collections.abc import Mapping
from typing import Final

from cardwise.clock import Clock
from cardwise.core.values.decoded import Json
from cardwise.kube import errors
from cardwise.kube.client import KubeClient

_TIMEOUT: Final = 2.0


class FreshList:
    """Methods may be called from any thread: while one lists, the others wait for that list."""

    def __init__(
        self,
        client: KubeClient,
        path: str,
        clock: Clock,
        *,
        query: Mapping[str, str] | None = None,
        trusted: float = 1.0,
    ) -> None:
        """`trusted`: for how many seconds a list counts, and the API server's refusal of it."""
        self._client = client
        self._path = path
        self._query = query
        self._trusted = trusted
        self._clock = clock
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._found: dict[str, Json] | errors.KubeError = {}

    def get(self, name: str) -> Json | None:
        """The object as it was `trusted` seconds ago at most, None where there was none. Raises KubeError."""
        with self._lock:
            if self._clock.now() >= self._until:
                self._found = self._list()
                self._until = self._clock.now() + self._trusted
            found = self._found
        if isinstance(found, errors.KubeError):
            raise found
        return found.get(name)

    def _list(self) -> dict[str, Json] | errors.KubeError:
        try:
            items = self._client.get(self._path, self._query, timeout=_TIMEOUT).get("items") or ()
        except errors.NotFound:
            return {}  # their CRD is not installed
        except errors.KubeError as error:
            return error
        return {item["metadata"]["name"]: item for item in items}
