"""Checks of Cardwise's own components by the objects that these components write."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from cardwise.cli.cluster import cordons, installation, nodestates
from cardwise.cli.doctor import finding, policies, repairs, startup
from cardwise.cli.doctor.facts import Facts, is_of_chart, is_recent, nvidia_runtimes
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import gpunodes, names
from cardwise.core.api.mps import CLOSED_BY_FORMER_MANAGER, MANAGER_GONE, MpsState
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.shellcommand import command
from cardwise.core.values.wording import quote_unless_name
from cardwise.kube.leases.election import MAX_DURATION
from cardwise.kube.objects.extendedresources import ExtendedResource
from cardwise.kube.pods import nodeconstraints
from cardwise.kube.pods.budgets import parse_conditions
from cardwise.kube.pods.nodeconstraints import NodeLabelsAndTaints

_EXTENDER: Final = "cardwise-extender"
_DEVICE_PLUGIN: Final = "cardwise-deviceplugin"
_DEFAULT_LEASE_SECONDS: Final = 15.0  # the duration of a Lease without leaseDurationSeconds
# The device plugin repeats an event within this time while its cause lasts.
_EVENT_MAX_AGE: Final = timedelta(minutes=10)
_USABLE_MPS_STATES: Final = ("Ready", "Off")
_UNAVAILABLE_REMEDY: Final = (
    "remove the reason, or leave it so: pods that require MPS wait, and all others run there "
    "(docs/reference/mps.md#where-mps-cannot-run)"
)
_MAX_LISTED_REASONS: Final = 3
# The wording of an event of the device plugin.
_RESOURCE_IN_EVENT: Final = re.compile(r"ExtendedResource (\S+) belongs to a GPU of node ")


def is_installed(facts: Facts) -> bool | None:
    """Whether any object of the chart exists; None if unknown.

    Without such an object, all checks would fail for the same reason.
    """
    if facts.unknown_kinds >= {"cards", "classes"}:
        return False
    present_names = {
        manifest["metadata"]["name"]
        for manifest in (*facts.mutating_webhooks, *facts.validating_webhooks, *facts.daemonsets)
    }
    own_names = {names.WEBHOOK_CONFIGURATION, _DEVICE_PLUGIN}
    if present_names & own_names or policies.list_own_policies(facts) or facts.cards:
        return True
    return (
        None
        if facts.unread_kinds.keys() & {"mutating_webhooks", "validating_webhooks", "policies", "daemonsets", "cards"}
        else False
    )


def check_namespace(facts: Facts) -> Iterator[Finding]:
    """Check that Cardwise's namespace exists and is the one that the user named.

    Cardwise's namespace is that of the webhook's Service, since only administrators write the webhook's configuration.
    Without the configuration, workloads with the chart's label are a hint. The remedy of this finding is not a command,
    because every tenant can give a workload this label.
    """
    given_namespace = facts.cardwise_namespace
    used_namespaces = service_namespaces(facts)
    labelled_workloads = (
        manifest for manifest in (*facts.other_daemonsets, *facts.other_deployments) if is_of_chart(manifest)
    )
    labelled_namespaces = sorted({workload["metadata"]["namespace"] for workload in labelled_workloads})
    has_workload = any(map(is_of_chart, (*facts.daemonsets, *facts.deployments)))
    if used_namespaces and given_namespace not in used_namespaces:
        text = (
            f"Cardwise is not installed in namespace {given_namespace} but in "
            f"{wording.enumerate_first(sorted(used_namespaces), _MAX_LISTED_REASONS)}"
        )
        retry_command = command("cardwise doctor --cardwise-namespace {namespace}", namespace=min(used_namespaces))
        remedy = f"{retry_command} (or $CARDWISE_NAMESPACE)"
        yield Finding("installation", Severity.PROBLEM, text, remedy)
    elif not used_namespaces and labelled_namespaces and not has_workload:
        text = (
            f"no workload in namespace {given_namespace} has Cardwise's label, but some in "
            f"{wording.enumerate_first(labelled_namespaces, _MAX_LISTED_REASONS)}"
        )
        remedy = "if Cardwise is in another namespace: cardwise doctor --cardwise-namespace NAMESPACE"
        yield Finding("installation", Severity.PROBLEM, text, remedy)
    elif "namespace" in facts.unknown_kinds:
        text = f"namespace {given_namespace}, where Cardwise was expected, does not exist"
        remedy = (
            "give the namespace of Cardwise: cardwise doctor --cardwise-namespace NAMESPACE (kubectl get "
            "namespaces lists them)"
        )
        yield Finding("installation", Severity.PROBLEM, text, remedy)


def service_namespaces(facts: Facts) -> set[str]:
    """Return the namespaces that the webhook's configurations name for its Service; empty without a configuration."""
    hooks = (
        hook
        for configuration in facts.mutating_webhooks
        if _is_own_configuration(configuration)
        for hook in configuration.get("webhooks") or ()
    )
    services = ((hook.get("clientConfig") or {}).get("service") or {} for hook in hooks)
    return {service["namespace"] for service in services if "namespace" in service}


