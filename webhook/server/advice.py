"""Warnings at creation for what Kubernetes accepts and what then does nothing: pods that wait for ever, annotations
that nobody reads, quotas that count nothing.

Never a refusal: a node, a scheduler or a class may come later.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import islice
from typing import Final

from cardwise.core.api import lookalikes, names, quotas, request
from cardwise.core.values import quantity, wording
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.core.values.quantity import Unit
from webhook.cluster.offers import Offers
from webhook.pods import defaults
from webhook.pods.mutate import DEFAULT_SCHEDULER
from webhook.quotas.gpuquotas import QuotaStanding
from webhook.templates import containers, records
from webhook.templates.spellings import counted, is_zero

QUEUE: Final = "kueue.x-k8s.io/queue-name"  # the label of workloads that Kueue starts
_MOST_TOLD: Final = 8  # names of resources that nobody offers
_FEW: Final = 4  # keys of a node selector in one warning
_MOST_COMPARED: Final = 16  # keys of an object: each is compared with all that there are
_RANGES: Final = ("max", "min", "default", "defaultRequest")  # of a LimitRange


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


def keys(pod: Json, schedulers: Collection[str]) -> tuple[str, ...]:
    """Annotations and labels of a pod that nobody reads: misspelled, or of another GPU sharer or gang scheduler.

    A pod for another scheduler may have them for that one. `schedulers` ask the extender.
    """
    scheduler = (pod.get("spec") or {}).get("schedulerName") or DEFAULT_SCHEDULER
    if schedulers and scheduler not in schedulers:
        return ()
    told = []
    for where, values in (("annotations", annotations_of(pod)), ("labels", labels_of(pod))):
        for key in _maybe_ours(values):
            field = f"metadata.{where}[{key}]"
            if near := lookalikes.pod_key(key, values[key]):
                told.append(f"{field}: Cardwise does not read it; did you mean {near}?")
            elif where == "labels" and key in names.USER_ANNOTATIONS:
                told.append(f"{field}: Cardwise reads it as an annotation only")
    return tuple(told[:_MOST_TOLD])


def namespace(obj: Json) -> tuple[str, ...]:
    """What a namespace says of defaults, and what has no effect so."""
    annotations, labels = annotations_of(obj), labels_of(obj)
    told: list[str] = []
    for where, values in (("annotations", annotations), ("labels", labels)):
        told += [
            f"metadata.{where}[{key}]: Cardwise does not read it; did you mean {near}?"
            for key in _maybe_ours(values)
            if (near := lookalikes.namespace_key(key, label=where == "labels"))
        ]
    opted_in = labels.get(names.DEFAULTS_LABEL)
    if opted_in not in (None, defaults.ENABLED, defaults.DISABLED):
        field = f"metadata.labels[{names.DEFAULTS_LABEL}]"
        told.append(f"{field}: {wording.quoted(opted_in)} gives no defaults; write {defaults.ENABLED}")
    elif opted_in is None:
        told += [
            f"metadata.annotations[{key}]: has no effect without the label {names.DEFAULTS_LABEL}={defaults.ENABLED}"
            for key in defaults.KEYS
            if key in annotations
        ]
    return tuple(told[:_MOST_TOLD])


def resource_quota(
    obj: Json, standings: Iterable[QuotaStanding], offers: Offers | None, known: Mapping[str, object]
) -> tuple[str, ...]:
    """What a ResourceQuota counts less of than it seems to. `standings` are the GPUQuotas of its namespace, `known` the
    classes.
    """
    hard = (obj.get("spec") or {}).get("hard") or {}
    rewritten = frozenset(records.read(obj).get("hard", ()))  # of these the author has been told
    ours = {key: amount for key, amount in hard.items() if key not in rewritten}
    told = [f"spec.hard[{key}]: {why}" for key, why in _uncounted(ours, offers, known)]
    missing = quotas.uncounted(hard)
    if missing == quotas.WHOLE_CARDS and not any(quotas.counts_instead(one.quota, missing) for one in standings):
        told.append(
            f"spec.hard[{quotas.SHARES}]: counts no whole cards: pods that ask for {names.GPU_COUNT} or a class get "
            f"past it; add {missing}, or a GPUQuota, unless another quota of the namespace counts them"
        )
    return tuple(told[:_MOST_TOLD])


def limit_range(obj: Json, offers: Offers | None, known: Mapping[str, object]) -> tuple[str, ...]:
    """Resources in a LimitRange that are those of no container. `known` are the classes."""
    items = (obj.get("spec") or {}).get("limits") or ()
    told = [
        f"spec.limits[{i}].{name}[{key}]: {why}"
        for i, item in enumerate(items)
        for name in _RANGES
        for key, why in _uncounted(item.get(name) or {}, offers, known, written=lambda near: near)
    ]
    return tuple(told[:_MOST_TOLD])


def _maybe_ours(values: Json) -> list[str]:
    return list(islice(filter(lookalikes.maybe_ours, sorted(values)), _MOST_COMPARED))


def _uncounted(
    amounts: Json,
    offers: Offers | None,
    known: Mapping[str, object],
    written: Callable[[str], str] = lambda near: f"requests.{near}",
) -> Iterator[tuple[str, str]]:
    """The keys about GPUs that mean nothing, each with why. `written`: how a key for a resource is spelled."""
    there = offers.resources() if offers is not None else None
    foreign = []
    for key in sorted(amounts):
        name = counted(key)
        if not lookalikes.like_a_gpu(name) or name in (*names.REQUESTED, *names.OWN_RESOURCES):
            continue
        if of_class := names.class_of(name):
            if of_class not in known:
                yield key, f"there is no ResourceClass {of_class} now; until there is, it counts nothing"
        elif there is not None and name not in there:
            foreign.append((key, name))
    for key, name in foreign[:_MOST_TOLD]:
        near = lookalikes.meant(name, (*sorted(there or ()), *known))
        if near:
            meant = written(near if "/" in near else f"{names.CLASS_PREFIX}{near}")
            yield key, f"no node offers it, so it counts nothing; did you mean {meant}?"
        elif not is_zero(amounts[key]):
            yield key, "no node offers it, so it counts nothing until one does"


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
