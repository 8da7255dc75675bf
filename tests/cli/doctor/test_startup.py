"""doctor on Cardwise's own pods: refused, crashing, not starting, not ready; and on users' pods that disappear or wait.

The messages are those of Kubernetes 1.37, and of the parts themselves.
"""

import json
from datetime import timedelta

import pytest

from cardwise.cli.cluster import podevents
from cardwise.cli.cluster.podevents import Event
from cardwise.cli.doctor import checks, probing, repairs, startup
from cardwise.cli.doctor.facts import Facts
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.cli.doctor.waiting import check_unrewritten_pods
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests import build
from tests.cli.clusters import Cluster
from tests.cli.doctor.planted import NOW, part, troubles
from tests.fakes.clock import FakeClock

SYSTEM = names.NAMESPACE
NO_DRIVER = (
    "NVML does not start (NVML Shared Library Not Found); check that the NVIDIA driver is installed and its library is "
    "mounted into this container. For simulated GPUs give --simulated-gpus FILE"
)
POD_SECURITY = (
    'Error creating: pods "cardwise-deviceplugin-x7k2p" is forbidden: violates PodSecurity "baseline:latest": hostPath '
    'volumes (volumes "kubelet-plugins", "cri")'
)
GKE = (
    'Error creating: pods "cardwise-extender-5d4f-abcde" is forbidden: insufficient quota to match these scopes: '
    "[{PriorityClass In [system-cluster-critical system-node-critical]}]"
)
QUOTA = (
    'Error creating: pods "cardwise-mps-q" is forbidden: exceeded quota: small, requested: pods=1, used: pods=3, '
    "limited: pods=3"
)
NO_CLASS = 'Error creating: pods "cardwise-mps-q" is forbidden: no PriorityClass with name high was found'
WEBHOOK = 'Error creating: admission webhook "images.example.com" denied the request: only from our registry'


def stamp(seconds: float) -> str:
    """So many seconds ago."""
    return f"{NOW - timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"


def event(kind: str, name: str, reason: str, message: str, age: float = 60.0) -> Json:
    """Of Cardwise's namespace, as the API server hands it on."""
    return build.event(reason, message, about=f"{kind}/{name}", namespace=SYSTEM, at=stamp(age))


def read(*objects: Json) -> list[Event]:
    return [event for event in map(podevents.parse_event, objects) if event is not None]


def pod(component: str, number: int = 0, **container: object) -> Json:
    """Of a part, ten minutes old. `container`: its status; without one the pod waits for a node."""
    labels = {"app.kubernetes.io/name": "cardwise", "app.kubernetes.io/component": component}
    metadata = {"namespace": SYSTEM, "name": f"cardwise-{component}-{number}", "labels": labels}
    ready = bool(container.get("ready"))
    status: Json = {"phase": "Running" if container else "Pending"}
    status["conditions"] = [{"type": "Ready", "status": str(ready)}]
    if container:
        status["containerStatuses"] = [{"name": component, "ready": ready, "restartCount": 0} | container]
    spec = {"nodeName": f"n{number}"} if container else {}
    return {"metadata": metadata | {"creationTimestamp": stamp(600)}, "spec": spec, "status": status}


def ended(message: str, code: int = 1, reason: str = "Error", age: float = 30.0) -> Json:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": stamp(age)}}


def crashing(component: str, message: str, number: int = 0, **end: object) -> Json:
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}}
    return pod(component, number, state=waiting, lastState=ended(message, **end), restartCount=5)  # type: ignore[arg-type]


def waiting(component: str, reason: str, message: str) -> Json:
    return pod(component, state={"waiting": {"reason": reason, "message": message}})


def log(**entry: str) -> str:
    """The end of a part's log, as the kubelet keeps it: its first line is cut."""
    lines = ['rmation", "event": "cut"}', '{"level": "info", "event": "starting"}', json.dumps(entry), ""]
    return "\n".join(lines)


