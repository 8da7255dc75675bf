"""`cardwise doctor --before-install`: checks a cluster without Cardwise and proposes values of the chart.

Each check is a function of `PreinstallFacts`. A finding may propose values (`Finding.values`), and `install_command`
joins them. Values that the chart can look up itself (`auto`) are proposed too, because `helm template` and GitOps tools
cannot look them up.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from cardwise.cli.doctor import bypasses, cluster, components, facts, finding, repairs, units
from cardwise.cli.doctor.facts import PROBE_POD_PREFIX, Facts, namespaced_name
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import cdiruntimes, gpunodes, names
from cardwise.core.values import shellcommand, wording
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.core.values.wording import quote_unless_name
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.pods.nodeconstraints import NodeLabelsAndTaints

_APPS: Final = "/apis/apps/v1"
_BATCH: Final = "/apis/batch/v1"
_MAX_LISTED: Final = 5
_NAMESPACE_CHECK: Final = "namespace"  # the check whose remedies must run before the installation
_CONTROL_PLANE: Final = "node-role.kubernetes.io/control-plane"
_POD_SECURITY_LABEL: Final = "pod-security.kubernetes.io/enforce"
_MODES_DOC: Final = "docs/install.md#which-schedulermode"
_DEFAULT_TAINT: Final = f"{names.NVIDIA_GPU}:NoSchedule"  # the default of the chart's value webhook.toleratedTaints
_KUBERNETES_TAINT_PREFIX: Final = "node.kubernetes.io/"  # Kubernetes removes taints with this prefix itself
_SOCKET_BY_DISTRIBUTION: Final = {
    "k3s": "/run/k3s/containerd/containerd.sock",
    "rke2": "/run/k3s/containerd/containerd.sock",
}
_CRIO_SOCKET: Final = "/var/run/crio/crio.sock"
_NODE_COMPONENT_SPEC: Final = {  # the spec of the node components, reduced to the fields that admission checks
    "containers": [
        {
            "name": "probe",
            "image": "cardwise-doctor-probe",
            "imagePullPolicy": "Never",
            "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
            "volumeMounts": [{"name": "node", "mountPath": "/node", "readOnly": True}],
        }
    ],
    "volumes": [{"name": "node", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}],
    "hostPID": True,
}


@dataclass(slots=True)
class PreinstallFacts(Facts):
    """The facts before an installation: those of `Facts`, and the controllers of all pods."""

    pods: Sequence[Json] = ()
    statefulsets: Sequence[Json] = ()
    replicasets: Sequence[Json] = ()
    jobs: Sequence[Json] = ()
    cronjobs: Sequence[Json] = ()


KIND_COUNT: Final = facts.KIND_COUNT + len(fields(PreinstallFacts)) - len(fields(Facts))


def read_preinstall_facts(client: KubeClient, namespace: str) -> PreinstallFacts:
    """Read the cluster. Raises `errors.Unreachable` only. `namespace`: the namespace of the planned installation."""
    cluster_facts = PreinstallFacts(cardwise_namespace=namespace)
    facts.fill_facts(cluster_facts, client, namespace)
    lists = {
        "pods": paths.pods(),
        "statefulsets": paths.namespaced(_APPS, "statefulsets"),
        "replicasets": paths.namespaced(_APPS, "replicasets"),
        "jobs": paths.namespaced(_BATCH, "jobs"),
        "cronjobs": paths.namespaced(_BATCH, "cronjobs"),
    }
    facts.collect_lists(cluster_facts, client, {kind: (path, {}) for kind, path in lists.items()})
    return cluster_facts


def run_preinstall_checks(client: KubeClient, namespace: str, *, probe: bool = True) -> list[Finding]:
    """Run the checks. Raises `errors.KubeError` if nothing can be read.

    namespace: the namespace of the planned installation.
    probe: whether to create a pod there by dry run.
    """
    cluster_facts = read_preinstall_facts(client, namespace)
    findings = [*check_preinstall_facts(cluster_facts, namespace)]
    if probe and cluster_facts.namespace is not None:
        findings += check_admission(client, namespace)
    return finding.sort_findings(findings)


def check_preinstall_facts(cluster_facts: PreinstallFacts, namespace: str) -> Iterator[Finding]:
    """Run all checks that need only the facts."""
    if components.is_installed(cluster_facts):
        text = "Cardwise is already installed in this cluster; the proposed values are for a new installation"
        yield Finding(
            "installation",
            Severity.NOTE,
            text,
            "to check the installation, run cardwise doctor without --before-install",
        )
    yield from cluster.check_kubernetes_version(cluster_facts)
    yield from check_control_plane(cluster_facts)
    yield from check_gpu_nodes(cluster_facts)
    yield from check_taints(cluster_facts)
    yield from check_container_runtimes(cluster_facts)
    yield from check_runtime_classes(cluster_facts)
    yield from check_pod_security(cluster_facts, namespace)
    yield from check_other_plugins(cluster_facts)
    yield from cluster.check_gpushare_leftovers(cluster_facts)
    yield from units.check_bare_numbers(cluster_facts)
    yield from check_refused_workloads(cluster_facts, namespace)
    yield from finding.report_unread_kinds(cluster_facts.unread_kinds, KIND_COUNT)


def install_command(findings: Iterable[Finding], namespace: str) -> str:
    """Return the commands that install the chart with the proposed values and test it.

    A command for the namespace precedes them if a finding requires one.
    """
    all_findings = list(findings)
    namespace_commands = [
        finding.remedy for finding in all_findings if finding.check == _NAMESPACE_CHECK and finding.remedy
    ]
    settings = dict.fromkeys(shlex.quote(setting) for proposal in all_findings for setting in proposal.values)
    flags = [f"--set {setting}" for setting in ("image.repository=$REGISTRY/cardwise", *settings)]
    helm = shellcommand.command("helm install cardwise helm/cardwise --namespace {namespace}", namespace=namespace)
    test = shellcommand.command("helm test cardwise --namespace {namespace}", namespace=namespace)
    return "\n".join([*namespace_commands, " \\\n  ".join([helm, *flags, "--wait"]), test, ""])


def check_control_plane(cluster_facts: PreinstallFacts) -> Iterator[Finding]:
    """Propose `scheduler.mode`: the way to configure kube-scheduler."""
    if cluster_facts.unread_kinds.keys() & {"nodes", "schedulers"}:
        return
    static_nodes = [
        pod["spec"].get("nodeName", "") for pod in cluster_facts.schedulers if names.MIRROR in annotations_of(pod)
    ]
    control_plane_nodes = {
        node["metadata"]["name"]: labels_of(node)[_CONTROL_PLANE]
        for node in cluster_facts.nodes
        if _is_control_plane(node)
    }
    own_mode_values = ("scheduler.mode=own", f"scheduler.image={repairs.scheduler_image(cluster_facts)}")
    kubeadm_nodes = [name for name, label in control_plane_nodes.items() if not label]  # k3s and RKE2 write "true"
    if static_nodes and kubeadm_nodes:
        text = f"kube-scheduler is a static pod on {finding.name_nodes(sorted(static_nodes))}, as kubeadm creates it"
        remedy = (
            f"scheduler.mode=kubeadm changes its manifest, scheduler.mode=own leaves it unchanged ({_MODES_DOC}); "
            f"for helm template also set scheduler.controlPlaneNodes={len(kubeadm_nodes)}"
        )
        yield Finding("scheduler", Severity.OK, text, remedy, values=("scheduler.mode=kubeadm",))
        return
    if static_nodes and control_plane_nodes:
        text = (
            f"kube-scheduler is a static pod on {finding.name_nodes(sorted(static_nodes))}, but kubeadm did not "
            "create it"
        )
    elif control_plane_nodes:
        text = (
            "kube-scheduler is not a static pod on the control plane "
            f"({finding.name_nodes(sorted(control_plane_nodes))})"
        )
    else:
        text = "no control plane node is visible: a provider runs the control plane"
    remedy = (
        f"scheduler.mode=own runs a second kube-scheduler for pods that request GPUs ({_MODES_DOC}), and from "
        "Kubernetes 1.34 on scheduler.mode=claims needs none; "
        "scheduler.mode=kubeadm cannot work"
    )
    yield Finding("scheduler", Severity.OK, text, remedy, values=own_mode_values)


def _is_control_plane(node: Json) -> bool:
    return _CONTROL_PLANE in labels_of(node)


def check_gpu_nodes(cluster_facts: PreinstallFacts) -> Iterator[Finding]:
    """Report the nodes that would run the device plugin."""
    if "nodes" in cluster_facts.unread_kinds:
        return
    labelled_nodes = [node["metadata"]["name"] for node in _list_labelled_nodes(cluster_facts)]
    offering_nodes = [
        name
        for name, gpu_count in _count_offered_gpus(cluster_facts).items()
        if gpu_count and name not in labelled_nodes
    ]
    if labelled_nodes:
        text = f"{finding.name_nodes(labelled_nodes)} with a GPU label: Cardwise's DaemonSets would run there"
        yield Finding("nodes", Severity.OK, text)
    label_command = shellcommand.command(
        "kubectl label node NODE {label:text}", label=f"{gpunodes.GPU_PRESENT_LABEL}=true"
    )
    label_remedy = f"{label_command}, or set nodes.selector to a label that they have"
    if offering_nodes:
        offer_verb, has_verb = ("offers", "has") if len(offering_nodes) == 1 else ("offer", "have")
        nodes = finding.name_nodes(offering_nodes)
        text = f"{nodes} {offer_verb} {names.NVIDIA_GPU}, but {has_verb} no GPU label that Cardwise knows"
        yield Finding("nodes", Severity.WARNING, text, label_remedy)
    if not labelled_nodes and not offering_nodes:
        text = "no node has a GPU label: no GPU will be found until such a node joins"
        yield Finding("nodes", Severity.WARNING, text, label_remedy)


def check_taints(cluster_facts: PreinstallFacts) -> Iterator[Finding]:
    """Find taints of nodes with GPUs that pods with a share would not tolerate."""
    unusual_taints = {
        quote_unless_name(taint)
        for node in _list_labelled_nodes(cluster_facts)
        for taint in NodeLabelsAndTaints.from_node(node).taints
        if not taint.key.startswith(_KUBERNETES_TAINT_PREFIX) and f"{taint.key}:{taint.effect}" != _DEFAULT_TAINT
    }
    if unusual_taints:
        taints = sorted(unusual_taints)
        listing = wording.enumerate_first(taints, _MAX_LISTED)
        text = f"nodes with GPUs have taints that pods with a share do not tolerate: {listing}"
        remedy = "let pods with a share tolerate them, except taints that reserve nodes for a team"
        setting = f"webhook.toleratedTaints={{{','.join([_DEFAULT_TAINT, *taints])}}}"
        yield Finding("taints", Severity.NOTE, text, f"{remedy}: {setting}")


def check_container_runtimes(cluster_facts: PreinstallFacts) -> Iterator[Finding]:
    """Check that containers can get a card by CDI, and propose the path of the runtime's socket."""
    nodes_by_runtime: dict[str, list[str]] = {}
    for node in _list_labelled_nodes(cluster_facts):
        runtime = str(((node.get("status") or {}).get("nodeInfo") or {}).get("containerRuntimeVersion", ""))
        nodes_by_runtime.setdefault(runtime, []).append(node["metadata"]["name"])
    sockets = {socket for socket in map(_cri_socket, nodes_by_runtime) if socket is not None}
    settings = tuple(f"nodes.criSocket={socket}" for socket in sockets) if len(sockets) == 1 else ()
    for runtime, nodes in nodes_by_runtime.items():
        name, _, version = runtime.partition("://")
        subject = (
            f"{finding.name_nodes(nodes)}: {quote_unless_name(runtime) if runtime else 'unknown container runtime'}"
        )
        if name not in cdiruntimes.CDI_SUPPORTED_SINCE:
            yield Finding("runtime", Severity.PROBLEM, f"{subject} has no CDI", cluster.cdi_remedy(name, version))
        elif not cdiruntimes.has_cdi(name, version):
            text = f"{subject} does not support CDI by default; without CDI a container can use other GPUs than its own"
            yield Finding("runtime", Severity.WARNING, text, cluster.cdi_remedy(name, version), values=settings)
        else:
            remedy = f"its socket: {settings[0]}" if settings else ""
            yield Finding("runtime", Severity.OK, f"{subject} takes CDI devices", remedy, values=settings)
    if len(sockets) > 1:
        text = f"the runtimes of nodes with GPUs have different sockets ({', '.join(sorted(sockets))})"
        yield Finding("runtime", Severity.PROBLEM, text, "select nodes of one kind with nodes.selector")


