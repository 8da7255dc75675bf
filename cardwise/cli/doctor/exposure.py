"""Checks on each GPU node that pods see a GPU only if they request one.

NVIDIA's runtime gives GPUs to a container whose environment requests GPUs, if a file on the node allows that. The probe
pod requests GPUs as a CUDA image does: it sets only `CUDA_VERSION`, which means all GPUs. Then the probe lists the
device nodes in its container. It runs with the node's default runtime, and with each NVIDIA RuntimeClass. A dry run in
a user's namespace shows whether such a pod is admitted there. The pod itself runs in Cardwise's namespace, where no
team's quota counts it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cardwise.cli.doctor import probing
from cardwise.cli.doctor.facts import Facts, nvidia_runtimes
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

CHECK_NAME: Final = "runtime"
_RUNTIME_CLASS_POLICY: Final = f"runtimeclasses.{names.GROUP}"
_DEVICE_PLUGIN: Final = "cardwise-deviceplugin"
_TIMEOUT_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.5
_MAX_PARALLEL_PODS: Final = 50  # maximum number of probe pods at the same time
_MAX_LISTED: Final = 5
_MAX_REASON_BYTES: Final = 200  # maximum length of a reason
_TOOLKIT_SETTING: Final = "accept-nvidia-visible-devices-envvar-when-unprivileged"
_STARTED_MARK: Final = "looked"
_SCRIPT: Final = (
    f"echo {_STARTED_MARK} >/dev/termination-log; ls -d /dev/nvidia[0-9]* >>/dev/termination-log 2>/dev/null; exit 0"
)
_REMEDY_BY_ACCESS: Final = {
    "cdi": f"set {_TOOLKIT_SETTING} = false in config.toml of NVIDIA's container toolkit there, and "
    "deviceplugin.privileged of the chart: shares get their GPUs by CDI",
    "env": f"enable CDI in the container runtime there, then set {_TOOLKIT_SETTING} = false; until then make runc its "
    "default runtime",
}


def check_exposure(
    client: KubeClient,
    namespace: str,
    cardwise_namespace: str,
    cluster_facts: Facts,
    *,
    image: str = "",
    clock: Clock = SYSTEM,
) -> Iterator[Finding]:
    """Check on each node that pods see a GPU only if they request one.

    namespace: the namespace of the dry runs.
    cardwise_namespace: the namespace of Cardwise.
    image: an image with a shell; "" for the image of the device plugin, which the nodes have already.
    """
    access_by_node = {
        card["spec"]["node"]: (card.get("status") or {}).get("gpuAccess") or "cdi"
        for card in cluster_facts.cards
        if card["spec"].get("memoryMiB")
    }
    nodes = [node for node in cluster_facts.nodes if node["metadata"]["name"] in access_by_node]
    probe_image = image or _probe_image(cluster_facts)
    if not nodes:
        return
    if not probe_image:
        text = "not tested whether pods without a GPU request get one: no image for the test is known"
        yield Finding(
            CHECK_NAME, Severity.NOTE, text, "give an image with a shell, which the nodes can pull, with --probe-image"
        )
        return
    for name, handler in [("", ""), *nvidia_runtimes(cluster_facts)]:  # "": the default runtime
        title = f"RuntimeClass {name}" if name else "the default runtime"
        nodes_with_handler = [node["metadata"]["name"] for node in nodes if not name or _has_handler(node, handler)]
        if not nodes_with_handler:
            continue
        try:
            client.create(
                paths.pods(namespace), _probe_pod(probe_image, name, nodes_with_handler[0]), query={"dryRun": "All"}
            )
        except errors.Unreachable:
            raise
        except errors.KubeError as error:
            yield _explain_refusal(title, error)
            continue
        results_by_node: dict[str, _ProbeResult] = {}
        for first_index in range(0, len(nodes_with_handler), _MAX_PARALLEL_PODS):
            pods = {
                node: _probe_pod(probe_image, name, node)
                for node in nodes_with_handler[first_index : first_index + _MAX_PARALLEL_PODS]
            }
            try:
                results_by_node |= _run_probes(client, cardwise_namespace, pods, clock)
            except errors.Forbidden as error:
                yield _explain_refusal(title, error)
                return
        runtime_class_remedy = f"list {name} in policies.runtimeClasses of the chart; " if name else ""
        yield from _report_probe_results(title, results_by_node, access_by_node, runtime_class_remedy)


def _probe_image(cluster_facts: Facts) -> str | None:
    """Return the image of the device plugin; None if its DaemonSet is not in Cardwise's namespace."""
    for daemonset in cluster_facts.daemonsets:
        if daemonset["metadata"]["name"] == _DEVICE_PLUGIN:
            return str(daemonset["spec"]["template"]["spec"]["containers"][0]["image"])
    return None


def _has_handler(node: Json, handler: str) -> bool:
    """Whether the node's kubelet has the handler; True if it does not list its handlers."""
    handlers = node.get("status", {}).get("runtimeHandlers") or ()
    return not handlers or any(entry.get("name") == handler for entry in handlers)


