"""`cardwise explain` of a pod: why it is pending, or why it runs where it runs, in sentences and tables.

Uses the extender's engine, with the placement policy that applies to the pod.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from cardwise.cli.cluster import nodestates, published, snapshots, workloads
from cardwise.cli.cluster.published import PublishedPolicy
from cardwise.cli.explanation import gangfit, holdups, remedies
from cardwise.cli.explanation.holdups import PodSurroundings
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
_CLOSED = {"type": ", not in the class", "quota": ", closed by quota", "mps": ", closed by MPS"}
_ABOUT_DEVICES = (Refusal.NO_SUCH_DEVICE, Refusal.NO_DEVICE)
_FEW_NODES = 10  # on which the pod fits
_MOST_MODEL = 80  # bytes
_NO_STATUS = wire.ExtendedResourceStatus()


def explain_pod(
    pod: Json,
    survey: Survey | None,
    gang: Sequence[str] = (),
    settings: PublishedPolicy | None = None,
    engine: "SurveyedEngine | None" = None,
    *,
    surroundings: PodSurroundings = PodSurroundings(),
) -> str:
    """The whole text for one pod (decoded JSON) in the surveyed cluster.

    survey: None if cards may not be read; then only the pod itself is explained.
    gang: the sentences about its gang.
    settings: the extender's published settings.
    """
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    subject = f"pod {metadata['namespace']}/{metadata['name']}"
    node = spec.get("nodeName")
    if status.get("phase") in names.FINISHED_PHASES:
        reason = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
        says = [f"Its status: {wording.sanitize_message(reason)}"] if reason else []
        lines = [f"{subject} has ended ({status['phase']}) and holds no GPU.", *says, *_explain_exits(pod)]
        if status.get("reason") == _NOT_ADMITTED:
            lines += _explain_not_admitted(pod)
        return join_lines(lines)
    try:
        # What waits must have been rewritten, or the extender refuses it. What runs may be gpushare's.
        pod_request = request.parse(pod) if node else request.parse_mutated(pod)
    except request.NotRewritten as error:
        never = f"{subject} can never be placed: {error.field}: {error.problem}."
        return join_lines(
            [f"{never} {holdups.explain_not_rewritten(pod, surroundings)}", *_explain_deletion(pod, surroundings)]
        )
    except InvalidRequest as error:
        # What runs has been judged at its creation; an annotation may have been changed since.
        return (
            _explain_placed(subject, pod, node, survey, surroundings)
            if node
            else f"{subject} can never be placed: {error}\n"
        )
    together = join_lines(gang)
    if pod_request is None and gang:
        at = f"is on node {node}" if node else "is placed together with its gang"
        other = next(iter(surroundings.partners), "")
        retry_command = command("cardwise explain pod {pod}", pod=other)
        next_step = f"To explain members that request GPUs: {retry_command}\n" if other else ""
        return f"{subject} requests no GPU and no device of Cardwise, and {at}.\n{together}{next_step}"
    if pod_request is None:
        known = f"{', '.join(names.REQUESTED)}, or {names.CLASS_PREFIX} and the name of a class"
        classes = survey.classes if survey is not None else {}
        foreign = join_lines(holdups.explain_foreign_resources(pod, surroundings, list(classes)))
        return f"{subject} requests no GPU and no device of Cardwise ({known}).\n{foreign}"
    asks = f"{subject} requests {_describe_request(pod_request, pod)}.\n{together}"
    if node:
        return asks + _explain_placed("It", pod, node, survey, surroundings)
    if pod["metadata"].get("deletionTimestamp"):
        return asks + join_lines(_explain_deletion(pod, surroundings))
    return asks + _explain_waiting(
        pod, pod_request, survey, settings or PublishedPolicy(), engine, surroundings=surroundings
    )


def _explain_deletion(pod: Json, surroundings: PodSurroundings) -> list[str]:
    """That the pod is being deleted, and what that waits for; empty if it is not."""
    metadata, node = pod["metadata"], (pod.get("spec") or {}).get("nodeName")
    if not metadata.get("deletionTimestamp"):
        return []
    deleted_since, finalizer_note = workloads.deleted_at(metadata), workloads.describe_finalizers(metadata)
    if not node:
        return [f"It is being deleted (since {deleted_since}) and is no longer scheduled{finalizer_note}."]
    free = f": {holdings} is free once its containers have ended" if (holdings := _describe_holdings(pod)) else ""
    lines = [f"It is being deleted (since {deleted_since}){finalizer_note}{free}."]
    if any(nodestates.NOT_READY in sentence for sentence in holdups.explain_node_state(pod, surroundings)):
        lines.append(
            f"Node {node} does not report that its containers have ended: the pod stays until the node is ready again "
            "or is deleted."
        )
    return lines


def _describe_holdings(pod: Json) -> str:
    """What the pod holds, in words; "" if its annotations name no card and no device."""
    try:
        assigned = assignment.decode(annotations_of(pod))
    except assignment.InvalidAssignment:
        return "what it holds"
    return "what it holds" if assigned is not None else ""


def _explain_not_admitted(pod: Json) -> list[str]:
    """What to do about a pod that the kubelet refused."""
    metadata = pod["metadata"]
    delete = command("kubectl delete pod -n {namespace} {pod}", namespace=metadata["namespace"], pod=metadata["name"])
    removal = "" if workloads.is_bare(pod) else f"; `{delete}` removes this one"
    refused = (
        "The node's kubelet refused it. This happens to every pod with a share after a reboot of the node, and to a "
        "pod that is bound while the device plugin is replaced. The pod never runs again: "
        f"{workloads.describe_replacement(pod)}{removal}."
    )
    avoid = (
        "Drain a node before a reboot. A Job does not count the pods that a drain evicts if its podFailurePolicy "
        "ignores the pod condition DisruptionTarget; every other failure counts towards its backoffLimit."
    )
    return [refused, avoid]


def join_lines(lines: Iterable[str]) -> str:
    """Join lines. A sentence stays one line, whatever texts of other users it contains."""
    return "".join(f"{' '.join(line.splitlines())}\n" for line in lines)


def _describe_request(pod_request: request.PodRequest, pod: Json) -> str:
    container = _container_names(pod)
    parts = []
    for card_request in pod_request.containers:
        amount = (
            f"{card_request.cards} whole GPU{'s' * (card_request.cards > 1)}"
            if card_request.whole
            else f"{card_request.mem} MiB"
        )
        over = f" over {card_request.cards} GPUs" if card_request.cards > 1 and not card_request.whole else ""
        core = f" and {card_request.core} % of the SMs" if card_request.core else ""
        of_class = f" of class {quote_unless_name(card_request.resource_class)}" if card_request.resource_class else ""
        parts.append(f"{amount}{over}{core}{of_class} (container {quote_unless_name(card_request.name)})")
    for device in pod_request.devices:
        amount = f"{device.count} device{'s' * (device.count > 1)}"
        parts.append(
            f"{amount} of class {quote_unless_name(device.resource_class)} "
            f"(container {_container_name(device.key, container)})"
        )
    return " + ".join(parts)


def _container_name(key: str, container: Mapping[str, str]) -> str:
    """The name of a container by its key, for a sentence; the key if the pod has no such container."""
    return quote_unless_name(container.get(key, key))


def _container_names(pod: Json) -> dict[str, str]:
    """The names of its containers, by key."""
    return {container.key: container.spec.get("name", container.key) for container in request.containers(pod)}


def _explain_placed(subject: str, pod: Json, node: str, survey: Survey | None, surroundings: PodSurroundings) -> str:
    annotations = annotations_of(pod)
    try:
        assigned = assignment.decode(annotations)
    except assignment.InvalidAssignment as error:
        return f"{subject} is on node {node}, but its annotations are invalid: {error}.\n"
    if assigned is None:
        return join_lines(
            [
                _explain_unassigned(subject, pod, surroundings),
                *_explain_deletion(pod, surroundings),
                *holdups.explain_node_state(pod, surroundings),
            ]
        )
    lines = [f"{subject} is on node {node}:"]
    container = _container_names(pod)
    for key, shares in assigned.containers.items():
        for share in shares:
            part = f"{share.mem} of {share.total} MiB ({assignment.fraction(share.mem, share.total)})"
            details = (
                ""
                if survey is None
                else _describe_neighbors(survey, node, share, pod) + _describe_card_state(survey, node, share)
            )
            card = f"GPU {share.index} {quote_unless_name(share.uuid)}"
            lines.append(f"  container {_container_name(key, container)}: {part} of {card}{details}")
    for key, devices in assigned.devices.items():
        for device in devices:
            state = "" if survey is None else _describe_device_state(survey, node, device)
            of_class = quote_unless_name(device.resource_class)
            description = f"device {quote_unless_name(device.uuid)} of class {of_class}"
            lines.append(f"  container {_container_name(key, container)}: {description}{state}")
    if assigned.containers:
        # Of devices alone no annotation tells.
        runs = (pod.get("status") or {}).get("phase") == "Running"  # simulated nodes grant nothing
        not_granted = "its init containers have not ended" if _is_initializing(pod) else "its container is not running"
        not_yet = f"The node has not given it the share yet: {not_granted}."
        if runs:
            statuses = pod["status"].get("containerStatuses") or ()
            over = statuses and all(_terminated_state(status) and not _is_restarted(pod, status) for status in statuses)
            not_yet = "Its containers have ended." if over else "It runs."
        lines.append("The node has given it the share." if annotations.get(names.ASSIGNED) == "true" else not_yet)
    if surroundings.warning is not None:
        message, reason = (
            wording.sanitize_message(surroundings.warning.message),
            quote_unless_name(surroundings.warning.reason),
        )
        lines.append(f"  its last warning ({reason}, {surroundings.warning.at}): {message}")
    return join_lines(
        [
            *lines,
            *_explain_containers(pod),
            *_explain_deletion(pod, surroundings),
            *holdups.explain_node_state(pod, surroundings),
        ]
    )


def _explain_unassigned(subject: str, pod: Json, surroundings: PodSurroundings) -> str:
    """Why a bound pod has no card, and what to do."""
    intro = f"{subject} is on node {pod['spec']['nodeName']}"
    if names.MIRROR in annotations_of(pod):
        has_none = "a static pod cannot get a GPU of Cardwise. Use a DaemonSet instead."
        return f"{intro} as a static pod, which no scheduler places: {has_none}"
    try:
        request.parse_mutated(pod)
    except request.NotRewritten:
        reason = "the webhook has not rewritten it"
        return f"{intro} without a GPU of Cardwise: {reason}. {holdups.explain_not_rewritten(pod, surroundings)}"
    except InvalidRequest:
        pass  # an annotation has been changed since its creation
    return (
        f"{intro} without an assignment: it was not bound by the Cardwise extender, so its containers with a share do "
        f"not start, and the extender deletes it (event {names.BOUND_WITHOUT_EXTENDER}); "
        f"{workloads.describe_replacement(pod)}. Ask your administrator to run `cardwise doctor`: kube-scheduler "
        "does not call the extender, or something else has bound the pod."
    )


def _explain_containers(pod: Json) -> list[str]:
    """Why containers do not run, as the kubelet reports it."""
    lines = []
    init = _init_containers(pod)
    for status in statuses_of(pod):
        state, kind = status.get("state") or {}, "init container" if status.get("name") in init else "container"
        name = quote_unless_name(status.get("name"))
        if status.get("name") in init and "running" in state:
            lines.append(f"  {kind} {name} is running: the containers after it start once it has ended")
            continue
        if ended := _terminated_state(status):
            exit_text = _describe_exit(ended)
            if _is_restarted(pod, status):
                successor_note = ", and the containers after it start once it has succeeded" * (
                    status.get("name") in init
                )
                lines.append(f"  {kind} {name} ended with {exit_text}: the kubelet restarts it{successor_note}")
            elif status.get("name") not in init:
                note = "; the pod's share is free once all its containers have ended"
                lines.append(f"  {kind} {name} has ended with {exit_text}{note}")
            elif ended.get("exitCode"):
                lines.append(f"  {kind} {name} failed with {exit_text}: the containers after it do not start")
            continue
        if "running" in state and status.get("started") is False:
            lines.append(f"  container {name} is running but not ready; see the pod's events")
        waits = state.get("waiting") or {}
        if waits.get("reason") in (None, *_STARTING):
            continue
        ended = (status.get("lastState") or {}).get("terminated") or {}
        last_end = f"; it ended with {_describe_exit(ended)}" if "exitCode" in ended else ""
        message = f": {wording.sanitize_message(waits['message'])}" if waits.get("message") else ""
        lines.append(f"  {kind} {name} does not run: {quote_unless_name(waits['reason'])}{last_end}{message}")
    return lines


def _describe_exit(ended: Json) -> str:
    """How a container has ended."""
    return f"exit code {ended.get('exitCode')} ({quote_unless_name(ended.get('reason'))})"


def _init_containers(pod: Json) -> set[str]:
    """The names of containers that must have ended before those after them start; sidecars are not among them."""
    containers = (pod.get("spec") or {}).get("initContainers") or ()
    return {container["name"] for container in containers if container.get("restartPolicy") != "Always"}


def _terminated_state(status: Json) -> Json:
    """The state of a terminated container; {} if it has not terminated."""
    return (status.get("state") or {}).get("terminated") or {}


def _is_restarted(pod: Json, status: Json) -> bool:
    """Whether the kubelet starts the container again that has ended; its status may be between two starts."""
    spec, exit_code = pod.get("spec") or {}, _terminated_state(status).get("exitCode")
    if pod["metadata"].get("deletionTimestamp"):
        return False
    of_pod = spec.get("restartPolicy") or "Always"
    if status.get("name") in _init_containers(pod):
        return of_pod != "Never" and exit_code != 0  # it runs until it has succeeded
    containers = (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
    own_status = next(
        (container.get("restartPolicy") for container in containers if container.get("name") == status.get("name")),
        None,
    )
    return (own_status or of_pod) == "Always" or ((own_status or of_pod) == "OnFailure" and exit_code != 0)


def _is_initializing(pod: Json) -> bool:
    """Whether an init container runs, waits or has failed."""
    init = _init_containers(pod)
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or ()
    return any(status.get("name") in init and _terminated_state(status).get("exitCode") != 0 for status in statuses)


def _explain_exits(pod: Json) -> list[str]:
    """With which exit code containers have failed."""
    lines = []
    init = _init_containers(pod)
    for status in statuses_of(pod):
        ended = _terminated_state(status)
        if ended.get("exitCode"):
            kind = "init container" if status.get("name") in init else "container"
            lines.append(f"  {kind} {quote_unless_name(status.get('name'))} ended with {_describe_exit(ended)}")
    return lines


def _describe_neighbors(survey: Survey, node: str, share: assignment.CardShare, pod: Json) -> str:
    """The other pods that hold some of the card."""
    state = survey.ledger.node(node)
    held = [holding for holding in survey.ledger.holdings(node) if holding.uid != pod["metadata"]["uid"]]
    others = [
        holding
        for holding in held
        if any(_is_same_card(state, share, other_share) for other_share in holding.assignment.shares())
    ]
    return (
        f", beside {', '.join(remedies.describe_holder(other_share, share.uuid) for other_share in others)}"
        if others
        else ", alone"
    )


def _is_same_card(node: NodeState | None, share: assignment.CardShare, other: assignment.CardShare) -> bool:
    """Whether both are of one card, which may have another index now than when they were given."""
    position = node.position(share) if node is not None else None
    return card_of(share) == card_of(other) if node is None or position is None else position == node.position(other)


def _describe_card_state(survey: Survey, node: str, share: assignment.CardShare) -> str:
    """What is wrong with the card; "" for nothing."""
    state = survey.ledger.node(node)
    position = state.position(share) if state is not None else None
    if state is None or position is None:
        now = next(
            (resource.spec.node for resource in survey.resources if share.uuid and resource.spec.uuid == share.uuid), ""
        )
        return f"; this GPU is on node {now} now" if now else "; this GPU is not on the node any more"
    card = state.cards[position]
    sick = f"; this GPU is unhealthy{_describe_health_reason(survey, card.uuid)}" * (not card.healthy)
    return sick + "; this GPU is cordoned" * card.cordoned


def _describe_health_reason(survey: Survey, uuid: str) -> str:
    """Why a GPU is unhealthy, in brackets; "" if unknown."""
    reason = next((resource.status.reason for resource in survey.resources if resource.spec.uuid == uuid), "")
    return f" ({wording.sanitize_message(reason)})" if reason else ""


def _describe_device_state(survey: Survey, node: str, share: assignment.DeviceShare) -> str:
    """As `_describe_card_state`."""
    state = survey.ledger.node(node)
    device = (
        next((listed for listed in state.devices if listed.uuid == share.uuid), None) if state is not None else None
    )
    if device is None:
        return "; this device is not on the node any more"
    return "; this device is unhealthy" * (not device.healthy) + "; this device is cordoned" * device.cordoned


def _explain_waiting(
    pod: Json,
    pod_request: request.PodRequest,
    survey: Survey | None,
    settings: PublishedPolicy,
    engine: "SurveyedEngine | None",
    *,
    surroundings: PodSurroundings,
) -> str:
    message = workloads.scheduler_message(pod)
    lines = [f"kube-scheduler says: {wording.sanitize_message(message)}"] if message else []
    lines += holdups.explain_installation(pod, surroundings)
    unplaced = holdups.explain_scheduler(pod, surroundings)
    lines += unplaced
    foreign = holdups.explain_foreign_resources(pod, surroundings, list(survey.classes) if survey is not None else [])
    lines += foreign
    if survey is None:
        lines += holdups.explain_avoided_nodes(pod, (), surroundings)
        lines += holdups.explain_quota_status(pod_request, surroundings.quotas)
        return join_lines(lines or ["kube-scheduler has not reported on it yet."])
    namespace, policy = pod["metadata"]["namespace"], published.policy_of_pod(pod, settings)
    headroom = [entry_headroom for _, entry_headroom in survey.quota_headroom(namespace)]
    with_cards = [node.name for node in survey.ledger.nodes()]
    if not with_cards:
        lines.append("No node has a GPU or a device of Cardwise: run `cardwise doctor` for the cause.")
    if only := holdups.daemonset_node(pod):
        has_some = any(node.name == only and (node.cards or node.devices) for node in survey.ledger.nodes())
        lines += holdups.explain_daemonset_node(only, surroundings, has_some=has_some)
        with_cards = [name for name in with_cards if name == only and not surroundings.is_node_gone(name)]
    lines += holdups.explain_avoided_nodes(pod, with_cards, surroundings)
    admitted = surroundings.admitting_nodes(pod)
    nodes = [name for name in with_cards if admitted is None or name in admitted]
    ranked = (
        engine.rank_nodes(pod_request, snapshots.load_of(pod), policy, nodes, headroom) if engine is not None else None
    )
    views = explanation.explain(survey.ledger, nodes, pod_request, policy, headroom, ranked=ranked)
    lines += gangfit.find_obstacles(pod, pod_request, survey, nodes=nodes, policy=policy, surroundings=surroundings)
    lines += holdups.explain_classes(pod_request, survey)
    lines += holdups.explain_quotas(pod_request, namespace, survey)
    fitting = [view.name for view in views if view.refusal is None and view.roomy]
    starving = [view.name for view in views if view.refusal is None and not view.roomy]
    if starving:
        fitting_nodes = wording.enumerate_first(starving, _FEW_NODES, "node")
        lines.append(
            f"Nodes with enough free GPU memory, but without the cpu and memory that the pod requests: {fitting_nodes}."
        )
    if fitting and not unplaced:
        noun = " and ".join(
            filter(None, ("GPUs" * bool(pod_request.containers), "devices" * bool(pod_request.devices)))
        )
        unchecked = "its node selector, taints, " if admitted is None else ""
        last_advice = (
            f"if it still waits, check {unchecked}cpu and memory, and whether kube-scheduler reaches the extender"
        )
        fitting_nodes = wording.enumerate_first(fitting, _FEW_NODES, "node")
        lines.append(
            f"{noun[0].upper()}{noun[1:]} that fit are free on {fitting_nodes} "
            f"(best first, {_describe_order(policy, ranked, settings)}); "
            f"{holdups.explain_other_reasons(pod, message, foreign) or last_advice}."
        )
    known = {resource.spec.uuid: resource.status for resource in survey.resources}
    for view in views:
        if view.refusal is None:
            continue
        lines.append(f"  {view.name}: {view.refusal.text}")
        if view.refusal in _ABOUT_DEVICES:  # its cards say nothing
            lines += _describe_shortage(view.devices)
        elif view.refusal is not Refusal.NO_SUCH_TYPE:  # where no card is of the type, the cards say nothing more
            lines += [_describe_card(card, known.get(card.uuid, _NO_STATUS)) for card in view.cards]
    avoided_nodes = [name for name in with_cards if name not in nodes and not surroundings.is_node_gone(name)]
    lines += remedies.suggest_remedies(
        pod, pod_request, survey, views, policy, avoided_nodes=avoided_nodes, surroundings=surroundings
    )
    return join_lines(lines)


def _describe_order(policy: str, ranked: Mapping[str, int] | None, settings: PublishedPolicy) -> str:
    """The policy by which the nodes are ordered."""
    if policy not in policies.SCORED or ranked is not None:
        return policy
    if settings.note and not settings.workload:
        return f"as {policies.BY_CARDS} would; the data that {policy} has learned is unknown here"
    return f"{policy} orders them as {policies.BY_CARDS} would"


def _describe_card(card: explanation.CardView, status: wire.ExtendedResourceStatus) -> str:
    reason = f" ({wording.sanitize_message(status.reason)})" if status.reason else ""
    sick = f", unhealthy{reason}" * (not card.healthy) + ", cordoned" * card.cordoned
    short = f", {card.short} MiB short" if card.short else ""
    holder_names = (
        f", held by {', '.join(remedies.describe_holder(holding, card.uuid) for holding in card.holders)}"
        if card.holders
        else ""
    )
    closed = _CLOSED.get(card.closed, "") + (_describe_mps(status.mps) if card.closed == "mps" else "")
    model = wording.sanitize_message(card.model, _MOST_MODEL)
    return f"    GPU {card.index} {model}: {card.free} of {card.total} MiB free{closed}{short}{sick}{holder_names}"


def _describe_mps(status: wire.MpsStatus | None) -> str:
    """The card's MPS state, as the MPS manager reports it."""
    if status is None:
        return " (the node has no manager)"
    alone = ", one user at a time" * (not status.multi_user)
    reason = f": {wording.sanitize_message(status.reason)}" if status.reason else ""
    return f" ({quote_unless_name(status.state)}{alone}{reason})"


def _describe_shortage(views: Sequence[explanation.DevicesView]) -> list[str]:
    """What a node that was refused for its devices has of each requested class, and which pods hold it."""
    lines = [f"    {_describe_devices(view)}" for view in views if view.total]
    if lines and all(view.free >= view.requested for view in views):
        lines.append(
            "    each class has enough free devices, but some devices belong to several classes: together "
            "they are too few"
        )
    return lines


def _describe_devices(view: explanation.DevicesView) -> str:
    short, sick = view.requested - view.free, view.total - view.healthy
    holder_names = ", ".join(sorted(f"{holding.namespace}/{holding.name_with_phase}" for holding in view.holders))
    return (
        f"{view.resource_class}: {view.requested} requested, {view.free} of {wording.pluralize(view.total, 'device')} "
        "free"
        + (f", {short} short" if short > 0 else "")
        + (f", {sick} unhealthy" if sick else "")
        + (f", held by {holder_names}" if holder_names else "")
    )
