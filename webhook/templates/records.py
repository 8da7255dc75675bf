"""Records the keys that the webhook wrote in place of bare names. After a later edit, the webhook uses the record to
remove stale keys.

`kubectl apply` knows only the bare name. If a manifest changes from one class to another, `kubectl apply` adds the new
bare name, and keeps the key that the webhook wrote for the former class. Server-side apply does the same, and records
each manifest's names in metadata.managedFields, with the bare name, although the stored object never had it. The record
is the annotation `cardwise.dev/rewritten`: the keys by *place* (a container's name, or `hard` of a ResourceQuota).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cardwise.core.api import names
from cardwise.core.values.decoded import Json, annotations_of, with_annotations
from webhook.templates.spellings import possible_spellings, rename_keys

Names = Mapping[str, frozenset[str]]
"""The names that a manifest has, by place."""

_LAST_APPLIED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"
_APPLY_OPERATION = "Apply"  # the operation of server-side apply in managedFields

_decode_record = msgspec.json.Decoder(dict[str, frozenset[str]]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any], float_hook=float).decode  # floats are parsed as in `review`


@dataclass(frozen=True, slots=True)
class AppliedNames:
    """The names in the manifest that is applied now, and in the manifest that was applied before."""

    now: Names
    before: Names

    def dropped_keys(self, place: str, keys: frozenset[str]) -> frozenset[str]:
        """The webhook's keys that the manifest named before, in any spelling, and no longer names."""
        now, before = (names_of.get(place, frozenset()) for names_of in (self.now, self.before))
        return frozenset(key for key in keys if possible_spellings(key) & before and not possible_spellings(key) & now)


NO_MANIFEST: Final = AppliedNames({}, {})


@dataclass(frozen=True, slots=True)
class AppliedManifests:
    """The names in the applied manifests: in the manifest of `kubectl apply` (None if there is none), and in the
    manifests of server-side apply.

    new: whether the object is created, or this update changes the manifest of `kubectl apply`. If not, keys outside the
        manifest were set in another way, such as by `kubectl edit`, and stay.
    """

    client: AppliedNames | None = None
    new: bool = False
    server: AppliedNames = NO_MANIFEST


@dataclass(frozen=True, slots=True)
class RewrittenPlace:
    """One place after rewriting: its lists of amounts by field, the webhook's keys, and the user's spelling of each key
    that was rewritten now.
    """

    amounts: Mapping[str, Json]
    own_keys: tuple[str, ...]
    written_names: Mapping[str, str]
    changed: bool


def read_record(manifest: Json) -> dict[str, frozenset[str]]:
    """The record of an object: the webhook's keys by place; empty without one, or if it cannot be read."""
    text = annotations_of(manifest).get(names.REWRITTEN)
    try:
        return _decode_record(text) if text else {}
    except msgspec.DecodeError:
        return {}


def with_record(manifest: Json, record: Mapping[str, tuple[str, ...]]) -> Json:
    """The object with this record."""
    other_annotations = {key: text for key, text in annotations_of(manifest).items() if key != names.REWRITTEN}
    encoded = {place: list(keys) for place, keys in record.items() if keys}
    annotation = {names.REWRITTEN: json.dumps(encoded, sort_keys=True)} if encoded else {}
    return with_annotations(manifest, other_annotations | annotation)


def read_manifests(workload: Json, old: Json | None, places: Callable[[Json], Names]) -> AppliedManifests:
    """The manifests of an object.

    old: the stored object at an update.
    places: reads the names of a manifest, which may be any text.
    """
    manifest, before = _last_applied_manifest(workload), _last_applied_manifest(old) if old else None
    return AppliedManifests(
        client=None if manifest is None else AppliedNames(places(manifest), places(before) if before else {}),
        new=old is None
        or annotations_of(old).get(_LAST_APPLIED_ANNOTATION) != annotations_of(workload).get(_LAST_APPLIED_ANNOTATION),
        server=_server_side_applied_names(workload, old, places),
    )


