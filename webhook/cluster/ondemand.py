"""Sends requests to the API server while a review waits, for data that no watch has.

Each answer is cached for a while, and each kind of request has a limit. Otherwise a client that posts many pods could
overload the API server or occupy all threads of the webhook.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec
import structlog

from cardwise.clock import Clock
from cardwise.core.api import names
from cardwise.core.gangs import gangs
from cardwise.core.gangs.gangs import ForeignPodGroup
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import errors, paths, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.nesting import null_deep_values, tolerate_depth
from cardwise.kube.objects.meta import ObjectMeta
from cardwise.kube.objects.pods import Pod
from cardwise.runtime.logs import LineLimit
from webhook import deadline

_LIST_SECONDS: Final = 2.0  # the timeout of a list, if the deadline of the review is not sooner

_NUMBER_CACHE_SECONDS: Final = 10.0  # seconds for which a gang's number is cached
_MAX_CACHED: Final = 10_000  # maximum number of gangs in the cache
_MAX_LOOKUPS: Final = 50  # maximum number of lookups per second of all namespaces together
_MAX_LOOKUPS_PER_OWNER: Final = 10  # maximum number of lookups per second of one namespace
# Maximum number of lookups that wait for the API server at the same time, each of a different namespace: half of the
# threads that answer reviews.
_MAX_CONCURRENT_LOOKUPS: Final = 2
# Seconds for which a failure is cached. After a timeout it is cached for longer, since each further attempt would
# occupy a thread until the next timeout.
_FAILURE_SECONDS: Final = 1.0
_TIMEOUT_SECONDS: Final = 5.0
# Minimum seconds until the deadline of a review for a lookup to begin. A shorter lookup could fail by itself, and all
# reviews share the failure: a client that calls with short timeouts must not cause it.
_MIN_LOOKUP_SECONDS: Final = 0.5
_MEMBERS_SECONDS: Final = 1.0  # the timeout of a list of a gang's members
_MAX_MEMBERS: Final = 50  # maximum number of members that a list returns, if the API server's cache applies the limit
# Maximum number of bytes of a list, for a cache that ignores the limit: a tenant's pods may have hundreds of MiB, and
# the webhook has 512 MiB of memory.
_MAX_BYTES: Final = 8 << 20
_MAX_LIST_BYTES: Final = 16 << 20  # maximum number of bytes of a list of classes or namespaces: some 8,000 objects

PODGROUPS: Final = f"/apis/{ForeignPodGroup.KUBERNETES}/v1beta1"
_DISCOVERY_SECONDS: Final = 30.0  # seconds for which the answer of discovery is cached

_ALL_GANGS: Final = ("", "", None)  # the key of `_skipped_until` that stands for all namespaces and gangs

_decode_list = tolerate_depth(msgspec.json.Decoder(wire.List).decode)
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode

_log = structlog.get_logger(__name__)

_T = TypeVar("_T")


class LookupLimit:
    """Limits how many lookups begin within any second. Thread-safe.

    total: maximum number of lookups of all owners together. An owner without a lookup in the last second has twice the
        limit. So a few busy owners cannot block the others.
    per_owner: maximum number of lookups of one owner (a namespace, an address).
    """

    def __init__(self, clock: Clock, *, per_owner: int, total: float = float("inf")) -> None:
        self._clock = clock
        self._per_owner = per_owner
        self._total = total
        self._lock = threading.Lock()
        self._lookups = deque[tuple[float, str]]()  # the lookups of the last second: time and owner
        self._lookups_by_owner = Counter[str]()  # the number of these lookups by owner

    def begin_lookup(self, owner: str) -> bool:
        """Whether the owner may start a lookup now. If so, it is counted."""
        with self._lock:
            now = self._clock.now()
            while self._lookups and now - self._lookups[0][0] >= 1:
                _, former_owner = self._lookups.popleft()
                self._lookups_by_owner[former_owner] -= 1
                if not self._lookups_by_owner[former_owner]:
                    del self._lookups_by_owner[former_owner]
            own_lookups = self._lookups_by_owner.get(owner, 0)
            if own_lookups >= self._per_owner or len(self._lookups) >= (
                self._total if own_lookups else 2 * self._total
            ):
                return False
            self._lookups.append((now, owner))
            self._lookups_by_owner[owner] += 1
            return True


class _LookupSlots:
    """Limits how many lookups wait for the API server at the same time. Thread-safe.

    Each namespace has at most one lookup slot, so a namespace whose pods take long to list cannot occupy all of them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._owners = set[str]()

    def acquire(self, namespace: str) -> bool:
        """Acquire a slot for the namespace; the caller must release it. Returns False if no slot is free."""
        with self._lock:
            if namespace in self._owners or len(self._owners) >= self._count:
                return False
            self._owners.add(namespace)
            return True

    def release(self, namespace: str) -> None:
        with self._lock:
            self._owners.remove(namespace)


