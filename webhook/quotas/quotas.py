"""Rewrites ResourceQuotas and LimitRanges in the same way as the pods that they count.

Amounts of gpu-mem to MiB: Kubernetes adds up plain numbers, so `64Gi` would stand for 68,719,476,736 MiB and limit
nothing. And names of ours to those under which a ResourceQuota counts requests for them: of what has a domain it counts
`requests.…` only, and lets any other key stand there without a word.
"""

from collections.abc import Mapping
from typing import Any

from cardwise.core.api import names
from cardwise.core.values import quantity
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity
from webhook.pods.mutate import spelling
from webhook.templates import records
from webhook.templates.spellings import Vocabulary, counted, unknown_classes

Json = dict[str, Any]

_QUOTA_KEYS = (names.GPU_MEM, f"requests.{names.GPU_MEM}", f"limits.{names.GPU_MEM}")
_MARKERS = (names.PLACE_MARKER, names.BIND_MARKER)
_HARD = "spec.hard"
_GIVEN = ("default", "defaultRequest")
_RANGE_FIELDS = ("max", "min", *_GIVEN)  # maxLimitRequestRatio is no amount


def resource_quota(quota: Json, old: Json | None, vocabulary: Vocabulary, *, update: bool) -> tuple[Json, list[str]]:
    """The quota, and warnings. `old` is the stored one at an update. Raises InvalidRequest, KubeError."""
    spec = quota.get("spec") or {}
    hard = spec.get("hard")
    if not hard:
        return quota, []
    _refuse_markers(hard)
    record = records.read(quota).get("hard", [])
    place = records.rewrite(
        {_HARD: _amounts(hard, _HARD)},
        vocabulary.in_quota,
        place="hard",
        recorded=record,
        manifests=records.applied(quota, old, _named),
        update=update,
        several=True,
    )
    after = quota | {"spec": spec | {"hard": place.amounts[_HARD]}}
    if place.changed:
        after = records.written(after, {"hard": place.ours})
    warnings = unknown_classes(_HARD, place.written, vocabulary, "it counts nothing")
    return after, [*warnings, *_counting_otherwise(place.written), *_left_alone(quota, old, record)]


def limit_range(limits: Json) -> tuple[Json, list[str]]:
    """The LimitRange, and warnings. Raises InvalidRequest."""
    spec = limits.get("spec") or {}
    items = [
        item | {name: _amounts(item[name], f"spec.limits[{i}].{name}") for name in _RANGE_FIELDS if item.get(name)}
        for i, item in enumerate(spec.get("limits") or ())
    ]
    warnings = [
        f"spec.limits[{i}].{name}[{names.GPU_MEM}]: Kubernetes gives this to every container and init container of the "
        "namespace, also of pods that want no card or a whole one; an ordinary init container is refused with it. For "
        f"a default share, annotate the namespace with {names.DEFAULT_GPU_MEM} and label it "
        f"{names.DEFAULTS_LABEL}=enabled"
        for i, item in enumerate(items)
        for name in _GIVEN
        if names.GPU_MEM in (item.get(name) or {})
    ]
    return (limits | {"spec": spec | {"limits": items}} if items else limits), warnings


def _refuse_markers(hard: Json) -> None:
    for key in hard:
        if counted(key) in _MARKERS:
            known = (names.CLASS_PREFIX + "<class>", names.WHOLE_GPU, names.GPU_MEM)
            remedy = f"write one of {', '.join('requests.' + name for name in known)}"
            raise InvalidRequest(f"{_HARD}[{key}]", "is a mark that Cardwise sets on some pods for itself", remedy)


def _counting_otherwise(written: Mapping[str, str]) -> list[str]:
    """Warnings of keys that count less than they may seem to."""
    return [
        f"{_HARD}[{spelled}]: counts cards asked for as a whole, as {key}; a share counts none, also where it is split "
        f"over cards: limit those by requests.{names.GPU_MEM}, or by a GPUQuota"
        for key, spelled in written.items()
        if counted(spelled) == names.GPU_COUNT
    ]


def _left_alone(quota: Json, old: Json | None, record: list[str]) -> list[str]:
    """A warning where an update changes nothing: a patch that takes a bare name away comes here as one."""
    if old is None or not record or quota.get("spec") != old.get("spec") or _about(quota) != _about(old):
        return []
    stored = ", ".join(record)
    told = f"{_HARD}: nothing has changed; what was written by another name is stored as {stored}: take it away by that"
    return [told]


def _about(quota: Json) -> tuple[Json | None, Json | None]:
    metadata = quota.get("metadata") or {}
    return metadata.get("labels"), metadata.get("annotations")


def _named(manifest: Json) -> dict[str, frozenset[str]]:
    """The keys of a manifest, which is a text that anybody wrote."""
    spec = manifest.get("spec")
    hard = spec.get("hard") if isinstance(spec, dict) else None
    return {"hard": frozenset(hard if isinstance(hard, dict) else ())}


def _amounts(amounts: Json, path: str) -> Json:
    return amounts | {key: _amount(amounts[key], f"{path}[{key}]") for key in _QUOTA_KEYS if key in amounts}


def _amount(text: str | int, field: str) -> str:
    try:
        value, _ = quantity.parse(text)
        # Zero is no request, but a quota that allows none.
        return spelling(text, 0 if value == 0 else quantity.memory(text))
    except InvalidQuantity as error:
        raise InvalidRequest(field, error.problem, error.remedy) from error