def rewrite_place(
    amounts: Mapping[str, Json],
    translate: Callable[[str, object], str],
    *,
    place: str,
    recorded: frozenset[str],
    manifests: AppliedManifests,
    update: bool,
    many_classes: bool = False,
) -> RewrittenPlace:
    """The lists of one place with stored names, without stale keys. Raises InvalidRequest, KubeError.

    recorded: the webhook's keys of this place in the record, which may be any text of a user.
    many_classes: whether the place may name many classes, as a quota does. A new class then replaces no other.
    """
    present_names = {name for place_amounts in amounts.values() for name in place_amounts}
    recorded = recorded & present_names  # first: several containers may have one name, and a long record
    translations = (
        (name, translate(name, amount)) for place_amounts in amounts.values() for name, amount in place_amounts.items()
    )
    new_keys = frozenset(new_origins for name, new_origins in translations if new_origins != name)
    stale_keys = frozenset[str]()
    if update:
        find_stale = _stale_keys_of_many_classes if many_classes else _stale_keys
        stale_keys = find_stale(recorded, place, manifests, new_keys)
    rewritten: dict[str, Json] = {}
    origins: dict[str, str] = {}
    for field, place_amounts in amounts.items():
        current_amounts = {name: amount for name, amount in place_amounts.items() if name not in stale_keys}
        rewritten[field], new_origins = rename_keys(current_amounts, field, translate)
        origins |= new_origins
    remaining_names = {name for place_amounts in rewritten.values() for name in place_amounts}
    own_keys = sorted({*((recorded & remaining_names) - stale_keys), *origins})
    return RewrittenPlace(rewritten, tuple(own_keys), origins, changed=bool(stale_keys or origins))


def _stale_keys(
    recorded: frozenset[str], place: str, manifests: AppliedManifests, new_keys: frozenset[str]
) -> frozenset[str]:
    client = manifests.client
    managed_names = client.now.get(place) if client else None
    dropped, unmanaged_keys = manifests.server.dropped_keys(place, recorded), recorded - (managed_names or frozenset())
    if new_keys:
        return dropped | unmanaged_keys
    if not manifests.new or managed_names is None:
        return dropped
    return dropped | {key for key in unmanaged_keys if managed_names.isdisjoint(possible_spellings(key))}


def _stale_keys_of_many_classes(
    recorded: frozenset[str], place: str, manifests: AppliedManifests, new_keys: frozenset[str]
) -> frozenset[str]:
    """The stale keys of a place with many classes: keys that are added again, and keys that a manifest no longer names.

    Any other key may come from a patch, and stays: a limit that is kept is safer than a limit that vanishes unnoticed.
    """
    client, dropped = manifests.client, manifests.server.dropped_keys(place, recorded)
    if client is None:
        return dropped | (recorded & new_keys)
    unmanaged_keys = recorded - client.now.get(place, frozenset())
    return (
        dropped
        | (unmanaged_keys & new_keys)
        | (client.dropped_keys(place, unmanaged_keys) if manifests.new else frozenset())
    )


def _server_side_applied_names(manifest: Json, old: Json | None, places: Callable[[Json], Names]) -> AppliedNames:
    """The names of server-side apply; empty without it. If an update removes all managedFields, all names stay."""
    applied_fields = _applied_fields(manifest)
    if not applied_fields or not old:
        return NO_MANIFEST
    return AppliedNames(_merge_names(map(places, applied_fields)), _merge_names(map(places, _applied_fields(old))))


def _applied_fields(manifest: Json) -> list[Json]:
    """The fields of each server-side apply, as a manifest without values."""
    managed = (manifest.get("metadata") or {}).get("managedFields") or ()
    try:
        unfolded = [
            _unfold_managed_fields(fields.get("fieldsV1") or {})
            for fields in managed
            if fields.get("operation") == _APPLY_OPERATION
        ]
    except (msgspec.DecodeError, RecursionError):
        return []
    return [fields for fields in unfolded if isinstance(fields, dict)]


def _unfold_managed_fields(fields: Json) -> Json | list[Json]:
    """Decode fieldsV1: `f:name` is a field, `k:{"name":"main"}` the element of a list with these values."""
    inner = {name: _unfold_managed_fields(content) for name, content in fields.items() if isinstance(content, dict)}
    elements = [
        (content if isinstance(content, dict) else {}) | _decode_object(name.removeprefix("k:"))
        for name, content in inner.items()
        if name.startswith("k:")
    ]
    return elements or {name.removeprefix("f:"): content for name, content in inner.items() if name.startswith("f:")}


def _merge_names(name_sets: Iterable[Names]) -> Names:
    union: dict[str, set[str]] = {}
    for names_by_place in name_sets:
        for place, names_of_place in names_by_place.items():
            union.setdefault(place, set()).update(names_of_place)
    return {place: frozenset(names_of_place) for place, names_of_place in union.items()}


def _last_applied_manifest(manifest: Json) -> Json | None:
    """The manifest of `kubectl apply`; None without one, or if it cannot be read."""
    text = annotations_of(manifest).get(_LAST_APPLIED_ANNOTATION)
    try:
        return _decode_object(text) if text else None
    except (msgspec.DecodeError, RecursionError):
        return None
