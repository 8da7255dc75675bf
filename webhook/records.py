"""Which keys of an object we wrote in place of bare names, so that a later edit drops the stale ones.

`kubectl apply` knows the bare name only: where a manifest changes from one class to another, it adds the new bare name
and leaves the key that we made of the old one. The record is the annotation `cardwise.dev/rewritten` of the object:
by *place* (a container's name, or `hard` of a ResourceQuota), the keys.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cardwise.core import names
from webhook.spellings import renamed, sources

Json = dict[str, Any]

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"

_decode_record = msgspec.json.Decoder(dict[str, list[str]]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class Applied:
    """The names that the manifest of `kubectl apply` has, by place.

    `new`: this update brings it. Else what it does not name has come in other ways since, and stays.
    """

    places: Mapping[str, frozenset[str]]
    new: bool


@dataclass(frozen=True, slots=True)
class Place:
    """One place after the rewriting: lists of amounts by their field, our keys, and of those written now the origin."""

    amounts: Mapping[str, Json]
    ours: tuple[str, ...]
    written: Mapping[str, str]
    changed: bool


def read(obj: Json) -> dict[str, list[str]]:
    """Empty where there is no record, or none that can be read."""
    text = _annotations(obj).get(names.REWRITTEN)
    try:
        return _decode_record(text) if text else {}
    except msgspec.DecodeError:
        return {}


def written(obj: Json, record: Mapping[str, tuple[str, ...]]) -> Json:
    """The object with this record."""
    kept = {key: value for key, value in _annotations(obj).items() if key != names.REWRITTEN}
    text = {place: list(keys) for place, keys in record.items() if keys}
    own = {names.REWRITTEN: json.dumps(text, sort_keys=True)} if text else {}
    return obj | {"metadata": (obj.get("metadata") or {}) | {"annotations": kept | own}}


def applied(obj: Json, old: Json | None, places: Callable[[Json], Mapping[str, frozenset[str]]]) -> Applied | None:
    """What `kubectl apply` last applied; None where it never did. `places` reads a manifest, which may be anything."""
    text = _annotations(obj).get(_LAST_APPLIED)
    if not text:
        return None
    try:
        manifest = _decode_object(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return Applied(places(manifest), new=old is None or _annotations(old).get(_LAST_APPLIED) != text)


def rewrite(
    amounts: Mapping[str, Json],
    spell: Callable[[str, object], str],
    *,
    place: str,
    recorded: list[str],
    manifest: Applied | None,
    update: bool,
) -> Place:
    """The lists of one place by the names that they stand for, without stale keys. Raises InvalidRequest, KubeError."""
    there = {name for listed in amounts.values() for name in listed}
    brought = any(spell(name, amount) != name for listed in amounts.values() for name, amount in listed.items())
    stale = _stale(frozenset(recorded), place, manifest, brought=brought) & there if update else frozenset()
    result: dict[str, Json] = {}
    origins: dict[str, str] = {}
    for field, listed in amounts.items():
        kept = {name: amount for name, amount in listed.items() if name not in stale}
        result[field], new = renamed(kept, field, spell)
        origins |= new
    left = {name for listed in result.values() for name in listed}
    ours = sorted({*(key for key in recorded if key in left and key not in stale), *origins})
    return Place(result, tuple(ours), origins, changed=bool(stale or origins))


def _stale(recorded: frozenset[str], place: str, manifest: Applied | None, *, brought: bool) -> frozenset[str]:
    named = manifest.places.get(place) if manifest else None
    by_user = recorded & named if named else frozenset[str]()
    if brought:
        return recorded - by_user
    if manifest is None or not manifest.new or named is None:
        return frozenset()
    return frozenset(key for key in recorded - by_user if named.isdisjoint(sources(key)))


def _annotations(obj: Json) -> Json:
    found: Json = (obj.get("metadata") or {}).get("annotations") or {}
    return found
