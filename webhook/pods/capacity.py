"""Whether the cards and devices of the cluster could ever serve what a pod requests.

Also warnings about GPU resources of other domains that no node offers: misspelled, or of another GPU sharer.
"""

from collections.abc import Collection, Sequence
from typing import Final

from cardwise.core.api import lookalikes, names
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.request import ContainerRequest, DeviceRequest, PodRequest
from cardwise.core.placement import fitting
from cardwise.core.values import wording
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from webhook.cluster.cards import CardSizes
from webhook.pods.context import Context, Lookups
from webhook.pods.pod import PodUnderReview, container_path
from webhook.pods.refusals import collect_warnings
from webhook.templates.containers import amount_lists
from webhook.templates.spellings import is_zero

_MIB_PER_GIB = 1024
_MAX_FOREIGN_WARNINGS: Final = 8


def validate(pod: PodUnderReview, context: Context) -> None:
    """Refuse a pod that fits on no node, also when the nodes are empty. Raises InvalidRequest, KubeError."""
    if (pod_request := pod.request) is None:
        return
    oversize, cluster = context.settings.oversize, context.cluster
    pod.warnings += collect_warnings(
        oversize, lambda: _check_cards(pod_request, cluster), "a node with such a GPU joins"
    )
    pod.warnings += collect_warnings(
        oversize, lambda: _check_devices(pod_request, cluster), "a node with such a device joins"
    )


def validate_offered_resources(pod: PodUnderReview, context: Context) -> None:
    """Warn about GPU resources of other domains that no node offers. Never a refusal: a node may offer them later."""
    offers = context.cluster.offers()
    if offers is None:
        return
    offered_names = offers.resources()
    known_names = (*sorted(offered_names), *context.cluster.classes())
    warnings: dict[str, str] = {}
    for container in pod.containers:
        for kind, amounts in amount_lists(container.spec.get("resources") or {}):
            for name, amount in amounts.items():
                if name in warnings or name in offered_names or _is_known_resource(name) or is_zero(amount):
                    continue
                if len(warnings) >= _MAX_FOREIGN_WARNINGS:  # each suggestion compares the name with all known names
                    break
                suggested_name = lookalikes.suggest_resource(name, known_names)
                remedy = f"did you mean {suggested_name}?" if suggested_name else "the pod waits until a node does"
                if lookalikes.is_of_other_vendor(name):
                    remedy = f"{remedy}; Cardwise shares NVIDIA GPUs only"
                warnings[name] = f"{container.path}.resources.{kind}[{name}]: no node offers it; {remedy}"
    pod.warnings += warnings.values()


def check_nodes(pod_request: PodRequest, cluster: Lookups, nodes: Collection[str] | None) -> tuple[str, ...]:
    """Warnings about requests that fit on none of the nodes which the pod's selector and affinity allow.

    Raises KubeError.
    """
    if not nodes:
        return ()
    try:
        warnings = [*_check_cards(pod_request, cluster, nodes), *_check_devices(pod_request, cluster, nodes)]
    except InvalidRequest as error:
        warnings = [f"{error.field}: {error.problem}"]
    limitation = f"spec.nodeSelector and spec.affinity allow only {wording.pluralize(len(nodes), 'node')} with GPUs"
    return tuple(f"{text.partition('; ')[0]}: {limitation}" for text in warnings)


def _check_cards(pod_request: PodRequest, cluster: Lookups, nodes: Collection[str] | None = None) -> list[str]:
    """Warnings about classes without cards. Raises InvalidRequest if no existing node could ever take the pod.

    nodes: checks only these nodes.
    """
    warnings = []
    by_class: dict[str, list[ContainerRequest]] = {}
    for container in pod_request.containers:
        by_class.setdefault(container.resource_class, []).append(container)
    for name, containers in by_class.items():
        resource_class = cluster.resource_class(name) if name else None
        cards = cluster.cards(resource_class, nodes)
        if resource_class is not None and not cards.largest:
            field = f"{container_path(containers[0].key)}.resources.limits[{names.CLASS_PREFIX}{name}]"
            warnings.append(
                f"{field}: no GPU of the class is in the cluster now; the pod waits until a node brings one"
            )
        _refuse_oversized_requests(PodRequest(containers=tuple(containers)), cards, resource_class)
        if cards.largest:
            _refuse_too_many_shares(containers, cluster.max_clients())
    if len(by_class) > 1:
        cards = cluster.cards(None, nodes)
        _refuse_too_many_cards(pod_request, cards, "")
        if not warnings:  # a class without cards may later get larger cards than the present ones
            _refuse_requests_that_exceed_cards_together(pod_request, cards, "")
    return warnings