def _is_own_configuration(configuration: Json) -> bool:
    """Whether a webhook configuration belongs to the chart."""
    return bool(configuration["metadata"]["name"] == names.WEBHOOK_CONFIGURATION)


def check_definitions(facts: Facts) -> Iterator[Finding]:
    """Check that the API server knows the kinds of `cardwise.dev`."""
    missing_kinds = sorted(facts.unknown_kinds & {"cards", "classes"})
    if missing_kinds:
        yield Finding(
            "installation",
            Severity.PROBLEM,
            "the CRDs of cardwise.dev are not installed",
            repairs.suggest_installation(facts),
        )
    elif is_installed(facts) is False:
        text = "only Cardwise's CRDs are installed: Cardwise was uninstalled, or its installation has failed"
        yield Finding("installation", Severity.PROBLEM, text, repairs.suggest_installation(facts))
    elif "cards" not in facts.unread_kinds:
        yield Finding("installation", Severity.OK, f"the CRDs of {names.API_VERSION} are installed")


def check_webhooks(facts: Facts) -> Iterator[Finding]:
    """Check the webhook configurations.

    Cardwise's configurations must have the CA. The webhook writes it into them at its start. Mutating webhooks of other
    projects that run after Cardwise's webhook are reported.
    """
    if facts.unread_kinds.keys() & {"mutating_webhooks", "validating_webhooks"}:
        return
    for kind, configurations, name in (
        ("Mutating", facts.mutating_webhooks, names.WEBHOOK_CONFIGURATION),
        ("Mutating", facts.mutating_webhooks, names.LATE_CONFIGURATION),
        ("Validating", facts.validating_webhooks, names.WEBHOOK_CONFIGURATION),
    ):
        configuration_object = next(
            (configuration for configuration in configurations if configuration["metadata"]["name"] == name), None
        )
        title = f"{kind}WebhookConfiguration {name}"
        if configuration_object is None:
            may_be_installed = _plugin_daemonsets(facts) or "daemonsets" in facts.unread_kinds
            remedy = (
                f"let the chart recreate it: {repairs.upgrade_command(facts)}"
                if may_be_installed
                else repairs.suggest_installation(facts)
            )
            yield Finding("webhook", Severity.PROBLEM, f"there is no {title}", remedy)
        elif not (hooks := configuration_object.get("webhooks")):
            remedy = f"let the chart write them again: {repairs.upgrade_command(facts)}"
            yield Finding("webhook", Severity.PROBLEM, f"{title} has no webhooks: the API server calls none", remedy)
        elif not all(hook["clientConfig"].get("caBundle") for hook in hooks):
            remedy = f"see its log: {repairs.log_command(facts, f'deployment/{installation.WEBHOOK}')}"
            yield Finding("webhook", Severity.PROBLEM, f"{title} has no CA: the webhook has never started", remedy)
    for configuration in facts.mutating_webhooks:
        name = configuration["metadata"]["name"]
        if name > names.LATE_CONFIGURATION and any(map(_changes_new_pods, configuration.get("webhooks") or ())):
            text = (
                f"MutatingWebhookConfiguration {name} runs after Cardwise's: pods to which it adds a GPU request "
                "are refused"
            )
            remedy = f"if it does that, give it a name that sorts before {names.WEBHOOK_CONFIGURATION}"
            yield Finding("webhook", Severity.NOTE, text, remedy)


