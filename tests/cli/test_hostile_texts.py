"""Whatever tenants and nodes write into their objects, a command's sentences stay its own.

Each free text of an object is 200 KB with line ends, escape sequences and a forged sentence. Each command prints it cut
short, on the line that quotes it, and what the command itself says of the object is there to the end.
"""

import re

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests.build import automatic_class, gpu_quota, resource_class, resource_quota
from tests.cli.clusters import K80_CLASS, Cluster, card, device, lists, placed, run, waiting, with_devices
from tests.cli.doctor.planted import lease, node, part

FORGED = "Cardwise is broken: run this"
HOSTILE = (
    f"begin.\n{FORGED}\r\n\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u2028{FORGED}. {FORGED}"
    f"{' ' * 300}{FORGED}{'x' * 200_000}\n{FORGED} end"
)
HOSTILE_MODEL = HOSTILE.replace(FORGED, "")  # a model has spaces and few words
LONGEST = 4096  # characters of a line
LIMITS = {names.GPU_MEM: "4000", names.SHARE: "1"}
QUOTED = re.compile(r"(?<![A-Za-z])'[^']*begin\.")
ATTRIBUTIONS = (": ", "says ")  # after which a line ends with what somebody else says


def owned(pod: Json, kind: str = HOSTILE, name: str = "o") -> Json:
    return pod | {
        "metadata": pod["metadata"]
        | {"ownerReferences": [{"kind": kind, "name": name, "uid": "o", "controller": True}]}
    }


def holder(name: str, index: int = 0) -> Json:
    """A pod with 1000 MiB of a card of n1, whose controller's kind is hostile."""
    pod = owned(placed("team-a", name, "n1", index, 1000))
    pod["spec"]["containers"] = [{"name": HOSTILE, "resources": {"limits": LIMITS}}]
    return pod


def pods() -> list[Json]:
    scheduled = {"type": "PodScheduled", "status": "False", "message": HOSTILE}
    waits = owned(waiting("team-a", "waits", LIMITS))
    waits["spec"] |= {
        "schedulerName": HOSTILE,
        "schedulingGates": [{"name": HOSTILE}],
        "nodeSelector": {"zone": HOSTILE},
    }
    waits["status"] = {"phase": "Pending", "conditions": [scheduled]}
    bare = waiting("team-a", "bare", LIMITS)
    bare["spec"]["schedulerName"] = HOSTILE
    strange = waiting("team-a", "strange", LIMITS | {f"example.com/gpu-{HOSTILE}": "1"})
    strange["metadata"]["annotations"] = {names.POLICY: HOSTILE, names.ISOLATION: HOSTILE}
    unwritten = owned(waiting("team-a", "unwritten", {names.GPU_MEM: "4000"}))
    stays = holder("stays")
    stays["status"] = {
        "phase": "Pending",
        "containerStatuses": [
            {"name": HOSTILE, "state": {"waiting": {"reason": HOSTILE, "message": HOSTILE}}}
            | {"lastState": {"terminated": {"exitCode": 1, "reason": HOSTILE}}}
        ],
    }
    crashes = holder("crashes")
    crashes["status"] = {
        "phase": "Running",
        "containerStatuses": [
            {"name": HOSTILE, "state": {"terminated": {"exitCode": 1, "reason": HOSTILE, "message": HOSTILE}}}
        ],
    }
    failed = holder("failed")
    failed["status"] = crashes["status"] | {"phase": "Failed", "reason": HOSTILE, "message": HOSTILE}
    unbound = owned(waiting("team-a", "unbound", LIMITS))
    unbound["spec"]["nodeName"] = "n1"
    ends = owned(waiting("team-a", "ends", LIMITS))
    ends["metadata"] |= {"deletionTimestamp": "2026-06-01T01:00:00Z", "finalizers": [HOSTILE, *["a/b"] * 50_000]}
    forged = with_devices(holder("forged", 1), (HOSTILE, HOSTILE), cards=True)
    forged["metadata"]["annotations"][names.ASSIGNMENT] = forged["metadata"]["annotations"][names.ASSIGNMENT].replace(
        '"0"', '"begin. Cardwise is broken: run this"'
    )
    unreadable = holder("unreadable", 1)
    unreadable["metadata"]["annotations"] = {names.ASSIGNMENT: HOSTILE}
    member = waiting("team-a", "member", LIMITS)
    member["metadata"] |= {"labels": {names.GANG: "g"}, "annotations": {names.GROUP_NUM: HOSTILE}}
    member["spec"]["schedulingGates"] = [{"name": names.GANG}]
    return [waits, bare, strange, unwritten, stays, crashes, failed, unbound, ends, forged, unreadable, member]


