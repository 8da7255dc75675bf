"""Checks on each node with GPUs that a pod without a GPU request gets no GPU.

NVIDIA's runtime gives GPUs to a container whose environment requests them, if a file on the node allows that. The probe
pod requests them as an image does, by `CUDA_VERSION`, which alone means all GPUs, and lists the device nodes that it
finds. It runs with the node's default runtime, and with each NVIDIA RuntimeClass. A dry run in a user's namespace shows
whether such a pod is admitted there. The pod itself runs in Cardwise's namespace, where no team's quota counts it.
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

CHECK: Final = "runtime"
_POLICY: Final = f"runtimeclasses.{names.GROUP}"
_DEVICE_PLUGIN: Final = "cardwise-deviceplugin"
_SECONDS: Final = 60.0
_EVERY: Final = 0.5
_AT_ONCE: Final = 50  # pods
_FEW: Final = 5
_SHOWN: Final = 200  # bytes of a reason
_SETTING: Final = "accept-nvidia-visible-devices-envvar-when-unprivileged"
_STARTED: Final = "looked"
_SCRIPT: Final = (
    f"echo {_STARTED} >/dev/termination-log; ls -d /dev/nvidia[0-9]* >>/dev/termination-log 2>/dev/null; exit 0"
)
_REMEDIES: Final = {
    "cdi": f"set {_SETTING} = false in config.toml of NVIDIA's container toolkit there, and deviceplugin.privileged of "
    "the chart: shares get their GPUs by CDI",
    "env": f"enable CDI in the container runtime there, then set {_SETTING} = false; until then make runc its default "
    "runtime",
}


def check_exposure(
    client: KubeClient, namespace: str, installed: str, cluster_facts: Facts, *, image: str = "", clock: Clock = SYSTEM
) -> Iterator[Finding]:
    """`namespace`: of the dry runs. `installed`: that of Cardwise. `image` has a shell; "": that of the device plugin,
    which the nodes have already.
    """
    access = {
        card["spec"]["node"]: (card.get("status") or {}).get("gpuAccess") or "cdi"
        for card in cluster_facts.cards
        if card["spec"].get("memoryMiB")
    }
    nodes = [node for node in cluster_facts.nodes if node["metadata"]["name"] in access]
    image = image or _probe_image(cluster_facts)
    if not nodes:
        return
    if not image:
        text = "not tested whether pods without a GPU request get one: no image for the test is known"
        yield Finding(
            CHECK, Severity.NOTE, text, "give an image with a shell, which the nodes can pull, with --probe-image"
        )
        return
    for name, handler in [("", ""), *nvidia_runtimes(cluster_facts)]:  # the default, and NVIDIA's
        title = f"RuntimeClass {name}" if name else "the default runtime"
        served = [node["metadata"]["name"] for node in nodes if not name or _has_handler(node, handler)]
        if not served:
            continue
        try:
            client.create(paths.pods(namespace), _probe_pod(image, name, served[0]), query={"dryRun": "All"})
        except errors.Unreachable:
            raise
        except errors.KubeError as error:
            yield _judge_refusal(title, error)
            continue
        results_by_node: dict[str, _ProbeResult] = {}
        for start in range(0, len(served), _AT_ONCE):
            pods = {node: _probe_pod(image, name, node) for node in served[start : start + _AT_ONCE]}
            try:
                results_by_node |= _run_probes(client, installed, pods, clock)
            except errors.Forbidden as error:
                yield _judge_refusal(title, error)
                return
        runtime_class_remedy = f"list {name} in policies.runtimeClasses of the chart; " if name else ""
        yield from _judge_results(title, results_by_node, access, runtime_class_remedy)


def _probe_image(cluster_facts: Facts) -> str:
    """The image of the device plugin; "" if its DaemonSet is not in Cardwise's namespace."""
    for daemonset in cluster_facts.daemonsets:
        if daemonset["metadata"]["name"] == _DEVICE_PLUGIN:
            return str(daemonset["spec"]["template"]["spec"]["containers"][0]["image"])
    return ""


def _has_handler(node: Json, handler: str) -> bool:
    """Whether the node's kubelet has the handler; True if it does not list its handlers."""
    handlers = node.get("status", {}).get("runtimeHandlers") or ()
    return not handlers or any(known_handler.get("name") == handler for known_handler in handlers)


def _probe_pod(image: str, runtime_class: str, node: str) -> Json:
    asking = {"CUDA_VERSION": "1.0", "NVIDIA_DISABLE_REQUIRE": "true"}
    container = {
        "name": "look",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", _SCRIPT],
        "env": [{"name": name, "value": text} for name, text in asking.items()],
    }
    return probing.pod_of(
        container,
        {names.DEFAULTS_OPT_OUT: "disabled"},
        nodeName=node,
        restartPolicy="Never",
        tolerations=[{"operator": "Exists"}],
        **({"runtimeClassName": runtime_class} if runtime_class else {}),
    )


