"""`cardwise explain`: why a pod waits, or why it is where it is, in sentences and a table of cards and devices.

It asks the engine that the extender asks, under the policy that is in force for the pod.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from cardwise.cli.cluster import nodestates, published, snapshots, workloads
from cardwise.cli.cluster.published import Published
from cardwise.cli.explanation import gangfit, holdups, remedies
from cardwise.cli.explanation.holdups import Around
from cardwise.core.api import assignment, names, policies, request
from cardwise.core.placement.nodestate import NodeState, card_of
from cardwise.core.preemption import explanation
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, annotations_of, statuses_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.refusals import Refusal
from cardwise.core.values.shellcommand import command
from cardwise.core.values.wording import quote_unless_name
from cardwise.kube import wire
from cardwise.kube.survey import Survey

if TYPE_CHECKING:
    from cardwise.cli.cluster.engine import SurveyedEngine

_STARTING = ("ContainerCreating", "PodInitializing")
_NOT_ADMITTED = "UnexpectedAdmissionError"  # of the kubelet, where a device plugin does not give what a pod needs
_CLOSED = {"type": ", not of the class", "quota": ", closed by quota", "mps": ", closed by MPS"}
_ABOUT_DEVICES = (Refusal.NO_SUCH_DEVICE, Refusal.NO_DEVICE)
_FEW_NODES = 10  # on which the pod fits
_MOST_MODEL = 80  # bytes
_UNTOLD = wire.ExtendedResourceStatus()


def explain(
    pod: Json,
    survey: Survey | None,
    gang: Sequence[str] = (),
    told: Published | None = None,
    engine: "SurveyedEngine | None" = None,
    *,
    around: Around = Around(),
) -> str:
    """The whole text for one pod (decoded JSON) in the cluster as surveyed; `gang` are the sentences of its gang.

    Without a survey, where cards may not be read, what the pod itself tells. `told`: what the extender says of itself.
    """
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    where = f"pod {metadata['namespace']}/{metadata['name']}"
    node = spec.get("nodeName")
    if status.get("phase") in names.FINISHED_PHASES:
        why = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
        says = [f"Its status says: {wording.message(why)}"] if why else []
        lines = [f"{where} has ended ({status['phase']}) and holds nothing.", *says, *_exits(pod)]
        if status.get("reason") == _NOT_ADMITTED:
            lines += _not_admitted(pod)
        return text(lines)
    try:
        # What waits must have been rewritten, or the extender refuses it. What runs may be gpushare's.
        asked = request.parse(pod) if node else request.parse_mutated(pod)
    except request.NotRewritten as error:
        never = f"{where} can never be placed: {error.field}: {error.problem}."
        return text([f"{never} {holdups.not_rewritten(pod, around)}", *_ends(pod, around)])
    except InvalidRequest as error:
        # What runs has been judged at its creation; an annotation may have been changed since.
        return _placed(where, pod, node, survey, around) if node else f"{where} can never be placed: {error}\n"
    together = text(gang)
    if asked is None and gang:
        at = f"is on node {node}" if node else "is placed together with its gang"
        other = next(iter(around.partners), "")
        again = command("cardwise explain pod {pod}", pod=other)
        what = f"What keeps those waiting that ask for some: {again}\n" if other else ""
        return f"{where} asks for no GPU and no device of Cardwise, and {at}.\n{together}{what}"
    if asked is None:
        known = f"{', '.join(names.REQUESTED)}, or {names.CLASS_PREFIX} and the name of a class"
        classes = survey.classes if survey is not None else {}
        foreign = text(holdups.foreign(pod, around, list(classes)))
        return f"{where} asks for no GPU and no device of Cardwise ({known}).\n{foreign}"
    asks = f"{where} asks for {_in_words(asked, pod)}.\n{together}"
    if node:
        return asks + _placed("It", pod, node, survey, around)
    if pod["metadata"].get("deletionTimestamp"):
        return asks + text(_ends(pod, around))
    return asks + _waiting(pod, asked, survey, told or Published(), engine, around=around)


def _ends(pod: Json, around: Around) -> list[str]:
    """That the pod is being deleted, and what that waits for; empty where it is not."""
    metadata, node = pod["metadata"], (pod.get("spec") or {}).get("nodeName")
    if not metadata.get("deletionTimestamp"):
        return []
    since, kept = workloads.deleted_at(metadata), workloads.kept_by_finalizers(metadata)
    if not node:
        return [f"It is being deleted (since {since}) and is not placed any more{kept}."]
    free = f": {what} is free once its containers have ended" if (what := _what_it_holds(pod)) else ""
    lines = [f"It is being deleted (since {since}){kept}{free}."]
    if any(nodestates.NOT_READY in one for one in holdups.state_of_node(pod, around)):
        lines.append(
            f"Node {node} does not report that its containers have ended: the pod stays until the node is back, or is "
            "deleted."
        )
    return lines


def _what_it_holds(pod: Json) -> str:
    """In words; "" where its annotations name no card and no device."""
    try:
        assigned = assignment.decode(annotations_of(pod))
    except assignment.InvalidAssignment:
        return "what it holds"
    return "what it holds" if assigned is not None else ""


def _not_admitted(pod: Json) -> list[str]:
    """What to do about a pod that the kubelet has refused on its node."""
    metadata = pod["metadata"]
    delete = command("kubectl delete pod -n {namespace} {pod}", namespace=metadata["namespace"], pod=metadata["name"])
    removal = "" if workloads.is_bare(pod) else f"; `{delete}` removes this one"
    refused = (
        "The node's kubelet refused it, as it does with each pod with a share after a reboot of the node, and with a "
        f"pod that is bound while the device plugin is replaced. The pod never runs again: {workloads.successor(pod)}"
        f"{removal}."
    )
    avoid = (
        "Drain a node before a reboot. A Job does not count the pods that a drain evicts if its podFailurePolicy "
        "ignores the pod condition DisruptionTarget; each other failure counts towards its backoffLimit."
    )
    return [refused, avoid]


def text(lines: Iterable[str]) -> str:
    """A sentence is one line, whatever somebody has written that is told in it."""
    return "".join(f"{' '.join(line.splitlines())}\n" for line in lines)


def _in_words(asked: request.PodRequest, pod: Json) -> str:
    container = _names(pod)
    parts = []
    for c in asked.containers:
        amount = f"{c.cards} whole card{'s' * (c.cards > 1)}" if c.whole else f"{c.mem} MiB"
        over = f" over {c.cards} cards" if c.cards > 1 and not c.whole else ""
        core = f" and {c.core} % of the SMs" if c.core else ""
        of_class = f" of class {quote_unless_name(c.resource_class)}" if c.resource_class else ""
        parts.append(f"{amount}{over}{core}{of_class} (container {quote_unless_name(c.name)})")
    for one in asked.devices:
        amount = f"{one.count} device{'s' * (one.count > 1)}"
        parts.append(
            f"{amount} of class {quote_unless_name(one.resource_class)} (container {_called(one.key, container)})"
        )
    return " + ".join(parts)


def _called(key: str, container: Mapping[str, str]) -> str:
    """The name of a container by its key, as a sentence has it; the key where the pod has no such container."""
    return quote_unless_name(container.get(key, key))


def _names(pod: Json) -> dict[str, str]:
    """What its containers are called, by their keys."""
    return {c.key: c.spec.get("name", c.key) for c in request.containers(pod)}


def _placed(who: str, pod: Json, node: str, survey: Survey | None, around: Around) -> str:
    annotations = annotations_of(pod)
    try:
        assigned = assignment.decode(annotations)
    except assignment.InvalidAssignment as error:
        return f"{who} is on node {node}, and its annotations cannot be read: {error}.\n"
    if assigned is None:
        return text([_without_assignment(who, pod, around), *_ends(pod, around), *holdups.state_of_node(pod, around)])
    lines = [f"{who} is on node {node}:"]
    container = _names(pod)
    for key, shares in assigned.containers.items():
        for share in shares:
            part = f"{share.mem} of {share.total} MiB ({assignment.fraction(share.mem, share.total)})"
            about = "" if survey is None else _beside(survey, node, share, pod) + _state(survey, node, share)
            card = f"card {share.index} {quote_unless_name(share.uuid)}"
            lines.append(f"  container {_called(key, container)}: {part} of {card}{about}")
    for key, devices in assigned.devices.items():
        for device in devices:
            state = "" if survey is None else _state_of_device(survey, node, device)
            of_class = quote_unless_name(device.resource_class)
            what = f"device {quote_unless_name(device.uuid)} of class {of_class}"
            lines.append(f"  container {_called(key, container)}: {what}{state}")
    if assigned.containers:
        # Of devices alone no annotation tells.
        runs = (pod.get("status") or {}).get("phase") == "Running"  # simulated nodes grant nothing
        why = "its init containers have not ended" if _initializing(pod) else "its container is not up"
        not_yet = f"The node has not granted it yet: {why}."
        if runs:
            statuses = pod["status"].get("containerStatuses") or ()
            over = statuses and all(_ended(one) and not _restarts(pod, one) for one in statuses)
            not_yet = "Its containers have ended." if over else "It runs."
        lines.append("The node has granted it." if annotations.get(names.ASSIGNED) == "true" else not_yet)
    if around.warning is not None:
        said, reason = wording.message(around.warning.message), quote_unless_name(around.warning.reason)
        lines.append(f"  its last warning ({reason}, {around.warning.at}): {said}")
    return text([*lines, *_states(pod), *_ends(pod, around), *holdups.state_of_node(pod, around)])


def _without_assignment(who: str, pod: Json, around: Around) -> str:
    """Of a pod that is on a node and has no card: why, and what to do."""
    on = f"{who} is on node {pod['spec']['nodeName']}"
    if names.MIRROR in annotations_of(pod):
        has_none = "it has no GPU of Cardwise, and can have none. Write it as a DaemonSet."
        return f"{on} as a static pod, which no scheduler places: {has_none}"
    try:
        request.parse_mutated(pod)
    except request.NotRewritten:
        why = "the webhook has not rewritten it"
        return f"{on} without a GPU of Cardwise: {why}. {holdups.not_rewritten(pod, around)}"
    except InvalidRequest:
        pass  # an annotation has been changed since its creation
    return (
        f"{on} without an assignment: it was not bound by the Cardwise extender, so its containers with a share do not "
        f"start, and the extender deletes it (event {names.BOUND_PAST_CARDWISE}); {workloads.successor(pod)}. Your "
        "administrator runs `cardwise doctor`: kube-scheduler does not ask the extender, or something else has bound "
        "the pod."
    )


def _states(pod: Json) -> list[str]:
    """Why containers do not run, as the kubelet says it."""
    lines = []
    init = _init_containers(pod)
    for one in statuses_of(pod):
        state, kind = one.get("state") or {}, "init container" if one.get("name") in init else "container"
        name = quote_unless_name(one.get("name"))
        if one.get("name") in init and "running" in state:
            lines.append(f"  {kind} {name} runs: the containers after it start once it has ended")
            continue
        if ended := _ended(one):
            how = _how(ended)
            if _restarts(pod, one):
                then = ", and the containers after it start once it has succeeded" * (one.get("name") in init)
                lines.append(f"  {kind} {name} ended with {how}: the kubelet restarts it{then}")
            elif one.get("name") not in init:
                rest = "; what the pod holds is free once all of it has ended"
                lines.append(f"  {kind} {name} has ended with {how}{rest}")
            elif ended.get("exitCode"):
                lines.append(f"  {kind} {name} failed with {how}: the containers after it do not start")
            continue
        if "running" in state and one.get("started") is False:
            lines.append(f"  container {name} runs and is not ready; the pod's events say why")
        waits = state.get("waiting") or {}
        if waits.get("reason") in (None, *_STARTING):
            continue
        ended = (one.get("lastState") or {}).get("terminated") or {}
        last = f"; it ended with {_how(ended)}" if "exitCode" in ended else ""
        said = f": {wording.message(waits['message'])}" if waits.get("message") else ""
        lines.append(f"  {kind} {name} does not run: {quote_unless_name(waits['reason'])}{last}{said}")
    return lines


def _how(ended: Json) -> str:
    """How a container has ended."""
    return f"exit code {ended.get('exitCode')} ({quote_unless_name(ended.get('reason'))})"


def _init_containers(pod: Json) -> set[str]:
    """The names of containers that must have ended before those after them start; sidecars are not among them."""
    containers = (pod.get("spec") or {}).get("initContainers") or ()
    return {one["name"] for one in containers if one.get("restartPolicy") != "Always"}


def _ended(status: Json) -> Json:
    """How the container has ended, {} where it has not."""
    return (status.get("state") or {}).get("terminated") or {}


def _restarts(pod: Json, status: Json) -> bool:
    """Whether the kubelet starts the container again that has ended; its status may be between two starts."""
    spec, exit_code = pod.get("spec") or {}, _ended(status).get("exitCode")
    if pod["metadata"].get("deletionTimestamp"):
        return False
    of_pod = spec.get("restartPolicy") or "Always"
    if status.get("name") in _init_containers(pod):
        return of_pod != "Never" and exit_code != 0  # it runs until it has succeeded
    containers = (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
    own = next((one.get("restartPolicy") for one in containers if one.get("name") == status.get("name")), None)
    return (own or of_pod) == "Always" or ((own or of_pod) == "OnFailure" and exit_code != 0)


def _initializing(pod: Json) -> bool:
    """Whether an init container runs, waits or has failed."""
    init = _init_containers(pod)
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or ()
    return any(one.get("name") in init and _ended(one).get("exitCode") != 0 for one in statuses)


def _exits(pod: Json) -> list[str]:
    """With which exit code containers have failed."""
    lines = []
    init = _init_containers(pod)
    for one in statuses_of(pod):
        ended = _ended(one)
        if ended.get("exitCode"):
            kind = "init container" if one.get("name") in init else "container"
            lines.append(f"  {kind} {quote_unless_name(one.get('name'))} ended with {_how(ended)}")
    return lines


def _beside(survey: Survey, node: str, share: assignment.CardShare, pod: Json) -> str:
    """The other pods that hold some of the card."""
    state = survey.ledger.node(node)
    held = [h for h in survey.ledger.holdings(node) if h.uid != pod["metadata"]["uid"]]
    others = [h for h in held if any(_is_same(state, share, one) for one in h.assignment.shares())]
    return f", beside {', '.join(remedies.holder(one, share.uuid) for one in others)}" if others else ", alone"


def _is_same(node: NodeState | None, one: assignment.CardShare, other: assignment.CardShare) -> bool:
    """Whether both are of one card, which may have another index now than when they were given."""
    position = node.position(one) if node is not None else None
    return card_of(one) == card_of(other) if node is None or position is None else position == node.position(other)


def _state(survey: Survey, node: str, share: assignment.CardShare) -> str:
    """What is wrong with the card, if anything."""
    state = survey.ledger.node(node)
    position = state.position(share) if state is not None else None
    if state is None or position is None:
        now = next((one.spec.node for one in survey.resources if share.uuid and one.spec.uuid == share.uuid), "")
        return f"; this card is on node {now} now" if now else "; this card is not on the node any more"
    card = state.cards[position]
    sick = f"; this card is unhealthy{_reason(survey, card.uuid)}" * (not card.healthy)
    return sick + "; this card is cordoned" * card.cordoned


def _reason(survey: Survey, uuid: str) -> str:
    """Why a card is unhealthy, in brackets; "" where nobody has said."""
    said = next((one.status.reason for one in survey.resources if one.spec.uuid == uuid), "")
    return f" ({wording.message(said)})" if said else ""


def _state_of_device(survey: Survey, node: str, share: assignment.DeviceShare) -> str:
    """As `_state`."""
    state = survey.ledger.node(node)
    device = next((one for one in state.devices if one.uuid == share.uuid), None) if state is not None else None
    if device is None:
        return "; this device is not on the node any more"
    return "; this device is unhealthy" * (not device.healthy) + "; this device is cordoned" * device.cordoned


def _waiting(
    pod: Json,
    asked: request.PodRequest,
    survey: Survey | None,
    told: Published,
    engine: "SurveyedEngine | None",
    *,
    around: Around,
) -> str:
    said = workloads.scheduler_says(pod)
    lines = [f"kube-scheduler says: {wording.message(said)}"] if said else []
    lines += holdups.installation(pod, around)
    unplaced = holdups.nobody_places(pod, around)
    lines += unplaced
    foreign = holdups.foreign(pod, around, list(survey.classes) if survey is not None else [])
    lines += foreign
    if survey is None:
        lines += holdups.no_node(pod, (), around)
        lines += holdups.quotas_by_status(asked, around.quotas)
        return text(lines or ["kube-scheduler has not said anything of it yet."])
    namespace, policy = pod["metadata"]["namespace"], published.in_force(pod, told)
    headroom = [left for _, left in survey.headroom(namespace)]
    with_cards = [node.name for node in survey.ledger.nodes()]
    if not with_cards:
        lines.append("No node has a card or a device that Cardwise gives: `cardwise doctor` says why.")
    if only := holdups.only_node(pod):
        has_some = any(node.name == only and (node.cards or node.devices) for node in survey.ledger.nodes())
        lines += holdups.of_only_node(only, around, has_some=has_some)
        with_cards = [name for name in with_cards if name == only and not around.is_gone(name)]
    lines += holdups.no_node(pod, with_cards, around)
    admitted = around.admitted(pod)
    nodes = [name for name in with_cards if admitted is None or name in admitted]
    ranked = engine.ranked(asked, snapshots.load_of(pod), policy, nodes, headroom) if engine is not None else None
    views = explanation.explain(survey.ledger, nodes, asked, policy, headroom, ranked=ranked)
    lines += gangfit.obstacles(pod, asked, survey, nodes=nodes, policy=policy, around=around)
    lines += holdups.types(asked, survey)
    lines += holdups.quotas_in_the_way(asked, namespace, survey)
    fitting = [view.name for view in views if view.refusal is None and view.roomy]
    starving = [view.name for view in views if view.refusal is None and not view.roomy]
    if starving:
        on = wording.few(starving, _FEW_NODES, "node")
        lines.append(f"Room on cards, but not the cpu and memory of the pod beside it, is on {on}.")
    if fitting and not unplaced:
        what = " and ".join(filter(None, ("cards" * bool(asked.containers), "devices" * bool(asked.devices))))
        unknown = "its node selector, taints, " if admitted is None else ""
        still = f"if it still waits, look at {unknown}cpu and memory, and whether kube-scheduler reaches the extender"
        on = wording.few(fitting, _FEW_NODES, "node")
        lines.append(
            f"{what.capitalize()} that fit are free on {on} (best first, {_by(policy, ranked, told)}); "
            f"{holdups.beside_cards(pod, said, foreign) or still}."
        )
    known = {one.spec.uuid: one.status for one in survey.resources}
    for view in views:
        if view.refusal is None:
            continue
        lines.append(f"  {view.name}: {view.refusal.text}")
        if view.refusal in _ABOUT_DEVICES:  # its cards say nothing
            lines += _shortage(view.devices)
        elif view.refusal is not Refusal.NO_SUCH_TYPE:  # where no card is of the type, the cards say nothing more
            lines += [_card(card, known.get(card.uuid, _UNTOLD)) for card in view.cards]
    away = [name for name in with_cards if name not in nodes and not around.is_gone(name)]
    lines += remedies.remedies(pod, asked, survey, views, policy, away=away, around=around)
    return text(lines)


def _by(policy: str, ranked: Mapping[str, int] | None, told: Published) -> str:
    """Says which policy puts the nodes in this order."""
    if policy not in policies.SCORED or ranked is not None:
        return policy
    if told.note and not told.workload:
        return f"as {policies.BY_CARDS} would; what {policy} has learned is not known here"
    return f"{policy} leaves it to {policies.BY_CARDS}"


def _card(card: explanation.CardView, told: wire.ExtendedResourceStatus) -> str:
    why = f" ({wording.message(told.reason)})" if told.reason else ""
    sick = f", unhealthy{why}" * (not card.healthy) + ", cordoned" * card.cordoned
    short = f", {card.short} MiB short" if card.short else ""
    by = f", held by {', '.join(remedies.holder(one, card.uuid) for one in card.holders)}" if card.holders else ""
    closed = _CLOSED.get(card.closed, "") + (_of_mps(told.mps) if card.closed == "mps" else "")
    model = wording.message(card.model, _MOST_MODEL)
    return f"    card {card.index} {model}: {card.free} of {card.total} MiB free{closed}{short}{sick}{by}"


def _of_mps(told: wire.MpsStatus | None) -> str:
    """What the node's manager says of the card."""
    if told is None:
        return " (the node has no manager)"
    alone = ", one user at a time" * (not told.multi_user)
    return f" ({quote_unless_name(told.state)}{alone}{': ' * bool(told.reason)}{wording.message(told.reason)})"


def _shortage(seen: Sequence[explanation.DevicesView]) -> list[str]:
    """What a node that was refused for its devices has of each class that is asked for, and who holds it."""
    lines = [f"    {_devices(view)}" for view in seen if view.total]
    if lines and all(view.free >= view.asked for view in seen):
        lines.append("    each class has enough free, but some of these devices are of several: together too few")
    return lines


def _devices(view: explanation.DevicesView) -> str:
    short, sick = view.asked - view.free, view.total - view.healthy
    by = ", ".join(sorted(f"{one.namespace}/{one.marked_name}" for one in view.holders))
    return (
        f"{view.resource_class}: {view.asked} asked, {view.free} of {wording.count(view.total, 'device')} free"
        + (f", {short} short" if short > 0 else "")
        + (f", {sick} unhealthy" if sick else "")
        + (f", held by {by}" if by else "")
    )
