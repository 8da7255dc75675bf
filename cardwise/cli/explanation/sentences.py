"""Explains a pod in sentences and tables: why it is pending, or why it runs on its node and card.

The explanation uses the extender's engine, with the placement policy that applies to the pod.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from cardwise.cli.cluster import liveworkload, nodestates, published, workloads
from cardwise.cli.cluster.published import PublishedPolicy
from cardwise.cli.explanation import blockers, gangfit, policylines, remedies
from cardwise.cli.explanation.blockers import PodContext
from cardwise.core.api import assignment, names, policies, request, sharing
from cardwise.core.api.isolation import ComputeTier, Isolation, MemoryTier
from cardwise.core.api.mps import MpsState
from cardwise.core.placement.fitting import CardClosed
from cardwise.core.placement.nodestate import NodeState, card_of
from cardwise.core.preemption import explanation
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, annotations_of, statuses_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.refusals import Refusal
from cardwise.core.values.shellcommand import command
from cardwise.core.values.wording import quote_unless_name
from cardwise.kube.clusterstate import ClusterState
from cardwise.kube.objects.extendedresources import ExtendedResourceStatus, MpsStatus

if TYPE_CHECKING:
    from cardwise.cli.cluster.engine import ClusterEngine

_STARTING_REASONS = ("ContainerCreating", "PodInitializing")
_ADMISSION_ERROR = "UnexpectedAdmissionError"  # the kubelet's reason if a device plugin has refused an allocation
_UNAVAILABLE_TEXT: Final[Mapping[CardClosed | None, str]] = {
    None: "",
    CardClosed.TYPE: ", not in the class",
    CardClosed.QUOTA: ", closed by quota",
    CardClosed.TIER: ", its memory tier is ",
    CardClosed.MPS: ", closed by MPS",
    CardClosed.TENANT: ", closed by share-with",
}
_DEVICE_REFUSALS = (Refusal.NO_SUCH_DEVICE, Refusal.NO_DEVICE)
_MAX_LISTED_NODES = 10  # maximum number of fitting nodes named in one line
_MAX_MODEL_BYTES = 80  # maximum length of a model's name
_NO_STATUS = ExtendedResourceStatus()


def explain_pod(
    pod: Json,
    cluster_state: ClusterState | None,
    gang_lines: Sequence[str] = (),
    settings: PublishedPolicy | None = None,
    engine: "ClusterEngine | None" = None,
    *,
    context: PodContext = PodContext(),
) -> str:
    """Return the whole explanation of one pod (decoded JSON) in the cluster as it was read.

    cluster_state: None if reading cards is forbidden; then only the pod itself is explained.
    gang_lines: the sentences about its gang.
    settings: the extender's published settings.
    """
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    subject = f"pod {metadata['namespace']}/{metadata['name']}"
    node = spec.get("nodeName")
    if status.get("phase") in names.FINISHED_PHASES:
        reason = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
        status_lines = [f"Its status: {wording.sanitize_message(reason)}"] if reason else []
        lines = [f"{subject} has ended ({status['phase']}) and holds no GPU.", *status_lines, *_explain_exits(pod)]
        if status.get("reason") == _ADMISSION_ERROR:
            lines += _explain_not_admitted(pod)
        return join_lines(lines)
    try:
        # The extender refuses a pending pod that the webhook has not rewritten. A running pod may be gpushare's.
        pod_request = request.parse(pod) if node else request.parse_mutated(pod)
    except request.NotRewritten as error:
        never_note = f"{subject} can never be placed: {error.field}: {error.problem}."
        return join_lines(
            [f"{never_note} {blockers.explain_not_rewritten(pod, context)}", *_explain_deletion(pod, context)]
        )
    except InvalidRequest as error:
        # The webhook validated the running pod at its creation, but annotations may have been changed since then.
        return (
            _explain_placed(subject, pod, node, cluster_state, context)
            if node
            else f"{subject} can never be placed: {error}\n"
        )
    gang_text = join_lines(gang_lines)
    if pod_request is None and gang_lines:
        place_note = f"is on node {node}" if node else "is placed together with its gang"
        other_member = next(iter(context.pending_members), "")
        retry_command = command("cardwise explain pod {pod}", pod=other_member)
        next_step = f"To explain members that request GPUs: {retry_command}\n" if other_member else ""
        return f"{subject} requests no GPU and no device of Cardwise, and {place_note}.\n{gang_text}{next_step}"
    if pod_request is None:
        resource_names = f"{', '.join(names.REQUESTED)}, or {names.CLASS_PREFIX} and the name of a class"
        classes = cluster_state.classes if cluster_state is not None else {}
        foreign_text = join_lines(blockers.explain_foreign_resources(pod, context, list(classes)))
        return f"{subject} requests no GPU and no device of Cardwise ({resource_names}).\n{foreign_text}"
    policy_line = policylines.explain_policy(pod, pod_request, settings or PublishedPolicy())
    request_text = f"{subject} requests {_describe_request(pod_request, pod)}.\n{gang_text}"
    if node:
        return request_text + _explain_placed("It", pod, node, cluster_state, context, policy_line=policy_line)
    if pod["metadata"].get("deletionTimestamp"):
        return request_text + join_lines(_explain_deletion(pod, context))
    return f"{request_text}{policy_line}\n" + _explain_waiting(
        pod, pod_request, cluster_state, settings or PublishedPolicy(), engine, context=context
    )


def _explain_deletion(pod: Json, context: PodContext) -> list[str]:
    """Explain that the pod is being deleted, and what the deletion waits for; empty if it is not being deleted."""
    metadata, node = pod["metadata"], (pod.get("spec") or {}).get("nodeName")
    if not metadata.get("deletionTimestamp"):
        return []
    deleted_since, finalizer_note = workloads.deletion_time(metadata), workloads.finalizers_suffix(metadata)
    if not node:
        return [f"It is being deleted (since {deleted_since}) and is no longer scheduled{finalizer_note}."]
    free_note = ": what it holds is free once its containers have ended" * _may_hold_cards(pod)
    lines = [f"It is being deleted (since {deleted_since}){finalizer_note}{free_note}."]
    if any(nodestates.NOT_READY in sentence for sentence in blockers.explain_node_state(pod, context)):
        lines.append(
            f"Node {node} does not report that its containers have ended: the pod stays until the node is ready again "
            "or is deleted."
        )
    return lines


def _may_hold_cards(pod: Json) -> bool:
    """Whether the pod's annotations name cards or devices, or cannot be read."""
    try:
        return assignment.decode(annotations_of(pod)) is not None
    except assignment.InvalidAssignment:
        return True


