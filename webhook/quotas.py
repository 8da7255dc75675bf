"""Amounts of gpu-mem in a ResourceQuota or LimitRange, rewritten to MiB like those of pods.

Kubernetes adds up plain numbers: `64Gi` would stand for 68,719,476,736 MiB and limit nothing.
"""

from typing import Any

from cardwise.core import names, quantity
from cardwise.core.quantity import InvalidQuantity
from cardwise.core.request import InvalidRequest
from webhook.mutate import spelling

Json = dict[str, Any]

_QUOTA_KEYS = (names.GPU_MEM, f"requests.{names.GPU_MEM}", f"limits.{names.GPU_MEM}")
_RANGE_FIELDS = ("max", "min", "default", "defaultRequest")  # maxLimitRequestRatio is no amount


def resource_quota(quota: Json) -> Json:
    """Raises InvalidRequest."""
    spec = quota.get("spec") or {}
    hard = spec.get("hard")
    if not hard:
        return quota
    return quota | {"spec": spec | {"hard": _amounts(hard, "spec.hard")}}


def limit_range(limits: Json) -> Json:
    """Raises InvalidRequest."""
    spec = limits.get("spec") or {}
    items = [
        item | {name: _amounts(item[name], f"spec.limits[{i}].{name}") for name in _RANGE_FIELDS if item.get(name)}
        for i, item in enumerate(spec.get("limits") or ())
    ]
    return limits | {"spec": spec | {"limits": items}} if items else limits


def _amounts(amounts: Json, path: str) -> Json:
    return amounts | {key: _amount(amounts[key], f"{path}[{key}]") for key in _QUOTA_KEYS if key in amounts}


def _amount(text: str | int, field: str) -> str:
    try:
        value, _ = quantity.parse(text)
        # Zero is no request, but a quota that allows none.
        return spelling(text, 0 if value == 0 else quantity.memory(text))
    except InvalidQuantity as error:
        raise InvalidRequest(field, error.problem, error.remedy) from error
