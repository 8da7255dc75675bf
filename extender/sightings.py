"""Our own objects as the watch shows them: what their statuses say now, and what of them decides over their statuses.

Apart from the projections that feed the state, which hold nothing of a status: these are compared with what ought to
be written. What has changed since the last look is remembered, so that 40,000 cards are not compared all the time.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field
from sys import intern
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from cardwise.core import classes, quotas
from cardwise.core.invalid import InvalidRequest
from cardwise.core.quotas import GPUQuota
from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from cardwise.kube.reflector import Reflector

T = TypeVar("T")

Object = dict[str, Any]


class CardStatus(NamedTuple):
    """What the extender says in the status of an ExtendedResource; MiB and percent. -1: the object does not say it."""

    memory: int = -1
    core: int = -1
    shares: int = -1
    whole: bool = False
    pods: int = -1
    free: int = -1
    classes: tuple[str, ...] = ()


class CardSeen(NamedTuple):
    """An ExtendedResource."""

    node: str
    model: str
    status: CardStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSeen:
    """A ResourceClass. `problem`: why it cannot be read. `auto_model`: the model that Cardwise made it for, while it
    is as Cardwise wrote it; "" for a class that is a person's.
    """

    uid: str
    version: str
    generation: int = 0
    problem: str = ""
    auto_model: str = ""
    status: Object = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaSeen:
    """A GPUQuota; `quota` is None where it cannot be read, for `problem`."""

    namespace: str
    name: str
    generation: int = 0
    quota: GPUQuota | None = None
    problem: str = ""
    status: Object = field(default_factory=dict)


class Seen(Generic[T]):
    """The objects of one kind by key, and which have changed: a reflector's handler. Read by any one other thread."""

    def __init__(self) -> None:
        self.values: dict[str, T] = {}
        self._changed: set[str] = set()
        self._lock = threading.Lock()

    def on_change(self, key: str, old: T | None, new: T) -> None:
        del old
        with self._lock:
            self._put(key, new)

    def on_delete(self, key: str, old: T) -> None:
        del old
        with self._lock:
            self._put(key, None)

    def on_synced(self) -> None:
        pass

    def changed(self) -> set[str]:
        """The keys of what has changed, come or gone since the last call."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return changed

    def snapshot(self) -> dict[str, T]:
        """A copy of all, taken in one step."""
        with self._lock:
            return dict(self.values)

    def _put(self, key: str, new: T | None) -> None:
        before = self.values.get(key)
        if new is not None:
            self.values[key] = new
        else:
            self.values.pop(key, None)
        self._mark(key, before, new)

    def _mark(self, key: str, before: T | None, new: T | None) -> None:
        """The object was and is so; under the lock."""
        del before, new
        self._changed.add(key)


class CardsSeen(Seen[CardSeen]):
    """As `Seen`; changes are told by node, and models are counted."""

    def __init__(self) -> None:
        super().__init__()
        self._of_node: dict[str, set[str]] = {}
        self._models: Counter[str] = Counter()

    def names(self, node: str) -> list[str]:
        """The cards of the node."""
        with self._lock:
            return list(self._of_node.get(node, ()))

    def nodes(self) -> set[str]:
        """The nodes that have cards."""
        with self._lock:
            return set(self._of_node)

    def models(self) -> set[str]:
        """The models of which there is a card; a card that says none is of no model."""
        with self._lock:
            return {model for model in self._models if model}

    def _mark(self, key: str, before: CardSeen | None, new: CardSeen | None) -> None:
        if before is not None:
            self._changed.add(before.node)
            here = self._of_node[before.node]
            here.discard(key)
            if not here:
                del self._of_node[before.node]
            self._models[before.model] -= 1
            if not self._models[before.model]:
                del self._models[before.model]
        if new is not None:
            self._changed.add(new.node)
            self._of_node.setdefault(new.node, set()).add(key)
            self._models[new.model] += 1


class ClassesSeen(Seen[ClassSeen]):
    """As `Seen`; also says which were deleted."""

    def __init__(self) -> None:
        super().__init__()
        self._deleted: list[str] = []

    def on_delete(self, key: str, old: ClassSeen) -> None:
        super().on_delete(key, old)
        with self._lock:
            self._deleted.append(key)

    def deleted(self) -> list[str]:
        """The names of the classes that were deleted since the last call."""
        with self._lock:
            deleted, self._deleted = self._deleted, []
            return deleted


class Sightings:
    """All three kinds. Cards and classes are known by name, quotas by "namespace/name"."""

    def __init__(self) -> None:
        self.cards = CardsSeen()
        self.classes = ClassesSeen()
        self.quotas: Seen[QuotaSeen] = Seen()

    def reflectors(self, client: KubeClient) -> tuple[Reflector[Any], ...]:
        """What keeps them true; to be started and stopped by who asks."""
        return (
            Reflector(client, paths.extendedresources(), card, self.cards, name="statuses of extendedresources"),
            Reflector(
                client, paths.resourceclasses(), resource_class, self.classes, name="statuses of resourceclasses"
            ),
            Reflector(client, paths.gpuquotas(), quota, self.quotas, name="statuses of gpuquotas"),
        )


class _Allocated(Struct, rename="camel"):
    memory_mib: int = msgspec.field(default=-1, name="memoryMiB")
    core_percent: int = -1
    shares: int = -1
    whole: bool | None = None
    pods: int = -1


class _Status(Struct, rename="camel"):
    allocated: _Allocated | None = None
    free_mib: int = msgspec.field(default=-1, name="freeMiB")
    classes: list[str] | None = None


class _Name(Struct):
    name: str


class _Spec(Struct):
    node: str
    model: str = ""


class _Card(Struct):
    metadata: _Name
    spec: _Spec
    status: _Status | None = None


_decode_card = msgspec.json.Decoder(_Card).decode
_decode_object = msgspec.json.Decoder(Object).decode


def card(raw: bytes) -> tuple[str, CardSeen] | None:
    """Key and record of an ExtendedResource."""
    read = _decode_card(raw)
    status = read.status or _Status()
    told = status.allocated or _Allocated()
    return read.metadata.name, CardSeen(
        intern(read.spec.node),
        intern(read.spec.model),
        CardStatus(
            told.memory_mib,
            told.core_percent,
            told.shares,
            bool(told.whole),
            # A status without `whole` is not whole, but not complete either.
            told.pods if told.whole is not None else -1,
            status.free_mib,
            tuple(intern(name) for name in status.classes or ()),
        ),
    )


def resource_class(raw: bytes) -> tuple[str, ClassSeen] | None:
    """Key and record of a ResourceClass."""
    obj = _decode_object(raw)
    metadata = obj["metadata"]
    problem = ""
    try:
        classes.parse(obj)
    except InvalidRequest as error:
        problem = str(error)
    return metadata["name"], ClassSeen(
        uid=metadata.get("uid", ""),
        version=metadata.get("resourceVersion", ""),
        generation=metadata.get("generation", 0),
        problem=problem,
        auto_model=_auto_model(obj),
        status=obj.get("status") or {},
    )


def quota(raw: bytes) -> tuple[str, QuotaSeen] | None:
    """Key and record of a GPUQuota."""
    obj = _decode_object(raw)
    metadata = obj["metadata"]
    parsed, problem = None, ""
    try:
        parsed = quotas.parse(obj)
    except InvalidRequest as error:
        problem = str(error)
    return f"{metadata['namespace']}/{metadata['name']}", QuotaSeen(
        namespace=metadata["namespace"],
        name=metadata["name"],
        generation=metadata.get("generation", 0),
        quota=parsed,
        problem=problem,
        status=obj.get("status") or {},
    )


def _auto_model(obj: Object) -> str:
    """The model of an automatic class that is as it was written, under the name that it was given."""
    if not classes.is_untouched_auto(obj):
        return ""
    selector = obj["spec"].get("selector")
    labels = selector.get("matchLabels") if isinstance(selector, dict) else None
    model = labels.get("model") if isinstance(labels, dict) else None
    # A copy of an automatic class under another name has its label and annotation, but is somebody's own.
    named_so = isinstance(model, str) and classes.name_of_model(model) == obj["metadata"]["name"]
    return model if isinstance(model, str) and named_so and selector == classes.auto_spec(model)["selector"] else ""