def _explain_not_admitted(pod: Json) -> list[str]:
    """Name the remedy for a pod that the kubelet has refused."""
    metadata = pod["metadata"]
    delete = command("kubectl delete pod -n {namespace} {pod}", namespace=metadata["namespace"], pod=metadata["name"])
    removal = "" if workloads.is_bare(pod) else f"; `{delete}` removes this one"
    refusal_text = (
        "The node's kubelet refused it. This happens to every pod with a share after a reboot of the node, and to a "
        "pod that is bound while the device plugin is replaced. The pod never runs again: "
        f"{workloads.describe_replacement(pod)}{removal}."
    )
    drain_advice = (
        "Drain a node before a reboot. A Job does not count the pods that a drain evicts if its podFailurePolicy "
        "ignores the pod condition DisruptionTarget; every other failure counts towards its backoffLimit."
    )
    return [refusal_text, drain_advice]


def join_lines(lines: Iterable[str]) -> str:
    """Join lines. Each stays one line, even if it contains text of other users."""
    return "".join(f"{' '.join(line.splitlines())}\n" for line in lines)


def _describe_request(pod_request: request.PodRequest, pod: Json) -> str:
    name_by_key = _container_names(pod)
    parts = []
    for card_request in pod_request.containers:
        amount = (
            f"{card_request.cards} whole GPU{'s' * (card_request.cards > 1)}"
            if card_request.whole
            else f"{card_request.mem} MiB"
        )
        spread_note = f" over {card_request.cards} GPUs" if card_request.cards > 1 and not card_request.whole else ""
        core = f" and {card_request.core} % of the SMs" if card_request.core else ""
        class_note = (
            f" of class {quote_unless_name(card_request.resource_class)}" if card_request.resource_class else ""
        )
        parts.append(f"{amount}{spread_note}{core}{class_note} (container {quote_unless_name(card_request.name)})")
    for device in pod_request.devices:
        amount = f"{device.count} device{'s' * (device.count > 1)}"
        parts.append(
            f"{amount} of class {quote_unless_name(device.resource_class)} "
            f"(container {_container_name(device.key, name_by_key)})"
        )
    return " + ".join(parts)