class _CachedAnswer(Generic[_T]):
    """The answer to a request, cached for some seconds; a failure is cached too.

    Thread-safe: while one thread sends the request, the other threads wait for its answer, each until the deadline of
    its review.
    """

    def __init__(self, fetch: Callable[[float], _T], seconds: float, clock: Clock) -> None:
        """`fetch` gets the timeout of the request in seconds, and may raise KubeError."""
        self._fetch = fetch
        self._seconds = seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._is_fetching = False
        self._expires_at = float("-inf")
        self._answer: _T | errors.KubeError

    def get(self) -> _T:
        """The answer. Raises KubeError, ReviewTimeout."""
        with self._changed:
            if not self._clock.wait_for(self._changed, lambda: not self._is_fetching, deadline.remaining_seconds()):
                raise deadline.ReviewTimeout
            is_expired = self._clock.now() >= self._expires_at
            if is_expired:
                timeout = deadline.limit_seconds(_LIST_SECONDS)
                if timeout < _MIN_LOOKUP_SECONDS:
                    raise deadline.ReviewTimeout
                self._is_fetching = True
            else:
                answer = self._answer
        if is_expired:
            answer = self._update_answer(timeout)
        if isinstance(answer, errors.KubeError):
            raise answer.with_traceback(None)  # otherwise each call would append its own traceback
        return answer

    def _update_answer(self, timeout: float) -> _T | errors.KubeError:
        """Fetch the answer, and cache it."""
        answer: _T | errors.KubeError
        seconds = self._seconds
        try:
            try:
                answer = self._fetch(timeout)
            except errors.KubeError as error:
                # A timeout that a deadline has shortened says less about the API server.
                is_full_timeout = isinstance(error, errors.TimedOut) and timeout == _LIST_SECONDS
                answer, seconds = error, _TIMEOUT_SECONDS if is_full_timeout else _FAILURE_SECONDS
            with self._changed:
                self._answer, self._expires_at = answer, self._clock.now() + seconds
            return answer
        finally:
            with self._changed:
                self._is_fetching = False
                self._changed.notify_all()


class FreshList:
    """Finds objects that the watch has not delivered yet, in a list of all objects that is used for a while.

    So any number of unknown names, in one pod or in thousands of pods, needs only one list request. Thread-safe: while
    one thread lists, the other threads wait for this list.
    """

    def __init__(
        self,
        client: KubeClient,
        path: str,
        clock: Clock,
        *,
        query: Mapping[str, str] | None = None,
        max_age_seconds: float = 1.0,
    ) -> None:
        """`max_age_seconds`: the seconds for which a list is valid."""
        self._client = client
        self._path = path
        self._query = query
        self._cached_list = _CachedAnswer(self._list, max_age_seconds, clock)

    def get(self, name: str) -> Json | None:
        """The object as it was at most `max_age_seconds` seconds ago; None if it did not exist.

        Raises KubeError, ReviewTimeout.
        """
        return self._cached_list.get().get(name)

    def _list(self, timeout: float) -> dict[str, Json]:
        try:
            page = self._client.request(
                "GET", self._path, query=self._query, timeout=timeout, max_bytes=_MAX_LIST_BYTES
            )
            objects = [_decode_object(wire.trim_object(bytes(raw))) for raw in _decode_list(page).items or ()]
        except errors.NotFound:
            return {}  # the CRD is not installed
        except (msgspec.DecodeError, RecursionError) as error:
            raise errors.Unreachable(f"GET {self._path}: not a List: {error}") from error
        return {manifest["metadata"]["name"]: manifest for manifest in objects}


_decode = null_deep_values(msgspec.json.Decoder(wire.ListOf[Pod]).decode)


