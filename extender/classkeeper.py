"""Keeps the automatic classes: one ResourceClass for each model of which there is a card (docs/design/0003).

What is to be done is decided from what the watch shows (`changes`, pure); the keeper does it and says once what it
cannot do. A class that a person made or edited is never touched.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import structlog

from cardwise.core import classes, names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from extender.sightings import ClassSeen, Object, Sightings

_log = structlog.get_logger(__name__)

_EVERY = 1.0  # seconds between two looks
_LINGER = 10.0  # seconds: the object of a card that moves to another node is deleted and comes again
_ASK = 5.0  # seconds until it is asked again whether a class is in use, which means looking at all that is held
_SHOWN = 5.0  # seconds in which the watch shows what was done
_RETRY = 30.0  # seconds after a refusal
_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Changes:
    """Classes to make, by name the model, and to delete; and by name what keeps a model from having a class."""

    creates: Mapping[str, str] = field(default_factory=dict)
    deletes: Collection[str] = ()
    clashes: Mapping[str, str] = field(default_factory=dict)


def changes(models: Collection[str], found: Mapping[str, ClassSeen], in_use: Callable[[str], bool]) -> Changes:
    """What makes the classes right. `models`: those of which there is a card; `in_use`: whether a pod holds or waits
    for a class.
    """
    by_name: dict[str, list[str]] = {}
    for model in sorted(models):
        by_name.setdefault(classes.name_of_model(model), []).append(model)
    creates, clashes = {}, {}
    for name, alike in by_name.items():
        there = found.get(name)
        if there is None:
            creates[name] = alike[0]
        owner = alike[0] if there is None else there.auto_model
        others = [model for model in alike if model != owner]
        if owner and others:
            clashes[name] = _clash(name, owner, others)
    deletes = [
        name for name, one in found.items() if one.auto_model and one.auto_model not in models and not in_use(name)
    ]
    return Changes(creates, deletes, clashes)


def _clash(name: str, owner: str, others: list[str]) -> str:
    others_named = ", ".join(map(repr, others))
    return (
        f"the class is of model {owner!r} only, though {others_named} would have the name {name} as well; "
        f"make a ResourceClass of another name for {others_named}"
    )


def automatic(name: str, model: str) -> Object:
    """The object of a model's class."""
    spec = classes.auto_spec(model)
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


class ClassKeeper:
    """`active`: whether to write, which one extender does: the leader, once it knows all pods and cards.

    All methods belong to one thread; `clashes` may be read by any.
    """

    def __init__(
        self,
        client: KubeClient,
        seen: Sightings,
        *,
        active: Callable[[], bool],
        in_use: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clashes: Mapping[str, str] = {}
        self._client = client
        self._seen = seen
        self._active = active
        self._in_use = in_use
        self._clock = clock
        self._looked_at = float("-inf")
        self._idle_since: dict[str, float] = {}  # classes to delete, since when
        self._used_until: dict[str, float] = {}
        self._not_before: dict[str, float] = {}  # classes that something was done or tried about
        self._kept: set[str] = set()  # classes that were there for a model when last looked at
        self._said: dict[str, str] = {}

    def step(self) -> None:
        """One round, if it is time for one."""
        now = self._clock()
        if now - self._looked_at < _EVERY:
            return
        self._looked_at = now
        if not self._active():
            self._idle_since.clear()
            self._kept.clear()
            return
        found, models = self._seen.classes.snapshot(), self._seen.cards.models()
        wanted = changes(models, found, self._used)
        self.clashes = wanted.clashes
        self._say(models, found, wanted.clashes)
        self._used_until = {name: at for name, at in self._used_until.items() if at > now}
        self._not_before = {name: at for name, at in self._not_before.items() if at > now}
        for name, model in wanted.creates.items():
            if name not in self._not_before:
                self._create(name, model)
        self._idle_since = {name: self._idle_since.get(name, now) for name in wanted.deletes}
        for name, since in self._idle_since.items():
            if now - since >= _LINGER and name not in self._not_before:
                self._delete(name, found[name])
        self._kept = {classes.name_of_model(model) for model in models} & found.keys()

    def _used(self, name: str) -> bool:
        """As `in_use`, but not asked again at once where it was."""
        if name not in self._used_until and self._in_use(name):
            self._used_until[name] = self._clock() + _ASK
        return name in self._used_until

    def _say(self, models: Collection[str], found: Mapping[str, ClassSeen], clashes: Mapping[str, str]) -> None:
        """Once, what a person may wonder about."""
        said = dict(clashes)
        for model in sorted(models):
            name = classes.name_of_model(model)
            if name in found and not found[name].auto_model:
                said.setdefault(name, f"a person's class has this name: there is no automatic one for model {model!r}")
        for name, text in said.items():
            if self._said.get(name) != text:
                _log.warning("automatic class", name=name, problem=text)
        self._said = said

    def _create(self, name: str, model: str) -> None:
        if name in self._kept:
            _log.warning("an automatic class was deleted while its cards are there; it is made anew", name=name)
        try:
            self._client.create(paths.resourceclasses(), automatic(name, model), timeout=_TIMEOUT)
        except errors.AlreadyExists:
            self._wait(name, _RETRY)  # somebody was first, as the watch will show
        except errors.KubeError as error:
            _log.warning("cannot make an automatic class", name=name, model=model, error=str(error))
            self._wait(name, _RETRY)
        else:
            _log.info("automatic class made", name=name, model=model)
            self._wait(name, _SHOWN)

    def _delete(self, name: str, seen: ClassSeen) -> None:
        # Whoever edits it meanwhile makes it theirs, and a class of this name that was made anew is another one.
        options = {"preconditions": {"uid": seen.uid, "resourceVersion": seen.version}}
        try:
            self._client.delete(paths.resourceclasses(name), options, timeout=_TIMEOUT)
        except (errors.NotFound, errors.Conflict):
            self._wait(name, 1.0)  # the watch is behind
        except errors.KubeError as error:
            _log.warning("cannot delete an automatic class", name=name, error=str(error))
            self._wait(name, _RETRY)
        else:
            _log.info("automatic class deleted: no card of its model is left", name=name, model=seen.auto_model)
            self._wait(name, _SHOWN)

    def _wait(self, name: str, seconds: float) -> None:
        self._not_before[name] = self._clock() + seconds
