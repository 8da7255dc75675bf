"""ResourceQuota and LimitRange, rewritten like the pods that they count.

Amounts of gpu-mem to MiB: Kubernetes adds up plain numbers, so `64Gi` would stand for 68,719,476,736 MiB and limit
nothing. And names of classes and cards to those under which a ResourceQuota counts requests for them.
"""

from typing import Any

from cardwise.core import names, quantity
from cardwise.core.invalid import InvalidRequest
from cardwise.core.quantity import InvalidQuantity
from webhook import records
from webhook.mutate import spelling
from webhook.spellings import Vocabulary, unknown_classes

Json = dict[str, Any]

_QUOTA_KEYS = (names.GPU_MEM, f"requests.{names.GPU_MEM}", f"limits.{names.GPU_MEM}")
_HARD = "spec.hard"
_RANGE_FIELDS = ("max", "min", "default", "defaultRequest")  # maxLimitRequestRatio is no amount


def resource_quota(quota: Json, old: Json | None, vocabulary: Vocabulary, *, update: bool) -> tuple[Json, list[str]]:
    """The quota, and warnings. `old` is the stored one at an update. Raises InvalidRequest, KubeError."""
    spec = quota.get("spec") or {}
    hard = spec.get("hard")
    if not hard:
        return quota, []
    place = records.rewrite(
        {_HARD: _amounts(hard, _HARD)},
        vocabulary.in_quota,
        place="hard",
        recorded=records.read(quota).get("hard", []),
        manifest=records.applied(quota, old, _named),
        update=update,
        several=True,
    )
    after = quota | {"spec": spec | {"hard": place.amounts[_HARD]}}
    if place.changed:
        after = records.written(after, {"hard": place.ours})
    return after, unknown_classes(_HARD, place.written, vocabulary, "it counts nothing")


def limit_range(limits: Json) -> Json:
    """Raises InvalidRequest."""
    spec = limits.get("spec") or {}
    items = [
        item | {name: _amounts(item[name], f"spec.limits[{i}].{name}") for name in _RANGE_FIELDS if item.get(name)}
        for i, item in enumerate(spec.get("limits") or ())
    ]
    return limits | {"spec": spec | {"limits": items}} if items else limits


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