def _probe_pod(image: str, runtime_class: str, node: str) -> Json:
    variables = {"CUDA_VERSION": "1.0", "NVIDIA_DISABLE_REQUIRE": "true"}
    container = {
        "name": "look",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", _SCRIPT],
        "env": [{"name": name, "value": text} for name, text in variables.items()],
    }
    return probing.build_restricted_pod(
        container,
        {names.DEFAULTS_OPT_OUT: "disabled"},
        nodeName=node,
        restartPolicy="Never",
        tolerations=[{"operator": "Exists"}],
        **({"runtimeClassName": runtime_class} if runtime_class else {}),
    )


def _explain_refusal(title: str, error: errors.KubeError) -> Finding:
    if _RUNTIME_CLASS_POLICY in error.message:
        return Finding(
            CHECK_NAME,
            Severity.OK,
            f"a policy keeps pods without a GPU request from using {title.removeprefix('the ')}",
        )
    text = f"not tested whether a pod without a GPU request gets one through {title}: {error.message}"
    return Finding(CHECK_NAME, Severity.NOTE, text, "give a namespace in which you may create pods with -n")


@dataclass(frozen=True, slots=True)
class _ProbeResult:
    """The output of a probe pod; without output, the reason that Kubernetes reports; "" without a reason."""

    message: str = ""
    reason: str = ""

    @property
    def has_run(self) -> bool:
        return self.message.startswith(_STARTED_MARK)


def _run_probes(client: KubeClient, namespace: str, pods: Mapping[str, Json], clock: Clock) -> dict[str, _ProbeResult]:
    """Run the probe pods, one per node, and delete them. Returns their results by node."""
    probe_results: dict[str, _ProbeResult] = {}
    pods_by_node: dict[str, Json] = {}
    created_names = []
    try:
        for pod in pods.values():
            created_names.append(pod["metadata"]["name"])
            client.create(paths.pods(namespace), pod)
        deadline = clock.now() + _TIMEOUT_SECONDS
        while len(probe_results) < len(pods) and clock.now() < deadline:
            for node, pod in pods.items():
                if node not in probe_results:
                    pods_by_node[node] = client.get(paths.pods(namespace, pod["metadata"]["name"]))
                    message = _termination_message(pods_by_node[node])
                    probe_results |= (
                        {node: _ProbeResult(message, _failure_reason(pods_by_node[node]))}
                        if message is not None
                        else {}
                    )
            clock.sleep(_POLL_SECONDS)
        return {
            node: probe_results.get(node) or _ProbeResult(reason=_failure_reason(pods_by_node.get(node, {})))
            for node in pods
        }
    finally:
        for name in created_names:
            probing.delete_pod(client, namespace, name, {"gracePeriodSeconds": 0})


def _termination_message(pod: Json) -> str | None:
    """Return the termination message of the pod's container; None while the container has not ended."""
    status = pod.get("status") or {}
    if status.get("phase") not in ("Succeeded", "Failed"):
        return None
    states = [status.get("state", {}).get("terminated") or {} for status in status.get("containerStatuses") or ()]
    return next((str(state.get("message") or "") for state in states), "")


def _failure_reason(pod: Json) -> str:
    """Return why the probe's container has no output."""
    status = pod.get("status") or {}
    for container_status in status.get("containerStatuses") or ():
        state = container_status.get("state") or {}
        end = state.get("terminated") or state.get("waiting") or {}
        if end.get("reason"):
            message = f": {end['message']}" if end.get("message") else ""
            return wording.sanitize_message(f"{end['reason']}{message}", _MAX_REASON_BYTES)
    return wording.sanitize_message(
        ": ".join(filter(None, (status.get("reason"), status.get("message")))), _MAX_REASON_BYTES
    )


def _report_probe_results(
    title: str, probe_results: Mapping[str, _ProbeResult], access_by_node: Mapping[str, str], runtime_class_remedy: str
) -> Iterator[Finding]:
    card_files_by_node = {
        node: [line for line in probe_result.message.split() if line.startswith("/dev/")]
        for node, probe_result in probe_results.items()
    }
    for method, remedy in _REMEDY_BY_ACCESS.items():
        exposed_nodes = [
            f"{node} ({', '.join(card_files)})"
            for node, card_files in card_files_by_node.items()
            if card_files and access_by_node.get(node, "cdi") == method
        ]
        if exposed_nodes:
            nodes_text = wording.enumerate_first(exposed_nodes, _MAX_LISTED)
            text = f"a pod without a GPU request gets GPUs through {title}: {nodes_text}"
            yield Finding(CHECK_NAME, Severity.WARNING, text, runtime_class_remedy + remedy)
    nodes_by_reason: dict[str, list[str]] = {}
    for node, probe_result in probe_results.items():
        if not probe_result.has_run:
            nodes_by_reason.setdefault(probe_result.reason, []).append(node)
    for reason, nodes in nodes_by_reason.items():
        nodes_text = wording.enumerate_first(nodes, _MAX_LISTED)
        text = f"unknown whether pods without a GPU request get one through {title} on {nodes_text}"
        detail = f": Kubernetes reports about the test pod: {reason}" if reason else ""
        remedy = "check whether pods start there; give an image with a shell that the nodes have with --probe-image"
        yield Finding(CHECK_NAME, Severity.NOTE, text + detail, remedy)
    closed_node_count = sum(
        probe_result.has_run and not card_files_by_node[node] for node, probe_result in probe_results.items()
    )
    if closed_node_count:
        text = (
            f"a pod without a GPU request gets none through {title} on {wording.pluralize(closed_node_count, 'node')}"
        )
        yield Finding(CHECK_NAME, Severity.OK, text)