def _container_name(key: str, name_by_key: Mapping[str, str]) -> str:
    """Return a container's name for a sentence; the key if the pod has no such container."""
    return quote_unless_name(name_by_key.get(key, key))


def _container_names(pod: Json) -> dict[str, str]:
    """Return the names of the pod's containers, by key."""
    return {container.key: container.spec.get("name", container.key) for container in request.containers(pod)}


def _explain_placed(
    subject: str,
    pod: Json,
    node: str,
    cluster_state: ClusterState | None,
    context: PodContext,
    *,
    policy_line: str = "",
) -> str:
    annotations = annotations_of(pod)
    try:
        pod_assignment = assignment.decode(annotations)
    except assignment.InvalidAssignment as error:
        return f"{subject} is on node {node}, but its annotations are invalid: {error}.\n"
    if pod_assignment is None:
        return join_lines(
            [
                _explain_unassigned(subject, pod, context),
                *_explain_deletion(pod, context),
                *blockers.explain_node_state(pod, context),
            ]
        )
    lines = [f"{subject} is on node {node}:"]
    name_by_key = _container_names(pod)
    for key, shares in pod_assignment.containers.items():
        for share in shares:
            amount_text = f"{share.mem} of {share.total} MiB ({assignment.fraction(share.mem, share.total)})"
            details = (
                ""
                if cluster_state is None
                else _describe_neighbors(cluster_state, node, share, pod)
                + _card_state_suffix(cluster_state, node, share)
                + _isolation_suffix(cluster_state, share)
            )
            if not share.whole and sharing.tenant_of(annotations_of(pod), pod["metadata"]["namespace"]).exclusive:
                details += "; only pods of its namespace share this GPU"
            card = f"GPU {share.index} {quote_unless_name(share.uuid)}"
            lines.append(f"  container {_container_name(key, name_by_key)}: {amount_text} of {card}{details}")
    for key, devices in pod_assignment.devices.items():
        for device in devices:
            state = "" if cluster_state is None else _device_state_suffix(cluster_state, node, device)
            class_name = quote_unless_name(device.resource_class)
            description = f"device {quote_unless_name(device.uuid)} of class {class_name}"
            lines.append(f"  container {_container_name(key, name_by_key)}: {description}{state}")
    lines += [policy_line] if policy_line else []
    if pod_assignment.containers:
        # A pod without cards may still hold devices that no annotation names.
        is_running = (pod.get("status") or {}).get(
            "phase"
        ) == "Running"  # on simulated nodes no device plugin grants anything
        cause = "its init containers have not ended" if _is_initializing(pod) else "its container is not running"
        grant_note = f"The node has not given it the share yet: {cause}."
        if is_running:
            statuses = pod["status"].get("containerStatuses") or ()
            has_ended = statuses and all(
                _terminated_state(status) and not _is_restarted(pod, status) for status in statuses
            )
            grant_note = "Its containers have ended." if has_ended else "It runs."
        lines.append("The node has given it the share." if annotations.get(names.ASSIGNED) == "true" else grant_note)
    if context.warning is not None:
        message, reason = (
            wording.sanitize_message(context.warning.message),
            quote_unless_name(context.warning.reason),
        )
        lines.append(f"  its last warning ({reason}, {context.warning.last_timestamp}): {message}")
    return join_lines(
        [
            *lines,
            *_explain_containers(pod),
            *_explain_deletion(pod, context),
            *blockers.explain_node_state(pod, context),
        ]
    )


def _explain_unassigned(subject: str, pod: Json, context: PodContext) -> str:
    """Explain why a bound pod has no card, and name the remedy."""
    intro = f"{subject} is on node {pod['spec']['nodeName']}"
    if names.MIRROR in annotations_of(pod):
        static_note = "a static pod cannot get a GPU of Cardwise. Use a DaemonSet instead."
        return f"{intro} as a static pod, which no scheduler places: {static_note}"
    try:
        request.parse_mutated(pod)
    except request.NotRewritten:
        reason = "the webhook has not rewritten it"
        return f"{intro} without a GPU of Cardwise: {reason}. {blockers.explain_not_rewritten(pod, context)}"
    except InvalidRequest:
        pass  # an annotation has been changed since the pod's creation
    return (
        f"{intro} without an assignment: it was not bound by the Cardwise extender, so its containers with a share do "
        f"not start, and the extender deletes it (event {names.BOUND_WITHOUT_EXTENDER}); "
        f"{workloads.describe_replacement(pod)}. Ask your administrator to run `cardwise doctor`: kube-scheduler "
        "does not call the extender, or something else has bound the pod."
    )