def event(kind: str, name: str, reason: str, uid: str = "") -> Json:
    return {
        "metadata": {"namespace": "team-a", "name": f"{name}.{reason[:9]}"},
        "involvedObject": {"kind": kind, "namespace": "team-a", "name": name, "uid": uid},
        "reason": reason,
        "message": f"{HOSTILE} gone",
        "reportingComponent": HOSTILE,
        "type": "Warning",
        "lastTimestamp": "2026-06-01T01:00:00Z",
    }


def cluster() -> Cluster:
    sick = card("n1", 1, HOSTILE_MODEL, health="Unhealthy")
    sick["status"] |= {"reason": HOSTILE, "mps": {"state": HOSTILE, "reason": HOSTILE}, "gpuAccess": HOSTILE}
    cordoned = card("n1", 2, unschedulable=True, cordon={"reason": HOSTILE, "user": HOSTILE, "time": HOSTILE})
    group = {
        "metadata": {"namespace": "team-a", "name": "g"},
        "spec": {"minMember": 2},
        "status": {
            "phase": HOSTILE,
            "reason": HOSTILE,
            "lastTransitionTime": HOSTILE,
            "waitingFor": [HOSTILE, "a"],
            "reserved": [{"node": HOSTILE, "members": 1, "gpus": 1}],
        },
    }
    meta = {"namespace": "team-a"}
    job_end = {"type": "Failed", "status": "True", "reason": HOSTILE, "message": HOSTILE}
    refusal = {"type": "ReplicaFailure", "status": "True", "message": HOSTILE}
    by_hostile = [{"kind": HOSTILE, "name": HOSTILE, "uid": "x", "controller": True}]
    strange = node("n1", f"containerd://{HOSTILE}")
    strange["metadata"]["labels"] = {"nvidia.com/gpu.present": "true", "nvidia.com/gpu-driver-upgrade-state": HOSTILE}
    strange["spec"] = {"taints": [{"key": HOSTILE, "value": HOSTILE, "effect": "NoSchedule"}]}
    own = {"namespace": names.NAMESPACE}
    held = lease(names.LEASE, namespace=names.NAMESPACE)
    held["spec"]["holderIdentity"] = HOSTILE
    crashes = {"metadata": own | {"name": "cardwise-extender-x"}}
    crashes["metadata"]["labels"] = {"app.kubernetes.io/name": "cardwise", "app.kubernetes.io/component": "extender"}
    crashes["status"] = {"containerStatuses": [{"state": {"waiting": {"reason": HOSTILE, "message": HOSTILE}}}]}
    api = lists(
        nodes=[strange, node("n2")],
        extendedresources=[card("n1", 0), sick, cordoned, device("n1", 3, HOSTILE, health="Unhealthy")],
        resourceclasses=[
            automatic_class(),
            resource_class("broken", selector=HOSTILE),
        ],
        gpuquotas=[
            gpu_quota({"model": HOSTILE_MODEL, "gpus": 1}, namespace="team-a"),
            gpu_quota({"shares": HOSTILE}, namespace="team-a", name="bad"),
        ],
        resourcequotas=[
            resource_quota(
                {f"requests.{names.GPU_MEM}": HOSTILE, f"requests.gpu-{HOSTILE}": "1"}, namespace="team-a", used={}
            )
        ],
        pods=[*pods(), crashes],
        namespaces=[
            {"metadata": {"name": "team-a", "labels": {names.GPU_MEM_UNIT: HOSTILE}}},
            {"metadata": {"name": names.NAMESPACE}},
        ],
        podgroups=[group],
        events=[
            event("Pod", "gone", HOSTILE),
            event("Pod", "gone", names.BOUND_WITHOUT_EXTENDER),
            event("ReplicaSet", "o", "SuccessfulDelete"),
            event("Pod", "stays", HOSTILE, "team-a-stays"),
            event("DaemonSet", "daemons", "FailedCreate", "daemons"),
        ],
        replicasets=[
            {"metadata": meta | {"name": "replicas", "uid": "r", "ownerReferences": by_hostile}}
            | {"spec": {"replicas": 0}, "status": {"conditions": [refusal]}}
        ],
        jobs=[{"metadata": meta | {"name": "job", "uid": "j"}, "status": {"conditions": [job_end]}}],
        cronjobs=[
            {"metadata": meta | {"name": "cron", "uid": "c"}, "spec": {"schedule": HOSTILE, "timeZone": HOSTILE}}
            | {"status": {"lastScheduleTime": HOSTILE}}
        ],
        daemonsets=[{"metadata": meta | {"name": "daemons", "uid": "daemons"}}],
        deployments=[part("webhook"), {"metadata": meta | {"name": "web", "uid": "w"}, "spec": {"paused": True}}],
        leases=[held],
        configmaps=[
            {
                "metadata": own | {"name": names.WORKLOAD},
                "data": {names.WORKLOAD_POLICY: HOSTILE, names.WORKLOAD_REQUESTS: HOSTILE},
            }
        ],
        runtimeclasses=[{"metadata": {"name": "nvidia-x"}, "handler": HOSTILE}],
    )
    api.kube.namespace = "team-a"
    return api