def _cri_socket(runtime: str) -> str | None:
    """Return `nodes.criSocket` for a runtime that a node reports; None for the chart's default."""
    if runtime.startswith("cri-o://"):
        return _CRIO_SOCKET
    return next((socket for word, socket in _SOCKET_BY_DISTRIBUTION.items() if word in runtime), None)


def check_runtime_classes(cluster_facts: PreinstallFacts) -> Iterator[Finding]:
    """Propose `nodes.runtimeClass` and `policies.runtimeClasses`.

    `nodes.runtimeClass` is the RuntimeClass that gives the device plugin the driver. `policies.runtimeClasses` are the
    RuntimeClasses that only pods with a share may use.
    """
    if "runtimeclasses" in cluster_facts.unread_kinds:
        return
    classes = [name for name, _ in facts.nvidia_runtimes(cluster_facts)]
    suggested_class = "nvidia" if "nvidia" in classes else classes[0] if len(classes) == 1 else ""
    if suggested_class:
        text = f"RuntimeClass {suggested_class} gives Cardwise's DaemonSets access to NVIDIA's driver"
        yield Finding("driver", Severity.OK, text, values=(f"nodes.runtimeClass={suggested_class}",))
    elif classes:
        text = f"the cluster has several RuntimeClasses for NVIDIA GPUs: {', '.join(classes)}"
        remedy = "set nodes.runtimeClass to the one whose runtime mounts the driver's libraries"
        yield Finding("driver", Severity.PROBLEM, text, remedy)
    else:
        text = (
            "the cluster has no NVIDIA RuntimeClass: NVIDIA's runtime must be the default runtime of the nodes "
            "with GPUs"
        )
        remedy = (
            "otherwise no GPU is found (the device plugin exits with NVML Shared Library Not Found): install NVIDIA's "
            "container toolkit there, and its RuntimeClass"
        )
        yield Finding("driver", Severity.NOTE, text, remedy)
    if unlisted_classes := [name for name in classes if name not in bypasses.RUNTIME_CLASSES]:
        text = f"pods without a share would get GPUs through {', '.join(unlisted_classes)}"
        setting = f"policies.runtimeClasses={{{','.join([*bypasses.RUNTIME_CLASSES, *unlisted_classes])}}}"
        yield Finding("policies", Severity.NOTE, text, f"let a policy prevent that: {setting}", values=(setting,))