def _explain_containers(pod: Json) -> list[str]:
    """Explain from the kubelet's report why containers do not run."""
    lines = []
    init_names = _init_containers(pod)
    for status in statuses_of(pod):
        state, kind = status.get("state") or {}, "init container" if status.get("name") in init_names else "container"
        name = quote_unless_name(status.get("name"))
        if status.get("name") in init_names and "running" in state:
            lines.append(f"  {kind} {name} is running: the containers after it start once it has ended")
            continue
        if terminated := _terminated_state(status):
            exit_text = _describe_exit(terminated)
            if _is_restarted(pod, status):
                successor_note = ", and the containers after it start once it has succeeded" * (
                    status.get("name") in init_names
                )
                lines.append(f"  {kind} {name} ended with {exit_text}: the kubelet restarts it{successor_note}")
            elif status.get("name") not in init_names:
                note = "; the pod's share is free once all its containers have ended"
                lines.append(f"  {kind} {name} has ended with {exit_text}{note}")
            elif terminated.get("exitCode"):
                lines.append(f"  {kind} {name} failed with {exit_text}: the containers after it do not start")
            continue
        if "running" in state and status.get("started") is False:
            lines.append(f"  container {name} is running but not ready; see the pod's events")
        waiting_state = state.get("waiting") or {}
        if waiting_state.get("reason") in (None, *_STARTING_REASONS):
            continue
        terminated = (status.get("lastState") or {}).get("terminated") or {}
        last_end = f"; it ended with {_describe_exit(terminated)}" if "exitCode" in terminated else ""
        message = f": {wording.sanitize_message(waiting_state['message'])}" if waiting_state.get("message") else ""
        lines.append(f"  {kind} {name} does not run: {quote_unless_name(waiting_state['reason'])}{last_end}{message}")
    return lines


def _describe_exit(terminated: Json) -> str:
    """Describe how a container has ended."""
    return f"exit code {terminated.get('exitCode')} ({quote_unless_name(terminated.get('reason'))})"


def _init_containers(pod: Json) -> set[str]:
    """Return the names of the init containers that must end before the next container starts, without sidecars."""
    containers = (pod.get("spec") or {}).get("initContainers") or ()
    return {container["name"] for container in containers if container.get("restartPolicy") != "Always"}


def _terminated_state(status: Json) -> Json:
    """Return the state of a terminated container; {} if it has not terminated."""
    return (status.get("state") or {}).get("terminated") or {}