def _changes_new_pods(hook: Json) -> bool:
    return any(
        set(rule.get("operations") or ()) & {"CREATE", "*"}
        and set(rule.get("apiGroups") or ()) & {"", "*"}
        and set(rule.get("resources") or ()) & {"pods", "*", "*/*"}
        for rule in hook.get("rules") or ()
    )


def check_webhook_exposure(facts: Facts) -> Iterator[Finding]:
    """Check that not every pod can connect to the webhook.

    Every pod can connect if the webhook accepts clients without a certificate and NetworkPolicies allow all clients.
    """
    webhook = next((listed for listed in facts.deployments if listed["metadata"]["name"] == installation.WEBHOOK), None)
    if webhook is None or "networkpolicies" in facts.unread_kinds:
        return
    template = webhook["spec"]["template"]
    spec = template["spec"]
    if any(
        argument.startswith("--client-ca=") for listed in spec["containers"] for argument in listed.get("args") or ()
    ):
        return
    https_ports = [
        port for listed in spec["containers"] for port in listed.get("ports") or () if port.get("name") == "https"
    ]
    ports = {"https", *(port["containerPort"] for port in https_ports)}
    labels = (template.get("metadata") or {}).get("labels") or {}
    remedy = "set webhook.clientCA of the chart (docs/install.md#only-the-api-server-asks-the-webhook)"
    if spec.get("hostNetwork"):
        reason = "it uses the nodes' network, to which no NetworkPolicy applies"
    elif _are_callers_restricted(facts.networkpolicies, labels, ports):
        return
    else:
        reason = "it requires no client certificate, and no NetworkPolicy restricts who may connect"
        remedy += ", or networkPolicies.sources.apiServer"
    yield Finding("webhook", Severity.NOTE, f"the webhook is open to pods: {reason}", remedy)


def _are_callers_restricted(policies: Iterable[Json], labels: Mapping[str, str], ports: Collection[int | str]) -> bool:
    """Whether NetworkPolicies restrict which pods may connect to these ports of the pods with these labels.

    The ports are restricted if at least one NetworkPolicy selects the pods, and no rule opens a port to all pods.
    """
    selecting_policies = [
        listed["spec"]
        for listed in policies
        if "Ingress" in (listed["spec"].get("policyTypes") or ("Ingress",))
        and all(condition.matches(labels) for condition in parse_conditions(listed["spec"].get("podSelector") or {}))
    ]
    rules = [rule for spec in selecting_policies for rule in spec.get("ingress") or ()]
    opening_rules = [
        rule for rule in rules if not rule.get("ports") or any(_opens_port(port, ports) for port in rule["ports"])
    ]
    return bool(selecting_policies) and not any(_admits_all_pods(rule.get("from")) for rule in opening_rules)


def _opens_port(port: Json, ports: Collection[int | str]) -> bool:
    """Whether a rule's entry includes one of these ports. An entry may be a port, a range, or all ports."""
    first_port = port.get("port")
    if not isinstance(first_port, int):
        return first_port is None or first_port in ports
    return any(isinstance(listed, int) and first_port <= listed <= port.get("endPort", first_port) for listed in ports)


def _admits_all_pods(peers: Sequence[Json] | None) -> bool:
    """Whether a rule with these callers admits the pods of all namespaces; a rule without callers does."""
    return not peers or any(
        (peer.get("namespaceSelector") == {} and not peer.get("podSelector"))
        or (peer.get("ipBlock") or {}).get("cidr", "").endswith("/0")
        for peer in peers
    )


