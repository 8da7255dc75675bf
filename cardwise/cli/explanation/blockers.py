"""Explains causes that block a pending pod before any card is checked.

These causes concern the pod's scheduler, gates, gang, nodes, classes and quotas.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cardwise.cli.cluster import nodestates, workloads
from cardwise.cli.cluster.installation import Webhook
from cardwise.cli.cluster.podevents import Event
from cardwise.cli.cluster.podgroups import UNKNOWN_PHASE, GangView
from cardwise.cli.cluster.workloads import scheduler_message
from cardwise.core.api import lookalikes, names, quotas, request
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import fitting
from cardwise.core.placement.totals import EntryView
from cardwise.core.preemption import explanation
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, labels_of
from cardwise.core.values.refusals import Refusal
from cardwise.core.values.shellcommand import command
from cardwise.core.values.timestamps import parse_timestamp
from cardwise.core.values.wording import quote_unless_name
from cardwise.kube.clusterstate import ClusterState
from cardwise.kube.pods import eligible, nodeconstraints

_DEFAULT_SCHEDULER: Final = "default-scheduler"  # the schedulerName of kube-scheduler, which should call Cardwise
_KUEUE_GATE_PREFIX: Final = "kueue.x-k8s.io/"
_MAX_LISTED: Final = 5
_MAX_LISTED_NODES: Final = 10  # maximum number of nodes named in one line
_SELECTOR_MESSAGE: Final = "didn't match Pod's node affinity/selector"  # a message of kube-scheduler


@dataclass(frozen=True, slots=True)
class PodContext:
    """Facts about a pod besides cards.

    nodes: decoded Nodes; None if they may not be read.
    former_replicas: names of pods that the pod's Deployment created before its last change.
    hopeless_pods: names of pods whose deletion would not help. They belong to the pod's own gang or controller. If one
        of them were deleted, it would be recreated and wait beside this pod.
    bare: UIDs of pods that no controller recreates.
    pending_members: the requests of the other pending pods of the gang, by pod name.
    reachable_nodes: the nodes that each pending pod of the gang may use, by pod name; unknown for pods that are missing
        here.
    bound_members: names of the gang's pods that have a node.
    missing_members: number of pods of the gang that must still get a node before the gang starts; 0 if unknown.
    is_planned: whether cards are reserved for the gang, or the gang waits only for kube-scheduler.
    schedulers: the names of the chart's own kube-schedulers; None if unknown.
    stopped_schedulers: the names in `schedulers` whose kube-scheduler does not run.
    webhook: the state of the webhook; None if unknown or not needed.
    leaderless_seconds: seconds without a leading extender; None if an extender is leader; infinite if there never was a
        leader.
    directly_bound: pods of the namespace that the extender deleted recently because another scheduler had bound them.
    quotas: the GPUQuotas of the namespace from their statuses, for users without the right to read cards.
    warning: the newest warning event about a bound pod whose containers have not started.
    pods: decoded pods that the user may see, to count those of the pod's gang or controller.
    """

    nodes: Sequence[Json] | None = None
    former_replicas: frozenset[str] = frozenset()
    hopeless_pods: frozenset[str] = frozenset()
    bare_uids: frozenset[str] = frozenset()
    pending_members: Mapping[str, PodRequest] = field(default_factory=dict)
    reachable_nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    bound_members: frozenset[str] = frozenset()
    missing_members: int = 0
    is_planned: bool = False
    schedulers: frozenset[str] | None = None
    stopped_schedulers: frozenset[str] = frozenset()
    webhook: Webhook | None = None
    leaderless_seconds: float | None = None
    directly_bound: tuple[str, ...] = ()
    quotas: Sequence[EntryView] = ()
    warning: Event | None = None
    pods: Sequence[Json] = ()

    def is_node_gone(self, node: str) -> bool:
        """Whether no Node with this name exists."""
        return self.nodes is not None and all(listed["metadata"]["name"] != node for listed in self.nodes)

    def admitting_nodes(self, pod: Json) -> frozenset[str] | None:
        """Return the nodes that the pod's selector, affinity and tolerations allow; None if unknown."""
        return None if self.nodes is None else eligible.eligible_nodes(pod, self.nodes)

    def offered_resources(self) -> frozenset[str] | None:
        """Return the GPU resources that at least one node offers; None if unknown."""
        if self.nodes is None:
            return None
        offered = ((node.get("status") or {}).get("capacity") or {} for node in self.nodes)
        return frozenset(
            name
            for capacity in offered
            for name, amount in capacity.items()
            if lookalikes.is_like_gpu(name) and amount != "0"
        )