def _is_restarted(pod: Json, status: Json) -> bool:
    """Whether the kubelet will restart a container that has ended, so that the container's stop is only temporary."""
    spec, exit_code = pod.get("spec") or {}, _terminated_state(status).get("exitCode")
    if pod["metadata"].get("deletionTimestamp"):
        return False
    pod_policy = spec.get("restartPolicy") or "Always"
    if status.get("name") in _init_containers(pod):
        return pod_policy != "Never" and exit_code != 0  # an init container is not restarted after success
    containers = (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
    container_policy = next(
        (container.get("restartPolicy") for container in containers if container.get("name") == status.get("name")),
        None,
    )
    return (container_policy or pod_policy) == "Always" or (
        (container_policy or pod_policy) == "OnFailure" and exit_code != 0
    )


def _is_initializing(pod: Json) -> bool:
    """Whether an init container of the pod runs, waits or has failed."""
    init_names = _init_containers(pod)
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or ()
    return any(
        status.get("name") in init_names and _terminated_state(status).get("exitCode") != 0 for status in statuses
    )


def _explain_exits(pod: Json) -> list[str]:
    """Explain with which exit codes containers have failed."""
    lines = []
    init_names = _init_containers(pod)
    for status in statuses_of(pod):
        terminated = _terminated_state(status)
        if terminated.get("exitCode"):
            kind = "init container" if status.get("name") in init_names else "container"
            lines.append(f"  {kind} {quote_unless_name(status.get('name'))} ended with {_describe_exit(terminated)}")
    return lines


def _describe_neighbors(cluster_state: ClusterState, node: str, share: assignment.CardShare, pod: Json) -> str:
    """Describe the other pods on the card."""
    state = cluster_state.ledger.node(node)
    other_holdings = [
        holding for holding in cluster_state.ledger.holdings(node) if holding.uid != pod["metadata"]["uid"]
    ]
    neighbors = [
        holding
        for holding in other_holdings
        if any(_is_same_card(state, share, other_share) for other_share in holding.assignment.shares())
    ]
    return (
        f", beside {', '.join(remedies.describe_holder(other_share, share.uuid) for other_share in neighbors)}"
        if neighbors
        else ", alone"
    )


def _is_same_card(node: NodeState | None, share: assignment.CardShare, other: assignment.CardShare) -> bool:
    """Whether two shares are of the same card. The card's index may have changed since the shares were assigned."""
    position = node.position(share) if node is not None else None
    return card_of(share) == card_of(other) if node is None or position is None else position == node.position(other)


def _card_state_suffix(cluster_state: ClusterState, node: str, share: assignment.CardShare) -> str:
    """Describe a fault of the card, as the end of a sentence; empty without a fault."""
    state = cluster_state.ledger.node(node)
    position = state.position(share) if state is not None else None
    if state is None or position is None:
        present_node = next(
            (
                resource.spec.node
                for resource in cluster_state.resources
                if share.uuid and resource.spec.uuid == share.uuid
            ),
            "",
        )
        return f"; this GPU is on node {present_node} now" if present_node else "; this GPU is not on the node any more"
    card = state.cards[position]
    health_note = f"; this GPU is unhealthy{_health_reason_suffix(cluster_state, card.uuid)}" * (not card.healthy)
    return health_note + "; this GPU is cordoned" * card.cordoned


def _isolation_suffix(cluster_state: ClusterState, share: assignment.CardShare) -> str:
    """What limits the share, as the end of a line; empty for a whole GPU, or if the node has not reported it."""
    tiers = next((r.status.isolation for r in cluster_state.resources if r.spec.uuid == share.uuid), None)
    if share.whole or tiers is None:
        return ""
    if tiers.memory == MemoryTier.ADVISORY:
        return f"; nothing limits the share, because {wording.sanitize_message(tiers.memory_reason)}"
    memory_note = "MPS limits its memory" if tiers.memory == MemoryTier.MPS else "the driver limits its memory"
    if share.core and tiers.compute == ComputeTier.NONE:
        return f"; {memory_note}, and nothing limits its SMs"
    return f"; {memory_note}" + f" and its SMs to {share.core} %" * bool(share.core)


def _health_reason_suffix(cluster_state: ClusterState, uuid: str) -> str:
    """Return the reason why a GPU is unhealthy, in brackets, as the end of a sentence; empty if unknown."""
    reason = next((resource.status.reason for resource in cluster_state.resources if resource.spec.uuid == uuid), "")
    return f" ({wording.sanitize_message(reason)})" if reason else ""


def _device_state_suffix(cluster_state: ClusterState, node: str, share: assignment.AssignedDevice) -> str:
    """Describe a fault of the device, as the end of a sentence; empty without a fault."""
    state = cluster_state.ledger.node(node)
    device = (
        next((listed for listed in state.devices if listed.uuid == share.uuid), None) if state is not None else None
    )
    if device is None:
        return "; this device is not on the node any more"
    return "; this device is unhealthy" * (not device.healthy) + "; this device is cordoned" * device.cordoned


def _explain_waiting(
    pod: Json,
    pod_request: request.PodRequest,
    cluster_state: ClusterState | None,
    settings: PublishedPolicy,
    engine: "ClusterEngine | None",
    *,
    context: PodContext,
) -> str:
    message = workloads.scheduler_message(pod)
    claim_lines = blockers.explain_claim(pod)
    is_gated = bool((pod.get("spec") or {}).get("schedulingGates"))
    # Of a pod behind its own gate kube-scheduler says only that there is one.
    says_more = message is not None and not (claim_lines and is_gated)
    lines = [f"kube-scheduler says: {wording.sanitize_message(message)}"] if message and says_more else []
    lines += claim_lines
    lines += blockers.explain_installation(pod, context)
    scheduler_lines = blockers.explain_scheduler(pod, context)
    lines += scheduler_lines
    foreign_lines = blockers.explain_foreign_resources(
        pod, context, list(cluster_state.classes) if cluster_state is not None else []
    )
    lines += foreign_lines
    if cluster_state is None:
        lines += blockers.explain_avoided_nodes(pod, (), context)
        lines += blockers.explain_quota_status(pod_request, context.quotas)
        return join_lines(lines or ["kube-scheduler has not reported on it yet."])
    namespace, policy = pod["metadata"]["namespace"], published.policy_of_pod(pod, settings)
    headroom = [entry_headroom for _, entry_headroom in cluster_state.quota_headroom(namespace)]
    card_nodes = [node.name for node in cluster_state.ledger.nodes()]
    if not card_nodes:
        lines.append("No node has a GPU or a device of Cardwise: run `cardwise doctor` for the cause.")
    if only_node := blockers.daemonset_node(pod):
        has_devices = any(
            node.name == only_node and (node.cards or node.devices) for node in cluster_state.ledger.nodes()
        )
        lines += blockers.explain_daemonset_node(only_node, context, has_devices=has_devices)
        card_nodes = [name for name in card_nodes if name == only_node and not context.is_node_gone(name)]
    lines += blockers.explain_avoided_nodes(pod, card_nodes, context)
    admitting_nodes = context.admitting_nodes(pod)
    nodes = [name for name in card_nodes if admitting_nodes is None or name in admitting_nodes]
    score_by_node = (
        engine.rank_nodes(pod_request, liveworkload.load_of(pod), policy, nodes, headroom)
        if engine is not None
        else None
    )
    views = explanation.explain(cluster_state.ledger, nodes, pod_request, policy, headroom, ranked=score_by_node)
    facts = policylines.NodeFacts(pod, pod_request, context.nodes or (), context.pods)
    ranks = policylines.rank_nodes(pod_request, facts, nodes) if context.nodes is not None else {}
    if ranks:
        views.sort(key=lambda view: (view.score is None, not view.has_free_load, ranks[view.name]))
        lines += policylines.explain_domains(pod_request, facts, nodes)
    lines += gangfit.find_obstacles(pod, pod_request, cluster_state, nodes=nodes, policy=policy, context=context)
    lines += blockers.explain_classes(pod_request, cluster_state)
    lines += blockers.explain_quotas(pod_request, namespace, cluster_state)
    best_nodes = [view.name for view in views if view.refusal is None and view.has_free_load]
    nodes_without_load = [view.name for view in views if view.refusal is None and not view.has_free_load]
    if nodes_without_load:
        fitting_nodes = wording.enumerate_first(nodes_without_load, _MAX_LISTED_NODES, "node")
        lines.append(
            f"Nodes with enough free GPU memory, but without the cpu and memory that the pod requests: {fitting_nodes}."
        )
    if best_nodes and not scheduler_lines:
        noun = " and ".join(
            filter(None, ("GPUs" * bool(pod_request.containers), "devices" * bool(pod_request.devices)))
        )
        unchecked_note = "its node selector, taints, " if admitting_nodes is None else ""
        fallback_advice = (
            f"if it still waits, check {unchecked_note}cpu and memory, and whether kube-scheduler reaches the extender"
        )
        fitting_nodes = wording.enumerate_first(best_nodes, _MAX_LISTED_NODES, "node")
        lines.append(
            f"{noun[0].upper()}{noun[1:]} that fit are free on {fitting_nodes} "
            f"(best first, {f'{pod_request.policy}, then ' if ranks else ''}"
            f"{_describe_order(policy, score_by_node, settings)}); "
            f"{blockers.explain_other_reasons(pod, message, foreign_lines) or fallback_advice}."
        )
    status_by_uuid = {resource.spec.uuid: resource.status for resource in cluster_state.resources}
    for view in views:
        if view.refusal is None:
            continue
        lines.append(f"  {view.name}: {view.refusal.text}")
        if view.refusal in _DEVICE_REFUSALS:  # the node's cards do not matter for this refusal
            lines += _describe_shortage(view.devices)
        elif view.refusal is not Refusal.NO_SUCH_TYPE:  # without a card of the type, the node's cards need no lines
            lines += [
                _describe_card(card, status_by_uuid.get(card.uuid, _NO_STATUS), pod_request.isolation)
                for card in view.cards
            ]
    avoided_nodes = [name for name in card_nodes if name not in nodes and not context.is_node_gone(name)]
    lines += remedies.suggest_remedies(
        pod, pod_request, cluster_state, views, policy, avoided_nodes=avoided_nodes, context=context
    )
    return join_lines(lines)


def _describe_order(policy: str, score_by_node: Mapping[str, int] | None, settings: PublishedPolicy) -> str:
    """Describe the policy by which the nodes are ordered."""
    if not policies.find_policy(policy).is_scored or score_by_node is not None:
        return policy
    if settings.note and not settings.workload:
        return f"as {policies.FALLBACK_POLICY} would; the data that {policy} has learned is unknown here"
    return f"{policy} orders them as {policies.FALLBACK_POLICY} would"


def _describe_card(card: explanation.CardView, status: ExtendedResourceStatus, demand: Isolation) -> str:
    """Describe a card that a waiting pod does not get. `demand`: what the pod demands."""
    reason = f" ({wording.sanitize_message(status.reason)})" if status.reason else ""
    health_note = f", unhealthy{reason}" * (not card.healthy) + ", cordoned" * card.cordoned
    shortage = f", {card.missing_mib} MiB short" if card.missing_mib else ""
    holder_names = (
        f", held by {', '.join(remedies.describe_holder(holding, card.uuid) for holding in card.holders)}"
        if card.holders
        else ""
    )
    unavailable_note = _UNAVAILABLE_TEXT[card.closed]
    if card.closed is CardClosed.MPS:
        unavailable_note += _describe_mps(status.mps)
    elif card.closed is CardClosed.TIER:
        unavailable_note += _describe_tier(status, demand)
    model = wording.sanitize_message(card.model, _MAX_MODEL_BYTES)
    return (
        f"    GPU {card.index} {model}: {card.free} of {card.total} MiB "
        f"free{unavailable_note}{shortage}{health_note}{holder_names}"
    )


def _describe_tier(status: ExtendedResourceStatus, demand: Isolation) -> str:
    """Describe the memory tier of a card that does not meet the demand, and why it is not stronger."""
    tiers = status.isolation
    if tiers is None:
        return f"unknown, the pod demands {demand}{_describe_mps(status.mps)}"
    if demand.strength <= Isolation(tiers.memory).strength:
        return f"{tiers.memory}, but not for several GPUs in one container, and the pod demands {demand}"
    return f"{tiers.memory}, the pod demands {demand} ({wording.sanitize_message(tiers.memory_reason)})"


def _describe_mps(status: MpsStatus | None) -> str:
    """Describe the card's MPS state, which the MPS manager reports."""
    if status is None:
        return " (the node has no manager)"
    user_note = ", one user at a time" * (not status.multi_user and status.state != MpsState.UNAVAILABLE)
    reason = f": {wording.sanitize_message(status.reason)}" if status.reason else ""
    return f" ({quote_unless_name(status.state)}{user_note}{reason})"


def _describe_shortage(views: Sequence[explanation.DevicesView]) -> list[str]:
    """Describe, for a node that lacks devices, the devices of each requested class and the pods that hold them."""
    lines = [f"    {_describe_devices(view)}" for view in views if view.total]
    if lines and all(view.free >= view.requested for view in views):
        lines.append(
            "    each class has enough free devices, but some devices belong to several classes: together "
            "they are too few"
        )
    return lines


def _describe_devices(view: explanation.DevicesView) -> str:
    missing_count, unhealthy_count = view.requested - view.free, view.total - view.healthy
    holder_names = ", ".join(sorted(f"{holding.namespace}/{holding.name_with_phase}" for holding in view.holders))
    return (
        f"{view.resource_class}: {view.requested} requested, {view.free} of {wording.pluralize(view.total, 'device')} "
        "free"
        + (f", {missing_count} short" if missing_count > 0 else "")
        + (f", {unhealthy_count} unhealthy" if unhealthy_count else "")
        + (f", held by {holder_names}" if holder_names else "")
    )