def _judge_refusal(title: str, error: errors.KubeError) -> Finding:
    if _POLICY in error.message:
        return Finding(CHECK, Severity.OK, f"a pod without a GPU request may not use {title.removeprefix('the ')}")
    text = f"not tested whether a pod without a GPU request gets one through {title}: {error.message}"
    return Finding(CHECK, Severity.NOTE, text, "give a namespace in which you may create pods with -n")


@dataclass(frozen=True, slots=True)
class _ProbeResult:
    """The output of a probe pod; without output, the reason that Kubernetes reports, or ""."""

    message: str = ""
    reason: str = ""

    @property
    def has_run(self) -> bool:
        return self.message.startswith(_STARTED)


def _run_probes(client: KubeClient, namespace: str, pods: Mapping[str, Json], clock: Clock) -> dict[str, _ProbeResult]:
    """The results of each node's pod; the pods are deleted."""
    outcomes: dict[str, _ProbeResult] = {}
    finished_pods: dict[str, Json] = {}
    created = []
    try:
        for pod in pods.values():
            created.append(pod["metadata"]["name"])
            client.create(paths.pods(namespace), pod)
        deadline = clock.now() + _SECONDS
        while len(outcomes) < len(pods) and clock.now() < deadline:
            for node, pod in pods.items():
                if node not in outcomes:
                    finished_pods[node] = client.get(paths.pods(namespace, pod["metadata"]["name"]))
                    message = _termination_message(finished_pods[node])
                    outcomes |= (
                        {node: _ProbeResult(message, _failure_reason(finished_pods[node]))}
                        if message is not None
                        else {}
                    )
            clock.sleep(_EVERY)
        return {
            node: outcomes.get(node) or _ProbeResult(reason=_failure_reason(finished_pods.get(node, {})))
            for node in pods
        }
    finally:
        for name in created:
            probing.delete(client, namespace, name, {"gracePeriodSeconds": 0})


def _termination_message(pod: Json) -> str | None:
    """None while it has not ended."""
    status = pod.get("status") or {}
    if status.get("phase") not in ("Succeeded", "Failed"):
        return None
    states = [status.get("state", {}).get("terminated") or {} for status in status.get("containerStatuses") or ()]
    return next((str(state.get("message") or "") for state in states), "")


def _failure_reason(pod: Json) -> str:
    """Why its container has not looked."""
    status = pod.get("status") or {}
    for container_status in status.get("containerStatuses") or ():
        state = container_status.get("state") or {}
        end = state.get("terminated") or state.get("waiting") or {}
        if end.get("reason"):
            message = f": {end['message']}" if end.get("message") else ""
            return wording.sanitize_message(f"{end['reason']}{message}", _SHOWN)
    return wording.sanitize_message(": ".join(filter(None, (status.get("reason"), status.get("message")))), _SHOWN)


def _judge_results(
    title: str, probe_results: Mapping[str, _ProbeResult], access: Mapping[str, str], runtime_class_remedy: str
) -> Iterator[Finding]:
    cards = {
        node: [line for line in probed.message.split() if line.startswith("/dev/")]
        for node, probed in probe_results.items()
    }
    for method, remedy in _REMEDIES.items():
        open_to_all = [
            f"{node} ({', '.join(gpu_count)})"
            for node, gpu_count in cards.items()
            if gpu_count and access.get(node, "cdi") == method
        ]
        if open_to_all:
            nodes_text = wording.enumerate_first(open_to_all, _FEW)
            text = f"a pod without a GPU request gets GPUs through {title}: {nodes_text}"
            yield Finding(CHECK, Severity.WARNING, text, runtime_class_remedy + remedy)
    silent: dict[str, list[str]] = {}
    for node, probed in probe_results.items():
        if not probed.has_run:
            silent.setdefault(probed.reason, []).append(node)
    for reason, nodes in silent.items():
        nodes_text = wording.enumerate_first(nodes, _FEW)
        text = f"unknown whether pods without a GPU request get one through {title} on {nodes_text}"
        detail = f": Kubernetes reports about the test pod: {reason}" if reason else ""
        remedy = "check whether pods start there; give an image with a shell that the nodes have with --probe-image"
        yield Finding(CHECK, Severity.NOTE, text + detail, remedy)
    closed = sum(probed.has_run and not cards[node] for node, probed in probe_results.items())
    if closed:
        text = f"a pod without a GPU request gets none through {title} on {wording.pluralize(closed, 'node')}"
        yield Finding(CHECK, Severity.OK, text)
