"""Validates pods: what can never run, or would go past sharing, is refused with the field and the remedy.

The last word on a pod: other webhooks may have changed it after ours. Rules that need no knowledge of the cluster are
ValidatingAdmissionPolicies of the chart, so that they hold while nobody serves this.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from cardwise.core.api import classes, lookalikes, names, request
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.request import ContainerRequest, DeviceRequest, PodRequest
from cardwise.core.placement import fitting
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from webhook.pods import devices
from webhook.pods.mutate import INTERNAL
from webhook.pods.order import added_later

Oversize = Literal["refuse", "wait"]

_SCHEDULER_PLACES = "a pod that requests a GPU share must be placed by the scheduler"
_KNOWN = (*names.REQUESTED, *INTERNAL)
_GIB = 1024  # MiB
_SHOWN = 10  # of the classes that there are, in a refusal


@dataclass(frozen=True, slots=True)
class CardSizes:
    """The largest and the smallest card, as much as is given away of them, and the most cards of one node; 0 while no
    card is known. Of devices, only how many.

    `each`: what one node has on each of one card, of two, and so on; empty where only the largest is known.
    """

    largest: MiB = MiB(0)
    most: int = 0
    smallest: MiB = MiB(0)
    each: tuple[MiB, ...] = ()

    def on_each(self, count: int) -> MiB:
        """The most MiB that some node has on each of so many cards, of which no node has fewer than `most`."""
        return self.each[count - 1] if self.each else self.largest


class CardCatalog(Protocol):
    """The cards and their classes; as `decisions.View`."""

    def cards(self, resource_class: ResourceClass | None = None, nodes: Collection[str] | None = None) -> CardSizes: ...

    def classes(self) -> Mapping[str, ResourceClass]: ...

    def resource_class(self, name: str) -> ResourceClass | None: ...


def pod(obj: Json, inventory: CardCatalog, oversize: Oversize) -> tuple[PodRequest | None, tuple[str, ...]]:
    """What the pod asks for, and warnings for the user. Raises InvalidRequest, KubeError."""
    _refuse_unknown(obj, inventory)
    devices.check_noted(obj, inventory.resource_class)
    try:
        asked = request.parse_mutated(obj)
    except request.NotRewritten as error:
        raise added_later(error.field) from error
    if asked is None:
        _refuse_unwritten(obj)
        return None, ()
    if (obj.get("spec") or {}).get("nodeName"):
        remedy = "use spec.nodeSelector or spec.affinity.nodeAffinity instead"
        raise InvalidRequest("spec.nodeName", _SCHEDULER_PLACES, remedy)
    cards = or_waits(oversize, lambda: _fits_by_class(asked, inventory), "such a card comes")
    return asked, (*cards, *or_waits(oversize, lambda: _devices_fit(asked, inventory), "such a device comes"))


def or_waits(oversize: Oversize, check: Callable[[], Iterable[str]], until: str) -> tuple[str, ...]:
    """The warnings of a check of what no node has now; where such pods wait, also of what it refuses, and until when.
    Raises InvalidRequest.
    """
    try:
        return tuple(check())
    except InvalidRequest as error:
        if oversize == "refuse":
            raise
        return (f"{error.field}: {error.problem}; the pod waits until {until}",)


def kept_to(asked: PodRequest, inventory: CardCatalog, nodes: Collection[str] | None) -> tuple[str, ...]:
    """Warnings of what none of these nodes has, which the pod's selector and affinity leave; others may have it.

    Raises KubeError.
    """
    if not nodes:
        return ()
    try:
        found = [*_fits_by_class(asked, inventory, nodes), *_devices_fit(asked, inventory, nodes)]
    except InvalidRequest as error:
        found = [f"{error.field}: {error.problem}"]
    where = f"by spec.nodeSelector and spec.affinity the pod keeps to {wording.count(len(nodes), 'node')} with cards"
    return tuple(f"{text.partition('; ')[0]}: {where}" for text in found)


def small(asked: PodRequest, inventory: CardCatalog, least: int) -> tuple[str, ...]:
    """Warnings of shares below `least` MiB of a card, which hardly any program can use: often the unit is missing.

    Raises KubeError.
    """
    found = []
    for c in asked.containers:
        known = inventory.resource_class(c.resource_class) if c.resource_class else None
        of_class = known is not None and known.share is not None and not c.mem % known.share.memory
        if c.whole or c.mem_per_card >= least or of_class:  # what one of a class is, its author has thought about
            continue
        fits = c.mem_per_card * _GIB <= inventory.cards(known).largest
        meant = f"did you mean {c.mem}Gi?" if fits else f"write at least {least * c.cards}Mi"
        problem = f"{c.mem} is {c.mem} MiB, less than most programs need to start on a card ({least})"
        found.append(f"{_path(c.key)}.resources.limits[{names.GPU_MEM}]: {problem}; {meant}")
    return tuple(found)


def binding(obj: Json) -> None:
    """`obj` is the pod that somebody other than the extender binds. Raises InvalidRequest."""
    try:
        asks = request.parse(obj) is not None
    except InvalidRequest:
        asks = True
    if asks:
        raise InvalidRequest(
            "target",
            "only the Cardwise extender binds pods that ask for a share of a card",
            "let kube-scheduler with the Cardwise extender place the pod",
        )


def _refuse_unwritten(obj: Json) -> None:
    """Raises InvalidRequest where a pod that asks for nothing has what the mutating webhook rewrites, or takes out."""
    if annotations_of(obj).get(names.CLASS):
        raise added_later(f"metadata.annotations[{names.CLASS}]")
    of_member = (names.PLACE_MARKER, names.BIND_MARKER) if labels_of(obj).get(names.GANG) else ()
    for container in request.containers(obj):
        for name in (container.spec.get("resources") or {}).get("limits") or ():
            if name in INTERNAL and name not in of_member:
                raise added_later(f"{container.path}.resources.limits[{name}]")


def _refuse_unknown(obj: Json, inventory: CardCatalog) -> None:
    annotated = annotations_of(obj).get(names.CLASS)
    for container in request.containers(obj):
        resources = container.spec.get("resources") or {}
        for kind in ("limits", "requests"):
            for name in resources.get(kind) or ():
                if not name.startswith(names.CLASS_PREFIX) or name in _KNOWN:
                    continue
                asked = names.class_of(name)
                field = f"{container.path}.resources.{kind}[{name}]"
                _check_class(asked, f"metadata.annotations[{names.CLASS}]" if asked == annotated else field, inventory)


def _check_class(name: str, field: str, inventory: CardCatalog) -> None:
    classes.check_name(name, field)
    if inventory.resource_class(name) is not None:
        return
    known = inventory.classes()
    near = lookalikes.meant(names.CLASS_PREFIX + name, known)
    if near in names.REQUESTED:
        raise InvalidRequest(field, f"there is no ResourceClass {name}", f"did you mean {near}?")
    likely = difflib.get_close_matches(name, known, n=_SHOWN, cutoff=0.0)
    more = f" or one of {len(known) - len(likely)} more" if len(known) > len(likely) else ""
    any_card = f"{names.GPU_MEM} (such as 8Gi) or {names.WHOLE_GPU} (whole cards) for any card"
    raise InvalidRequest(
        field,
        f"there is no ResourceClass {name}",
        f"write {', '.join(likely)}{more} (kubectl get resourceclass), or ask for {any_card}"
        if likely
        else f"there are none yet (kubectl get resourceclass); ask for {any_card}",
    )


def _fits_by_class(asked: PodRequest, inventory: CardCatalog, nodes: Collection[str] | None = None) -> list[str]:
    """Warnings of classes that have no card. `nodes`: on these only. Raises InvalidRequest where no node there is could
    ever take the pod.
    """
    warnings = []
    by_class: dict[str, list[ContainerRequest]] = {}
    for container in asked.containers:
        by_class.setdefault(container.resource_class, []).append(container)
    for name, containers in by_class.items():
        known = inventory.resource_class(name) if name else None
        cards = inventory.cards(known, nodes)
        if known is not None and not cards.largest:
            field = f"{_path(containers[0].key)}.resources.limits[{names.CLASS_PREFIX}{name}]"
            warnings.append(f"{field}: no card is of the class now; the pod waits until one comes")
        _fits(PodRequest(containers=tuple(containers)), cards, known)
    if len(by_class) > 1:
        cards = inventory.cards(None, nodes)
        _check_count(asked, cards, "")
        if not warnings:  # cards of a class that has none yet may be larger than any
            _check_together(asked, cards, "")
    return warnings


def _devices_fit(asked: PodRequest, inventory: CardCatalog, nodes: Collection[str] | None = None) -> list[str]:
    """As `_fits_by_class`, for the devices: all of a pod are of one node."""
    warnings = []
    by_class: dict[str, list[DeviceRequest]] = {}
    for one in asked.devices:
        by_class.setdefault(one.resource_class, []).append(one)
    for name, wanted in by_class.items():
        most = inventory.cards(inventory.resource_class(name), nodes).most
        count = sum(one.count for one in wanted)
        field = f"{_path(wanted[0].key)}.resources.limits[{names.CLASS_PREFIX}{name}]"
        if not most:
            warnings.append(f"{field}: no device is of the class now; the pod waits until one comes")
        elif count > most:
            together = " together with the pod's other containers" if len(wanted) > 1 else ""
            raise InvalidRequest(
                field,
                f"{count} devices of class {name}{together} are more than any node has ({most})",
                f"ask for at most {most}",
            )
    return warnings


def _fits(asked: PodRequest, cards: CardSizes, resource_class: ResourceClass | None) -> None:
    """`asked` is what a pod asks of one class, `cards` are the cards of that class; or of none, and all cards."""
    if not cards.largest:
        return  # nothing is known yet, or there are no cards: the pod may wait for them
    of_class = f" of class {resource_class.name}" if resource_class else ""
    for c in asked.containers:
        if 1 < c.cards <= cards.most and c.mem_per_card > (there := cards.on_each(c.cards)):
            raise InvalidRequest(
                f"{_path(c.key)}.resources.limits[{names.GPU_MEM}]",
                f"{_mib(c.mem_per_card)} on each of {c.cards} cards{of_class} is more than any node has ({there})",
                f"ask for at most {c.cards * there}Mi{_unit(c)}",
            )
    if asked.largest_share > cards.largest:
        culprits = [c for c in asked.containers if not c.whole and c.mem_per_card > cards.largest]
        sharing = [c for c in asked.containers if not c.whole and c.cards == 1]
        culprit = culprits[0] if culprits else sharing[0]
        together = " together with the pod's other containers" if not culprits and len(sharing) > 1 else ""
        key, remedy = _smaller(culprit, cards, resource_class)
        raise InvalidRequest(
            f"{_path(culprit.key)}.resources.limits[{key}]",
            f"{_mib(asked.largest_share)}{together} is more than the largest card{of_class} has ({cards.largest})",
            remedy,
        )
    _check_count(asked, cards, of_class)
    _check_together(asked, cards, of_class)


def _smaller(culprit: ContainerRequest, cards: CardSizes, resource_class: ResourceClass | None) -> tuple[str, str]:
    """The resource that is too large, as users write it, and what to write instead."""
    each = resource_class.share.memory if resource_class and resource_class.share else 0
    if not each or culprit.mem % each:
        splits = any(n * cards.on_each(n) >= culprit.mem for n in range(2, cards.most + 1))
        over = f", or split it over cards with {names.GPU_COUNT}" if splits else ""
        return names.GPU_MEM, f"ask for at most {cards.largest}Mi{over}{_unit(culprit)}"
    count, key = cards.largest // each, names.CLASS_PREFIX + culprit.resource_class
    if not count:
        return key, f"one of the class is {each} MiB: ask for {names.GPU_MEM} as well, at most {cards.largest}Mi"
    return key, f"ask for at most {count}, since one of the class is {each} MiB"


def _mib(amount: MiB) -> str:
    """The amount in MiB, and in GiB where it was perhaps written so: bare numbers of some namespaces count GiB."""
    whole = amount >= _GIB and amount % _GIB == 0
    return f"{amount} MiB" + (f" ({amount // _GIB} GiB)" if whole else "")


def _unit(asked: ContainerRequest) -> str:
    """What to tell of 8M, which is what the API server makes of 8000000 too."""
    return "; an amount without Mi or Gi, as 8M, counts no bytes" if asked.mem % 1000**2 == 0 else ""


def _check_count(asked: PodRequest, cards: CardSizes, of_class: str) -> None:
    if not cards.most:
        return
    whole = [c for c in asked.containers if c.whole]
    for container, wanted in (
        *((c, c.cards) for c in asked.containers if not c.whole),
        *((c, sum(w.cards for w in whole)) for c in whole[:1]),
    ):
        if wanted > cards.most:
            # As users write it; cardwise.dev/gpu is our own spelling of it.
            key = names.CLASS_PREFIX + container.resource_class if container.resource_class else names.GPU_COUNT
            raise InvalidRequest(
                f"{_path(container.key)}.resources.limits[{key}]",
                f"{wanted} cards{of_class} are more than any node has ({cards.most})",
                f"ask for at most {cards.most}",
            )


def _check_together(asked: PodRequest, cards: CardSizes, of_class: str) -> None:
    """As `_fits`, where each request alone would fit: what they need together, by what they surely cannot share."""
    if not cards.largest or len(asked.containers) < 2:
        return
    claims = fitting.claims(asked)
    shares = [claim for claim in claims if not claim.whole]
    widest = max((claim.cards for claim in shares), default=0)
    filled = -(-sum(claim.cards * claim.mem for claim in shares) // cards.largest)
    apart = sum(claim.cards for claim in shares if 2 * claim.mem > cards.largest)  # no two of them on one card
    needed = sum(claim.cards for claim in claims if claim.whole) + max(widest, filled, apart)
    if needed > cards.most:
        most = max(asked.containers, key=lambda container: container.cards)
        of_many = names.GPU_MEM if most.cards == 1 and not most.whole else names.GPU_COUNT
        key = names.CLASS_PREFIX + most.resource_class if most.resource_class else of_many
        raise InvalidRequest(
            f"{_path(most.key)}.resources.limits[{key}]",
            f"the pod's containers need at least {needed} cards{of_class} together, more than any node has "
            f"({cards.most})",
            "ask for fewer or smaller shares, or put some of the containers into pods of their own",
        )


def _path(key: str) -> str:
    return f"spec.initContainers[{key.removeprefix('init-')}]" if key.startswith("init-") else f"spec.containers[{key}]"