def check_leader(facts: Facts) -> Iterator[Finding]:
    """Check that an extender is leader: its Lease is not expired by the API server's clock."""
    if "leases" in facts.unread_kinds:
        return
    lease = next((listed for listed in facts.leases if listed["metadata"]["name"] == names.LEASE), None)
    spec = (lease or {}).get("spec") or {}
    holder = quote_unless_name(spec.get("holderIdentity") or "")
    if lease is None or not spec.get("holderIdentity"):
        text = f"no extender holds the Lease {names.LEASE}: pods that request GPUs stay pending"
        deployment = next((listed for listed in facts.deployments if listed["metadata"]["name"] == _EXTENDER), None)
        if lease is None and deployment is None:
            remedy = "start the extender (extender.enabled); ignore this if a single extender runs with --no-lease"
            yield Finding("extender", Severity.WARNING, text, remedy)
        else:
            yield Finding("extender", Severity.PROBLEM, text, _suggest_start(facts, deployment))
        return
    age = installation.lease_age(lease, facts.now)
    if age is None:
        text = f"extender {holder} holds the Lease {names.LEASE}, which has no renewal time"
        remedy = f"a running extender writes it within seconds: {_pods_command(facts)}"
        yield Finding("extender", Severity.WARNING, text, remedy)
        return
    if age > min(spec.get("leaseDurationSeconds") or _DEFAULT_LEASE_SECONDS, MAX_DURATION):
        text = f"extender {holder} leads, but has not renewed its Lease for {age:.0f} s"
        remedy = f"another replica takes over by itself; check that one runs: {_pods_command(facts)}"
        yield Finding("extender", Severity.PROBLEM, text, remedy)
    else:
        yield Finding("extender", Severity.OK, f"extender {holder} leads")


def _suggest_start(facts: Facts, deployment: Json | None) -> str:
    """Return the remedy if no extender is leader, although an extender was leader before or the Deployment exists."""
    if deployment is None:
        return f"let the chart start it: {repairs.upgrade_command(facts, extender_enabled='true')}"
    if not startup.desired_replicas(deployment):
        return repairs.scale_command(facts, _EXTENDER)
    if startup.is_faulty(facts, "extender"):
        return "first fix what `components` reports about its pods"
    return f"check that one runs: {_pods_command(facts)}"


def _pods_command(facts: Facts) -> str:
    return repairs.get_pods_command(facts.cardwise_namespace, "extender")