def check_pod_security(cluster_facts: PreinstallFacts, namespace: str) -> Iterator[Finding]:
    """Check that Pod Security admits pods with hostPath volumes in the namespace."""
    label = repairs.label_namespace_command(namespace)
    if "namespace" in cluster_facts.unknown_kinds:
        text = f"namespace {namespace} does not exist yet"
        create = shellcommand.command("kubectl create namespace {namespace}", namespace=namespace)
        yield Finding(_NAMESPACE_CHECK, Severity.NOTE, text, f"{create} && {label}")
    elif cluster_facts.namespace is not None:
        enforced_level = labels_of(cluster_facts.namespace).get(_POD_SECURITY_LABEL)
        if enforced_level == "privileged":
            yield Finding(_NAMESPACE_CHECK, Severity.OK, f"{namespace} admits pods with hostPath volumes")
        elif enforced_level:
            text = (
                f"Pod Security enforces {enforced_level} in {namespace}: the pods of Cardwise's DaemonSets would not "
                "be "
                "created"
            )
            yield Finding(_NAMESPACE_CHECK, Severity.PROBLEM, text, label)
        else:
            text = f"{namespace} has no label of Pod Security; some clusters (Talos) enforce baseline then"
            yield Finding(_NAMESPACE_CHECK, Severity.NOTE, text, label)