def the_finding(seen: Facts) -> Finding:
    (finding,) = troubles(seen)
    return finding


@pytest.mark.parametrize(
    ("controller", "message", "text", "remedy"),
    [
        (
            "DaemonSet/cardwise-deviceplugin", POD_SECURITY,
            'DaemonSet cardwise-deviceplugin cannot create pods: violates PodSecurity "baseline:latest": ',
            "kubectl label namespace cardwise-system pod-security.kubernetes.io/enforce=privileged --overwrite",
        ),
        (
            "ReplicaSet/cardwise-extender-5d4f", GKE, "insufficient quota to match these scopes",
            "helm upgrade cardwise helm/cardwise -n cardwise-system --reset-then-reuse-values",
        ),
        ("DaemonSet/cardwise-mps", QUOTA, "exceeded quota: small", "kubectl edit resourcequota small -n cardwise-"),
        ("DaemonSet/cardwise-mps", NO_CLASS, "no PriorityClass with name high was found", "mps.priorityClassName"),
        ("Job/cardwise-kubeadm-wire", WEBHOOK, "images.example.com", "exempt the namespace cardwise-system from"),
        ("Job/cardwise-cleanup", "no reason", "no reason", "admits the pods of namespace cardwise-system"),
    ],
)  # fmt: skip
def test_a_controller_of_ours_whose_pods_are_refused_is_found(sound, controller, message, text, remedy):
    sound.daemonsets = [
        part("deviceplugin", "DaemonSet", desiredNumberScheduled=2, currentNumberScheduled=0),
        part("mps", "DaemonSet", desiredNumberScheduled=2, currentNumberScheduled=1),
    ]
    sound.deployments = [part("extender", replicas=2), part("webhook", replicas=2)]
    sound.networkpolicies = []
    sound.unread_kinds["networkpolicies"] = "not of this test"
    sound.own_events = read(event(*controller.split("/"), "FailedCreate", message))
    finding = next(each_finding for each_finding in troubles(sound) if each_finding.check == startup.CHECK_NAME)
    assert (finding.level, text in finding.text, remedy in finding.remedy) == (Severity.PROBLEM, True, True), finding
    assert "-x7k2p" not in finding.text, "each try has another name"
    kind, name = controller.split("/")
    retry = (
        f"kubectl annotate -n cardwise-system {kind.lower()} {name} retried-at=$(date +%s) --overwrite (its controller"
    )
    assert retry in finding.remedy


def test_events_that_kubernetes_has_combined_name_the_same_cause(sound):
    sound.daemonsets = [part("deviceplugin", "DaemonSet", desiredNumberScheduled=2, currentNumberScheduled=0)]
    combined = f"(combined from similar events): {POD_SECURITY}"
    sound.own_events = read(event("DaemonSet", "cardwise-deviceplugin", "FailedCreate", combined))
    cause = next(finding for finding in troubles(sound) if finding.check == startup.CHECK_NAME)
    assert cause.text.startswith("DaemonSet cardwise-deviceplugin cannot create pods: violates PodSecurity")


def test_the_last_event_counts_whatever_field_has_its_time(sound):
    sound.daemonsets = [part("deviceplugin", "DaemonSet", desiredNumberScheduled=2, currentNumberScheduled=0)]
    about = ("DaemonSet", "cardwise-deviceplugin", "FailedCreate")
    former, repeated = event(*about, QUOTA, age=1100), event(*about, POD_SECURITY, age=3600)
    repeated |= {"lastTimestamp": None, "eventTime": stamp(3600), "series": {"lastObservedTime": stamp(60)}}
    for events in ([former, repeated], [repeated, former]):
        sound.own_events = read(*events)
        cause = next(finding for finding in troubles(sound) if finding.check == startup.CHECK_NAME)
        assert "violates PodSecurity" in cause.text


