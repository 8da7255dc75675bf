"""Simulated nodes: Node and ExtendedResource objects by the hundred, and a keeper that plays their kubelet.

The keeper marks their pods running, ends those that have a run time (annotation `simulated.test/run-seconds`),
finishes deletions, and reports the nodes' capacities of ResourceClasses as the device plugin would. It is a process of
the cluster: `python -m tests.cluster.simnodes KUBECONFIG`.
"""

import heapq
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from cardwise.core.api import classes, names
from cardwise.core.api.classes import Classifier, ResourceClass
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import errors, paths, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.objects import extendedresources
from cardwise.kube.objects.extendedresources import ExtendedResource
from cardwise.kube.objects.meta import ObjectMeta
from cardwise.kube.objects.pods import PodStatus
from tests.cluster.cards import TestCard, card_uuid

LABEL = "cardwise.dev/simulated"
RUN_SECONDS = "simulated.test/run-seconds"  # not in our domain: the webhook strips what it does not know there
CPUS = 64  # of a node
_WORKERS = 4
_GONE = (errors.NotFound, errors.Conflict)
_T = TypeVar("_T")


def create(client: KubeClient, nodes: Mapping[str, Sequence[TestCard]]) -> None:
    """Nodes that are Ready, with their cards. Existing ones are left as they are."""
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(_create_node, client, name, cards) for name, cards in nodes.items()]:
            done.result()


def remove(client: KubeClient, nodes: Sequence[str]) -> None:
    """The nodes and their cards; what ran there is for the caller to delete."""
    client.delete(paths.extendedresources(), query={"labelSelector": f"{names.NODE_LABEL} in ({','.join(nodes)})"})
    for name in nodes:
        with suppress(errors.NotFound):
            client.delete(paths.nodes(name))


def _create_node(client: KubeClient, name: str, cards: Sequence[TestCard]) -> None:
    labels = {LABEL: "true", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    try:
        node = client.create(paths.nodes(), {"metadata": {"name": name, "labels": labels}})
    except errors.Conflict:
        return
    # Admission adds a not-ready taint, which only the node lifecycle controller would take away.
    client.patch(paths.nodes(name), {"spec": {"taints": None}})
    total = sum(card.memory_mib for card in cards)
    capacity = {"cpu": str(CPUS), "memory": "512Gi", "pods": "500", "ephemeral-storage": "1Ti"}
    if cards:
        capacity |= {
            names.GPU_MEM: str(total),
            names.GPU_COUNT: str(len(cards)),
            names.GPU_CORE: str(100 * len(cards)),
            names.WHOLE_GPU: str(len(cards)),
            names.SHARE: "512",
        }
    ready = {"type": "Ready", "status": "True", "reason": "Simulated", "message": "kept by tests/cluster/simnodes.py"}
    addresses = [{"type": "InternalIP", "address": "192.0.2.1"}, {"type": "Hostname", "address": name}]
    status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready], "addresses": addresses}
    client.patch(paths.nodes(name, "status"), {"status": status})
    for index, card in enumerate(cards):
        _create_card(client, name, node["metadata"]["uid"], index, card)


def _create_card(client: KubeClient, node: str, node_uid: str, index: int, card: TestCard) -> None:
    uuid = card_uuid(node, index)
    name = names.extended_resource_name(uuid)
    spec = {"node": node, "index": index, "uuid": uuid, "model": card.model, "memoryMiB": card.memory_mib}
    resource = {
        "apiVersion": names.API_VERSION,
        "kind": "ExtendedResource",
        "metadata": {
            "name": name,
            "labels": {names.NODE_LABEL: node},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}],
        },
        "spec": spec,
    }
    client.create(paths.extendedresources(), resource)
    status = {"status": {"health": "Healthy", "gpuAccess": "cdi"}}
    client.patch(paths.extendedresources(name, "status"), status)


class _Named(msgspec.Struct):
    metadata: ObjectMeta


class _Container(msgspec.Struct):
    name: str
    image: str = ""


class _Spec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    containers: list[_Container] = []


class _Pod(msgspec.Struct):
    metadata: ObjectMeta
    spec: _Spec
    status: PodStatus


