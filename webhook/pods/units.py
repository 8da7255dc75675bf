"""Adds the namespace's unit to gpu-mem numbers without a unit: `2` becomes `2Gi`.

Runs before the request is read; later code does not need the unit. The stored number is in MiB, so scheduler, kubelet,
quotas and all components of Cardwise read the same number. Two kinds of numbers without a unit are in MiB already and
stay: numbers in a container with a share slot, which the webhook has rewritten before (in a second call, a copy of a
running pod, or a template made from a pod); and numbers that Kubernetes took from a LimitRange, whose amounts are
stored in MiB.
"""

import re
from typing import Final

from cardwise.core.api import names
from cardwise.core.api.request import Container
from cardwise.core.values import quantity
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity, Unit
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview, container_path
from webhook.templates import containers

# In MiB. A CUDA context alone takes about this much; a smaller share often lacks its unit (8 for 8Gi).
MIN_SHARE_MIB: Final = 256
_PREFIX: Final = "LimitRanger plugin set: "
# kubernetes plugin/pkg/admission/limitranger/admission.go: "cpu, example.com/x limit for init container main".
_LIMIT_RANGE_ENTRY: Final = re.compile(r"(.+) (request|limit) for (init )?container (\S+)")


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Add the unit to each number without a unit. Raises InvalidRequest.

    A number above the largest sum of MiB of one node's cards was meant in MiB, and is refused.
    """
    unit = context.settings.unit
    if unit is Unit.MIB:
        return
    from_limit_range = _entries_of_limit_range(pod.annotations.get(names.LIMIT_RANGER, ""))
    for i, container in enumerate(pod.containers):
        resources = dict(container.spec.get("resources") or {})
        if str((resources.get("limits") or {}).get(names.SHARE)) == "1":
            continue
        for kind, amounts in containers.amount_lists(resources):
            if (
                names.GPU_MEM in amounts
                and (_container_kind(container), container.spec.get("name"), kind) not in from_limit_range
            ):
                field = f"{container.path}.resources.{kind}[{names.GPU_MEM}]"
                text = amounts[names.GPU_MEM]
                resources[kind] = amounts | {names.GPU_MEM: add_unit(text, unit, field)}
                if resources[kind][names.GPU_MEM] != str(text):
                    _refuse_beyond_node(text, unit, _largest_node_mib(context), field)
        pod.put_resources(i, resources)


def validate(pod: PodUnderReview, context: Context) -> None:
    """Warn about shares below the minimum of the settings, too small for most programs: often the unit is missing.

    Raises KubeError.
    """
    min_mib, cluster = context.settings.min_share, context.cluster
    for key, card in pod.cards.items():
        resource_class = cluster.resource_class(card.resource_class) if card.resource_class else None
        is_class_share = (
            resource_class is not None
            and resource_class.share is not None
            and not card.mem % resource_class.share.memory
        )
        if (
            card.whole or card.mem_per_card >= min_mib or is_class_share
        ):  # a class's author chose the size of its unit on purpose
            continue
        fits = card.mem_per_card * Unit.GIB.mib <= cluster.cards(resource_class).largest
        advice = f"did you mean {card.mem}Gi?" if fits else f"write at least {min_mib * card.cards}Mi"
        problem = f"{card.mem} means {card.mem} MiB, less than most programs need to start on a GPU ({min_mib} MiB)"
        pod.warnings.append(f"{container_path(key)}.resources.limits[{names.GPU_MEM}]: {problem}; {advice}")


def add_unit(text: str | int, unit: Unit, field: str) -> str:
    """One amount with its unit. Raises InvalidRequest."""
    try:
        return quantity.with_unit(text, unit)
    except InvalidQuantity as error:
        raise InvalidRequest(field, error.problem, error.remedy) from error


def _largest_node_mib(context: Context) -> int:
    """The largest sum of MiB of one node's cards; 0 if unknown, or if larger requests may wait for a node."""
    cards = context.cluster.cards()
    return cards.largest * cards.max_cards if context.settings.oversize == "refuse" else 0


def _refuse_beyond_node(text: str | int, unit: Unit, largest_node: int, field: str) -> None:
    """Refuse a number that, with the unit, is more than any node has. Raises InvalidRequest.

    largest_node: MiB; 0 if unknown.
    """
    number, _ = quantity.parse(text)
    if largest_node and number * unit.mib > largest_node:
        raise InvalidRequest(
            field,
            f"{text} means {unit} in this namespace ({names.GPU_MEM_UNIT}, or webhook.gpuMemUnit of the chart): "
            f"{int(number * unit.mib)} MiB, more than all GPUs of any node have ({largest_node})",
            f"write {int(number)}Mi where MiB are meant",
        )


def _container_kind(container: Container) -> str:
    return "init" if container.key.startswith("init-") else ""


def _entries_of_limit_range(annotation: str) -> set[tuple[str, str, str]]:
    """The entries of gpu-mem that Kubernetes took from a LimitRange: kind and name of the container, and the list."""
    lists = set()
    for sentence in annotation.removeprefix(_PREFIX).split("; ") if annotation.startswith(_PREFIX) else ():
        match = _LIMIT_RANGE_ENTRY.fullmatch(sentence)
        if match and names.GPU_MEM in match[1].split(", "):
            lists.add(((match[3] or "").strip(), match[4], f"{match[2]}s"))
    return lists