def check_cards(facts: Facts) -> Iterator[Finding]:
    """Check the reports of the device plugins: cards, their health, and whether the kubelet knows the plugin."""
    if facts.unknown_kinds & {"cards"} or "cards" in facts.unread_kinds:
        return
    if not facts.cards:
        remedy = (
            "check that the device plugin runs on the nodes with GPUs (nodes.selector), and see its log: "
            f"{repairs.log_command(facts, f'daemonset/{_DEVICE_PLUGIN}')}"
        )
        text = "no GPU is known"
        plugins = _plugin_daemonsets(facts)
        runtime_names = [name for name, _ in nvidia_runtimes(facts)]
        if startup.is_faulty(facts, "deviceplugin"):
            remedy = "first fix what `components` reports about the device plugin, which reports the GPUs"
        elif plugins and not any((listed.get("status") or {}).get("desiredNumberScheduled") for listed in plugins):
            text = "no GPU is known: no node has the labels of nodes.selector"
            remedy = "set nodes.selector, or run: kubectl label node NODE nvidia.com/gpu.present=true"
        elif plugins and runtime_names and not any(_pod_spec(listed).get("runtimeClassName") for listed in plugins):
            text = f"no GPU is known: the device plugin runs without NVIDIA's RuntimeClass {runtime_names[0]}"
            remedy = (
                "without it the device plugin finds no driver, unless NVIDIA's runtime is the default: "
                f"{repairs.upgrade_command(facts, nodes_runtimeClass=runtime_names[0])}"
            )
        yield Finding("cards", Severity.PROBLEM, text, remedy)
        return
    unhealthy_cards = [card for card in facts.cards if (card.get("status") or {}).get("health") == "Unhealthy"]
    cordoned_cards = [card for card in facts.cards if card["spec"].get("unschedulable")]
    usable_count = len(facts.cards) - len({card["spec"]["uuid"] for card in (*unhealthy_cards, *cordoned_cards)})
    for reason, cards_of_reason in _group_by_reason(
        unhealthy_cards, lambda card: wording.sanitize_message(card["status"].get("reason") or "no reason given")
    ).items():
        text = f"{_describe_cards(cards_of_reason)} unhealthy: {reason}"
        remedy = "no pod gets a GPU until one is healthy: fix that, or give Cardwise other GPUs (nodes.gpus)"
        level = Severity.WARNING if usable_count else Severity.PROBLEM
        yield Finding(
            "cards",
            level,
            text,
            "it gets no new pods; this ends by itself once it is healthy" if usable_count else remedy,
        )
    now = facts.now or datetime.now(UTC)
    resources = msgspec.convert(cordoned_cards, list[ExtendedResource])
    for listed in cordons.abandoned_defrag_cordons(resources, now):
        card = cordons.describe_card(listed)
        text = f"{card} was cordoned{cordons.author_suffix(listed)} by a defrag and has not been uncordoned"
        remedy = f"if none runs any more: {cordons.uncordon_command(listed)}"
        yield Finding("cards", Severity.WARNING, text, remedy)
    if cordoned_cards and not usable_count:
        text = f"{_describe_cards(cordoned_cards)} cordoned, and no other is healthy"
        yield Finding("cards", Severity.PROBLEM, text, f"uncordon some: {cordons.uncordon_command(resources[0])}")
    yield from _find_conflicts(facts)
    node_by_name = {node["metadata"]["name"]: node for node in facts.nodes}
    card_nodes = sorted(facts.card_nodes())
    if "nodes" not in facts.unread_kinds:
        yield from _check_slots(facts, {name: node_by_name.get(name) for name in card_nodes}, _plugin_daemonsets(facts))
    count_text = "1 GPU or device" if len(facts.cards) == 1 else f"{len(facts.cards)} GPUs and devices"
    unschedulable_nodes = {
        name for name in card_nodes if name not in node_by_name or nodestates.unschedulable_reason(node_by_name[name])
    }
    unusable_uuids = {card["spec"]["uuid"] for card in (*unhealthy_cards, *cordoned_cards)}
    if "nodes" not in facts.unread_kinds:  # another finding reports nodes that take no pods
        unusable_uuids |= {card["spec"]["uuid"] for card in facts.cards if card["spec"]["node"] in unschedulable_nodes}
    if usable_count := len(facts.cards) - len(unusable_uuids):
        text = f"{count_text} on {wording.pluralize(len(card_nodes), 'node')}, {usable_count} usable"
        yield Finding("cards", Severity.OK, text)


def _find_conflicts(facts: Facts) -> Iterator[Finding]:
    """Find by recent Events the nodes that cannot offer a card because another node reports the same UUID.

    Only the ExtendedResource's name is read from an Event. The ExtendedResource names the card's node, and the state of
    this node determines whether the remedy deletes the node: a forged Event must not lead to the deletion of a healthy
    node.
    """
    node_by_resource = {resource["metadata"]["name"]: resource["spec"]["node"] for resource in facts.cards}
    nodes = {node["metadata"]["name"]: node for node in facts.nodes}
    resource_by_node: dict[str, str] = {}
    for event in sorted(facts.node_events, key=lambda event: event.time):
        match = _RESOURCE_IN_EVENT.search(event.message)
        may_exist = event.name in nodes or "nodes" in facts.unread_kinds
        if match and event.kind == "Node" and may_exist and is_recent(facts, event, _EVENT_MAX_AGE):
            resource_by_node[event.name] = match[1]
    for node, resource in sorted(resource_by_node.items()):
        other_node = node_by_resource.get(resource, node)
        if other_node == node:
            continue
        text = (
            f"node {node}: ExtendedResource {resource} belongs to a GPU of node {other_node}, so this node cannot "
            "publish it"
        )
        state = nodestates.unschedulable_reason(nodes[other_node]) if other_node in nodes else "gone"
        if (
            "nodes" not in facts.unread_kinds
            and state is not None
            and (state == "gone" or nodestates.NOT_READY in state)
        ):
            delete = command("kubectl delete node {node}", node=other_node)
            remedy = f"node {other_node} is {state}; if {node} was previously called {other_node}: {delete}"
        else:
            remedy = (
                "compare what nvidia-smi -L prints on both nodes: where they report the same UUID (clones of a "
                "machine?), only one of them can offer the GPU"
            )
        yield Finding("cards", Severity.WARNING, text, remedy)