def _check_devices(pod_request: PodRequest, cluster: Lookups, nodes: Collection[str] | None = None) -> list[str]:
    """Warnings about device classes without devices; refuses a pod that requests more devices than any node has. All
    devices of a pod are on one node.
    """
    warnings = []
    by_class: dict[str, list[DeviceRequest]] = {}
    for device in pod_request.devices:
        by_class.setdefault(device.resource_class, []).append(device)
    for name, requests in by_class.items():
        available = cluster.cards(cluster.resource_class(name), nodes).max_cards
        count = sum(device.count for device in requests)
        field = f"{container_path(requests[0].key)}.resources.limits[{names.CLASS_PREFIX}{name}]"
        if not available:
            warnings.append(
                f"{field}: no device of the class is in the cluster now; the pod waits until a node brings one"
            )
        elif count > available:
            together_phrase = " together with the pod's other containers" if len(requests) > 1 else ""
            raise InvalidRequest(
                field,
                f"{count} devices of class {name}{together_phrase} are more than any node has ({available})",
                f"request at most {available}",
            )
    return warnings


def _refuse_oversized_requests(requested: PodRequest, cards: CardSizes, resource_class: ResourceClass | None) -> None:
    """Check that the requests of one class fit its cards. Raises InvalidRequest.

    requested: the pod's requests of the class.
    cards: the cards of the class; without a class, all cards.
    """
    if not cards.largest:
        return  # no card is known yet: the pod may wait for one
    class_phrase = f" of class {resource_class.name}" if resource_class else ""
    for container in requested.containers:
        if 1 < container.cards <= cards.max_cards and container.mem_per_card > (
            largest := cards.largest_for(container.cards)
        ):
            raise InvalidRequest(
                f"{container_path(container.key)}.resources.limits[{names.GPU_MEM}]",
                f"{_describe_mib(container.mem_per_card)} on each of {container.cards} GPUs{class_phrase} is more "
                "than any node has "
                f"({largest})",
                f"request at most {container.cards * largest}Mi{_unit_suffix(container)}",
            )
    if requested.largest_share > cards.largest:
        too_large = [
            container
            for container in requested.containers
            if not container.whole and container.mem_per_card > cards.largest
        ]
        shares = [container for container in requested.containers if not container.whole and container.cards == 1]
        culprit = too_large[0] if too_large else shares[0]
        together_phrase = " together with the pod's other containers" if not too_large and len(shares) > 1 else ""
        key, remedy = _suggest_smaller(culprit, cards, resource_class)
        raise InvalidRequest(
            f"{container_path(culprit.key)}.resources.limits[{key}]",
            f"{_describe_mib(requested.largest_share)}{together_phrase} is more than the largest GPU{class_phrase} "
            f"has ({cards.largest})",
            remedy,
        )
    _refuse_too_many_cards(requested, cards, class_phrase)
    _refuse_requests_that_exceed_cards_together(requested, cards, class_phrase)


def _suggest_smaller(
    culprit: ContainerRequest, cards: CardSizes, resource_class: ResourceClass | None
) -> tuple[str, str]:
    """The resource that is too large, as users write it, and what to write instead."""
    share_mib = resource_class.share.memory if resource_class and resource_class.share else 0
    if not share_mib or culprit.mem % share_mib:
        can_split = any(n * cards.largest_for(n) >= culprit.mem for n in range(2, cards.max_cards + 1))
        split_hint = f", or split it over GPUs with {names.GPU_COUNT}" if can_split else ""
        return names.GPU_MEM, f"request at most {cards.largest}Mi{split_hint}{_unit_suffix(culprit)}"
    count, key = cards.largest // share_mib, names.CLASS_PREFIX + culprit.resource_class
    if not count:
        return key, f"one of the class is {share_mib} MiB: add {names.GPU_MEM} with at most {cards.largest}Mi"
    return key, f"request at most {count}, because one of the class is {share_mib} MiB"