def test_refusals_that_are_over_or_of_others_are_none(sound):
    full = part("deviceplugin", "DaemonSet", desiredNumberScheduled=2, currentNumberScheduled=2)
    sound.daemonsets = [full]
    sound.own_events = read(
        event("DaemonSet", "cardwise-deviceplugin", "FailedCreate", POD_SECURITY),
        event("Job", "cardwise-kubeadm-wire", "FailedCreate", WEBHOOK, age=1300),
        event("ReplicaSet", "theirs-5d4f", "FailedCreate", QUOTA),
        event("DaemonSet", "cardwise-mps", "FailedCreate", QUOTA),  # it is not there any more
    )
    assert troubles(sound) == []


@pytest.mark.parametrize(
    ("runtimes", "runs_with", "remedy"),
    [
        (["nvidia"], "", "--reset-then-reuse-values --set nodes.runtimeClass=nvidia"),
        (["nvidia"], "nvidia", "install NVIDIA's driver on that node"),
        ([], "", "container toolkit on that node, and set nodes.runtimeClass"),
    ],
)
def test_a_device_plugin_that_crashes_says_its_last_error(sound, runtimes, runs_with, remedy):
    sound.own_pods = [crashing("deviceplugin", log(level="error", event="cannot start", error=NO_DRIVER))]
    sound.own_pods[0]["spec"] |= {"runtimeClassName": runs_with} if runs_with else {}
    sound.runtimeclasses = [{"metadata": {"name": name}, "handler": name} for name in runtimes]
    finding = the_finding(sound)
    assert finding.text.startswith(
        "cardwise-deviceplugin on node n0 crashes, last error: cannot start: NVML does not start (NVML Shared "
    )
    assert remedy in finding.remedy


def test_one_cause_on_many_nodes_is_one_finding_and_a_problem_where_no_pod_is_ready(sound):
    message = log(level="error", event="cannot start", error=NO_DRIVER)
    sound.own_pods = [crashing("deviceplugin", message, number) for number in range(60)]
    finding = the_finding(sound)
    assert finding.text.startswith("cardwise-deviceplugin on 60 nodes (n0, n1, n10 and 57 more) crashes")
    assert finding.level is Severity.PROBLEM
    sound.own_pods = [*sound.own_pods[:1], pod("deviceplugin", 1, ready=True, state={"running": {}})]
    assert the_finding(sound).level is Severity.WARNING


def test_where_no_card_is_known_since_the_device_plugin_crashes_the_cause_comes_first(sound):
    sound.cards, sound.nodes = [], []
    sound.own_pods = [crashing("deviceplugin", log(level="error", event="cannot start", error=NO_DRIVER))]
    cause, effect = checks.finding.sort_findings(troubles(sound))
    assert (cause.check, effect.text) == ("components", "no GPU is known")
    assert effect.remedy == "first fix what `components` reports about the device plugin, which reports the GPUs"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (log(level="error", event="x failed", exception="Traceback:\n  File\nOSError: no"), "x failed: OSError: no"),
        (log(level="critical", event="out of files"), "out of files"),
        (log(level="info", event="stopping"), "stopping"),
        ("Usage: cardwise-mps [OPTIONS]\nError: No such option: --rot\n", "Error: No such option: --rot"),
        ("Traceback (most recent call last):\n  File x\nModuleNotFoundError: grpc\n", "ModuleNotFoundError: grpc"),
        ('exec: "cardwise-mps": executable file not found in $PATH', 'exec: "cardwise-mps": executable file not found'),
        ("", "exit code 1, and its log is empty"),
    ],
)
def test_the_last_error_is_found_in_what_the_kubelet_kept_of_the_log(sound, message, error):
    sound.own_pods = [crashing("mps", message)]
    finding = the_finding(sound)
    assert f"crashes, last error: {error}" in finding.text
    assert finding.remedy == "full log: kubectl logs -n cardwise-system cardwise-mps-0 --previous"


def test_a_part_that_is_killed_for_its_memory_names_the_limit(sound):
    sound.own_pods = [crashing("extender", "", reason="OOMKilled", code=137)]
    assert "raise its memory limit in extender.resources" in the_finding(sound).remedy