def check_admission(client: KubeClient, namespace: str) -> Iterator[Finding]:
    """Check by dry runs that the namespace admits the pods of the node components, with their PriorityClass."""
    plain_error = _dry_run_error(client, namespace, {})
    if plain_error is not None:
        text = (
            f"{namespace} refuses a pod like those of Cardwise's DaemonSets: "
            f"{wording.sanitize_message(plain_error.message)}"
        )
        if isinstance(plain_error, errors.Forbidden) and "violates PodSecurity" in plain_error.message:
            yield Finding("admission", Severity.PROBLEM, text, repairs.label_namespace_command(namespace))
        else:
            remedy = (
                "run this as an administrator, or change what refuses it (a ResourceQuota, a LimitRange, a webhook)"
            )
            yield Finding("admission", Severity.WARNING, text, remedy)
        return
    for priority in ("system-node-critical", "system-cluster-critical"):
        refusal = _dry_run_error(client, namespace, {"priorityClassName": priority})
        if refusal is None:
            continue
        if "insufficient quota to match these scopes" in refusal.message:
            text = (
                f"PriorityClass {priority} is admitted only where a ResourceQuota allows it (GKE): the chart creates "
                "one"
            )
            yield Finding("admission", Severity.OK, text)
        else:
            text = f"{namespace} refuses pods of PriorityClass {priority}: {wording.sanitize_message(refusal.message)}"
            remedy = (
                "let the ResourceQuota of this PriorityClass admit more pods, or set another priorityClassName for "
                "the components"
            )
            yield Finding("admission", Severity.WARNING, text, remedy)
        return
    yield Finding(
        "admission",
        Severity.OK,
        f"{namespace} admits pods like those of Cardwise's DaemonSets, also with system priority",
    )


