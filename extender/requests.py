"""What pods ask, remembered from filter to bind: a bind call names the pod only.

Apart from the state because it is a cache: what is not here is read from the API server.
"""

import threading
from collections import OrderedDict

from cardwise.core.request import PodRequest

_MOST = 20_000


class Requests:
    """By pod UID; the oldest go first. A pod's request never changes while it is pending."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._by_uid: OrderedDict[str, PodRequest] = OrderedDict()

    def put(self, uid: str, asked: PodRequest) -> None:
        if not uid:
            return
        with self._lock:
            self._by_uid[uid] = asked
            self._by_uid.move_to_end(uid)
            if len(self._by_uid) > self._most:
                self._by_uid.popitem(last=False)

    def take(self, uid: str) -> PodRequest | None:
        """What was remembered; it is forgotten, since a bind that fails is followed by another filter."""
        with self._lock:
            return self._by_uid.pop(uid, None)
