"""Reads the cluster for the page, with the rights of the person, and at most once every few seconds.

A list that the person may not read leaves a note; the other lists are shown.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeVar

from cardwise.cli import rights
from cardwise.cli.cluster import nodestates, podgroups, published, usage, visible
from cardwise.cli.cluster.podgroups import GangView
from cardwise.cli.cluster.published import PublishedPolicy
from cardwise.cli.cluster.visible import VisibleCluster
from cardwise.clock import SYSTEM, Clock
from cardwise.core.placement import totals
from cardwise.core.placement.totals import EntryView
from cardwise.core.values.decoded import Json
from cardwise.kube import clusterstate, errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.clusterstate import ClusterState, NativeQuota

_T = TypeVar("_T")

MIN_SECONDS: Final = 2.0  # pause between two reads
_PAUSE_FACTOR: Final = 4.0  # and at least so many times the duration of a read, for the sake of the API server
_STALE_SECONDS: Final = 10.0  # a page that is opened shows a snapshot of this age at most
MAX_MEASURED_NODES: Final = 64  # in a larger cluster the measured use of all nodes takes too many requests


@dataclass(slots=True, kw_only=True, eq=False)
class Snapshot:
    """The cluster as the person may see it. Not changed after the read; equal to itself only.

    generation: the number of the read.
    read_at: the API server's time of the read.
    cluster: None if the person may not read GPUs; then `classes` says what may be seen instead.
    waiting: the manifests of pods without a node.
    node_labels, node_reasons: by node, its labels, and why it takes no new pods.
    used_mib: measured GPU memory in MiB, by namespace, pod and UUID.
    notes: what is missing, and why.
    """

    generation: int
    read_at: datetime
    cluster: ClusterState | None = None
    classes: VisibleCluster | None = None
    policy: PublishedPolicy = field(default_factory=PublishedPolicy)
    waiting: Sequence[Json] = ()
    gangs: Sequence[GangView] = ()
    quotas: Sequence[EntryView] = ()
    native_quotas: Sequence[NativeQuota] = ()
    node_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    node_reasons: Mapping[str, str] = field(default_factory=dict)
    used_mib: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class ClusterReader:
    """Reads snapshots for all open pages. Thread-safe.

    client: with the person's credentials.
    cardwise_namespace: the namespace in which Cardwise is installed.
    """

    def __init__(self, client: KubeClient, cardwise_namespace: str, clock: Clock = SYSTEM) -> None:
        self.client = client
        self.cardwise_namespace = cardwise_namespace
        self.clock = clock
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._read_at, self._read_seconds = float("-inf"), 0.0

    @property
    def pause(self) -> float:
        """Seconds between two reads."""
        return max(MIN_SECONDS, _PAUSE_FACTOR * self._read_seconds)

    def latest(self, max_age: float = _STALE_SECONDS) -> Snapshot:
        """The last snapshot, or a new one if the last is older than `max_age` and `pause`. Raises `KubeError`."""
        snapshot = self._snapshot
        if snapshot is not None and not self._is_older(max_age):
            return snapshot
        with self._lock:  # who waits here gets the snapshot of the first
            if self._snapshot is None or self._is_older(max_age):
                began = self.clock.now()
                generation = self._snapshot.generation + 1 if self._snapshot is not None else 1
                self._snapshot = read_snapshot(self.client, self.cardwise_namespace, generation)
                self._read_at = self.clock.now()
                self._read_seconds = self._read_at - began
            return self._snapshot

    def _is_older(self, max_age: float) -> bool:
        return self.clock.now() - self._read_at > max(max_age, self.pause)


def read_snapshot(client: KubeClient, cardwise_namespace: str, generation: int = 1) -> Snapshot:
    """Read the cluster. Raises `KubeError`, but Forbidden only if neither GPUs, classes nor pods may be read."""
    policy = published.read_published(client, cardwise_namespace)
    snapshot = Snapshot(generation=generation, read_at=client.server_time(), policy=policy)
    try:
        snapshot.cluster = clusterstate.read_cluster_state(
            client, addresses=False, own_namespace=client.namespace, limits=policy.limits
        )
    except errors.Forbidden as error:
        snapshot.classes = visible.read_visible(client, error)
        snapshot.notes.append(f"GPUs are not shown: {rights.describe_missing_right(error)}")
    else:
        snapshot.notes += filter(None, (snapshot.cluster.partial, *snapshot.cluster.problems))
    _read_nodes(client, snapshot)
    unbound = paths.field_query("spec.nodeName", "")
    snapshot.waiting = _list_permitted(client, lambda scope: list(client.list_objects(paths.pods(scope), unbound)))
    snapshot.gangs = _list_permitted(client, lambda scope: podgroups.list_gangs(client, scope))
    snapshot.native_quotas = _list_permitted(client, lambda scope: clusterstate.list_native_quotas(client, scope))
    cluster = snapshot.cluster
    if cluster is not None and not cluster.partial:
        snapshot.quotas = totals.quota_entries(cluster.ledger, cluster.quotas, cluster.missing_class)
    else:  # the pods of other namespaces are unknown, but the extender has written what they use
        snapshot.quotas = _list_permitted(
            client,
            lambda namespace: totals.quota_entries_from_statuses(client.list_objects(paths.gpuquotas(namespace))),
        )
    _measure_usage(client, snapshot, cardwise_namespace)
    return snapshot


def _list_permitted(client: KubeClient, read: Callable[[str], Sequence[_T]]) -> Sequence[_T]:
    """Read a list of all namespaces, else of the person's namespace; empty if neither may be read."""
    for namespace in ("", client.namespace):
        try:
            return read(namespace)
        except errors.Forbidden:
            continue
        except errors.NotFound:  # the kind does not exist in this cluster
            break
    return ()


def _read_nodes(client: KubeClient, snapshot: Snapshot) -> None:
    try:
        nodes = list(client.list_objects(paths.nodes(), {"resourceVersion": "0"}))
    except errors.Forbidden as error:
        snapshot.notes.append(f"the states and labels of nodes are unknown: {rights.describe_missing_right(error)}")
        return
    snapshot.node_labels = {node["metadata"]["name"]: node["metadata"].get("labels") or {} for node in nodes}
    snapshot.node_reasons = nodestates.unschedulable_reasons(nodes)


def _measure_usage(client: KubeClient, snapshot: Snapshot, cardwise_namespace: str) -> None:
    nodes = [node.name for node in snapshot.cluster.ledger.nodes()] if snapshot.cluster is not None else []
    if 0 < len(nodes) <= MAX_MEASURED_NODES:
        snapshot.used_mib = usage.read_details(client, nodes, cardwise_namespace).used_mib