def explain_node_state(pod: Json, context: PodContext) -> list[str]:
    """Explain in one line a fault of a placed pod's node; empty if the node has no fault or reading it is forbidden."""
    name = pod["spec"]["nodeName"]
    if context.nodes is None:
        return []
    if context.is_node_gone(name):
        replacement_note = workloads.describe_replacement(pod)
        if workloads.controller_of(pod).get("kind") in ("DaemonSet", "Node"):
            replacement_note = "no controller replaces it"
        return [
            f"Node {name} is gone from the cluster: Kubernetes deletes its pods within minutes; {replacement_note}."
        ]
    node = next((node for node in context.nodes if node["metadata"]["name"] == name), None)
    state = nodestates.unschedulable_reason(node) if node is not None else None
    if state is None:
        return []
    outdated_note = ": the pod's reported state may be outdated" if nodestates.NOT_READY in state else ""
    return [f"Node {name} is {state}{outdated_note}."]


def explain_not_rewritten(pod: Json, context: PodContext) -> str:
    """Explain in one or two sentences why the webhook has not rewritten the pod, and name the remedy."""
    metadata, webhook = pod["metadata"], context.webhook
    namespace = metadata["namespace"]
    recreation = workloads.describe_recreation(pod)
    if webhook is None:
        return (
            "It was created while the webhook was not registered, or its namespace is exempt from the webhook "
            "(webhook.exemptNamespaces of the chart). In an exempt namespace no pod gets a GPU. Otherwise "
            f"{recreation}."
        )
    if namespace in webhook.exempt_namespaces:
        return (
            f"Namespace {namespace} is exempt from the webhook (webhook.exemptNamespaces of the chart), so no pod in "
            "it gets a GPU: create the pod in another namespace."
        )
    if webhook.registered_at is None:
        return (
            f"The webhook is not registered: ask your administrator to run `cardwise doctor`. Once it is, {recreation}."
        )
    created = metadata.get("creationTimestamp")
    created_at = parse_timestamp(created)
    if created_at is not None and created_at < webhook.registered_at:
        return (
            f"It was created at {created}, before the webhook was registered (at "
            f"{webhook.registered_at:%Y-%m-%dT%H:%M:%SZ}): "
            f"{recreation}."
        )
    return (
        "The webhook did not process it: its namespace was exempt at that time, or the API server had only just "
        "loaded the webhook's registration; "
        f"{recreation}."
    )