class GangNumbers:
    """Compares the size that a new pod names for its gang with the sizes that existing members name. Thread-safe.

    The members are listed only for pods of gangs, from the API server's cache. The cache may be stale, so different
    sizes may pass here; the extender detects them. The requests are limited, because every client that reaches the
    webhook can name gangs and namespaces. After a failure of the API server they stop for some seconds. After a timeout
    only the requests for the same namespace stop, because the pods of that namespace may be the cause. The number of a
    gang is cached for a while, because hundreds of its pods may be created together.
    """

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._log_limit = LineLimit(_log, clock)
        self._limit = LookupLimit(clock, per_owner=_MAX_LOOKUPS_PER_OWNER, total=_MAX_LOOKUPS)
        self._lookup_slots = _LookupSlots(_MAX_CONCURRENT_LOOKUPS)
        # The times until which lookups are skipped, by namespace, gang and number. Without a number, the gang's lookup
        # failed; without a gang, a lookup of the namespace timed out.
        self._skipped_until: dict[tuple[str, str, int | None], float] = {}

    def conflicting_member(self, namespace: str, gang: str, number: int) -> tuple[str, int] | None:
        """The name of an existing pod of the gang that names another size, and that size; None if no such pod is
        known, or if less time is left than a lookup may take.
        """
        if deadline.limit_seconds(_MEMBERS_SECONDS) < _MEMBERS_SECONDS:
            return None
        key, now = (namespace, gang, number), self._clock.now()
        if any(
            self._skipped_until.get(skipped_key, now) > now
            for skipped_key in (key, (namespace, gang, None), (namespace, "", None), _ALL_GANGS)
        ):
            return None
        if not self._limit.begin_lookup(namespace) or not self._lookup_slots.acquire(namespace):
            return None
        try:
            numbers = self._fetch_numbers(namespace, gang)
        except errors.KubeError as error:
            if isinstance(error, errors.TimedOut):
                key_to_skip = namespace, "", None
            elif errors.would_fail_other_writes(error) and not isinstance(error, errors.TooLarge):
                key_to_skip = _ALL_GANGS
            else:
                key_to_skip = namespace, gang, None
            self._skip_lookup(key_to_skip, _TIMEOUT_SECONDS)
            self._log_limit.log(
                "warning",
                namespace,
                "failed to compare the sizes that a gang's pods name; admitting the pod",
                namespace=namespace,
                gang=gang,
                error=str(error),
            )
            return None
        finally:
            self._lookup_slots.release(namespace)
        conflict = next(((name, other) for name, other in numbers.items() if other != number), None)
        if conflict is None and numbers:
            self._skip_lookup(key, _NUMBER_CACHE_SECONDS)
        return conflict

    def _skip_lookup(self, key: tuple[str, str, int | None], seconds: float) -> None:
        if len(self._skipped_until) >= _MAX_CACHED:
            self._skipped_until = {}
        self._skipped_until[key] = self._clock.now() + seconds

    def _fetch_numbers(self, namespace: str, gang: str) -> dict[str, int]:
        """The gang sizes that existing members name, by the names of the pods. Raises KubeError."""
        query = {"fieldSelector": "status.phase!=Failed", "resourceVersion": "0", "limit": str(_MAX_MEMBERS)}
        path, query = paths.pods(namespace), query | paths.label_query(names.GANG, gang)
        body = self._client.request("GET", path, query=query, timeout=_MEMBERS_SECONDS, max_bytes=_MAX_BYTES)
        try:
            pods = _decode(body).items or ()
        except msgspec.DecodeError as error:
            raise errors.ServerError(0, "NotAList", f"GET {path}: {error}") from error
        live_pods = (pod.metadata for pod in pods if not pod.terminating)
        return {meta.name: number for meta in live_pods if (number := _read_number(meta)) is not None}


def _read_number(meta: ObjectMeta) -> int | None:
    try:
        membership = gangs.membership({"metadata": {"labels": meta.labels, "annotations": meta.annotations}})
    except InvalidRequest:
        return None  # the pod was created while the webhook was down
    return membership.minimum if membership is not None else None


class PodGroups:
    """Whether the cluster serves Kubernetes' PodGroups. Thread-safe.

    Before 1.37, or without the feature gate GenericWorkload, the API server drops the field `spec.schedulingGroup` of a
    pod. But this happens only after the mutating webhooks have seen the field. So if a pod has the field, the webhook
    asks the API server.
    """

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        self._client = client
        self._served = _CachedAnswer(self._discover_podgroups, _DISCOVERY_SECONDS, clock)

    def is_served(self) -> bool:
        """Whether the API is served, by discovery, which all authenticated users may read.

        Raises KubeError, ReviewTimeout.
        """
        return self._served.get()

    def _discover_podgroups(self, timeout: float) -> bool:
        try:
            resources = self._client.get(PODGROUPS, timeout=timeout, max_bytes=_MAX_BYTES).get("resources") or ()
        except errors.NotFound:
            return False
        return any(resource.get("name") == "podgroups" for resource in resources)