def _describe_mib(amount: MiB) -> str:
    """The amount in MiB, and also in GiB if the user may have written GiB: in some namespaces, numbers without a unit
    mean GiB.
    """
    is_whole_gib = amount >= _MIB_PER_GIB and amount % _MIB_PER_GIB == 0
    return f"{amount} MiB" + (f" ({amount // _MIB_PER_GIB} GiB)" if is_whole_gib else "")


def _unit_suffix(container: ContainerRequest) -> str:
    """The hint for 8M, which is also how the API server stores 8000000."""
    return "; a number without Mi or Gi, such as 8M, means MiB, not bytes" if container.mem % 1000**2 == 0 else ""


def _refuse_too_many_shares(containers: Sequence[ContainerRequest], max_clients: int) -> None:
    """Check that one card can take the shares of all containers that share it. Raises InvalidRequest.

    containers: the containers that request cards of one class.
    max_clients: the maximum number of shares that any card takes; 0 if it is unknown.
    """
    shares = [container for container in containers if not container.whole and container.cards == 1]
    if max_clients and len(shares) > max_clients:
        key = names.CLASS_PREFIX + shares[0].resource_class if shares[0].resource_class else names.GPU_MEM
        raise InvalidRequest(
            f"{container_path(shares[max_clients].key)}.resources.limits[{key}]",
            f"{len(shares)} containers of the pod share one GPU, more than any GPU serves at once ({max_clients})",
            "move some of the containers into separate pods",
        )


def _refuse_too_many_cards(pod_request: PodRequest, cards: CardSizes, class_phrase: str) -> None:
    if not cards.max_cards:
        return
    whole_requests = [c for c in pod_request.containers if c.whole]
    for container, count in (
        *((c, c.cards) for c in pod_request.containers if not c.whole),
        *((c, sum(w.cards for w in whole_requests)) for c in whole_requests[:1]),
    ):
        if count > cards.max_cards:
            # The name of the resource that users write; cardwise.dev/gpu is only used internally.
            key = names.CLASS_PREFIX + container.resource_class if container.resource_class else names.GPU_COUNT
            raise InvalidRequest(
                f"{container_path(container.key)}.resources.limits[{key}]",
                f"{count} GPUs{class_phrase} are more than any node has ({cards.max_cards})",
                f"request at most {cards.max_cards}",
            )


def _refuse_requests_that_exceed_cards_together(pod_request: PodRequest, cards: CardSizes, class_phrase: str) -> None:
    """Check that the pod's requests fit together, even if each fits alone: counts the cards that they cannot share.
    Raises InvalidRequest as `_refuse_oversized_requests` does.
    """
    if not cards.largest or len(pod_request.containers) < 2:
        return
    card_requests = fitting.card_requests(pod_request)
    shares = [card_request for card_request in card_requests if not card_request.whole]
    widest = max((card_request.cards for card_request in shares), default=0)
    filled = -(-sum(card_request.cards * card_request.mem for card_request in shares) // cards.largest)
    separate = sum(
        card_request.cards for card_request in shares if 2 * card_request.mem > cards.largest
    )  # no card can hold two of these shares
    needed = sum(card_request.cards for card_request in card_requests if card_request.whole) + max(
        widest, filled, separate
    )
    if needed > cards.max_cards:
        largest = max(pod_request.containers, key=lambda container: container.cards)
        count_key = names.GPU_MEM if largest.cards == 1 and not largest.whole else names.GPU_COUNT
        key = names.CLASS_PREFIX + largest.resource_class if largest.resource_class else count_key
        raise InvalidRequest(
            f"{container_path(largest.key)}.resources.limits[{key}]",
            f"the pod's containers need at least {needed} GPUs{class_phrase} together, more than any node has "
            f"({cards.max_cards})",
            "request fewer or smaller shares, or move some containers into other pods",
        )


def _is_known_resource(name: str) -> bool:
    """Whether a resource name has a meaning even if no node offers it."""
    return not lookalikes.is_like_gpu(name) or name in names.REQUESTED or name.startswith(names.CLASS_PREFIX)
