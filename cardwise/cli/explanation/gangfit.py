"""Whether a gang that waits could ever start: its members on empty cards, and in its namespace's quotas."""

from collections.abc import Sequence
from typing import Final

from cardwise.cli.explanation.holdups import Around
from cardwise.core.api import quotas
from cardwise.core.api.quotas import NOTHING
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import fitting
from cardwise.core.preemption import explanation
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.kube.survey import Survey

_MEMBERS: Final = 32  # members that are placed for it: more take seconds on a big cluster
_FEW_NODES: Final = 3  # with one refusal, named in one line


def obstacles(
    pod: Json, asked: PodRequest, survey: Survey, *, nodes: Sequence[str], policy: str, around: Around
) -> list[str]:
    """What keeps the gang of a pod from starting whoever ends; empty where that is nothing, or cards are held for it.

    nodes: those with cards that the pod may be on.
    """
    if not around.partners or around.is_planned:
        return []
    namespace = pod["metadata"]["namespace"]
    members = {pod["metadata"]["name"]: asked, **around.partners}
    needed = around.needed or len(members)
    lines = _quotas(namespace, members, survey) if needed >= len(members) else []
    names = list(members)[:_MEMBERS]
    every = [node.name for node in survey.ledger.nodes()]
    allowed = [
        nodes if i == 0 else [node for node in every if node in around.reach.get(name, every)]
        for i, name in enumerate(names)
    ]
    kept = {one.uid for one in survey.ledger.holdings() if one.namespace == namespace and one.name in around.bound}
    requests = [members[name] for name in names]
    count, first = explanation.place_on_empty(survey.ledger, requests, allowed, policy, kept=kept)
    if first is None or count >= min(needed, len(names)):
        return lines
    nodes_by_text: dict[str, list[str]] = {}
    for node, refusal in first.refusals.items():
        nodes_by_text.setdefault(refusal.text, []).append(node)
    why = "; ".join(f"{wording.few(some, _FEW_NODES, 'node')}: {text}" for text, some in nodes_by_text.items())
    why = why or "it may be on no node with cards"
    name = names[first.index]
    if first.alone:
        lines.append(f"Its gang cannot start: member {name} finds no place even if every card is empty ({why}).")
    else:
        lines.append(
            f"Its gang does not fit together even if every card is empty: placed one after another, {count} of its "
            f"{len(names)} waiting members find a place, and {needed} have to; {name} finds none ({why})."
        )
    return lines


def _quotas(namespace: str, members: dict[str, PodRequest], survey: Survey) -> list[str]:
    """The entries of GPUQuotas whose hard amounts the members exceed together, as far as their claims are of one entry.

    Of whole cards nobody knows the MiB.
    """
    lines = []
    claims = [claim for asked in members.values() for claim in fitting.claims(asked)]
    for quota, left in survey.headroom(namespace):
        entry = left.entry
        of_all = not (entry.resource_class or entry.model)
        counted = [claim for claim in claims if of_all or claim.resource_class == entry.resource_class != ""]
        charge = quotas.total(claim.charge(claim.cards, 0) for claim in counted)
        lines += [
            f"Its gang cannot start: its {len(members)} waiting members ask for {limit.asked} {limit.unit} of "
            f"{quotas.title(entry)} together, and GPUQuota {quota.name} allows {limit.hard}."
            for limit in quotas.exceeded(entry, NOTHING, charge)
        ]
    return lines
