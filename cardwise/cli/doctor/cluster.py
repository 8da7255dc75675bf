"""Checks of the dependencies of Cardwise: Kubernetes, runtimes, clocks, other GPU plugins, remains of gpushare."""

from collections.abc import Iterator
from typing import Final

from cardwise.cli.cluster import installation, nodestates
from cardwise.cli.doctor import finding, repairs
from cardwise.cli.doctor.facts import Facts, is_infrastructure, namespaced_name
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import cdiruntimes, names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, labels_of
from cardwise.core.values.timestamps import parse_timestamp
from cardwise.core.values.wording import quote_unless_name

_MIN_VERSION: Final = (1, 31)  # equal to kubeVersion of the chart
_MAX_SKEW_SECONDS: Final = 5.0  # maximum difference of two clocks; a larger one uses up the safety margin of a Lease
_MAX_LISTED: Final = 5

# Parts of names of DaemonSets and Deployments of other GPU sharers. The names do not depend on the Helm release's name.
_PLUGIN_BY_NAME_PART: Final = {
    "nvidia-device-plugin": "NVIDIA's device plugin",
    "nvidia-gpu-device-plugin": "GKE's device plugin for NVIDIA's GPUs",
    "nvidia-dra-driver": "NVIDIA's DRA driver",
    "dra-driver-nvidia": "NVIDIA's DRA driver",
    "hami-device-plugin": "HAMi",
    "volcano-device-plugin": "Volcano's vGPU plugin",
    "gpu-manager": "Tencent's gpu-manager",
}
_GPUSHARE_NAME_PARTS: Final = ("gpushare-device-plugin", "gpushare-schd-extender")
_GPUSHARE_LABEL: Final = "gpushare"


def check_kubernetes_version(facts: Facts) -> Iterator[Finding]:
    """Check that Kubernetes has the minimum version."""
    version = str(facts.version.get("gitVersion", ""))
    min_version = cdiruntimes.format_version(_MIN_VERSION)
    if cdiruntimes.parse_version(version) >= _MIN_VERSION:
        yield Finding("kubernetes", Severity.OK, f"Kubernetes {version}")
    else:
        remedy = f"upgrade the control plane to {min_version} or later"
        yield Finding(
            "kubernetes", Severity.PROBLEM, f"Kubernetes {version or 'of unknown version'}, not {min_version}", remedy
        )


def check_unschedulable_nodes(facts: Facts) -> Iterator[Finding]:
    """Find nodes with cards that take no new pods: not ready, cordoned or under pressure."""
    states = {node["metadata"]["name"]: nodestates.unschedulable_reason(node) for node in facts.nodes}
    card_nodes = sorted(name for name in facts.card_nodes() if name in states)
    nodes_by_state: dict[str, list[str]] = {}
    for name in card_nodes:
        if (state := states[name]) is not None:
            nodes_by_state.setdefault(state, []).append(name)
    has_schedulable_node = any(states[name] is None for name in card_nodes)
    for state, nodes in nodes_by_state.items():
        node_argument = nodes[0] if len(nodes) == 1 else "NODE"
        text = f"{finding.name_nodes(nodes)} take{'s' * (len(nodes) == 1)} no new pods: {state}"
        level = Severity.WARNING if has_schedulable_node else Severity.PROBLEM
        yield Finding("nodes", level, text, nodestates.suggest_remedy(state, node_argument).replace("`", ""))


