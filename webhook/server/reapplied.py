"""Admission of a pod that is applied again: the manifest has the user's spellings, but the stored pod has the rewritten
ones.

Kubernetes forbids changes of a pod's requests, and treats another spelling as a change. So if the request in the
manifest means the stored amount, it is replaced by the stored spelling. The meaning of a spelling is derived only from
the stored pod, because classes may have changed since its creation.
"""

from collections.abc import Sequence
from functools import cache, partial

from cardwise.core.api import names, request
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity, Unit
from webhook.pods import scheduling
from webhook.templates import containers
from webhook.templates.spellings import is_equal


def restore_stored_names(pod: Json, stored: Json, unit: Unit, tolerated: Sequence[Json]) -> Json:
    """The update of a pod with stored spellings; the caller's object if nothing changes. Raises InvalidRequest.

    tolerated: tolerations for pods with cards.

    Only containers with a slot are changed; Kubernetes validates the rest.
    """
    read_split_counts = cache(partial(request.read_counts, annotations_of(stored)))
    stored_containers = {container.key: container for container in request.containers(stored)}
    spec, has_share = dict(pod.get("spec") or {}), False
    for container in request.containers(pod):
        stored_container = stored_containers.get(container.key)
        stored_resources = dict((stored_container.spec if stored_container is not None else {}).get("resources") or {})
        if stored_container is None or not request.has_slot(stored_container):
            continue
        has_share = True
        resources = dict(container.spec.get("resources") or {})
        for kind, amounts in containers.amount_lists(resources):
            field = f"{container.path}.resources.{kind}"
            card_count = str(request.split_cards(stored_container, read_split_counts))
            resources[kind] = _restore_amounts(amounts, stored_resources.get(kind) or {}, card_count, field, unit)
        containers.put_resources(spec, container, resources)
    if has_share:
        spec = scheduling.keep_added_tolerations(spec, stored.get("spec") or {}, tolerated)
    return pod if spec == pod.get("spec") else pod | {"spec": spec}


def _restore_amounts(amounts: Json, stored: Json, card_count: str, field: str, unit: Unit) -> Json:
    """The amounts of one list, by the names that the stored pod has. `card_count`: the number of cards of a split
    share.
    """
    restored: Json = {}
    for name, amount in amounts.items():
        key = _stored_name(name, stored)
        is_split_count = key == names.GPU_COUNT and names.GPU_MEM in stored
        stored_amount = card_count if is_split_count else stored.get(key)
        is_own = key in names.REQUESTED or names.class_of(key)
        if not is_own or stored_amount is None or (name in stored and str(amount) == str(stored_amount)):
            restored[name] = amount
        elif not _is_equal(key, amount, stored_amount, unit):
            raise InvalidRequest(
                f"{field}[{name}]",
                f"{amount} is not what the pod was created with ({stored_amount}), and the request of a pod cannot "
                "be changed",
                "delete the pod and create it again",
            )
        elif key in stored:
            restored[key] = stored_amount
    return restored


def _stored_name(name: str, stored: Json) -> str:
    """The stored name of the resource that a manifest names `name`."""
    if name in stored:
        return name
    if name in (names.GPU_COUNT, names.NVIDIA_GPU) and names.WHOLE_GPU in stored:
        return names.WHOLE_GPU
    return name if "/" in name else names.CLASS_PREFIX + name


def _is_equal(key: str, amount: object, stored: object, unit: Unit) -> bool:
    if key != names.GPU_MEM:
        return is_equal(amount, stored)
    try:
        return quantity.parse_mib(quantity.with_unit(str(amount), unit)) == quantity.parse_mib(str(stored))
    except InvalidQuantity:
        return False
