"""Tolerations for the taints of nodes with cards, added to pods that request cards.

Nodes with cards often have a taint that keeps other pods away. Kubernetes' ExtendedResourceToleration adds tolerations
for taints whose key is a requested resource. It does not help here, because these taints have NVIDIA's resource names.
"""

import re
from collections.abc import Iterable
from typing import Final

from cardwise.core.values.decoded import Json
from cardwise.kube.pods.nodeconstraints import Taint, Toleration

_TAINT: Final = re.compile(r"(?P<key>[^=:\s]+)(=(?P<value>[^=:\s]*))?:(?P<effect>NoSchedule|NoExecute)")


def toleration_of_taint(text: str) -> Json:
    """The toleration of `KEY:EFFECT`, with any value, or of `KEY=VALUE:EFFECT`. Raises ValueError."""
    match = _TAINT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a taint; write KEY:EFFECT or KEY=VALUE:EFFECT, as nvidia.com/gpu:NoSchedule")
    key, taint_value, effect = match["key"], match["value"], match["effect"]
    matching = {"operator": "Exists"} if taint_value is None else {"operator": "Equal", "value": taint_value}
    return {"key": key, **matching, "effect": effect}


def add_tolerations(spec: Json, added: Iterable[Json]) -> Json:
    """The pod's spec with the `added` tolerations that it does not have yet."""
    own_tolerations = spec.get("tolerations") or []
    missing = [
        toleration for toleration in added if not any(_covers(existing, toleration) for existing in own_tolerations)
    ]
    return spec | {"tolerations": [*own_tolerations, *missing]} if missing else spec


def keep_added_tolerations(spec: Json, stored: Json, added: Iterable[Json]) -> Json:
    """The spec of an update, with the tolerations that `add_tolerations` added at creation, because Kubernetes forbids
    removing tolerations.
    """
    stored_tolerations = stored.get("tolerations") or ()
    return add_tolerations(spec, [toleration for toleration in added if toleration in stored_tolerations])


def _covers(existing: Json, added: Json) -> bool:
    matches_any = existing.get("operator") == "Exists" or added["operator"] == "Equal"
    return matches_any and Toleration.from_json(existing).tolerates(Taint.from_json(added))