def check_runtimes(facts: Facts) -> Iterator[Finding]:
    """Check that each node with cards can restrict containers to their card."""
    access_by_node = {card["spec"]["node"]: (card.get("status") or {}).get("gpuAccess") for card in facts.cards}
    nodes_by_access: dict[tuple[str, str], list[str]] = {}
    for node in facts.nodes:
        name = node["metadata"]["name"]
        if name not in access_by_node or access_by_node[name] == "cdi":
            continue
        runtime_version = node.get("status", {}).get("nodeInfo", {}).get("containerRuntimeVersion", "")
        nodes_by_access.setdefault((access_by_node[name] or "", runtime_version), []).append(name)
    for (method, runtime_version), nodes in nodes_by_access.items():
        subject = finding.name_nodes(nodes)
        runtime, _, version = runtime_version.partition("://")
        if method == "env":
            version_text = quote_unless_name(runtime_version)
            text = (
                f"{subject}: GPUs are assigned by environment variable only, which a container can circumvent "
                f"({version_text})"
            )
            yield Finding("card-access", Severity.WARNING, text, cdi_remedy(runtime, version))
        else:
            version_text = quote_unless_name(runtime_version or "unknown")
            text = f"{subject}: the device plugin has not reported how containers get their GPUs ({version_text})"
            log = repairs.log_command(facts, "daemonset/cardwise-deviceplugin")
            yield Finding("card-access", Severity.WARNING, text, f"see the log of the device plugin there: {log}")
    cdi_node_count = sum(method == "cdi" for method in access_by_node.values())
    if cdi_node_count:
        yield Finding(
            "card-access",
            Severity.OK,
            f"{wording.pluralize(cdi_node_count, 'node')} with GPUs assigned by CDI: a container can open only its own",
        )


def cdi_remedy(runtime: str, version: str) -> str:
    if runtime not in cdiruntimes.CDI_SUPPORTED_SINCE:
        return "use containerd 2 or CRI-O: this runtime does not support CDI"
    min_version = cdiruntimes.CDI_SUPPORTED_SINCE[runtime]
    if cdiruntimes.parse_version(version) < min_version:
        return (
            f"upgrade {runtime} to {cdiruntimes.format_version(min_version)} or later: earlier versions do not "
            "support CDI"
        )
    if not cdiruntimes.has_cdi(runtime, version):
        default_version = cdiruntimes.format_version(cdiruntimes.CDI_DEFAULT_SINCE[runtime])
        return f"set enable_cdi = true in the configuration of {runtime} (the default since {default_version})"
    return "let the device plugin choose (deviceplugin.gpuAccess=auto), and check that the runtime reads /var/run/cdi"


def check_clocks(facts: Facts) -> Iterator[Finding]:
    """Compare each node's clock with the API server's clock: both write the time of a renewal into the node's Lease."""
    skewed_clocks = []
    for lease in (*facts.node_leases, *facts.leases):
        difference = _clock_skew(lease)
        if difference is not None and abs(difference) > _MAX_SKEW_SECONDS:
            skewed_clocks.append(f"{lease['metadata']['name']} ({difference:+.0f} s)")
    if skewed_clocks:
        text = f"clocks differ from the API server's: {wording.enumerate_first(skewed_clocks, _MAX_LISTED)}"
        yield Finding(
            "clocks", Severity.WARNING, text, "run NTP or chrony there: Leases and ages depend on these clocks"
        )
    elif facts.node_leases:
        yield Finding(
            "clocks",
            Severity.OK,
            f"the clocks agree with the API server's on {wording.pluralize(len(facts.node_leases), 'node')}",
        )


def _clock_skew(lease: Json) -> float | None:
    """Return by how many seconds the clock of the Lease's holder is ahead; None if the Lease does not show it."""
    renew_time = parse_timestamp((lease.get("spec") or {}).get("renewTime"))
    recorded_time = installation.last_write(lease)
    if renew_time is None or recorded_time is None:
        return None
    return (renew_time - recorded_time).total_seconds()