def test_a_crash_is_told_between_restarts_too_and_not_when_it_is_over(sound):
    running = {"running": {}}
    for container, is_told in (
        ({"state": ended("x")}, True),
        ({"state": running, "lastState": ended("x"), "restartCount": 1}, True),  # not ready again
        ({"state": running, "lastState": ended("x"), "restartCount": 3, "ready": True}, True),
        ({"state": running, "lastState": ended("x"), "restartCount": 1, "ready": True}, False),
        ({"state": running, "lastState": ended("x", age=3600), "restartCount": 9, "ready": True}, False),
        ({"state": running, "lastState": ended("x", code=0), "restartCount": 9, "ready": True}, False),
    ):
        sound.own_pods = [pod("webhook", **container)]
        assert [("crashes" in finding.text) for finding in troubles(sound)] == [True] * is_told, container


@pytest.mark.parametrize(
    ("planted", "events", "text", "remedy"),
    [
        (
            waiting("webhook", "ImagePullBackOff", "Back-off pulling image"), [],
            "pod cardwise-webhook-0 does not start: ImagePullBackOff: Back-off", "image.repository",
        ),
        (
            waiting("mps", "CreateContainerConfigError", "secret not found"), [],
            "cardwise-mps on node n0 does not start: CreateContainerConfigError: secret not found",
            "kubectl describe pod -n cardwise-system cardwise-mps-0",
        ),
        (
            waiting("deviceplugin", "ContainerCreating", ""),
            [("FailedCreatePodSandBox", 'failed to get sandbox runtime: no runtime for "nvidia" is configured')],
            'does not start: FailedCreatePodSandBox: failed to get sandbox runtime: no runtime for "nvidia"',
            "docs/container-toolkit.md",
        ),
        (
            waiting("deviceplugin", "ContainerCreating", ""),
            [("FailedMount", "hostPath type check failed: /var/lib/kubelet/device-plugins is not a directory")],
            "does not start: FailedMount: hostPath type check failed", "nodes.kubeletDir",
        ),
        (
            pod("extender"), [("FailedScheduling", "0/3 nodes are available: 3 Insufficient memory.")],
            "pod cardwise-extender-0 does not start: FailedScheduling: 0/3 nodes are", "kubectl describe pod",
        ),
        (pod("scheduler"), [], "pod cardwise-scheduler-0 does not start", "kubectl describe pod"),
        (
            pod("webhook", state={"running": {}}), [], "pod cardwise-webhook-0 is running but not ready",
            "kubectl get --raw /api/v1/namespaces/cardwise-system/pods/cardwise-webhook-0:9400/proxy/readyz",
        ),
    ],
)  # fmt: skip
def test_a_pod_of_ours_that_does_not_start_says_why(sound, planted, events, text, remedy):
    sound.own_pods = [planted]
    sound.own_events = read(*(event("Pod", planted["metadata"]["name"], *event_fields) for event_fields in events))
    finding = the_finding(sound)
    assert (finding.level, text in finding.text, remedy in finding.remedy) == (Severity.PROBLEM, True, True), finding


def test_two_replicas_of_which_one_is_not_ready_are_a_warning(sound):
    sound.own_pods = [pod("webhook", state={"running": {}}), pod("webhook", 1, ready=True, state={"running": {}})]
    assert the_finding(sound).level is Severity.WARNING
    sound.own_pods = [pod("webhook", number, state={"running": {}}) for number in range(2)]
    assert the_finding(sound).text == (
        "cardwise-webhook in 2 pods (cardwise-webhook-0, cardwise-webhook-1) is running but not ready"
    )


