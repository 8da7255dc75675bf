"""The taints of nodes that pods with cards tolerate, whatever their authors know of them.

Nodes with cards often have a taint that keeps all other pods away. Kubernetes' ExtendedResourceToleration lets pods in
by the name of the resource that they ask for, which is NVIDIA's on such a taint and never ours.
"""

import re
from collections.abc import Iterable
from typing import Final

from cardwise.core.values.decoded import Json
from cardwise.kube.pods.nodeconstraints import Taint, Toleration

_TAINT: Final = re.compile(r"(?P<key>[^=:\s]+)(=(?P<value>[^=:\s]*))?:(?P<effect>NoSchedule|NoExecute)")


def of_taint(text: str) -> Json:
    """The toleration of `KEY:EFFECT`, with any value, or of `KEY=VALUE:EFFECT`. Raises ValueError."""
    found = _TAINT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no taint; write KEY:EFFECT or KEY=VALUE:EFFECT, as nvidia.com/gpu:NoSchedule")
    key, value, effect = found["key"], found["value"], found["effect"]
    how = {"operator": "Exists"} if value is None else {"operator": "Equal", "value": value}
    return {"key": key, **how, "effect": effect}


def with_all(spec: Json, wanted: Iterable[Json]) -> Json:
    """The pod's spec with those of `wanted` that no toleration of its own makes needless."""
    own = spec.get("tolerations") or []
    lacking = [one for one in wanted if not any(_covers(each, one) for each in own)]
    return spec | {"tolerations": [*own, *lacking]} if lacking else spec


def kept(spec: Json, stored: Json, wanted: Iterable[Json]) -> Json:
    """The spec of an update with what `with_all` had added: Kubernetes lets nobody take a toleration away."""
    had = stored.get("tolerations") or ()
    return with_all(spec, [one for one in wanted if one in had])


def _covers(own: Json, wanted: Json) -> bool:
    each = own.get("operator") == "Exists" or wanted["operator"] == "Equal"
    return each and Toleration.of(own).tolerates(Taint.of(wanted))