def _check_slots(facts: Facts, nodes: Mapping[str, Json | None], plugins: Sequence[Json]) -> Iterator[Finding]:
    deleted_nodes = [name for name, node in nodes.items() if node is None]
    if deleted_nodes:
        delete = command(f"kubectl delete extendedresources -l {names.NODE_LABEL}={{node}}", node=deleted_nodes[0])
        remedy = f"they are removed within minutes; or run: {delete}"
        verb = "is" if len(deleted_nodes) == 1 else "are"
        text = f"{finding.name_nodes(deleted_nodes)} {verb} gone, but the GPUs are still listed"
        yield Finding("cards", Severity.NOTE, text, remedy)
    nodes_without_slots = {
        name: node
        for name, node in nodes.items()
        if node is not None and (node.get("status", {}).get("allocatable") or {}).get(names.SHARE, "0") == "0"
    }
    constraints = [nodeconstraints.constraints_of(_pod_spec(constraint)) for constraint in plugins]
    node_labels = {
        name: NodeLabelsAndTaints(node["metadata"].get("labels") or {}) for name, node in nodes_without_slots.items()
    }
    unselected_nodes = [
        name
        for name, labels in node_labels.items()
        if constraints and not any(constraint.admits(name, labels) for constraint in constraints)
    ]
    upgrading_nodes = [name for name in unselected_nodes if gpunodes.upgrade_label(node_labels[name].labels)]
    if upgrading_nodes:
        label = gpunodes.upgrade_label(node_labels[upgrading_nodes[0]].labels)
        text = (
            f"{finding.name_nodes(upgrading_nodes)}: NVIDIA's GPU Operator is replacing the driver, so the device "
            "plugin "
            "was stopped"
        )
        remedy = f"it starts again once the operator has changed the label {label}"
        yield Finding("cards", Severity.WARNING, text, remedy)
    unselected_nodes = [name for name in unselected_nodes if name not in upgrading_nodes]
    if unselected_nodes:
        text = (
            f"{finding.name_nodes(unselected_nodes)}: the device plugin does not run there, because nodes.selector "
            "does not "
            "match"
        )
        label = command("kubectl label node {node} nvidia.com/gpu.present=true", node=unselected_nodes[0])
        remedy = f"{label}, or set nodes.selector"
        yield Finding("cards", Severity.PROBLEM, text, remedy)
    other_nodes = [name for name in nodes_without_slots if name not in (*unselected_nodes, *upgrading_nodes)]
    if other_nodes:
        nodes_text = finding.name_nodes(other_nodes)
        text = (
            f"{nodes_text}: no {names.SHARE} is offered: Cardwise's device plugin is not registered with the kubelet "
            "there"
        )
        remedy = (
            "check that the device plugin runs there and that nodes.kubeletDir is the kubelet's folder: "
            f"{repairs.get_pods_command(facts.cardwise_namespace, 'deviceplugin')} -o wide"
        )
        if startup.is_faulty(facts, "deviceplugin"):
            remedy = "first fix what `components` reports about the device plugin"
        yield Finding("cards", Severity.PROBLEM, text, remedy)


def _group_by_reason(cards: Iterable[Json], reason: Callable[[Json], str]) -> dict[str, list[Json]]:
    """Group cards by the reason that a function returns for each."""
    cards_by_reason: dict[str, list[Json]] = {}
    for card in cards:
        cards_by_reason.setdefault(reason(card), []).append(card)
    return cards_by_reason


def _plugin_daemonsets(facts: Facts) -> list[Json]:
    """Return the DaemonSet of the device plugin, if it exists."""
    return [daemonset for daemonset in facts.daemonsets if daemonset["metadata"]["name"] == _DEVICE_PLUGIN]


def _pod_spec(daemonset: Json) -> Json:
    spec: Json = ((daemonset.get("spec") or {}).get("template") or {}).get("spec") or {}
    return spec