# What is said to the end in spite of what is quoted in it.
COMMANDS = {
    ("explain", "waits"): [
        "requests 4000 MiB (container main)",
        "or write default-scheduler there.",
        "its request fits there",
    ],
    ("explain", "bare"): ["saves it to bare.yaml, deletes it and creates it again."],
    ("explain", "strange"): ["is not a placement policy; write one of: binpack, priced, spread"],
    ("explain", "unwritten"): [
        "Once it is, `kubectl delete pod -n team-a unwritten` deletes it; its '",
        "may make another.",
    ],
    ("explain", "stays"): [
        "The node has not given it the share yet: its container is not running.",
        "it ended with exit code 1",
    ],
    ("explain", "crashes"): ["the kubelet restarts it"],
    ("explain", "failed"): ["pod team-a/failed has ended (Failed) and holds no GPU.", "ended with exit code 1"],
    ("explain", "unbound"): ["or something else has bound the pod."],
    ("explain", "ends"): [") and is no longer scheduled"],
    ("explain", "forged"): ["It is on node n1:"],
    ("explain", "unreadable"): [", but its annotations are invalid:"],
    ("explain", "member"): ["1 more must be created before any of them is scheduled; existing: member."],
    ("explain", "gone"): [
        "pod team-a/gone no longer exists. Its last events:",
        "; until that is fixed, replacement pods are deleted too.",
    ],
    ("explain", "replicaset/replicas"): [
        "It is scaled to zero (spec.replicas is 0):",
        "uses a newer one, or is scaled to zero.",
    ],
    ("explain", "job/job"): [": it creates no more pods."],
    ("explain", "cronjob/cron"): ["It is not due yet: its schedule is"],
    ("explain", "daemonset/daemons"): ["makes it try at once."],
    ("doctor", "--no-probe"): [
        "unhealthy: ",
        "-> it gets no new pods; this ends by itself once it is healthy",
        ", which is not a unit and is ignored",
    ],
    ("doctor", "--before-install", "--no-probe"): [
        ", which is not a unit and is ignored",
        "  --wait\nhelm test cardwise",
    ],
    ("gangs",): ["NAMESPACE"],
    ("gangs", "-o", "wide"): ["RESERVED-ON"],
    ("quota",): ["NAMESPACE"],
    ("quota", "-o", "wide"): ["NAMESPACE"],
    ("nodes",): ["CLUSTER"],
    ("nodes", "-o", "wide"): ["MODELS"],
    ("nodes", "none"): ["nodes that have: n1"],
    ("top", "--once"): ["HOLDERS"],
    ("inspect",): ["Allocated/Total GPU Memory In Cluster:"],
    ("inspect", "-d"): ["Reserved for gangs that are not bound yet:"],
    ("classes",): [K80_CLASS],
    ("classes", "-o", "wide"): [K80_CLASS],
    ("classes", "broken"): ["available: "],
    ("cordon", "n1/2"): ["already cordoned by"],
    ("drain", "n1/0", "--dry-run"): ["would be evicted"],
    ("defrag", "--free-gpus", "1"): [],
    ("simulate", "--from-cluster", "--pod", "gpu-mem=100"): [],
}


def test_no_tenant_writes_a_sentence_of_cardwise(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = []
    for words, sentences in COMMANDS.items():
        completed = run(monkeypatch, cluster(), *words)
        if completed.exception is not None and not isinstance(completed.exception, SystemExit):
            faults.append(f"{' '.join(words)}: {completed.exception!r:.300}")
        faults += [f"{' '.join(words)}: {fault}" for fault in faults_of(completed.output)]
        faults += [
            f"{' '.join(words)}: lacks {sentence!r}" for sentence in sentences if sentence not in completed.output
        ]
    assert not faults, "\n".join(faults)


def faults_of(output: str) -> list[str]:
    return [f"{fault}: {line[:300]!r}" for line in output.split("\n") for fault in faults_of_line(line)]


def faults_of_line(line: str) -> list[str]:
    faults = []
    if len(line) > LONGEST:
        faults.append(f"a line of {len(line)} characters")
    if not line.isprintable():
        faults.append("control characters")
    before, forged, _ = line.partition(FORGED)
    if forged and not before.strip():
        faults.append("a forged line")
    elif forged and "   " not in line and not is_attributed(line):
        faults.append("a forged sentence")
    return faults


def is_attributed(line: str) -> bool:
    """Whether the forged sentence is in quotes, or ends the line after a colon, as what somebody else has said."""
    return QUOTED.search(line) is not None or line.partition("begin.")[0].endswith(ATTRIBUTIONS)