def check_other_plugins(facts: Facts) -> Iterator[Finding]:
    """Find other programs that give the same cards to pods."""
    card_nodes = facts.card_nodes()
    offering_nodes = {
        node["metadata"]["name"]: gpu_count
        for node in facts.nodes
        if (gpu_count := (node.get("status", {}).get("allocatable") or {}).get(names.NVIDIA_GPU, "0")) != "0"
        and node["metadata"]["name"] in card_nodes
    }
    is_shared = bool(offering_nodes)
    if offering_nodes:
        cards = sum(int(number) for number in offering_nodes.values() if number.isdigit())
        subject = f"{finding.name_nodes(list(offering_nodes))}, {wording.pluralize(cards, 'GPU')}"
        yield Finding(
            "other-plugins",
            Severity.WARNING,
            f"{subject}: NVIDIA's device plugin offers them, so Cardwise does not use them unless nodes.gpus names "
            "them",
            "stop NVIDIA's plugin there, or split the GPUs between the two with nodes.gpus and that plugin's "
            "NVIDIA_VISIBLE_DEVICES",
        )
    similar_names: list[str] = []
    for kind, workload in _list_workloads(facts):
        for name_part, vendor in _PLUGIN_BY_NAME_PART.items():
            if name_part not in workload["metadata"]["name"]:
                continue
            is_shared = True
            if not is_infrastructure(facts, workload):
                similar_names.append(f"{kind} {namespaced_name(workload)}")
                continue
            yield Finding(
                "other-plugins",
                Severity.NOTE,
                f"{vendor} is installed: {kind} {namespaced_name(workload)}",
                "use a nodeSelector to run it on other nodes than Cardwise",
            )
    if similar_names:
        text = (
            "workloads in user namespaces are named like other GPU plugins: "
            f"{wording.enumerate_first(similar_names, _MAX_LISTED)}"
        )
        remedy = "if they are such plugins, use a nodeSelector to run them on other nodes than Cardwise"
        yield Finding("other-plugins", Severity.NOTE, text, remedy)
    if not is_shared and not facts.unread_kinds.keys() & {"nodes", "daemonsets"}:
        yield Finding("other-plugins", Severity.OK, "no other plugin assigns the GPUs of Cardwise's nodes")


def check_gpushare_leftovers(facts: Facts) -> Iterator[Finding]:
    """Find remains of an installation of gpushare."""
    card_nodes = facts.card_nodes()
    gpushare_workloads = [
        (kind, workload)
        for kind, workload in _list_workloads(facts)
        if any(name_part in workload["metadata"]["name"] for name_part in _GPUSHARE_NAME_PARTS)
    ]
    leftovers = [
        f"{kind} {namespaced_name(workload)}"
        for kind, workload in gpushare_workloads
        if is_infrastructure(facts, workload)
    ]
    similar_names = [
        f"{kind} {namespaced_name(workload)}"
        for kind, workload in gpushare_workloads
        if not is_infrastructure(facts, workload)
    ]
    for node in facts.nodes:
        metadata = node["metadata"]
        capacity = (node.get("status", {}).get("capacity") or {}).get(names.GPU_MEM, "0")
        if _GPUSHARE_LABEL in labels_of(node):
            leftovers.append(f"label {_GPUSHARE_LABEL} of node {metadata['name']}")
        elif capacity != "0" and metadata["name"] not in card_nodes:
            leftovers.append(f"{names.GPU_MEM}: {capacity} of node {metadata['name']}, where Cardwise has no GPU")
    if leftovers:
        remedy = "stop its DaemonSet node by node and its extender last; its running pods stay and are counted"
        yield Finding(
            "gpushare",
            Severity.WARNING,
            f"leftovers of gpushare: {wording.enumerate_first(leftovers, _MAX_LISTED)}",
            remedy,
        )
    if similar_names:
        text = (
            "workloads in user namespaces are named like those of gpushare: "
            f"{wording.enumerate_first(similar_names, _MAX_LISTED)}"
        )
        remedy = "if they belong to gpushare, see docs/migration.md for the meaning of its numbers and how to stop it"
        yield Finding("gpushare", Severity.NOTE, text, remedy)
    elif not leftovers and not facts.unread_kinds.keys() & {"nodes", "daemonsets", "deployments"}:
        yield Finding("gpushare", Severity.OK, "no leftovers of gpushare")


def _list_workloads(facts: Facts) -> Iterator[tuple[str, Json]]:
    """Yield kind and object of the workloads of all namespaces: another project may be installed in any namespace."""
    kinds = {
        "DaemonSet": (*facts.daemonsets, *facts.other_daemonsets),
        "Deployment": (*facts.deployments, *facts.other_deployments),
    }
    return ((kind, workload) for kind, workloads in kinds.items() for workload in workloads)