def daemonset_node(pod: Json) -> str | None:
    """Return the node that a DaemonSet chose for the pod; None for other pods."""
    required_affinity = (((pod.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}).get(
        nodeconstraints.REQUIRED_AFFINITY_FIELD
    ) or {}
    fields = [
        expression
        for term in required_affinity.get("nodeSelectorTerms") or ()
        for expression in term.get("matchFields") or ()
        if expression.get("key") == "metadata.name" and expression.get("operator") == "In"
    ]
    node_names = {str(name) for expression in fields for name in expression.get("values") or ()}
    return (
        node_names.pop() if len(node_names) == 1 and workloads.controller_of(pod).get("kind") == "DaemonSet" else None
    )


def explain_daemonset_node(name: str, context: PodContext, *, has_devices: bool) -> list[str]:
    """Explain the state of the node that a DaemonSet chose for a pod.

    has_devices: whether the node has cards or devices.
    """
    lines = [f"It is for node {name} only: its DaemonSet creates one pod for each node that its template allows."]
    if context.is_node_gone(name):
        return [*lines, f"Node {name} is gone from the cluster: the DaemonSet's controller deletes the pod."]
    states = (
        nodestates.unschedulable_reason(listed) for listed in context.nodes or () if listed["metadata"]["name"] == name
    )
    if nodestates.NOT_READY in (state := next(states, None) or ""):
        lines.append(f"Node {name} is {state}: the pod starts once it is ready.")
    if not has_devices:
        lines.append(
            f"Node {name} has no GPU or device of Cardwise. To keep the DaemonSet off such nodes, add a nodeSelector "
            "for nodes with GPUs to its template."
        )
    return lines


def explain_installation(pod: Json, context: PodContext) -> list[str]:
    """Explain known faults of the installation that keep all pods from cards, or delete them."""
    lines = []
    if context.leaderless_seconds == math.inf:
        lines.append(
            "No Cardwise extender has ever been leader here, so no pod gets a GPU: Cardwise is not installed, does "
            "not start, or is in another namespace (--cardwise-namespace). Ask your administrator to run `cardwise "
            "doctor`."
        )
    elif context.leaderless_seconds is not None:
        lines.append(
            f"No Cardwise extender has been leader for {context.leaderless_seconds:.0f} s, so no pod gets a GPU: "
            "ask your administrator to run `cardwise doctor`."
        )
    if context.directly_bound:
        pod_names = wording.enumerate_first(context.directly_bound, _MAX_LISTED, "pod")
        cause = (
            "The scheduler of this pod does call the extender."
            if _scheduler_calls_extender(pod)
            else "Unless this was done by hand (spec.nodeName, a Binding), kube-scheduler does not call the extender: "
            "ask your administrator to run `cardwise doctor`."
        )
        lines.append(
            "Something other than Cardwise's extender has bound pods of this namespace within the last hour "
            f"({pod_names}), and the extender has deleted them. {cause}"
        )
    return lines


def explain_claim(pod: Json) -> list[str]:
    """Explain how far the allocation of a pending pod's ResourceClaim is; empty if it has none."""
    spec = pod.get("spec") or {}
    gates = [gate.get("name") for gate in spec.get("schedulingGates") or ()]
    if names.ALLOCATION_GATE in gates:
        describe = command(
            "kubectl describe pod -n {namespace} {name}",
            namespace=pod["metadata"]["namespace"],
            name=pod["metadata"]["name"],
        )
        return [
            (
                f"It waits behind the gate {names.ALLOCATION_GATE} until the extender has GPUs for it and allocates "
                f"its ResourceClaim; its events say what the extender last found (`{describe}`)."
            )
        ]
    node = (pod.get("status") or {}).get("nominatedNodeName")
    if node and any(map(request.names_claim, request.containers(pod))):
        return [f"Its GPUs are allocated on node {quote_unless_name(node)}; kube-scheduler must still place it there."]
    return []


def explain_scheduler(pod: Json, context: PodContext) -> list[str]:
    """Explain why no scheduler that calls Cardwise handles the pod; empty if such a scheduler handles it."""
    schedulers = context.schedulers
    spec, metadata = pod.get("spec") or {}, pod["metadata"]
    lines = []
    for name in (gate.get("name") or "" for gate in spec.get("schedulingGates") or ()):
        if name.startswith(_KUEUE_GATE_PREFIX):
            lines.append(
                f"Kueue has not admitted it yet (scheduling gate {quote_unless_name(name)}): "
                f"`{command('kubectl get workloads -n {namespace}', namespace=metadata['namespace'])}` shows why."
            )
        elif name not in (names.GANG, names.ALLOCATION_GATE):
            gate = quote_unless_name(name)
            lines.append(
                f"It is not scheduled until its scheduling gate {gate} is removed by the controller or "
                "person that set it."
            )
    if any(map(request.names_claim, request.containers(pod))):
        return lines  # every scheduler obeys claims
    scheduler = spec.get("schedulerName") or _DEFAULT_SCHEDULER
    if scheduler in context.stopped_schedulers:
        lines.append(
            f"Its scheduler {quote_unless_name(scheduler)} is not running: the Deployment "
            f"{names.SCHEDULER} of Cardwise has no ready pod. Ask your administrator to run `cardwise doctor`."
        )
        return lines
    if scheduler in {_DEFAULT_SCHEDULER, *((names.SCHEDULER,) if schedulers is None else schedulers)}:
        return lines
    if scheduler == names.SCHEDULER:
        recreation = workloads.describe_recreation(pod, dropped_fields=["schedulerName"])
        lines.append(
            f"Its scheduler {scheduler} no longer exists, so nothing places the pod: {recreation}. The new pod gets a "
            "scheduler that exists."
        )
    elif not _scheduler_calls_extender(pod):
        lines.append(
            f"Its scheduler is {quote_unless_name(scheduler)}, and it is unknown whether that one calls "
            f"Cardwise: if not, the pod never gets a GPU. {_suggest_default_scheduler(pod)}"
        )
    return lines


def _scheduler_calls_extender(pod: Json) -> bool:
    """Whether the pod's scheduler has reported a refusal by the extender."""
    message = scheduler_message(pod)
    return message is not None and any(refusal.text in message for refusal in Refusal)


def _suggest_default_scheduler(pod: Json) -> str:
    """Explain in one sentence how to give the pod to the default scheduler."""
    if workloads.is_bare(pod):
        recreation = workloads.describe_recreation(pod, dropped_fields=["schedulerName"])
        return f"Without spec.schedulerName its scheduler would be {_DEFAULT_SCHEDULER}: {recreation}."
    creator = quote_unless_name(workloads.controller_of(pod).get("kind") or "manifest")
    return f"Remove spec.schedulerName from the template of its {creator}, or write {_DEFAULT_SCHEDULER} there."


def explain_gang(view: GangView) -> list[str]:
    """Explain the gang's phase, and name its missing pods."""
    since = f" since {quote_unless_name(view.since)}" if view.since else ""
    counts_text = f"{len(view.members)} exist, {len(view.bound)} have a node"
    state = f" ({quote_unless_name(view.phase)}{since})" if view.phase != UNKNOWN_PHASE else ""
    lines = [f"Its gang {view.name} needs {view.minimum or 'an unknown number of'} pods: {counts_text}{state}."]
    if not view.minimum:
        lines.append(
            f"The number is unknown, so the gang waits forever: create a PodGroup {view.name} with spec.minMember, or "
            f"create its pods again with the annotation {names.GROUP_NUM}."
        )
    waiting_for = [*map(quote_unless_name, view.waiting_for)]
    missing_count = view.minimum - len(view.members)
    if missing_count > 0:
        counts_text = wording.enumerate_first(view.members, _MAX_LISTED) or "none"
        lines.append(f"{missing_count} more must be created before any of them is scheduled; existing: {counts_text}.")
    elif len(view.bound) < view.minimum and view.waiting_for:
        lines.append(
            f"The gang fits and waits for {wording.enumerate_first(waiting_for, _MAX_LISTED)} to be scheduled."
        )
    if view.reserved:
        reserved_nodes = [
            f"{quote_unless_name(reservation.node)} ({reservation.cards})" for reservation in view.reserved
        ]
        lines.append(
            f"GPUs reserved for it: {view.cards}, on "
            f"{wording.enumerate_first(reserved_nodes, _MAX_LISTED_NODES, 'node')}."
        )
    if view.reason and view.minimum:
        lines.append(f"Last status: {wording.sanitize_message(view.reason)}.")
    return lines


def explain_avoided_nodes(pod: Json, card_nodes: Sequence[str], context: PodContext) -> list[str]:
    """Name the nodes with cards that the pod cannot use, and explain which of these nodes are closed to all pods.

    Empty if the pod can use all nodes with cards.
    """
    admitting_nodes = context.admitting_nodes(pod)
    if admitting_nodes is None:
        selector = _describe_selector(pod)
        if not selector or _SELECTOR_MESSAGE not in (scheduler_message(pod) or ""):
            return []
        excluding_fields = f"its nodeSelector ({selector}), or its node affinity"
        return [f"It excludes nodes by {excluding_fields}; ask an administrator which labels the nodes have."]
    avoided_nodes = [name for name in card_nodes if name not in admitting_nodes]
    gone_nodes = [name for name in avoided_nodes if context.is_node_gone(name)]
    lines = [f"Node {name} is gone from the cluster; its GPUs stay listed for some minutes." for name in gone_nodes]
    avoided_nodes = [name for name in avoided_nodes if name not in gone_nodes]
    if not avoided_nodes:
        return lines
    states = unschedulable_states(pod, avoided_nodes, context)
    lines += [
        f"Node {node} takes no new pods: it is {state}."
        if len(node_names) == 1
        else f"{wording.enumerate_first(node_names, _MAX_LISTED, 'node')} take no new pods: they are {state}."
        for state, node_names in _group_by_state(states).items()
        for node in node_names[:1]
    ]
    excluded_nodes = [
        name for name in avoided_nodes if not states.get(name) or not _admits_without_state(pod, name, context)
    ]
    if excluded_nodes:
        excluded_text = (
            "every node with GPUs"
            if len(excluded_nodes) == len(card_nodes)
            else wording.enumerate_first(excluded_nodes, _MAX_LISTED, "node")
        )
        lines.append(f"It excludes {excluded_text} by {avoidance_reasons(pod, excluded_nodes, context)}.")
    return lines


def unschedulable_states(pod: Json, avoided_nodes: Collection[str], context: PodContext) -> dict[str, str]:
    """Return the state of each node in `avoided_nodes` where a taint of Kubernetes' own keeps the pod away."""
    tolerations = (pod.get("spec") or {}).get("tolerations") or ()
    states = {}
    for node in context.nodes or ():
        keys = [taint.partition(":")[0].partition("=")[0] for taint in eligible.untolerated_taints(node, tolerations)]
        if node["metadata"]["name"] in avoided_nodes and any(map(nodestates.state_of_taint, keys)):
            state = nodestates.unschedulable_reason(node)
            if state is not None:
                states[node["metadata"]["name"]] = state
    return states


def find_blocking_states(pod: Json, avoided_nodes: Collection[str], context: PodContext) -> dict[str, str]:
    """Return the state of each node in `avoided_nodes` that the pod could use if the node had another state."""
    states = unschedulable_states(pod, avoided_nodes, context)
    return {name: state for name, state in states.items() if _admits_without_state(pod, name, context)}


def _admits_without_state(pod: Json, name: str, context: PodContext) -> bool:
    """Whether the pod could use the node if the node's state allowed it."""
    node = next(node for node in context.nodes or () if node["metadata"]["name"] == name)
    spec = node.get("spec") or {}
    taints = [taint for taint in spec.get("taints") or () if not nodestates.state_of_taint(taint["key"])]
    return eligible.is_node_eligible(node | {"spec": spec | {"taints": taints}}, pod)


def _group_by_state(states: Mapping[str, str]) -> dict[str, list[str]]:
    nodes_by_state: dict[str, list[str]] = {}
    for name, state in states.items():
        nodes_by_state.setdefault(state, []).append(name)
    return nodes_by_state


def avoidance_reasons(pod: Json, avoided_nodes: Collection[str], context: PodContext) -> str:
    """Name the fields of the pod that exclude some of these nodes."""
    spec = pod.get("spec") or {}
    all_tolerations = [{"operator": "Exists"}]
    nodes = [node for node in context.nodes or () if node["metadata"]["name"] in avoided_nodes]
    spec_by_reason = {
        f"its nodeSelector ({_describe_selector(pod)})": {
            "nodeSelector": spec.get("nodeSelector"),
            "tolerations": all_tolerations,
        },
        "its node affinity": {"affinity": spec.get("affinity"), "tolerations": all_tolerations},
    }
    reasons = [
        reason
        for reason, part in spec_by_reason.items()
        if not all(eligible.is_node_eligible(node, {"spec": part}) for node in nodes)
    ]
    taints = {
        taint
        for node in nodes
        for taint in eligible.untolerated_taints(node, spec.get("tolerations") or ())
        if not nodestates.state_of_taint(taint.partition(":")[0].partition("=")[0])
    }
    if taints:
        reasons.append(
            "taints that it does not tolerate "
            f"({wording.enumerate_first([*map(quote_unless_name, sorted(taints))], _MAX_LISTED)})"
        )
    return " and ".join(reasons)


def _describe_selector(pod: Json) -> str:
    labels = ((pod.get("spec") or {}).get("nodeSelector") or {}).items()
    return wording.enumerate_first([quote_unless_name(f"{key}={text}") for key, text in labels], _MAX_LISTED)


def explain_other_reasons(pod: Json, message: str | None, foreign_lines: Sequence[str]) -> str | None:
    """Explain why a pod is pending although cards are free; None if unknown.

    message: kube-scheduler's reason, or None. A reason about cards may be outdated, since cards are free now.
    """
    gates = [gate.get("name") for gate in (pod.get("spec") or {}).get("schedulingGates") or ()]
    is_in_gang = names.GANG in labels_of(pod)
    if names.GANG in gates or (names.ALLOCATION_GATE in gates and is_in_gang):
        return "it waits for its gang"
    if foreign_lines:
        return "the lines above say what it waits for"
    if names.ALLOCATION_GATE in gates:
        return "the extender allocates them next; if it still waits, its events say why"
    if message is None:
        return None
    if f"Insufficient {names.SHARE}" in message:
        return f"their device plugins offer no {names.SHARE} now: ask your administrator to run `cardwise doctor`"
    if f"{names.EXTENDER_PREFIX}/" in message:
        return "no Cardwise extender answers kube-scheduler: ask your administrator to run `cardwise doctor`"
    own_messages = (*(refusal.text for refusal in Refusal), *(f"Insufficient {name}" for name in names.REQUESTED))
    if any(text in message for text in own_messages) or f"Insufficient {names.CLASS_PREFIX}" in message:
        return None
    return "kube-scheduler's message above says what it waits for"


def explain_foreign_resources(pod: Json, context: PodContext, classes: Sequence[str]) -> list[str]:
    """Explain the GPU resources that the pod requests and that are not Cardwise's."""
    offered_names = context.offered_resources()
    lines = []
    for name in dict.fromkeys(_requested_resource_names(pod)):
        if not lookalikes.is_like_gpu(name) or name in names.REQUESTED or name.startswith(names.CLASS_PREFIX):
            continue
        if offered_names is not None and name in offered_names:
            resource = quote_unless_name(name)
            lines.append(f"It requests {resource}, which belongs to another device plugin, not to Cardwise.")
            continue
        suggested_name = lookalikes.suggest_resource(name, (*sorted(offered_names or ()), *classes))
        offer_note = "which no node offers" if offered_names is not None else "which does not belong to Cardwise"
        vendor_note = " Cardwise shares NVIDIA GPUs only." if lookalikes.is_of_other_vendor(name) else ""
        hint = f"; did you mean {suggested_name}?" if suggested_name else "."
        lines.append(f"It requests {quote_unless_name(name)}, {offer_note}{hint}{vendor_note}")
    return lines


def _requested_resource_names(pod: Json) -> list[str]:
    return [
        name
        for container in request.containers(pod)
        for name, amount in ((container.spec.get("resources") or {}).get("limits") or {}).items()
        if str(amount) != "0"
    ]


def explain_classes(pod_request: PodRequest, cluster_state: ClusterState) -> list[str]:
    """Return a line for each class that the pod names, about the cards or devices of the class."""
    card_classes = dict.fromkeys(
        container.resource_class for container in pod_request.containers if container.resource_class
    )
    device_classes = dict.fromkeys(device.resource_class for device in pod_request.devices)
    return [
        _explain_unknown_class(name, cluster_state) or _explain_card_class(name, cluster_state) for name in card_classes
    ] + [
        _explain_unknown_class(name, cluster_state) or _explain_device_class(name, cluster_state)
        for name in device_classes
    ]


def _explain_unknown_class(name: str, cluster_state: ClusterState) -> str | None:
    """Explain why the class cannot be described; None if it can be described."""
    if not cluster_state.missing_class(name):
        return None
    available = ", ".join(sorted(cluster_state.classes)) or "none"
    problem = next((text for text in cluster_state.problems if text.startswith(f"ResourceClass {name}: ")), None)
    return problem or f"There is no ResourceClass {name}; available: {available}."


def _explain_card_class(name: str, cluster_state: ClusterState) -> str:
    cards_by_node = {
        node.name: [card for card in node.cards if name in card.classes] for node in cluster_state.ledger.nodes()
    }
    cards = [card for node_cards in cards_by_node.values() for card in node_cards]
    if not cards and cluster_state.classes[name].untouched:
        return f"The cluster has no GPU of class {name} now: the pod waits until a node brings one."
    if not cards:
        return f"No GPU matches class {name}: see its selector with `{_show_class_command(name)}`."
    nodes_text = _list_nodes_with_counts({node: len(node_cards) for node, node_cards in cards_by_node.items()})
    unhealthy_count = sum(not card.healthy for card in cards)
    return f"Of class {name}: {len(cards)} GPU{'s' * (len(cards) > 1)} on {nodes_text}" + (
        f", {unhealthy_count} of them unhealthy." if unhealthy_count else "."
    )


def _explain_device_class(name: str, cluster_state: ClusterState) -> str:
    """Describe the devices of the class, and name nodes where some are free."""
    devices_by_node = {
        node: [device for device in node.devices if name in device.classes] for node in cluster_state.ledger.nodes()
    }
    devices = [device for node_devices in devices_by_node.values() for device in node_devices]
    if not devices:
        return f"No device matches class {name}: see its selector with `{_show_class_command(name)}`."
    counts = {node.name: len(node_devices) for node, node_devices in devices_by_node.items()}
    free_by_node = {
        node.name: sum(node.is_free(device) for device in node_devices)
        for node, node_devices in devices_by_node.items()
    }
    unhealthy_count = sum(not device.healthy for device in devices)
    return (
        f"Of class {name}: {wording.pluralize(len(devices), 'device')} on {_list_nodes_with_counts(counts)}"
        + (f", {unhealthy_count} of them unhealthy" if unhealthy_count else "")
        + f"; free: {_list_nodes_with_counts(free_by_node) or 'none'}."
    )


def _show_class_command(name: str) -> str:
    return command("kubectl get resourceclass {name} -o yaml", name=name)


def _list_nodes_with_counts(counts: Mapping[str, int]) -> str:
    """List nodes with their numbers, and leave out zeros."""
    nodes_with_counts = [f"{node} ({count})" for node, count in counts.items() if count]
    return wording.enumerate_first(nodes_with_counts, _MAX_LISTED_NODES, "node")


def explain_quota_status(pod_request: PodRequest, views: Sequence[EntryView]) -> list[str]:
    """Explain the entries of the namespace's GPUQuotas to users without the right to read cards.

    An entry for all cards certainly counts the pod's cards, and so does an entry for the pod's class. For other entries
    this is unknown, so the requested amount is left out. The MiB of whole cards are unknown.
    """
    lines = []
    for view in views:
        entry = view.entry
        card_requests = [
            limit
            for limit in fitting.card_requests(pod_request)
            if not (entry.resource_class or entry.model) or limit.resource_class == entry.resource_class != ""
        ]
        charge = quotas.sum_charges(limit.charge(limit.cards, 0) for limit in card_requests)
        amounts = ", ".join(
            f"{limit.used} of {limit.hard} {limit.unit} used"
            + (f", {limit.requested} requested" if limit.requested else "")
            for limit in quotas.entry_limits(entry, view.used, charge)
        )
        verdict = "does not allow this on" if quotas.exceeded_limits(entry, view.used, charge) else "on"
        lines.append(f"GPUQuota {view.quota.name} {verdict} {quotas.entry_title(entry)}: {amounts}.")
    return lines


def explain_quotas(pod_request: PodRequest, namespace: str, cluster_state: ClusterState) -> list[str]:
    """Explain the entries of GPUQuotas that keep the pod from cards, with their hard, used and requested amounts."""
    lines = []
    card_requests = fitting.card_requests(pod_request)
    for quota, headroom in cluster_state.quota_headroom(namespace):
        excess = explanation.find_exceeding_charge(card_requests, headroom, cluster_state.ledger)
        if excess is None:
            continue
        charge, closes_all_cards = excess
        used = cluster_state.ledger.used_amounts(namespace, headroom.entry)
        exceeded_text = ", ".join(
            f"{limit.used} of {limit.hard} {limit.unit} used, {limit.requested} requested"
            for limit in quotas.exceeded_limits(headroom.entry, used, charge)
        )
        other_gpus_note = "" if closes_all_cards else "; GPUs that it does not limit are still available"
        lines.append(
            f"GPUQuota {quota.name} does not allow this on {quotas.entry_title(headroom.entry)}: "
            f"{exceeded_text}{other_gpus_note}."
        )
    return lines
