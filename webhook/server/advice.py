"""Warnings at creation for pods that Kubernetes accepts and that would then wait for ever.

Never a refusal: a node, a scheduler or a class may come later.
"""

from collections.abc import Collection, Iterable
from fractions import Fraction
from typing import Final

from cardwise.core.api import lookalikes, names, request
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import Unit
from webhook.cluster.offers import Offers
from webhook.pods.mutate import DEFAULT_SCHEDULER
from webhook.templates import containers
from webhook.templates.spellings import is_zero

QUEUE: Final = "kueue.x-k8s.io/queue-name"  # the label of workloads that Kueue starts
_MOST_TOLD: Final = 8  # names of resources that nobody offers
_FEW: Final = 4  # keys of a node selector in one warning


def foreign_names(pod: Json, offers: Offers, classes: Iterable[str]) -> tuple[str, ...]:
    """Resources of other domains, about GPUs, that no node offers: misspelled, or of another GPU sharer."""
    there = offers.resources()
    told: dict[str, str] = {}
    for container in request.containers(pod):
        for kind, amounts in containers.lists(container.spec.get("resources") or {}):
            for name, amount in amounts.items():
                if name in told or name in there or _is_known(name) or is_zero(amount):
                    continue
                if len(told) >= _MOST_TOLD:  # each is compared with all that there are
                    return tuple(told.values())
                near = lookalikes.meant(name, (*sorted(there), *classes))
                remedy = f"did you mean {near}?" if near else "the pod waits until one does"
                if lookalikes.of_other_vendor(name):
                    remedy = f"{remedy}; Cardwise shares NVIDIA GPUs only"
                told[name] = f"{container.path}.resources.{kind}[{name}]: no node offers it; {remedy}"
    return tuple(told.values())


def placing(
    pod: Json, schedulers: Collection[str], offers: Offers | None, left: Collection[str] | None
) -> tuple[str, ...]:
    """Warnings about a pod that asks for cards: its scheduler, its gates, its nodes. `schedulers` ask the extender.
    `left`: as `Offers.left`.
    """
    spec = pod.get("spec") or {}
    found = []
    scheduler = spec.get("schedulerName") or DEFAULT_SCHEDULER
    if schedulers and scheduler not in schedulers:
        asking = DEFAULT_SCHEDULER if DEFAULT_SCHEDULER in schedulers else min(schedulers)
        found.append(
            f"spec.schedulerName: {scheduler} does not ask Cardwise, so the pod gets no card and waits; leave it out, "
            f"or write {asking}"
        )
    found += [
        f"spec.schedulingGates[{gate['name']}]: the pod waits until this gate is taken away{_by_whom(gate['name'])}"
        for gate in spec.get("schedulingGates") or ()
        if gate.get("name") not in (None, "", names.GANG)
    ]
    if offers is not None and (unmatched := offers.unmatched(spec.get("nodeSelector") or {})):
        shown = ", ".join(unmatched[:_FEW])
        found.append(f"spec.nodeSelector: no node with cards has {shown} now; the pod waits until one does")
    elif left is not None and not left:
        field = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
        found.append(f"{field}: no node with cards meets it now; the pod waits until one does")
    return tuple(found)


def of_kueue(template: Json, unit: Unit) -> tuple[str, ...]:
    """Warnings about a template whose workload waits in a queue of Kueue. Kueue adds up the numbers that are written
    there and knows no units, so it can only count bare numbers of one `unit`.
    """
    found = []
    for container in request.containers(template):
        for kind, amounts in containers.lists(container.spec.get("resources") or {}):
            amount = str(amounts.get(names.GPU_MEM, ""))
            try:
                counted = quantity.parse(amount)[0]
                meant = Fraction(quantity.memory(quantity.with_unit(amount, unit)), unit.mib)
            except quantity.InvalidQuantity:
                continue  # told by who judges it
            if counted != meant:
                where = f"{container.path}.resources.{kind}[{names.GPU_MEM}]"
                whole = meant.denominator == 1
                remedy = f"{meant}, which is the same in {unit}" if whole else f"whole {unit}"
                found.append(f"{where}: Kueue counts {counted} of {amount}; write {remedy}")
    return tuple(found)


def _by_whom(gate: str) -> str:
    return ", by Kueue" if gate.startswith("kueue.x-k8s.io/") else ""


def _is_known(name: str) -> bool:
    """Whether the name is none that only a node can give a meaning."""
    return not lookalikes.like_a_gpu(name) or name in names.REQUESTED or name.startswith(names.CLASS_PREFIX)