def _dry_run_error(client: KubeClient, namespace: str, spec: Json) -> errors.KubeError | None:
    """Create a pod with this spec by dry run. Returns the refusal; None if the pod is admitted."""
    metadata = {"generateName": PROBE_POD_PREFIX}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": _NODE_COMPONENT_SPEC | spec}
    try:
        client.create(paths.pods(namespace), pod, query={"dryRun": "All"})
    except errors.Unreachable:
        raise
    except errors.KubeError as error:
        return error
    return None


def check_other_plugins(cluster_facts: PreinstallFacts) -> Iterator[Finding]:
    """Find nodes that both NVIDIA's device plugin and ours would serve, and other programs that share GPUs."""
    offered_by_node = _count_offered_gpus(cluster_facts)
    labelled_names = [node["metadata"]["name"] for node in _list_labelled_nodes(cluster_facts)]
    contested_nodes = {name: offered_by_node[name] for name in labelled_names if name in offered_by_node}
    for other_finding in cluster.check_other_plugins(cluster_facts):
        if not (contested_nodes and other_finding.level is Severity.OK):
            yield other_finding
    if contested_nodes:
        text = (
            f"{finding.name_nodes(sorted(contested_nodes))}, "
            f"{wording.pluralize(sum(contested_nodes.values()), 'GPU')}: NVIDIA's "
            "device plugin offers them, so Cardwise leaves them alone"
        )
        remedy = (
            "stop it on the nodes that Cardwise should share (docs/integrations/gpu-operator.md: devicePlugin.enabled, "
            "or nvidia.com/gpu.deploy.device-plugin=false), or select other nodes with nodes.selector"
        )
        yield Finding("other-plugins", Severity.WARNING, text, remedy)


