"""The webhook's view of the cluster: namespaces with defaults, cards and devices, classes, quotas, LimitRanges.

Reflectors keep the view up to date. A stale view causes few refusals, because a namespace or class that the view does
not have is read from the API server.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.mps import MpsState
from cardwise.core.placement.nodestate import MAX_CLIENTS
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity, MiB
from cardwise.kube import errors, paths, wire
from cardwise.kube.cardspernode import CardsPerNodeLimiter
from cardwise.kube.client import KubeClient
from cardwise.kube.objects import extendedresources, gpuquotas, resourceclasses
from cardwise.kube.objects.namespaces import decode as decode_namespace
from cardwise.kube.objects.unreadable import Unreadable
from cardwise.kube.watch.reflector import CENTRAL_PACE, Reflector, WakeHandler
from cardwise.runtime.logs import LineLimit
from webhook import deadline
from webhook.cluster import limitranges, namespaces, offers
from webhook.cluster.cards import CardFacts, CardSizes, CardSums
from webhook.cluster.gpuquotas import QuotaUsage
from webhook.cluster.limitranges import Bounds
from webhook.cluster.namespaces import Defaults
from webhook.cluster.offers import NodeOffer, NodeOffers
from webhook.cluster.ondemand import FreshList, GangNumbers, LookupLimit, PodGroups

LIMIT_RANGES: Final = paths.namespaced("/api/v1", "limitranges")
RESOURCE_QUOTAS: Final = paths.namespaced("/api/v1", "resourcequotas")

# The number of failed calls after which readiness no longer waits for an optional list: its CRD is not installed, or
# the webhook may not read it.
_MAX_LIST_FAILURES = 3

# The timeout in seconds for reading the pod of a Binding. The API server waits one second for the webhook's answer (the
# chart's timeoutSeconds).
BINDING_SECONDS: Final = 0.6
# Maximum number of pods of Bindings that are read per second for one address without a certificate: several times as
# many as one API server needs, at negligible cost for the API server.
_MAX_BINDINGS_PER_CALLER: Final = 200
# Maximum number of bytes of a pod as JSON. An object in etcd has at most 1.5 MiB, and JSON may write one letter as six
# bytes.
_MAX_POD_BYTES: Final = 8 << 20
# Parts of resource names. A pod whose text has none of them requests nothing of Cardwise, so it is not decoded: a large
# pod would take 80 ms, in which no other review advances.
_RESOURCE_DOMAINS: Final = (b"aliyun.com/", f"{names.GROUP}/".encode())

# How the keys begin by which a ResourceQuota counts GPUs.
_GPU_QUOTA_KEYS: Final = ("requests.aliyun.com/", f"requests.{names.CLASS_PREFIX}")

T = TypeVar("T")

_log = structlog.get_logger("webhook.view")


_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class ClusterView:
    """Implements `pods.context.Lookups`. Thread-safe."""

    def __init__(self, client: KubeClient, clock: Clock = SYSTEM, *, kept_back: MiB | None = MiB(0)) -> None:
        self._client = client
        self._lookup_failures = LineLimit(_log, clock)
        self._card_sums = CardSums(kept_back)
        self._gang_numbers = GangNumbers(client, clock)
        self._bindings = LookupLimit(clock, per_owner=_MAX_BINDINGS_PER_CALLER)
        self._podgroups = PodGroups(client, clock)
        self._fresh_classes = FreshList(client, paths.resourceclasses(), clock)
        self._quota_usages: _ByNamespace[QuotaUsage] = _ByNamespace()
        self._gpu_resource_quotas: _ByNamespace[bool] = _ByNamespace()  # True for each that counts GPUs
        self._bounds: _ByNamespace[Bounds] = _ByNamespace()
        self._parse_errors: dict[str, str] = {}
        selector = {"labelSelector": f"{names.DEFAULTS_LABEL}={namespaces.ENABLED}"}
        # A short time, because a pod that is created immediately after its namespace was labelled must get the default.
        self._fresh_namespaces = FreshList(client, paths.namespaces(), clock, query=selector, max_age_seconds=0.2)
        self._namespaces: Reflector[Defaults] = Reflector(
            client,
            paths.namespaces(),
            _project_namespace,
            WakeHandler(),
            query=selector,
            pace=CENTRAL_PACE,
            clock=clock,
        )
        limited_cards = CardsPerNodeLimiter(_project_card, self._card_sums)
        self._card_reflector: Reflector[CardFacts] = Reflector(
            client,
            paths.extendedresources(),
            limited_cards.project,
            limited_cards,
            on_list_failed=limited_cards.on_list_failed,
            pace=CENTRAL_PACE,
            clock=clock,
        )
        self._class_reflector: Reflector[ResourceClass] = Reflector(
            client,
            paths.resourceclasses(),
            self._project_class,
            WakeHandler(),
            pace=CENTRAL_PACE,
            clock=clock,
        )
        self._quota_reflector: Reflector[QuotaUsage] = Reflector(
            client,
            paths.gpuquotas(),
            self._project_quota,
            self._quota_usages,
            pace=CENTRAL_PACE,
            clock=clock,
        )
        self._limit_range_reflector: Reflector[Bounds] = Reflector(
            client,
            LIMIT_RANGES,
            self._project_limit_range,
            self._bounds,
            pace=CENTRAL_PACE,
            clock=clock,
        )
        self._resource_quota_reflector: Reflector[bool] = Reflector(
            client,
            RESOURCE_QUOTAS,
            _project_resource_quota,
            self._gpu_resource_quotas,
            pace=CENTRAL_PACE,
            clock=clock,
        )
        self._offers = NodeOffers()
        self._node_reflector: Reflector[NodeOffer] = Reflector(
            client, paths.nodes(), offers.project, self._offers, pace=CENTRAL_PACE, clock=clock
        )
        # The webhook is not ready until the required lists are complete. Of the optional lists, some do not exist in
        # clusters without ResourceClasses or GPUQuotas, and the list of nodes is only used for warnings.
        self._required = (self._namespaces, self._card_reflector)
        self._optional = (
            self._class_reflector,
            self._quota_reflector,
            self._limit_range_reflector,
            self._resource_quota_reflector,
            self._node_reflector,
        )

    def start(self) -> None:
        for reflector in (*self._required, *self._optional):
            reflector.start()

    def stop(self) -> None:
        for reflector in (*self._required, *self._optional):
            reflector.stop()

    def staleness(self) -> dict[str, float]:
        """Seconds since each reflector last heard from the API server."""
        return {reflector.name: reflector.staleness_seconds() for reflector in (*self._required, *self._optional)}

    def problems(self) -> list[str]:
        """The reasons why the view is not complete yet."""
        awaited_reflectors = (reflector for reflector in self._optional if reflector.errors < _MAX_LIST_FAILURES)
        return [
            f"{reflector.name} are not listed yet"
            for reflector in (*self._required, *awaited_reflectors)
            if not reflector.synced.is_set()
        ]

    def defaults(self, namespace: str) -> Defaults | None:
        return self._namespaces.store.get(namespace)

    def defaults_or_fetch(self, namespace: str) -> Defaults | None:
        cached_defaults = self._namespaces.store.get(namespace)
        if cached_defaults is not None:
            return cached_defaults
        # The API server sent the review because the namespace has the label, so the watch is late.
        manifest = self._fresh_namespaces.get(namespace)
        return namespaces.defaults_of(manifest) if manifest is not None else None

    def cards(self, resource_class: ResourceClass | None = None, nodes: Collection[str] | None = None) -> CardSizes:
        if nodes is not None:
            return self._card_sums.sizes_on(nodes, resource_class)
        if resource_class is not None and self._class_reflector.store.get(resource_class.name) != resource_class:
            return self._card_sums.unlisted_class_sizes(resource_class)
        return self._card_sums.class_sizes(resource_class)

    def reviewed_class_cards(self, resource_class: ResourceClass) -> CardSizes | None:
        return self._card_sums.reviewed_class_sizes(resource_class)

    def classes(self) -> Mapping[str, ResourceClass]:
        return self._class_reflector.store.snapshot()

    def resource_class(self, name: str) -> ResourceClass | None:
        deadline.check()  # a pod may name many classes
        cached_class = self._class_reflector.store.get(name)
        if cached_class is not None:
            return cached_class
        # The class may have been created a moment ago.
        manifest = self._fresh_classes.get(name)
        return resourceclasses.record_of(manifest).resource_class if manifest is not None else None

    def quotas(self, namespace: str) -> Sequence[QuotaUsage]:
        return self._quota_usages.in_namespace(namespace)

    def has_gpu_resource_quota(self, namespace: str) -> bool:
        return any(self._gpu_resource_quotas.in_namespace(namespace))

    def offers(self) -> NodeOffers | None:
        return self._offers if self._node_reflector.synced.is_set() else None

    def bounds(self, namespace: str) -> Bounds:
        return limitranges.combine_bounds(self._bounds.in_namespace(namespace))

    def mps_scopes(self) -> frozenset[str]:
        return self._card_sums.mps_scopes()

    def do_node_daemons_prevail(self) -> bool:
        return self._card_sums.do_node_daemons_prevail()

    def has_kernel_limit(self) -> bool:
        return self._card_sums.has_kernel_limit()

    def max_clients(self) -> int:
        return self._card_sums.max_clients()

    def conflicting_member(self, namespace: str, gang: str, number: int) -> tuple[str, int] | None:
        return self._gang_numbers.conflicting_member(namespace, gang, number)

    def serves_podgroups(self) -> bool:
        return self._podgroups.is_served()

    def pod(self, namespace: str, name: str, caller: str, check_size: Callable[[bytes], None]) -> Json | None:
        if caller and not self._bindings.begin_lookup(caller):
            self._lookup_failures.log(
                "warning", caller, "admitting Bindings of this client without a check: it sends too many", caller=caller
            )
            return None
        try:
            timeout = deadline.limit_seconds(BINDING_SECONDS)
            raw = self._client.request("GET", paths.pods(namespace, name), timeout=timeout, max_bytes=_MAX_POD_BYTES)
            text = wire.trim_object(raw)
            if not any(domain in text for domain in _RESOURCE_DOMAINS):
                return None
            check_size(text)
            return _decode_object(text)
        except errors.NotFound:
            return None
        except (errors.KubeError, InvalidRequest, msgspec.DecodeError, RecursionError) as error:
            # Admit the Binding, as if the webhook were down (failurePolicy Ignore): the pod may request no GPU.
            self._lookup_failures.log(
                "warning",
                namespace,
                "admitting a Binding without a check: its pod could not be read",
                pod=f"{namespace}/{name}",
                error=str(error),
            )
            return None

    def _project_class(self, raw: bytes) -> tuple[str, ResourceClass] | None:
        record = resourceclasses.decode(raw)
        if isinstance(record.parsed, Unreadable):
            self._log_unreadable(f"ResourceClass {record.name}", record.parsed.problem)
            return None
        return record.name, record.parsed

    def _project_quota(self, raw: bytes) -> tuple[str, QuotaUsage] | None:
        record = gpuquotas.decode(raw)
        if isinstance(record.parsed, Unreadable):
            self._log_unreadable(f"GPUQuota {record.key}", record.parsed.problem)
            return None
        return record.key, QuotaUsage(record.parsed, record.used)

    def _project_limit_range(self, raw: bytes) -> tuple[str, Bounds] | None:
        manifest = _decode_object(wire.trim_object(raw))
        key = _key_of(manifest)
        try:
            return key, limitranges.parse(manifest)
        except (InvalidRequest, InvalidQuantity) as error:
            self._log_unreadable(f"LimitRange {key}", str(error))
            return None

    def _log_unreadable(self, object_name: str, problem: str) -> None:
        """Log once that an object cannot be read: its status may change often."""
        if self._parse_errors.get(object_name) != problem:
            self._parse_errors[object_name] = problem
            _log.warning("ignored an object that cannot be parsed", object=object_name, error=problem)


class _ByNamespace(Generic[T]):
    """Handler of a reflector whose keys are "namespace/name". Stores the objects by namespace."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, dict[str, T]] = {}

    def in_namespace(self, namespace: str) -> Sequence[T]:
        with self._lock:  # the reflector's thread may change the objects at the same time
            return list(self._records.get(namespace, {}).values())

    def on_change(self, key: str, old: T | None, new: T) -> None:  # noqa: ARG002
        with self._lock:
            self._records.setdefault(key.partition("/")[0], {})[key] = new

    def on_delete(self, key: str, old: T) -> None:  # noqa: ARG002
        namespace = key.partition("/")[0]
        with self._lock:
            records = self._records.get(namespace, {})
            records.pop(key, None)
            if not records:
                self._records.pop(namespace, None)

    def on_synced(self) -> None:
        pass


