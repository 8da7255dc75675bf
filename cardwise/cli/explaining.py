"""`cardwise explain`: why a pod waits, or why it is where it is, in sentences and a table of cards."""

from collections.abc import Mapping
from typing import Any

from cardwise.cli import standing
from cardwise.core import assignment, explanation, names, policies, request
from cardwise.core.invalid import InvalidRequest
from cardwise.core.ledger import Holding
from cardwise.core.verdict import Refusal
from cardwise.kube.survey import Survey


def explain(pod: Mapping[str, Any], survey: Survey) -> str:
    """The whole text for one pod (decoded JSON) in the cluster as surveyed."""
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    where = f"pod {metadata['namespace']}/{metadata['name']}"
    node = spec.get("nodeName")
    if status.get("phase") in names.FINISHED_PHASES:
        why = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
        return f"{where} has ended ({status['phase']}) and holds nothing.\n" + (f"{why}\n" if why else "")
    try:
        asked = request.parse(pod)
    except InvalidRequest as error:
        # What runs has been judged at its creation; an annotation may have been changed since.
        return _placed(where, pod, node, survey) if node else f"{where} can never be placed: {error}\n"
    if asked is None:
        known = f"{', '.join(names.REQUESTED)}, or {names.CLASS_PREFIX} and the name of a class"
        return f"{where} asks for no GPU of Cardwise ({known}).\n"
    text = f"{where} asks for {_in_words(asked)}.\n"
    return text + (_placed("It", pod, node, survey) if node else _waiting(pod, asked, survey))


def _in_words(asked: request.PodRequest) -> str:
    parts = []
    for c in asked.containers:
        amount = f"{c.cards} whole card{'s' * (c.cards > 1)}" if c.whole else f"{c.mem} MiB"
        over = f" over {c.cards} cards" if c.cards > 1 and not c.whole else ""
        core = f" and {c.core} % of the SMs" if c.core else ""
        of_class = f" of class {c.device_class}" if c.device_class else ""
        parts.append(f"{amount}{over}{core}{of_class} (container {c.name})")
    return " + ".join(parts)


def _placed(who: str, pod: Mapping[str, Any], node: str, survey: Survey) -> str:
    annotations = pod["metadata"].get("annotations") or {}
    try:
        assigned = assignment.decode(annotations)
    except assignment.InvalidAssignment as error:
        return f"{who} is on node {node}, and its annotations cannot be read: {error}.\n"
    if assigned is None:
        return (
            f"{who} is on node {node} without an assignment: it was not bound by the Cardwise extender, so its "
            "containers do not start. Delete it, and check that kube-scheduler uses the extender.\n"
        )
    lines = [f"{who} is on node {node}:"]
    held = survey.ledger.holdings(node)
    for key, shares in assigned.containers.items():
        for share in shares:
            others = [h for h in held if h.uid != pod["metadata"]["uid"] and _touches(h, share.index)]
            beside = f", beside {', '.join(map(_name, others))}" if others else ", alone"
            part = f"{share.mem} of {share.total} MiB ({assignment.fraction(share.mem, share.total)})"
            lines.append(
                f"  container {key}: {part} of card {share.index} {share.uuid}{beside}{_state(survey, node, share)}"
            )
    granted = annotations.get(names.ASSIGNED) == "true"
    lines.append("The node has granted it." if granted else "The node has not granted it yet: its container is not up.")
    return "\n".join(lines) + "\n"


def _state(survey: Survey, node: str, share: assignment.CardShare) -> str:
    """What is wrong with the card, if anything."""
    state = survey.ledger.node(node)
    position = state.position(share) if state is not None else None
    if state is None or position is None:
        return "; this card is not on the node any more"
    return "" if state.cards[position].healthy else "; this card is unhealthy"


def _waiting(pod: Mapping[str, Any], asked: request.PodRequest, survey: Survey) -> str:
    policy = asked.policy or policies.DEFAULT
    namespace = pod["metadata"]["namespace"]
    rooms = [room for _, room in survey.rooms(namespace)]
    views = explanation.explain(survey.ledger, [n.name for n in survey.ledger.nodes()], asked, policy, rooms)
    lines = []
    conditions = (pod.get("status") or {}).get("conditions") or ()
    said = next((c.get("message") for c in conditions if c.get("type") == "PodScheduled" and c.get("message")), None)
    if said:
        lines.append(f"kube-scheduler says: {said}")
    if not views:
        lines.append("No node has a card that Cardwise shares: is the device plugin running?")
    lines += standing.types(asked, survey)
    lines += standing.quotas_in_the_way(asked, namespace, survey)
    fitting = [view.name for view in views if view.refusal is None]
    if fitting:
        lines.append(
            f"Cards that fit are free on {', '.join(fitting)} (best first, {policy}); if it still waits, look at its "
            "node selector, taints, cpu and memory, and whether kube-scheduler reaches the extender."
        )
    for view in views:
        if view.refusal is None:
            continue
        lines.append(f"  {view.name}: {view.refusal.text}")
        # Where no card is of the type, the cards say nothing more.
        lines += map(_card, view.cards if view.refusal is not Refusal.NO_SUCH_TYPE else ())
    return "\n".join(lines) + "\n"


_CLOSED = {"type": ", not of the class", "quota": ", closed by quota"}


def _card(card: explanation.CardView) -> str:
    sick = "" if card.healthy else ", unhealthy"
    short = f", {card.short} MiB short" if card.short else ""
    by = f", held by {', '.join(map(_name, card.holders))}" if card.holders else ""
    closed = _CLOSED.get(card.closed, "")
    return f"    card {card.index} {card.model}: {card.free} of {card.total} MiB free{closed}{short}{sick}{by}"


def _touches(holding: Holding, index: int) -> bool:
    return index in holding.assignment.indices()


def _name(holding: Holding) -> str:
    mem = f"{holding.namespace}/{holding.name} ({holding.assignment.mem} MiB)"
    return f"{mem} {holding.mark}" if holding.mark else mem