def _count_offered_gpus(cluster_facts: PreinstallFacts) -> Mapping[str, int]:
    """Count the GPUs that each node offers through NVIDIA's device plugin."""
    return {
        node["metadata"]["name"]: int(cards) if cards.isdigit() else 1
        for node in cluster_facts.nodes
        for cards in [str(((node.get("status") or {}).get("allocatable") or {}).get(names.NVIDIA_GPU, "0"))]
        if cards != "0"
    }


def _list_labelled_nodes(cluster_facts: PreinstallFacts) -> list[Json]:
    return [node for node in cluster_facts.nodes if gpunodes.is_labelled(labels_of(node))]


def check_refused_workloads(cluster_facts: PreinstallFacts, namespace: str) -> Iterator[Finding]:
    """Find pods and pod templates whose new pods the chart's policies would refuse."""
    workloads_by_bypass: dict[bypasses.Bypass, list[str]] = {}
    own_namespaces = components.service_namespaces(cluster_facts)
    for kind, manifest, spec in _pod_specs(cluster_facts):
        workload_namespace = manifest["metadata"]["namespace"]
        if workload_namespace in (*bypasses.INFRASTRUCTURE, namespace) or (
            workload_namespace in own_namespaces and facts.is_of_chart(manifest)
        ):
            continue
        for bypass in bypasses.find_bypasses(spec):
            workloads_by_bypass.setdefault(bypass, []).append(f"{kind} {namespaced_name(manifest)}")
    for bypass, workloads in workloads_by_bypass.items():
        workloads_text = (
            f"{wording.pluralize(len(workloads), 'workload')} "
            f"({wording.enumerate_first(sorted(workloads), _MAX_LISTED)})"
        )
        text = f"{workloads_text} would be refused when created again, because they have {bypass.text}"
        yield Finding("policies", Severity.WARNING, text, bypass.remedy)
    lists = {"pods", "daemonsets", "deployments", "statefulsets", "replicasets", "jobs", "cronjobs"}
    if not workloads_by_bypass and not cluster_facts.unread_kinds.keys() & lists:
        yield Finding("policies", Severity.OK, "the chart's policies refuse no existing pod or template")


def _pod_specs(cluster_facts: PreinstallFacts) -> Iterator[tuple[str, Json, Json]]:
    """Yield kind, object and pod spec of each controller and each bare pod, but not of the controllers' pods."""
    kinds = {
        "DaemonSet": (*cluster_facts.daemonsets, *cluster_facts.other_daemonsets),
        "Deployment": (*cluster_facts.deployments, *cluster_facts.other_deployments),
        "StatefulSet": cluster_facts.statefulsets,
        "ReplicaSet": cluster_facts.replicasets,
        "Job": cluster_facts.jobs,
        "CronJob": cluster_facts.cronjobs,
    }
    for kind, objects in kinds.items():
        for manifest in objects:
            if _controller_kind(manifest) not in kinds:
                spec = manifest.get("spec") or {}
                template = ((spec.get("jobTemplate") or {}).get("spec") or spec).get("template") or {}
                yield kind, manifest, template.get("spec") or {}
    for pod in cluster_facts.pods:
        if _controller_kind(pod) not in kinds and names.MIRROR not in annotations_of(pod):
            yield "Pod", pod, pod.get("spec") or {}


def _controller_kind(manifest: Json) -> str | None:
    """Return the kind of the object's controller; None without one."""
    owners = manifest["metadata"].get("ownerReferences") or ()
    return next((str(owner.get("kind")) for owner in owners if owner.get("controller")), None)