def _key_of(manifest: Json) -> str:
    """The key of a namespaced object in a reflector."""
    return f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}"


def _project_namespace(raw: bytes) -> tuple[str, Defaults]:
    metadata = decode_namespace(raw).metadata
    return metadata.name, namespaces.read_defaults(metadata.annotations)


def _project_resource_quota(raw: bytes) -> tuple[str, bool]:
    """The key of a ResourceQuota, and whether it counts GPUs."""
    manifest = _decode_object(wire.trim_object(raw))
    hard = (manifest.get("spec") or {}).get("hard") or {}
    return _key_of(manifest), any(name.startswith(_GPU_QUOTA_KEYS) for name in hard)


def _project_card(raw: bytes) -> tuple[str, CardFacts]:
    card = extendedresources.decode(raw)
    status = card.status.mps
    mps = status.mode if status is not None and status.state != MpsState.UNAVAILABLE else ""
    facts = CardFacts(
        card.spec.node,
        MiB(card.spec.memory_mib),
        extendedresources.labels_of(card),
        extendedresources.is_other_device(card),
        mps,
        extendedresources.has_kernel_limit(card),
        (status.max_clients if status is not None else 0) or MAX_CLIENTS,
        extendedresources.headroom_of(card),
    )
    return card.metadata.name, facts