def _class_of(raw: bytes) -> ResourceClass | None:
    try:
        return classes.parse(msgspec.json.decode(raw))
    except InvalidRequest:
        return None


class Keeper:
    """Plays the kubelets of all simulated nodes until it is stopped."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._is_simulated: dict[str, bool] = {}  # by name of a node
        self._changed = threading.Event()  # nodes, classes or cards
        self._workers = [ThreadPoolExecutor(1) for _ in range(_WORKERS)]
        self._ending: list[tuple[float, str, _Pod]] = []  # (when, uid, pod): the uid settles ties
        self._lock = threading.Lock()
        self._seen: dict[str, str] = {}  # uid -> what was last asked for

    def run(self) -> None:
        """Watch pods for ever; a broken watch starts anew."""
        threading.Thread(target=self._end_pods, daemon=True).start()
        threading.Thread(target=self._tell_classes, daemon=True).start()
        for path in (paths.nodes(), paths.resourceclasses(), paths.extendedresources()):
            threading.Thread(target=self._notice, args=(path,), daemon=True).start()
        while True:
            try:
                self._watch()
            except errors.KubeError as error:
                print(f"watch ended: {error}", flush=True)
                time.sleep(0.5)

    def _watch(self) -> None:
        version = ""
        for page in self._client.list_pages(paths.pods(), {"fieldSelector": "spec.nodeName!="}):
            parts = msgspec.json.decode(page, type=wire.List)
            version = parts.metadata.resource_version
            for raw in parts.items or ():
                self._adopt(msgspec.json.decode(raw, type=_Pod))
        query = {"fieldSelector": "spec.nodeName!="}
        for line in self._client.watch(paths.pods(), query, version, 600):
            event = msgspec.json.decode(line, type=wire.WatchEvent)
            if event.type == wire.EventType.ERROR:
                return
            if event.type in (wire.EventType.ADDED, wire.EventType.MODIFIED):
                self._adopt(msgspec.json.decode(event.object, type=_Pod))

    def _adopt(self, pod: _Pod) -> None:
        meta = pod.metadata
        if not self._simulates(pod.spec.node_name):
            return
        wanted = "delete" if meta.deletion_timestamp else "run" if pod.status.phase == "Pending" else ""
        with self._lock:
            if not wanted or self._seen.get(meta.uid) == wanted:
                return
            self._seen[meta.uid] = wanted
            seconds = meta.annotations.get(RUN_SECONDS)
            if wanted == "run" and seconds:
                heapq.heappush(self._ending, (time.monotonic() + float(seconds), meta.uid, pod))
        self._do(self._delete if wanted == "delete" else self._mark_running, pod)

    def _simulates(self, node: str) -> bool:
        if node not in self._is_simulated:
            try:
                stored = self._patient(lambda: self._client.get(paths.nodes(node)))
            except _GONE:
                return False
            self._is_simulated[node] = LABEL in stored["metadata"].get("labels", {})
        return self._is_simulated[node]

    def _do(self, action: Callable[[_Pod], None], pod: _Pod) -> None:
        """In order for each pod, as kubelets do: else a late "running" may follow the word that all has ended."""
        self._workers[hash(pod.metadata.uid) % _WORKERS].submit(self._try, action, pod)

    def _try(self, action: Callable[[_Pod], None], pod: _Pod) -> None:
        meta = pod.metadata
        try:
            self._patient(lambda: action(pod))
        except _GONE:
            return
        except errors.KubeError as error:
            print(f"{meta.namespace}/{meta.name}: {error}", flush=True)
            with self._lock:
                self._seen.pop(meta.uid, None)

    def _patient(self, ask: Callable[[], _T]) -> _T:
        """Again where the API server did not answer: a pod may have no other event that would bring it back."""
        while True:
            try:
                return ask()
            except (errors.Unreachable, errors.ServerError, errors.TooManyRequests) as error:
                print(f"again in a moment: {error}", flush=True)
                time.sleep(0.5)

    def _delete(self, pod: _Pod) -> None:
        """As a kubelet: first the word that the containers have ended, then the end of the object.

        Without a phase: the pod may have finished meanwhile, and must not be told to run again.
        """
        meta = pod.metadata
        self._patch_status(pod, None, "terminated", {"exitCode": 0})
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta.uid}}
        self._client.delete(paths.pods(meta.namespace, meta.name), options)
        with self._lock:
            self._seen.pop(meta.uid, None)

    def _mark_running(self, pod: _Pod) -> None:
        self._patch_status(pod, "Running", "running", {})

    def _mark_succeeded(self, pod: _Pod) -> None:
        self._patch_status(pod, "Succeeded", "terminated", {"exitCode": 0, "reason": "Completed"})

    def _end_pods(self) -> None:
        while True:
            due = []
            with self._lock:
                while self._ending and self._ending[0][0] <= time.monotonic():
                    due.append(heapq.heappop(self._ending)[2])
            for pod in due:
                self._do(self._mark_succeeded, pod)
            time.sleep(0.2)

    def _notice(self, path: str) -> None:
        """Any change below this path."""
        while True:
            try:
                version = self._client.get(path, {"limit": "1"})["metadata"]["resourceVersion"]
                self._changed.set()
                for _ in self._client.watch(path, {}, version, 600):
                    self._changed.set()
            except errors.KubeError:
                time.sleep(0.5)

    def _tell_classes(self) -> None:
        published: dict[str, dict[str, str]] = {}
        while self._changed.wait():
            self._changed.clear()
            try:
                self._tell_changed(published)
            except errors.KubeError as error:
                print(f"classes: {error}", flush=True)
                self._changed.set()
            time.sleep(0.2)

    def _tell_changed(self, published: dict[str, dict[str, str]]) -> None:
        """`published`: what each node says of classes by now."""
        known = [
            resource_class
            for raw in self._items(paths.resourceclasses())
            if (resource_class := _class_of(raw)) is not None
        ]
        classifier = Classifier(known)
        nodes = self._items(paths.nodes(), {"labelSelector": f"{LABEL}=true"})
        wanted: dict[str, Counter[str]] = {
            msgspec.json.decode(raw, type=_Named).metadata.name: Counter() for raw in nodes
        }
        for raw in self._items(paths.extendedresources()):
            resource = msgspec.json.decode(raw, type=ExtendedResource)
            spec = resource.spec
            if spec.node in wanted:
                selecting = classifier.select_classes(extendedresources.labels_of(resource))
                wanted[spec.node].update(
                    {selected.name: classes.max_shares(spec.memory_mib, selected) for selected in selecting}
                )
        for node in published.keys() - wanted.keys():
            del published[node]
        for node, counts in wanted.items():
            now = {names.CLASS_PREFIX + name: str(count) for name, count in counts.items()}
            before = published.get(node, {})
            if now != before:
                change = dict.fromkeys(before) | now
                status = {"status": {"capacity": change, "allocatable": change}}
                with suppress(errors.NotFound):  # it has gone meanwhile
                    self._client.patch(paths.nodes(node, "status"), status)
                published[node] = now

    def _items(self, path: str, query: Mapping[str, str] | None = None) -> Iterator[msgspec.Raw]:
        for page in self._client.list_pages(path, query):
            yield from msgspec.json.decode(page, type=wire.List).items or ()

    def _patch_status(self, pod: _Pod, phase: str | None, state: str, detail: Mapping[str, object]) -> None:
        ready = state == "running"
        conditions = [{"type": kind, "status": str(ready)} for kind in ("Ready", "ContainersReady")]
        containers = [
            {
                "name": c.name,
                "image": c.image,
                "imageID": "",
                "ready": ready,
                "restartCount": 0,
                "state": {state: detail},
            }
            for c in pod.spec.containers
        ]
        status: dict[str, object] = {"conditions": conditions, "containerStatuses": containers}
        if phase is not None:
            status["phase"] = phase
        path = paths.pods(pod.metadata.namespace, pod.metadata.name, "status")
        self._client.patch(path, {"metadata": {"uid": pod.metadata.uid}, "status": status}, "merge")


if __name__ == "__main__":
    Keeper(KubeClient.load(Path(sys.argv[1]))).run()