def _describe_cards(cards: Sequence[Json]) -> str:
    """Describe cards in a few words: one by its name, several by their number and nodes."""
    if len(cards) == 1:
        return f"{cards[0]['spec']['node']}: {quote_unless_name(cards[0]['spec']['uuid'])} is"
    nodes = sorted({card["spec"]["node"] for card in cards})
    return f"{finding.name_nodes(nodes)}, {len(cards)} GPUs:"


def check_mps(facts: Facts) -> Iterator[Finding]:
    """Check the MPS daemons, if there is an MPS manager."""
    status_by_uuid = {
        card["spec"]["uuid"]: (card.get("status") or {}).get("mps") for card in facts.cards if _is_card(card)
    }
    reported_status = {uuid: status for uuid, status in status_by_uuid.items() if status}
    if status_by_uuid and not reported_status:
        text = "no node has an MPS manager: memory limits depend on the programs' frameworks"
        yield Finding("mps", Severity.NOTE, text, "run cardwise-mps on the nodes with GPUs: mps.enabled=true")
    state_by_uuid = {uuid: status.get("state") for uuid, status in reported_status.items()}
    unavailable_cards = [
        card for card in facts.cards if state_by_uuid.get(card["spec"]["uuid"]) == MpsState.UNAVAILABLE
    ]
    for reason, cards_of_reason in _group_by_reason(unavailable_cards, _mps_reason).items():
        text = f"{_describe_cards(cards_of_reason)} shared without MPS, so limits are advisory: {reason}"
        yield Finding("mps", Severity.WARNING, text, _UNAVAILABLE_REMEDY)
    unusable_cards = [
        card
        for card in facts.cards
        if state_by_uuid.get(card["spec"]["uuid"], "Off") not in (*_USABLE_MPS_STATES, MpsState.UNAVAILABLE)
    ]
    cards_by_reason = _group_by_reason(
        unusable_cards,
        lambda card: f"{quote_unless_name(reported_status[card['spec']['uuid']].get('state'))}: {_mps_reason(card)}",
    )
    if unusable_cards and len(unusable_cards) == len(status_by_uuid):
        sorted_reasons = sorted(cards_by_reason, key=lambda reason: -len(cards_by_reason[reason]))
        text = (
            f"{_describe_cards(unusable_cards)} without working MPS, "
            f"{wording.enumerate_first(sorted_reasons, _MAX_LISTED_REASONS)}: "
            "no GPU is left for pods that use MPS"
        )
        yield Finding("mps", Severity.PROBLEM, text, _mps_remedy(facts, sorted_reasons[0]))
    else:
        for reason, cards_of_reason in cards_by_reason.items():
            text = f"{_describe_cards(cards_of_reason)} without MPS, {reason}"
            yield Finding("mps", Severity.WARNING, text, _mps_remedy(facts, reason))
    usable_count = sum(state in _USABLE_MPS_STATES for state in state_by_uuid.values())
    if usable_count:
        yield Finding(
            "mps", Severity.OK, f"MPS of {wording.pluralize(usable_count, 'GPU')} is ready, or off as requested"
        )


def _mps_remedy(facts: Facts, reason: str) -> str:
    if startup.is_faulty(facts, "mps"):
        return "first fix what `components` reports about cardwise-mps"
    if MANAGER_GONE in reason:
        return (
            "run cardwise-mps there (mps.enabled=true), or declare that it was removed: mps.enabled=false, with "
            "deviceplugin.mps=auto or never"
        )
    if CLOSED_BY_FORMER_MANAGER in reason:
        return (
            "run cardwise-mps there (mps.enabled=true) until the pods with MPS on these GPUs have ended, then remove "
            "it; or drain and reboot the node"
        )
    return f"the manager tries again by itself; see its log: {repairs.log_command(facts, 'daemonset/cardwise-mps')}"


def _mps_reason(card: Json) -> str:
    return wording.sanitize_message(card["status"]["mps"].get("reason") or "no reason given")


def _is_card(card: Json) -> bool:
    return bool(card["spec"].get("memoryMiB"))