def test_a_part_on_a_node_that_is_not_ready_names_the_node(sound):
    """The kubelet there reports nothing more: what its containers did last says nothing."""
    (card_node,) = sound.nodes
    unknown = [{"type": "Ready", "status": "Unknown"}]
    dead = {"metadata": {"name": "n0", "labels": {}}, "status": {"conditions": unknown}}
    sound.nodes = [card_node, dead]
    sound.own_pods = [pod("webhook", state={"running": {}}), pod("deviceplugin", state={"running": {}})]
    webhook, plugin = troubles(sound)
    assert webhook.text == (
        "pod cardwise-webhook-0 is not ready, because its node is NotReady (its kubelet does not report)"
    )
    assert plugin.text.startswith("cardwise-deviceplugin on node n0 is not ready, because its node is NotReady")
    assert {finding.remedy for finding in (webhook, plugin)} == {"kubectl describe node n0 says why"}
    sound.own_pods = [pod("deviceplugin", 1, state={"running": {}})]
    card_node["status"]["conditions"] = unknown
    assert [finding.check for finding in troubles(sound)] == ["nodes"], "said once"


def test_pods_that_start_end_or_are_not_parts_are_no_fault(sound):
    young, gone = pod("webhook", state={"running": {}}), pod("webhook", 1, state={"running": {}})
    young["metadata"]["creationTimestamp"] = stamp(20)
    gone["metadata"]["deletionTimestamp"] = stamp(1)
    evicted, done = pod("extender", state=ended("x")), pod("kubeadm", state=ended("", code=0))
    evicted["status"]["phase"], done["status"]["phase"] = "Failed", "Succeeded"
    sound.own_pods = [young, gone, evicted, done, pod("test", state=ended("x")), crashing("cleanup", "x")]
    assert troubles(sound) == []


def test_a_job_that_could_not_wire_kube_scheduler_says_why(sound):
    failed = pod("kubeadm", state=ended("node n1: kube-scheduler.yaml\nno kube-scheduler in /etc/kubernetes/manifests"))
    failed["status"]["phase"] = "Failed"
    sound.own_pods = [failed]
    finding = the_finding(sound)
    assert finding.text == "pod cardwise-kubeadm-0 failed: no kube-scheduler in /etc/kubernetes/manifests"
    assert finding.remedy == "full log: kubectl logs -n cardwise-system cardwise-kubeadm-0"


@pytest.mark.parametrize("name", ["webhook", "scheduler"])
def test_a_deployment_that_is_scaled_down_is_found(sound, name):
    sound.deployments = [part(name, replicas=0)]
    sound.unread_kinds["networkpolicies"] = "not of this test"
    finding = next(each_finding for each_finding in troubles(sound) if each_finding.check == startup.CHECK_NAME)
    assert finding.text == f"Deployment cardwise-{name} is scaled to 0"
    assert finding.remedy == f"kubectl scale deployment cardwise-{name} -n cardwise-system --replicas 2"


def test_without_a_leader_the_remedy_is_what_keeps_it_from_running(sound):
    sound.leases = []
    for deployments, pods, remedy in (
        ([], [], "start the extender (extender.enabled)"),
        ([part("extender")], [], "check that one runs: kubectl get pods -n cardwise-system -l app.kubernetes.io/comp"),
        ([part("extender", replicas=0)], [], "kubectl scale deployment cardwise-extender -n cardwise-system --repl"),
        ([part("extender")], [crashing("extender", "x")], "first fix what `components` reports about its pods"),
    ):
        sound.deployments, sound.own_pods = deployments, pods
        (finding,) = (finding for finding in troubles(sound) if finding.check == "extender")
        assert remedy in finding.remedy


def test_mps_that_is_down_on_all_cards_is_one_finding_with_the_reason(sound):
    reasons = [
        "the daemon of GPU-n1-0 ended: no such file",
        "the daemon of GPU-n1-1 ended: no such file",
    ]
    for card, reason in zip(sound.cards, reasons, strict=True):
        card["status"]["mps"] = {"state": "Down", "reason": reason}
    finding = the_finding(sound)
    assert (finding.check, finding.level) == ("mps", Severity.PROBLEM)
    assert finding.text == (
        f"node n1, 2 GPUs: without working MPS, Down: {reasons[0]}, Down: {reasons[1]}: no GPU is left for pods that "
        "use MPS"
    )
    assert finding.remedy == (
        "the manager tries again by itself; see its log: kubectl logs -n cardwise-system daemonset/cardwise-mps"
    )
    sound.own_pods = [crashing("mps", "x")]
    assert [finding.remedy for finding in troubles(sound) if finding.check == "mps"] == [
        "first fix what `components` reports about cardwise-mps"
    ]


