"""A container's slot: what makes the node give the container its GPUs or devices.

With an extender it is the resource `names.SHARE`. With scheduler.mode=claims it is the container's entry in the pod's
ResourceClaim, and the pod has no resource of Cardwise's device plugin.
"""

from typing import Final

from cardwise.core.api import names
from cardwise.core.api.request import Container
from cardwise.core.values.decoded import Json

# Resources of Cardwise in limits and requests that users must not write.
INTERNAL_RESOURCES: Final = (names.SHARE, names.FILTER_CALL_RESOURCE, names.BIND_CALL_RESOURCE)


def add_slot(container: Container, resources: Json, *, by_claim: bool) -> Json:
    """The resources with the container's slot."""
    if by_claim:
        return set_claim_entry(container, resources, needed=True)
    return resources | {"limits": (resources.get("limits") or {}) | {names.SHARE: "1"}}


def set_claim_entry(container: Container, resources: Json, *, needed: bool) -> Json:
    """The resources with the container's own entry in the pod's claim, or without an entry."""
    present = resources.get("claims") or []
    own = [entry for entry in present if entry.get("name") == names.POD_CLAIM]
    # Without `request` the container would get the devices of all containers.
    wanted = [{"name": names.POD_CLAIM, "request": container.spec.get("name")}] if needed else []
    if own == wanted:
        return resources
    entries = [entry for entry in present if entry not in own] + wanted
    others = {field: content for field, content in resources.items() if field != "claims"}
    return others | ({"claims": entries} if entries else {})
