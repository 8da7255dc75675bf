"""Keeps the automatic classes: one ResourceClass for each model of present or former cards (docs/design/0003).

A class outlives its cards. If a node group is scaled to zero, pods must still be able to request its cards, so that an
autoscaler adds a node. If the cards do not come back, an administrator must delete the class. Since nodes
can invent models, the number of classes without cards is limited: the oldest classes are kept, and all classes that
pods use.

Drivers may spell a model in several ways that give the same class name (old drivers leave out NVIDIA). Then the class
selects all spellings. `plan_changes` (pure) computes the changes from the objects of the watch. The controller writes
them, and logs each model without an automatic class once. A class that a person created or edited is never changed.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import classes, names
from cardwise.core.values.decoded import Json
from cardwise.core.values.wording import quote_text
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.objects.resourceclasses import ClassRecord
from extender.reporting.listers import Listers

_log = structlog.get_logger(__name__)

_INTERVAL_SECONDS = 1.0  # seconds between two comparisons
MAX_CLASSES_WITHOUT_CARDS = 64  # unused automatic classes: more than an autoscaler's node groups have models
_LINGER_SECONDS = (
    10.0  # seconds without cards before a class is deleted: the card of a moved machine is soon reported again
)
_USE_CHECK_SECONDS = 5.0  # seconds between two checks of whether a class is in use: each reads all holdings
_WATCH_DELAY_SECONDS = 5.0  # seconds after a write until the class is compared again: by then the watch shows the write
_RETRY_SECONDS = 30.0  # seconds until a refused write is tried again
_TIMEOUT = 2.0
_MAX_STEP_SECONDS = 1.0  # seconds of writing after which a step ends: this thread also writes all statuses
# Maximum number of writes of a kind in one step: this thread also writes statuses, and nodes can invent models.
_MAX_WRITES_PER_STEP = 8

Models = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClassChanges:
    """The names of classes to create, to update and to delete. Classes to create and update have their models."""

    creates: Mapping[str, Models] = field(default_factory=dict)
    updates: Mapping[str, Models] = field(default_factory=dict)
    deletes: Collection[str] = ()


def plan_changes(
    models: Collection[str], existing: Mapping[str, ClassRecord], in_use: Callable[[str], bool]
) -> ClassChanges:
    """Compute the changes of automatic classes that are needed.

    models: the models of all present cards.
    existing: the classes of the cluster, by name.
    in_use: returns whether a pod holds a card of a class or waits for one.
    """
    models_by_name: dict[str, list[str]] = {}  # by class name, the models that give this name
    for model in sorted(models):
        models_by_name.setdefault(classes.name_of_model(model), []).append(model)
    wanted_models: dict[str, Models] = {name: tuple(class_models) for name, class_models in models_by_name.items()}
    written_models = {name: record.auto_models for name, record in existing.items() if record.auto_models}
    # The oldest classes are kept, so that models which a node invents today do not displace models of former cards.
    without_cards = sorted(
        written_models.keys() - wanted_models.keys(), key=lambda name: (existing[name].created, name)
    )
    return ClassChanges(
        creates={name: class_models for name, class_models in wanted_models.items() if name not in existing},
        updates={
            name: class_models
            for name, class_models in wanted_models.items()
            if written_models.get(name, class_models) != class_models
        },
        deletes=[name for name in without_cards[MAX_CLASSES_WITHOUT_CARDS:] if not in_use(name)],
    )


def automatic_class(name: str, *models: str) -> Json:
    """The manifest of an automatic class. `models`: all models whose class has this name."""
    spec = classes.auto_spec(*models)
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ResourceClass",
        "metadata": {
            "name": name,
            "labels": {names.AUTO_LABEL: "true"},
            "annotations": {names.AUTO_SPEC: json.dumps(spec)},
        },
        "spec": spec,
    }


def _make_patch(name: str, models: Models, record: ClassRecord) -> Json:
    """The merge patch that sets the models of the class. It fails if the object has changed since `record`."""
    manifest = automatic_class(name, *models)
    selector = dict.fromkeys(classes.auto_spec(*record.auto_models)["selector"]) | manifest["spec"]["selector"]
    annotations = manifest["metadata"]["annotations"]
    return {
        "metadata": {"uid": record.uid, "resourceVersion": record.version, "annotations": annotations},
        "spec": {"selector": selector},
    }


class ClassController:
    """Creates, updates and deletes the automatic classes. All methods belong to one thread.

    active: returns whether this extender may write, because it leads and all lists of pods and cards are complete.
    in_use: returns whether a pod holds a card of a class or requests the class.
    """

    def __init__(
        self,
        client: KubeClient,
        listers: Listers,
        *,
        active: Callable[[], bool],
        in_use: Callable[[str], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._listers = listers
        self._active = active
        self._in_use = in_use
        self._clock = clock
        self._compared_at = float("-inf")
        self._classes_to_create: dict[str, None] = {}  # names of classes to create, the oldest first
        self._idle_since: dict[str, float] = {}  # by class without cards: since when
        self._used_until: dict[str, float] = {}
        self._not_before: dict[str, float] = {}  # by recently written class, when it may be written again
        self._present: set[str] = set()  # classes with cards whose object existed in the last step
        self._logged: dict[str, str] = {}

    def step(self) -> None:
        """Compare and write the classes, at most every `_INTERVAL_SECONDS` seconds."""
        now = self._clock.now()
        if now - self._compared_at < _INTERVAL_SECONDS:
            return
        self._compared_at = now
        if not self._active():
            self._idle_since.clear()
            self._present.clear()
            return
        existing, models = self._listers.classes.snapshot(), self._listers.cards.models()
        changes = plan_changes(models, existing, self._is_used)
        self._log_notices(models, existing)
        self._used_until = {name: at for name, at in self._used_until.items() if at > now}
        self._not_before = {name: at for name, at in self._not_before.items() if at > now}
        idle_names = [*changes.deletes, *changes.updates]
        self._idle_since = {name: self._idle_since.get(name, now) for name in idle_names}
        deletable_names = {name for name, since in self._idle_since.items() if now - since >= _LINGER_SECONDS}
        self._classes_to_create = {
            name: None for name in (*self._classes_to_create, *changes.creates) if name in changes.creates
        }
        for name in self._due_names(self._classes_to_create, now):
            self._create(name, changes.creates[name])
        grown = {name for name, models in changes.updates.items() if not set(models) <= set(existing[name].auto_models)}
        for name in self._due_names((name for name in changes.updates if name in deletable_names | grown), now):
            self._update(name, changes.updates[name], existing[name])
        for name in self._due_names((name for name in changes.deletes if name in deletable_names), now):
            self._delete(name, existing[name])
        self._present = {classes.name_of_model(model) for model in models} & existing.keys()

    def _due_names(self, names: Iterable[str], began: float) -> Iterator[str]:
        """The first of these classes that may be written now. Ends `_MAX_STEP_SECONDS` seconds after `began`."""
        for name in list(islice((name for name in names if name not in self._not_before), _MAX_WRITES_PER_STEP)):
            if self._clock.now() - began <= _MAX_STEP_SECONDS:
                yield name

    def _is_used(self, name: str) -> bool:
        """As `in_use`, but the result True is remembered for `_USE_CHECK_SECONDS`."""
        if name not in self._used_until and self._in_use(name):
            self._used_until[name] = self._clock.now() + _USE_CHECK_SECONDS
        return name in self._used_until

    def _log_notices(self, models: Collection[str], existing: Mapping[str, ClassRecord]) -> None:
        """Log once which models have no automatic class, and why."""
        notices: dict[str, str] = {}
        for model in sorted(models):
            name = classes.name_of_model(model)
            if name in existing and not existing[name].auto_models:
                notices.setdefault(name, f"a class of this name was created by hand, for model {quote_text(model)}")
        for name, text in notices.items():
            if self._logged.get(name) != text:
                _log.warning("a model has no automatic class", name=name, problem=text)
        self._logged = notices

    def _create(self, name: str, models: Models) -> None:
        if name in self._present:
            _log.warning(
                "recreating an automatic class that was deleted although nodes still have its cards", name=name
            )
        manifest = automatic_class(name, *models)
        self._write(
            name,
            lambda: self._client.create(paths.resourceclasses(), manifest, timeout=_TIMEOUT),
            ("failed to create an automatic class", "created an automatic class"),
            models,
        )

    def _update(self, name: str, models: Models, record: ClassRecord) -> None:
        patch = _make_patch(name, models, record)
        self._write(
            name,
            lambda: self._client.patch(paths.resourceclasses(name), patch, "merge", timeout=_TIMEOUT),
            ("failed to update an automatic class", "updated an automatic class"),
            models,
        )

    def _delete(self, name: str, record: ClassRecord) -> None:
        # The preconditions fail if a person has edited or recreated the class since: then it belongs to this person.
        options = {"preconditions": {"uid": record.uid, "resourceVersion": record.version}}
        self._write(
            name,
            lambda: self._client.delete(paths.resourceclasses(name), options, timeout=_TIMEOUT),
            (
                "failed to delete an automatic class",
                "deleted an automatic class: too many automatic classes have no card",
            ),
            record.auto_models,
        )

    def _write(self, name: str, write: Callable[[], object], events: tuple[str, str], models: Models) -> None:
        """Call `write`, and log the outcome. `events`: the log messages for a failure and for success."""
        failure_message, success_message = events
        try:
            write()
        except errors.AlreadyExists:
            self._defer(name, _RETRY_SECONDS)  # another writer has created the class; the watch will show it
        except (errors.NotFound, errors.Conflict):
            self._defer(name, 1.0)  # the watch is late
        except errors.KubeError as error:
            _log.warning(failure_message, name=name, models=models, error=str(error))
            self._defer(name, _RETRY_SECONDS)
        else:
            _log.info(success_message, name=name, models=models)
            self._defer(name, _WATCH_DELAY_SECONDS)

    def _defer(self, name: str, seconds: float) -> None:
        self._not_before[name] = self._clock.now() + seconds