def asking(namespace: str, name: str, **limits: str) -> Json:
    """A pod that waits."""
    container = {"name": "main", "resources": {"limits": limits}}
    metadata = {"namespace": namespace, "name": name, "ownerReferences": [OWNER]}
    return {"metadata": metadata, "spec": {"containers": [container]}, "status": {}}


OWNER = {"kind": "ReplicaSet", "name": "web-1", "uid": "web-1", "controller": True}


def plant_unrewritten(seen: Facts, count: int = 2, exempt: int = 0) -> None:
    """Beside them one that is right, of the chart's own scheduler, one that asks for nothing, and exempt ones."""
    condition = {
        "name": "not-exempt",
        "expression": "!(request.namespace in ['cardwise-system', 'old'])",
    }
    seen.mutating_webhooks[0]["webhooks"][0]["matchConditions"] = [condition]
    right = asking("team", "right", **{names.GPU_MEM: "100", names.SHARE: "1"})
    right["spec"]["schedulerName"] = names.SCHEDULER
    seen.deployments = [part("scheduler")]
    seen.pending_pods = [right, asking("team", "plain", cpu="1")]
    for namespace, some in (("team", count), ("old", exempt), ("cardwise-system", exempt)):
        seen.pending_pods += [asking(namespace, f"p{number}", **{names.GPU_MEM: "100"}) for number in range(some)]


def test_pods_that_the_webhook_has_not_seen_are_one_finding(sound):
    plant_unrewritten(sound)
    finding = the_finding(sound)
    assert (finding.check, finding.level) == ("webhook", Severity.WARNING)
    assert finding.text == "2 pods (team/p0, team/p1) were created without the webhook: they wait forever"
    assert finding.remedy.endswith("kubectl delete pods -n team p0 p1")
    plant_unrewritten(sound, 60)
    finding = the_finding(sound)
    assert "60 pods (team/p0, team/p1, team/p2 and 57 more) were created" in finding.text
    assert finding.remedy.endswith(" p8 p9 (and so on: 50 more pods)")
    plant_unrewritten(sound, 0)
    assert troubles(sound) == []


def test_pods_of_exempt_namespaces_that_the_webhook_never_sees_are_one_finding(sound):
    plant_unrewritten(sound, 0, exempt=1)
    finding = the_finding(sound)
    assert (finding.check, finding.level) == ("webhook", Severity.WARNING)
    assert finding.text == (
        "2 pods (old/p0, cardwise-system/p0) request GPUs in a namespace that is exempt from the webhook: they wait "
        "forever"
    )
    assert finding.remedy.endswith("take theirs out of webhook.exemptNamespaces of the chart")
    plant_unrewritten(sound, exempt=1)
    assert len(list(check_unrewritten_pods(sound))) == 2, "the others were created without the webhook"


def test_a_pod_of_no_controller_is_saved_before_it_is_deleted(sound):
    plant_unrewritten(sound)
    del sound.pending_pods[-2]["metadata"]["ownerReferences"]
    assert the_finding(sound).remedy == (
        "when the webhook runs: delete those with a controller, which recreates them: kubectl delete pods -n team p1; "
        "save and recreate those without a controller: kubectl get pod -n team p0 -o yaml > p0.yaml && "
        "kubectl replace --force -f p0.yaml"
    )


