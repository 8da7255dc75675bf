"""Sentences of `explain` about a waiting pod's types, and about the quotas that stand in its way."""

from collections.abc import Mapping

from cardwise.core.api import quotas
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import fitting, inventory
from cardwise.core.preemption import explanation
from cardwise.core.values import wording
from cardwise.kube.survey import Survey

_FEW = 10  # nodes named in one line


def types(asked: PodRequest, survey: Survey) -> list[str]:
    """A line for each class that the pod names: which cards or devices are in it."""
    named = dict.fromkeys(c.device_class for c in asked.containers if c.device_class)
    of_devices = dict.fromkeys(one.device_class for one in asked.devices)
    return [_unknown(name, survey) or _of_class(name, survey) for name in named] + [
        _unknown(name, survey) or _of_devices(name, survey) for name in of_devices
    ]


def _unknown(name: str, survey: Survey) -> str:
    """Why there is nothing to say of the class; "" where it can be read."""
    if not survey.missing(name):
        return ""
    known = ", ".join(sorted(survey.classes)) or "none"
    broken = next((text for text in survey.problems if text.startswith(f"ResourceClass {name}: ")), None)
    return broken or f"There is no ResourceClass {name}; those there are: {known}."


def _of_class(name: str, survey: Survey) -> str:
    nodes = {node.name: [card for card in node.cards if name in card.classes] for node in survey.ledger.nodes()}
    cards = [card for of_node in nodes.values() for card in of_node]
    if not cards:
        return f"No card is of class {name}: see its selector with `kubectl get resourceclass {name} -o yaml`."
    shown = _listed({node: len(of_node) for node, of_node in nodes.items()})
    sick = sum(not card.healthy for card in cards)
    return f"Of class {name}: {len(cards)} card{'s' * (len(cards) > 1)} on {shown}" + (
        f", {sick} of them unhealthy." if sick else "."
    )


def _of_devices(name: str, survey: Survey) -> str:
    """Which devices are of the class and where some are free."""
    nodes = {node: [device for device in node.devices if name in device.classes] for node in survey.ledger.nodes()}
    devices = [device for of_node in nodes.values() for device in of_node]
    if not devices:
        return f"No device is of class {name}: see its selector with `kubectl get resourceclass {name} -o yaml`."
    there = {node.name: len(of_node) for node, of_node in nodes.items()}
    free = {node.name: sum(inventory.is_free(node, one) for one in of_node) for node, of_node in nodes.items()}
    sick = sum(not device.healthy for device in devices)
    return (
        f"Of class {name}: {wording.count(len(devices), 'device')} on {_listed(there)}"
        + (f", {sick} of them unhealthy" if sick else "")
        + f"; free: {_listed(free) or 'none'}."
    )


def _listed(counts: Mapping[str, int]) -> str:
    """Nodes with a number each, without those that have none."""
    on = [f"{node} ({count})" for node, count in counts.items() if count]
    return wording.few(on, _FEW, "node")


def quotas_in_the_way(asked: PodRequest, namespace: str, survey: Survey) -> list[str]:
    """The entries of GPUQuotas that close cards to the pod, each with what is hard, used and asked."""
    lines = []
    claims = fitting.claims(asked)
    for quota, left in survey.headroom(namespace):
        found = explanation.exceeding(claims, left, survey.ledger)
        if found is None:
            continue
        charge, everywhere = found
        used = survey.ledger.used(namespace, left.entry)
        full = ", ".join(
            f"{one.used} of {one.hard} {one.unit} used, {one.asked} asked"
            for one in quotas.exceeded(left.entry, used, charge)
        )
        steer = "" if everywhere else "; cards that it does not limit are open"
        lines.append(f"GPUQuota {quota.name} closes {quotas.title(left.entry)}: {full}{steer}.")
    return lines
