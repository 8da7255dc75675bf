"""Checks of Cardwise's own parts, by what they have written into the cluster."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from cardwise.cli.doctor.facts import Facts, time, written
from cardwise.cli.doctor.finding import Finding, Level
from cardwise.core.api import names

Json = Mapping[str, Any]

_INSTALL: Final = "install the chart: helm install cardwise helm/cardwise -n cardwise-system --create-namespace"
_LEASE_SECONDS: Final = 15.0  # of a Lease that does not tell
_USABLE: Final = ("Ready", "Off")
_OF_OURS: Final = f".{names.GROUP}"  # how names of our policies end


def definitions(facts: Facts) -> Iterator[Finding]:
    """The kinds of `cardwise.dev`."""
    missing = sorted(facts.absent & {"cards", "classes"})
    if missing:
        yield Finding("installation", Level.PROBLEM, "the kinds of cardwise.dev are not installed", _INSTALL)
    elif "cards" not in facts.unread:
        yield Finding("installation", Level.OK, f"the kinds of {names.API_VERSION} are installed")


def webhooks(facts: Facts) -> Iterator[Finding]:
    """Both configurations, with the CA that the webhook puts in once it has run."""
    if facts.unread.keys() & {"mutating", "validating"}:
        return
    for kind, found in (("Mutating", facts.mutating), ("Validating", facts.validating)):
        ours = next((one for one in found if one["metadata"]["name"] == names.WEBHOOK_CONFIGURATION), None)
        what = f"{kind}WebhookConfiguration {names.WEBHOOK_CONFIGURATION}"
        if ours is None:
            yield Finding("webhook", Level.PROBLEM, f"there is no {what}", _INSTALL)
        elif not all(hook["clientConfig"].get("caBundle") for hook in ours.get("webhooks") or ()):
            remedy = "start the webhook, or look in its log why it may not patch the configuration"
            yield Finding("webhook", Level.PROBLEM, f"{what} has no CA: the webhook has never run", remedy)


def policies(facts: Facts) -> Iterator[Finding]:
    """The rules that hold also while the webhook is down."""
    if "policies" in facts.unread:
        return
    ours = sum(one["metadata"]["name"].endswith(_OF_OURS) for one in facts.policies)
    if ours:
        yield Finding("policies", Level.OK, f"{ours} ValidatingAdmissionPolicies hold also while the webhook is down")
    else:
        text = "no ValidatingAdmissionPolicy of Cardwise: users may write placement annotations themselves"
        yield Finding("policies", Level.WARNING, text, "set policies.enabled of the chart to true")


def leader(facts: Facts) -> Iterator[Finding]:
    """Whether an extender leads. By the API server's clock: it noted the last renewal, and says what time it is."""
    if "leases" in facts.unread:
        return
    lease = next((one for one in facts.leases if one["metadata"]["name"] == names.LEASE), None)
    spec = (lease or {}).get("spec") or {}
    holder = spec.get("holderIdentity")
    if not holder:
        text = f"no extender holds the Lease {names.LEASE}: pods that ask for cards wait"
        remedy = "start the extender; with --no-lease (one extender alone) this says nothing"
        yield Finding("extender", Level.WARNING, text, remedy)
        return
    renewed = written(lease or {}) or _renewed(spec)
    if renewed is None:
        text = f"extender {holder} holds the Lease {names.LEASE}, which does not tell when it was renewed"
        remedy = "see whether it runs: an extender that does writes it anew within seconds"
        yield Finding("extender", Level.WARNING, text, remedy)
        return
    age = (facts.now - renewed).total_seconds() if facts.now is not None else 0.0
    if age > (spec.get("leaseDurationSeconds") or _LEASE_SECONDS):
        text = f"extender {holder} leads, but has not renewed its Lease for {age:.0f} s"
        yield Finding("extender", Level.PROBLEM, text, "see whether it runs; a second one would take over by itself")
    else:
        yield Finding("extender", Level.OK, f"extender {holder} leads")


def _renewed(spec: Json) -> datetime | None:
    """By the extender's clock. Somebody may have edited it."""
    try:
        return time(spec["renewTime"])
    except (KeyError, TypeError, ValueError):
        return None


def cards(facts: Facts) -> Iterator[Finding]:
    """What the device plugins tell: cards, their health, and whether the kubelet knows the plugin."""
    if facts.absent & {"cards"} or "cards" in facts.unread:
        return
    if not facts.cards:
        text = "no card is known"
        remedy = "see that the device plugin runs on the nodes with cards, and its log there"
        yield Finding("cards", Level.WARNING, text, remedy)
        return
    sick = [card for card in facts.cards if (card.get("status") or {}).get("health") == "Unhealthy"]
    for card in sick:
        reason = card["status"].get("reason") or "no reason told"
        text = f"{card['spec']['node']}: {card['spec']['uuid']} is unhealthy: {reason}"
        yield Finding("cards", Level.WARNING, text, "it takes no new pod and comes back by itself once it is well")
    by_name = {node["metadata"]["name"]: node for node in facts.nodes}
    with_cards = sorted(facts.card_nodes())
    for name in with_cards if "nodes" not in facts.unread else ():
        yield from _slots(name, by_name.get(name))
    text = f"{len(facts.cards)} cards and devices on {len(with_cards)} nodes, {len(facts.cards) - len(sick)} healthy"
    yield Finding("cards", Level.OK, text)


def _slots(name: str, node: Json | None) -> Iterator[Finding]:
    if node is None:
        remedy = f"it goes by itself within minutes, or: kubectl delete extendedresources -l {names.NODE_LABEL}={name}"
        yield Finding("cards", Level.NOTE, f"node {name} is gone, its cards are still known", remedy)
    elif (node.get("status", {}).get("allocatable") or {}).get(names.SHARE, "0") == "0":
        text = f"{name}: offers no {names.SHARE}: the kubelet there does not know our device plugin"
        yield Finding("cards", Level.PROBLEM, text, "see that the device plugin runs there, and its log")


def mps(facts: Facts) -> Iterator[Finding]:
    """The daemons, where there is a manager."""
    known = {card["spec"]["uuid"]: (card.get("status") or {}).get("mps") for card in facts.cards if _is_card(card)}
    told = {uuid: status for uuid, status in known.items() if status}
    if known and not told:
        text = "no node has an MPS manager: nothing but their frameworks holds programs to their memory"
        yield Finding("mps", Level.NOTE, text, "run cardwise-mps on the nodes with cards")
    for card in facts.cards:
        status = told.get(card["spec"]["uuid"])
        if status and status.get("state") not in _USABLE:
            which = f"{card['spec']['node']}: MPS of {card['spec']['uuid']}"
            text = f"{which} is {status.get('state')}: {status.get('reason')}"
            yield Finding("mps", Level.WARNING, text, "it is tried again by itself; the manager's log says more")
    ready = sum(status.get("state") in _USABLE for status in told.values())
    if ready:
        yield Finding("mps", Level.OK, f"MPS of {ready} cards is ready or off on purpose")


def _is_card(card: Json) -> bool:
    return bool(card["spec"].get("memoryMiB"))