def test_while_the_configuration_is_missing_exempt_namespaces_are_those_of_the_webhooks_command_line(sound):
    plant_unrewritten(sound, exempt=1)
    sound.mutating_webhooks = []
    own, others = (finding.text for finding in check_unrewritten_pods(sound))
    assert "1 pod (cardwise-system/p0)" in own
    assert "3 pods (team/p0, team/p1, old/p0)" in others, "the chart's default"
    arguments = ["--bind=:8443", "--exempt-namespaces=kube-system,old,cardwise-system"]
    webhook = {"metadata": {"namespace": "cardwise-system", "name": "cardwise-webhook"}}
    sound.deployments = [webhook | {"spec": {"template": {"spec": {"containers": [{"args": arguments}]}}}}]
    assert "2 pods (team/p0, team/p1)" in list(check_unrewritten_pods(sound))[-1].text


def deletion(name: str, minutes: float) -> Event:
    manifest = event("Pod", name, names.BOUND_WITHOUT_EXTENDER, "deleted", age=minutes * 60)
    manifest |= {"reportingComponent": "cardwise-extender", "metadata": {"namespace": "team", "name": "e"}}
    (about,) = read(manifest | {"involvedObject": {"kind": "Pod", "namespace": "team", "name": name}})
    return about


@pytest.mark.parametrize(
    ("static", "own", "command"),
    [
        ("kube-scheduler --kubeconfig=/x", False, "--reset-then-reuse-values --set scheduler.mode=kubeadm"),
        ("kube-scheduler --config=/x", False, "whether kube-scheduler calls the extender: cardwise doctor without"),
        ("", False, "check whether kube-scheduler calls the extender: cardwise doctor without --no-probe tests this"),
        ("", True, "kube-scheduler is set to call the extender, so the pods named a node"),
    ],
)  # fmt: skip
def test_pods_that_disappear_are_found_and_only_a_configuration_without_extenders_is_changed(
    sound, static, own, command
):
    sound.pod_events = [deletion("old", 11), deletion("web-1", 2), deletion("web-0", 1), deletion("web-0", 3)]
    sound.pod_events.append(deletion("cardwise-doctor-71d59aa1", 1))
    sound.deployments = [part("extender", release="gpus"), *([part("scheduler", release="gpus")] if own else [])]
    if static:
        metadata = {"namespace": "kube-system", "name": "kube-scheduler-cp", "annotations": {names.MIRROR: "x"}}
        spec = {"nodeName": "cp", "containers": [{"command": static.split()}]}
        sound.schedulers = [{"metadata": metadata, "spec": spec}]
    finding = the_finding(sound)
    confirmed = static.startswith("kube-scheduler --kube")
    assert finding.level is (Severity.WARNING if confirmed else Severity.NOTE)
    assert finding.text == (
        "in the last 10 minutes 2 pods (team/web-0, team/web-1) disappeared: bound without the extender, so "
        "without a GPU, and then deleted (Events of cardwise-extender)"
    )
    assert command in finding.remedy
    assert finding.remedy.count("helm upgrade gpus ") == confirmed


def test_an_installation_that_helm_does_not_know_is_changed_by_its_values(sound):
    sound.deployments = [part("extender", release="")]
    assert (
        repairs.upgrade_command(sound, scheduler_mode="own")
        == "render and apply the chart again with scheduler.mode=own"
    )


def test_a_probe_that_was_deleted_before_it_was_looked_at_is_no_fault_of_the_webhook():
    api = Cluster({}, clock := FakeClock())
    limits = lambda request: request.body["spec"]["containers"][0]["resources"]["limits"]  # noqa: E731
    api.before_request(lambda request: limits(request).update({names.SHARE: "1"}), "create")
    api.before_request(lambda request: api.remove(request.path), "get")
    webhook, finding = probing.run_probe_pod(api.kube, "default", SYSTEM, clock, configuration_remedy="do so")
    assert (webhook.level, finding.level, finding.remedy) == (Severity.OK, Severity.PROBLEM, "do so")
    assert "the probe pod was deleted while it was pending: something had" in finding.text
