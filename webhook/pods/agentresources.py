"""The cpu and memory of the share agent: the pod keeps its QoS class, and no LimitRange or quota refuses it.

The table is in docs/design/0007-share-agent.md. The agent has an amount only if all containers that run beside it have
this amount. Ordinary init containers are ignored, because they have ended when the other containers run; a
HorizontalPodAutoscaler ignores them, too.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import InvalidQuantity
from webhook.cluster.limitranges import COUNTED_RESOURCES, Amount, Bounds

ResourceAmounts = Mapping[str, Amount]
ResourceFields = dict[str, dict[str, str]]

_KINDS: Final = ("requests", "limits")


def agent_resources(
    spec: Json,
    present_agent: Json,
    running_containers: Sequence[Json],
    default_amounts: ResourceAmounts,
    bounds: Bounds,
) -> ResourceFields:
    """The requests and limits of the agent by field.

    present_agent: the present agent; empty without one.
    running_containers: the pod's other containers and sidecars, without ordinary init containers.
    """
    if spec.get("resources"):
        # The pod has pod-level resources. Amounts of the agent then come from a LimitRange, and stay.
        existing = {kind: (present_agent.get("resources") or {}).get(kind) or {} for kind in _KINDS}
        return {
            kind: {name: str(text) for name, text in existing[kind].items() if name in COUNTED_RESOURCES}
            for kind in _KINDS
        }
    resources: ResourceFields = {kind: {} for kind in _KINDS}
    for kind in _KINDS:
        for name in COUNTED_RESOURCES:
            amounts = [_read_amount(container, kind, name) for container in running_containers]
            if all(amount is not None for amount in amounts):
                # If all amounts are 0, the agent's amount is 0, too: a request above 0 would change the QoS class.
                requests_nothing = not any(amounts)
                resources[kind][name] = (
                    "0" if requests_nothing else _raise_to_minimum(name, default_amounts, bounds).text
                )
    return resources


def misfit_reason(app_containers: Sequence[Json], agent: Json, init: Sequence[Json], bounds: Bounds) -> str:
    """Why a LimitRange would refuse the pod with the agent; "" if none does.

    Kubernetes writes the defaults of LimitRanges into the agent after the webhook has added it, and then calls the
    webhook again. They count from the first call, so that the second call has the same result.

    app_containers: the pod's containers.
    init: the pod's init containers, including the agent.
    """
    stored_agent = _with_defaults(agent, bounds)
    stored_init = [stored_agent if container is agent else container for container in init]
    for name, maximum in bounds.maximum.items():
        if any((_read_amount(stored_agent, kind, name) or 0) > maximum.number for kind in _KINDS):
            return f"a LimitRange allows a container {maximum.text} of {name} at most"
    for name, maximum in bounds.pod_maximum.items():
        for kind in _KINDS:
            agent_amount = _read_amount(stored_agent, kind, name)
            if agent_amount and _sum_amounts(app_containers, stored_init, kind, name) > maximum.number:
                return f"a LimitRange allows a pod {maximum.text} of {name} at most"
    return ""


def _with_defaults(container: Json, bounds: Bounds) -> Json:
    """The container with the defaults of LimitRanges for amounts that it does not set."""
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    default_limits = {name: amount.text for name, amount in bounds.default_limits.items()}
    # A limit that the container sets is also its request.
    default_requests = {name: amount.text for name, amount in bounds.default_requests.items() if name not in limits}
    return container | {"resources": {"limits": default_limits | limits, "requests": default_requests | requests}}


def _raise_to_minimum(name: str, default_amounts: ResourceAmounts, bounds: Bounds) -> Amount:
    minimum = bounds.minimum.get(name)
    return minimum if minimum is not None and minimum.number > default_amounts[name].number else default_amounts[name]


def _read_amount(container: Json, kind: str, name: str) -> Fraction | None:
    """The amount; None if the container sets none. If only the limit is set, it is also the request."""
    resources = container.get("resources") or {}
    amounts = resources.get(kind) or {}
    text = amounts.get(name)
    if text is None and kind == "requests":
        text = (resources.get("limits") or {}).get(name)
    try:
        return None if text is None else quantity.parse(text)[0]
    except InvalidQuantity:
        return None  # Kubernetes refuses the pod


def _sum_amounts(app_containers: Sequence[Json], init: Sequence[Json], kind: str, name: str) -> Fraction:
    """The pod's amount as LimitRanges count it: the larger of the sum of all containers and sidecars, and the maximum
    of each init container plus the sidecars before it.
    """
    sidecars, largest = Fraction(0), Fraction(0)
    for container in init:
        amount = _read_amount(container, kind, name) or Fraction(0)
        if container.get("restartPolicy") == "Always":
            sidecars += amount
            largest = max(largest, sidecars)
        else:
            largest = max(largest, sidecars + amount)
    running_total = sum(
        (_read_amount(container, kind, name) or Fraction(0) for container in app_containers),
        sidecars,
    )
    return max(running_total, largest)
