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
    `before`: those that the manifest of the stored object has.
    """

    places: Mapping[str, frozenset[str]]
    new: bool
    before: Mapping[str, frozenset[str]]


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
    manifest = _manifest(obj)
    if manifest is None:
        return None
    before = _manifest(old) if old else None
    new = old is None or _annotations(old).get(_LAST_APPLIED) != _annotations(obj).get(_LAST_APPLIED)
    return Applied(places(manifest), new, places(before) if before else {})


def rewrite(
    amounts: Mapping[str, Json],
    spell: Callable[[str, object], str],
    *,
    place: str,
    recorded: list[str],
    manifest: Applied | None,
    update: bool,
    several: bool = False,
) -> Place:
    """The lists of one place by the names that they stand for, without stale keys. Raises InvalidRequest, KubeError.

    `several`: the place may name many classes, as a quota does, so one that is brought replaces no other.
    """
    there = {name for listed in amounts.values() for name in listed}
    spelled = ((name, spell(name, amount)) for listed in amounts.values() for name, amount in listed.items())
    brought = frozenset(new for name, new in spelled if new != name)
    stale = frozenset[str]()
    if update:
        find = _stale_of_several if several else _stale
        stale = find(frozenset(recorded), place, manifest, brought) & there
    result: dict[str, Json] = {}
    origins: dict[str, str] = {}
    for field, listed in amounts.items():
        kept = {name: amount for name, amount in listed.items() if name not in stale}
        result[field], new = renamed(kept, field, spell)
        origins |= new
    left = {name for listed in result.values() for name in listed}
    ours = sorted({*(key for key in recorded if key in left and key not in stale), *origins})
    return Place(result, tuple(ours), origins, changed=bool(stale or origins))


def _stale(recorded: frozenset[str], place: str, manifest: Applied | None, brought: frozenset[str]) -> frozenset[str]:
    named = manifest.places.get(place) if manifest else None
    ours = recorded - (named or frozenset())
    if brought:
        return ours
    if manifest is None or not manifest.new or named is None:
        return frozenset()
    return frozenset(key for key in ours if named.isdisjoint(sources(key)))


def _stale_of_several(
    recorded: frozenset[str], place: str, manifest: Applied | None, brought: frozenset[str]
) -> frozenset[str]:
    """What is brought again, and what the manifest named and names no longer.

    Any other key may be there by a patch of its own: a limit that stays is safer than one that vanishes unseen.
    """
    if manifest is None:
        return recorded & brought
    named, before = (places.get(place, frozenset()) for places in (manifest.places, manifest.before))
    ours = recorded - named
    if not manifest.new:
        return ours & brought
    return ours & brought | {
        key for key in ours if named.isdisjoint(sources(key)) and before.intersection(sources(key))
    }


def _manifest(obj: Json) -> Json | None:
    """None where `kubectl apply` left none, or none that can be read."""
    text = _annotations(obj).get(_LAST_APPLIED)
    try:
        return _decode_object(text) if text else None
    except (msgspec.DecodeError, RecursionError):
        return None


def _annotations(obj: Json) -> Json:
    found: Json = (obj.get("metadata") or {}).get("annotations") or {}
    return found
