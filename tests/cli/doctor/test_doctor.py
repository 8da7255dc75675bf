"""doctor: each fault that it knows, planted, is found and told with a remedy; and a sound cluster has none."""

import json
import math
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest

from cardwise.cli.cluster import installation, podevents
from cardwise.cli.doctor import checks, exposure, facts, finding, probing, scheduler
from cardwise.cli.doctor.facts import Facts
from cardwise.cli.doctor.finding import Finding, Severity, table, worst_severity
from cardwise.core.api import gpunodes, names, schedulerconfig
from cardwise.core.api.assignment import Assignment, CardShare, encode
from cardwise.core.api.mps import CLOSED_BY_FORMER_MANAGER, MANAGER_GONE
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from cardwise.core.values.refusals import Refusal
from cardwise.kube import paths
from cardwise.kube.pods import nodeconstraints
from tests.build import asking, gpu_quota, resource_quota
from tests.cli.clusters import Cluster, card, run
from tests.cli.doctor.planted import NOW, Faults, configuration, controlled, lease, node, part, troubles, workload
from tests.fakes.apiserver import Fault, Request
from tests.fakes.clock import FakeClock

CONFIG = schedulerconfig.extender_stanzas(filter_url="https://a:1", bind_url="https://a:2", ca_file="ca")


def add_nodes(seen: Facts, count: int = 60) -> list[Json]:
    """So many nodes of eight cards."""
    seen.nodes = [node(f"n{i}") for i in range(count)]
    seen.cards = [card(f"n{i}", j) for i in range(count) for j in range(8)]
    for resource in seen.cards:
        resource["status"] |= {"gpuAccess": "cdi", "mps": {"state": "Ready"}}
    return list(seen.cards)


def test_a_reason_is_one_line_for_all_cards_that_it_is_of(sound):
    for resource in (cards := add_nodes(sound))[:-1]:
        resource["status"] |= {"health": "Unhealthy", "reason": "NvidiaDevicePluginActive"}
    (finding,) = troubles(sound)
    assert finding.text == "60 nodes (n0, n1, n10 and 57 more), 479 GPUs: unhealthy: NvidiaDevicePluginActive"
    assert finding.level is Severity.WARNING
    cards[-1]["status"] |= {"health": "Unhealthy", "reason": "XID 79"}
    resource, other = troubles(sound)
    assert (resource.level, other.level) == (Severity.PROBLEM, Severity.PROBLEM), "no card is usable"
    assert "no pod gets a GPU" in resource.remedy
    assert not any(f.check == "cards" and f.level is Severity.OK for f in checks.check_facts(sound))


def test_a_cluster_whose_cards_are_all_cordoned_has_a_problem(sound):
    for resource in add_nodes(sound, 1):
        resource["spec"]["unschedulable"] = True
    (finding,) = troubles(sound)
    assert (finding.level, "8 GPUs: cordoned" in finding.text) == (Severity.PROBLEM, True)
    assert "cardwise uncordon n0/0" in finding.remedy


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"spec": {"unschedulable": True}}, "node n1 takes no new pods: cordoned"),
        ({"conditions": [{"type": "Ready", "status": "False"}]}, "node n1 takes no new pods: NotReady"),
        ({"conditions": [{"type": "DiskPressure", "status": "True"}]}, "node n1 takes no new pods: under DiskPressure"),
    ],
)
def test_a_node_that_takes_no_pods_is_a_finding(sound, state, text):
    (planted,) = sound.nodes
    planted.update({"spec": state["spec"]} if "spec" in state else {})
    planted["status"] |= {key: field for key, field in state.items() if key != "spec"}
    (finding,) = troubles(sound)
    assert (finding.check, finding.level, finding.text) == ("nodes", Severity.PROBLEM, text), "no other node has GPUs"
    sound.nodes = [*sound.nodes, node("n2")]
    sound.cards = [*sound.cards, sound.cards[0] | {"spec": sound.cards[0]["spec"] | {"node": "n2"}}]
    (finding,) = troubles(sound)
    assert finding.level is Severity.WARNING
    planted["metadata"]["name"] = "without-cards"
    sound.nodes = [*sound.nodes, node("n1")]
    assert not any(finding.check == "nodes" for finding in troubles(sound))


def test_without_rights_it_does_not_say_that_there_is_no_problem(sound):
    plant_no_rights(sound)
    shown = table(list(checks.check_facts(sound))).splitlines()
    assert shown[-1].startswith("could not read 2 of 25 kinds of objects; the others: 0 problems, 0 warnings, 1 note")
    sound.unread_kinds = {"leases": "the server is currently unable to handle the request"}
    shown = table(list(checks.check_facts(sound))).splitlines()
    assert shown[-1].startswith("could not read 1 of 25 kinds of objects; the others: 0 problems")
    sound.unread_kinds = {}
    assert table(list(checks.check_facts(sound))).splitlines()[-1].startswith("0 problems")


def test_what_is_the_same_on_many_nodes_is_one_line(sound):
    for resource in add_nodes(sound):
        resource["status"] |= {"gpuAccess": "env", "mps": {"state": "Down", "reason": "no control program"}}
    texts = {finding.check: finding.text for finding in troubles(sound)}
    assert texts["card-access"].startswith(
        "60 nodes (n0, n1, n2 and 57 more): GPUs are assigned by environment variable only"
    )
    assert texts["mps"].endswith(
        "480 GPUs: without working MPS, Down: no control program: no GPU is left for pods that use MPS"
    )


def test_the_gravest_comes_first_and_of_equal_ones_what_others_stand_on(sound):
    plant_no_cards(sound)
    plant_dead_leader(sound)
    plant_hami(sound)
    findings = finding.sort_findings(checks.check_facts(sound))
    assert [finding.check for finding in findings if finding.level is Severity.PROBLEM] == ["extender", "cards"]
    assert [finding.level for finding in findings] == sorted(
        (finding.level for finding in findings), key=list(reversed(Severity)).index
    )


def test_a_sound_cluster_has_no_finding_but_good_ones(sound):
    assert troubles(sound) == []
    assert {finding.check for finding in checks.check_facts(sound)} >= {
        "kubernetes",
        "cards",
        "card-access",
        "mps",
        "extender",
    }


def of_gpushare(*words: str) -> Json:
    container = {"command": ["gpushare-device-plugin-v2", "--v=5", *words]}
    metadata = {"namespace": "kube-system", "name": "gpushare-device-plugin-ds"}
    return {"metadata": metadata, "spec": {"template": {"spec": {"containers": [container]}}}}


def in_gib(seen: Facts) -> None:
    seen.mutating_webhooks[0]["webhooks"][0]["clientConfig"]["service"] = {"path": "/mutate/gib"}


def said_of_units(seen: Facts) -> Finding:
    (finding,) = (finding for finding in checks.check_facts(seen) if finding.check == "gpu-mem-unit")
    return finding


LABELS = {"app.kubernetes.io/component": "webhook"}
EVERYBODY = {"ports": [{"protocol": "TCP", "port": 8443}]}
API_SERVERS = EVERYBODY | {"from": [{"ipBlock": {"cidr": "10.0.0.0/28"}}]}


def webhook_of(*args: str, **spec: object) -> Json:
    """Its Deployment, as the chart writes it."""
    container = {"args": ["--bind=:8443", *args], "ports": [{"name": "https", "containerPort": 8443}]}
    template = {"metadata": {"labels": LABELS}, "spec": {"containers": [container]} | spec}
    return {"metadata": {"namespace": names.NAMESPACE, "name": "cardwise-webhook"}, "spec": {"template": template}}


def network_policy(*rules: Json, **labels: str) -> Json:
    return {"metadata": {"name": "p"}, "spec": {"podSelector": {"matchLabels": labels or LABELS}, "ingress": [*rules]}}


def selecting(operator: str, policy: Json) -> Json:
    (key,) = LABELS
    policy["spec"]["podSelector"] = {"matchExpressions": [{"key": key, "operator": operator, "values": ["webhook"]}]}
    return policy


@pytest.mark.parametrize(
    ("policies", "is_open"),
    [
        pytest.param([], True, id="no policy"),
        pytest.param([network_policy(EVERYBODY)], True, id="for everybody, as the chart's without sources"),
        pytest.param([network_policy({})], True, id="all ports for everybody"),
        pytest.param([network_policy(API_SERVERS), network_policy({"ports": [{"port": "https"}]})], True, id="both"),
        pytest.param([network_policy(API_SERVERS, part="extender")], True, id="of other pods"),
        pytest.param([network_policy(API_SERVERS, {"ports": [{"port": 9400}]})], False, id="for API servers alone"),
        pytest.param([network_policy()], False, id="for nobody"),
        pytest.param(
            [network_policy(EVERYBODY | {"from": [{"namespaceSelector": {}}]})], True, id="for all namespaces"
        ),
        pytest.param([network_policy(EVERYBODY | {"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]})], True, id="for all"),
        pytest.param([network_policy({"ports": [{"port": 8000, "endPort": 9000}]})], True, id="a range of ports"),
        pytest.param([network_policy(API_SERVERS, {"ports": [{"protocol": "TCP"}]})], True, id="all ports of TCP"),
        pytest.param([selecting("NotIn", network_policy(API_SERVERS))], True, id="of other pods, by an expression"),
        pytest.param([selecting("In", network_policy(API_SERVERS))], False, id="of its pods, by an expression"),
    ],
)
def test_a_webhook_that_pods_can_connect_to_is_said_to_be_open(
    sound: Facts, policies: list[Json], is_open: bool
) -> None:
    sound.deployments, sound.networkpolicies = [webhook_of()], policies
    findings = troubles(sound)
    assert [finding.text.partition(":")[0] for finding in findings] == ["the webhook is open to pods"] * is_open
    assert all("webhook.clientCA" in finding.remedy and finding.level is Severity.NOTE for finding in findings)
    sound.unread_kinds["networkpolicies"] = ""
    assert "open to pods" not in str(troubles(sound))


def test_on_the_nodes_network_no_policy_closes_the_webhook_and_a_certificate_does(sound: Facts) -> None:
    sound.networkpolicies = [network_policy(API_SERVERS)]
    sound.deployments = [webhook_of(hostNetwork=True)]
    (finding,) = troubles(sound)
    assert finding.text.startswith("the webhook is open to pods: it uses the nodes' network")
    assert "networkPolicies" not in finding.remedy
    for spec in ({}, {"hostNetwork": True}):
        sound.deployments = [webhook_of("--client-ca=/etc/cardwise/client-ca/ca.crt", **spec)]
        assert troubles(sound) == []


@pytest.mark.parametrize(
    ("words", "unit"),
    [
        ([], "GiB"), (["--memory-unit=GiB"], "GiB"), (["--memory-unit=MiB"], "MiB"), (["-memory-unit", "MiB"], "MiB"),
        (["--memory-unit=mib"], "GiB"), (["sh", "-c", "exec plugin --memory-unit='MiB' -v"], "MiB"),
        (["--no-memory-unit=MiB"], "GiB"),
    ],
)  # fmt: skip
def test_the_unit_of_the_former_gpushare_is_found_and_proposed(sound, words, unit):
    sound.other_daemonsets = [of_gpushare(*words)]
    finding = said_of_units(sound)
    assert (finding.level is Severity.OK) == (unit == "MiB")
    if unit == "GiB":
        assert "counts aliyun.com/gpu-mem in GiB (--memory-unit of DaemonSet kube-system/gpushare-" in finding.text
        assert "webhook.gpuMemUnit=GiB" in finding.remedy
    in_gib(sound)
    finding = said_of_units(sound)
    assert (finding.level is Severity.OK) == (unit == "GiB")
    assert (f"webhook.gpuMemUnit={unit}" in finding.remedy) == (unit == "MiB")


@pytest.mark.parametrize("kinds", [False, True], ids=["new cluster", "kinds are left"])
def test_before_the_installation_the_unit_to_install_with_is_named(sound, kinds):
    (plant_uninstalled if kinds else plant_nothing_installed)(sound)
    sound.other_daemonsets = [of_gpushare()]
    finding = said_of_units(sound)
    assert (finding.level, finding.remedy) == (Severity.NOTE, "install Cardwise with webhook.gpuMemUnit=GiB")


def test_namespaces_that_count_otherwise_are_named_and_those_that_say_nonsense(sound):
    labels = {"team": "GiB", "odd": "gib", "same": "MiB"}
    sound.namespaces = [{"metadata": {"name": n, "labels": {names.GPU_MEM_UNIT: unit}}} for n, unit in labels.items()]
    findings = [finding for finding in checks.check_facts(sound) if finding.check == "gpu-mem-unit"]
    assert [(finding.level, finding.text) for finding in findings] == [
        (
            Severity.WARNING,
            "namespace odd: its label cardwise.dev/gpu-mem-unit is 'gib', which is not a unit and is ignored",
        ),
        (Severity.OK, "numbers without a unit in aliyun.com/gpu-mem mean MiB, in team GiB"),
    ]
    in_gib(sound)
    sound.namespaces = []
    assert said_of_units(sound).text.endswith("mean GiB")


FAULTS = Faults()


@FAULTS.says(Severity.PROBLEM, "Kubernetes v1.29.9-gke.1, not 1.31", "upgrade the control plane")
def plant_old_kubernetes(seen: Facts) -> None:
    seen.version = {"gitVersion": "v1.29.9-gke.1"}


@FAULTS.says(Severity.PROBLEM, "the CRDs of cardwise.dev are not installed", "cardwise doctor --before-")
def plant_no_kinds(seen: Facts) -> None:
    seen.unknown_kinds, seen.cards, seen.nodes = {"cards", "classes"}, [], []


@FAULTS.says(Severity.PROBLEM, "there is no MutatingWebhookConfiguration cardwise", "--before-install")
def plant_no_webhook(seen: Facts) -> None:
    del seen.mutating_webhooks[0]


@FAULTS.says(
    Severity.PROBLEM,
    "there is no MutatingWebhookConfiguration zz-cardwise",
    "doctor --before-install prints the command",
)
def plant_no_late_webhook(seen: Facts) -> None:
    del seen.mutating_webhooks[1]


@FAULTS.says(Severity.NOTE, "MutatingWebhookConfiguration zzz-mesh runs after Cardwise's", "sorts before cardwise")
def plant_webhook_after_ours(seen: Facts) -> None:
    for name, resources in (("aaa", ["pods"]), ("zzz-of-services", ["services"]), ("zzz-mesh", ["*"])):
        rule = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": resources}
        seen.mutating_webhooks.append({"metadata": {"name": name}, "webhooks": [{"name": "a.b.c", "rules": [rule]}]})


@FAULTS.says(Severity.PROBLEM, "has no CA: the webhook has never started", "logs -n cardwise-system dep")
def plant_webhook_that_never_ran(seen: Facts) -> None:
    seen.validating_webhooks = [configuration("")]


@FAULTS.says(
    Severity.PROBLEM,
    "ValidatingWebhookConfiguration cardwise has no webhooks: the API server calls none",
    "let the chart write them again",
)
def plant_webhooks_taken_away(seen: Facts) -> None:
    seen.validating_webhooks[0]["webhooks"] = []


@FAULTS.says(Severity.WARNING, "no ValidatingAdmissionPolicy of Cardwise", "policies.enabled")
def plant_no_policies(seen: Facts) -> None:
    seen.policies = [{"metadata": {"name": "somebody-elses"}}]


@FAULTS.says(Severity.WARNING, "no extender holds the Lease cardwise-extender", "start the extender")
def plant_no_leader(seen: Facts) -> None:
    seen.leases = []


@FAULTS.says(Severity.PROBLEM, "no extender holds the Lease", "--replicas 2")
def plant_extender_at_zero(seen: Facts) -> None:
    """As it leaves its Lease, when it ends by itself."""
    seen.leases = [{"metadata": {"name": names.LEASE}, "spec": {"holderIdentity": ""}}]
    seen.deployments = [part("extender", replicas=0)]


@FAULTS.says(Severity.PROBLEM, "has not renewed its Lease for", "check that one runs: kubectl get")
def plant_dead_leader(seen: Facts) -> None:
    seen.leases = [lease(names.LEASE, age=60)]


@FAULTS.says(Severity.PROBLEM, "has not renewed its Lease for", "check that one runs: kubectl get")
def plant_dead_leader_of_an_hour(seen: Facts) -> None:
    """Somebody has written into its Lease that it has it for an hour."""
    seen.leases = [lease(names.LEASE, age=120)]
    seen.leases[0]["spec"]["leaseDurationSeconds"] = 3600


@FAULTS.says(
    Severity.WARNING,
    "extender e holds the Lease cardwise-extender, which",
    "a running extender writes it within seconds: kubectl get pods -n cardwise-system -l ",
)
def plant_lease_without_times(seen: Facts) -> None:
    seen.leases = [{"metadata": {"name": names.LEASE}, "spec": {"holderIdentity": "e"}}]


@FAULTS.says(Severity.PROBLEM, "no GPU is known", "nodes.selector")
def plant_no_cards(seen: Facts) -> None:
    seen.cards, seen.nodes = [], []


@FAULTS.says(Severity.PROBLEM, "no node has the labels of nodes.selector", "kubectl label node")
def plant_no_labels(seen: Facts) -> None:
    plant_no_cards(seen)
    seen.daemonsets = [{"metadata": {"name": "cardwise-deviceplugin", "namespace": names.NAMESPACE}, "status": {}}]


@FAULTS.says(Severity.PROBLEM, "without NVIDIA's RuntimeClass nvidia", "nodes.runtimeClass=nvidia")
def plant_no_runtime_class(seen: Facts) -> None:
    plant_no_cards(seen)
    plugin = {"spec": {"template": {"spec": {}}}, "status": {"desiredNumberScheduled": 2}}
    seen.daemonsets = [{"metadata": {"name": "cardwise-deviceplugin", "namespace": names.NAMESPACE}} | plugin]
    seen.runtimeclasses = [{"metadata": {"name": "nvidia"}, "handler": "nvidia"}]


@FAULTS.says(Severity.PROBLEM, "the CRDs of cardwise.dev are not installed", "--before-install")
def plant_nothing_installed(seen: Facts) -> None:
    seen.unknown_kinds, seen.nodes, seen.cards, seen.classes = {"cards", "classes"}, [], [], []
    seen.mutating_webhooks, seen.validating_webhooks, seen.policies, seen.leases = [], [], [], []


@FAULTS.says(
    Severity.PROBLEM, "only Cardwise's CRDs are installed: Cardwise was uninstalled,", "doctor --before-install prints"
)
def plant_uninstalled(seen: Facts) -> None:
    seen.nodes, seen.cards = [], []
    seen.mutating_webhooks, seen.validating_webhooks, seen.policies = [], [], []


@FAULTS.says(
    Severity.NOTE, "no GPU matches nvidia.l4: pods that request it wait", "kubectl delete resourceclass nvidia.l4"
)
def plant_class_without_cards(seen: Facts) -> None:
    auto, edited = {"labels": {names.AUTO_LABEL: "true"}}, {"labels": {}}
    seen.classes = [
        {"metadata": {"name": "nvidia.l4"} | auto, "status": {"devices": 0}},
        {"metadata": {"name": "nvidia.h200"} | auto, "status": {"devices": 1}},
        {"metadata": {"name": "new"} | auto},
        {"metadata": {"name": "theirs"} | edited, "status": {"devices": 0}},
    ]


def quota(namespace: str, *keys: str) -> Json:
    return resource_quota(dict.fromkeys(keys, "1"), namespace=namespace, name="cards")


@FAULTS.says(
    Severity.WARNING,
    "open: a ResourceQuota limits requests.aliyun.com/gpu-mem, but not whole GPUs (gpu-count or a class)",
    "add requests.cardwise.dev/gpu to it, or create a GPUQuota",
)
def plant_quota_of_shares(seen: Facts) -> None:
    """The others are closed: by a second quota, by a GPUQuota."""
    seen.resourcequotas = [
        quota("open", "requests.aliyun.com/gpu-mem"),
        quota("both", "requests.aliyun.com/gpu-mem"),
        quota("both", "requests.cardwise.dev/gpu"),
        quota("gpuquota", "requests.aliyun.com/gpu-mem"),
        quota("plain", "requests.cpu", "pods"),
    ]
    seen.gpuquotas = [gpu_quota({"gpus": 1}, namespace="gpuquota")]


@FAULTS.says(Severity.WARNING, "but not shares", "add requests.aliyun.com/gpu-mem to")
def plant_quota_of_whole_cards(seen: Facts) -> None:
    seen.resourcequotas = [quota("open", "requests.cardwise.dev/gpu")]


@FAULTS.says(
    Severity.WARNING,
    "ResourceQuota open/cards: requests.aliyun.com/gpumem counts nothing, because no node offers it",
    "did you mean requests.aliyun.com/gpu-mem?",
)
def plant_misspelled_quota(seen: Facts) -> None:
    seen.resourcequotas = [quota("open", "requests.aliyun.com/gpumem", "requests.cardwise.dev/mine", "requests.x/y")]


@FAULTS.says(
    Severity.WARNING, "n1: GPU-n1-0 is unhealthy: XID 79", "it gets no new pods; this ends by itself once it is healthy"
)
def plant_sick_card(seen: Facts) -> None:
    seen.cards[0]["status"] |= {"health": "Unhealthy", "reason": "XID 79"}


@FAULTS.says(Severity.PROBLEM, "node n1: no cardwise.dev/share is offered", "nodes.kubeletDir")
def plant_unregistered_plugin(seen: Facts) -> None:
    seen.nodes[0]["status"]["allocatable"][names.SHARE] = "0"


@FAULTS.says(Severity.PROBLEM, "n1: the device plugin does not run there", "kubectl label node n1")
def plant_label_taken_away(seen: Facts) -> None:
    plant_unregistered_plugin(seen)
    plugin = {"spec": {"template": {"spec": {"nodeSelector": {"nvidia.com/gpu.present": "true"}}}}}
    seen.daemonsets = [{"metadata": {"name": "cardwise-deviceplugin", "namespace": names.NAMESPACE}} | plugin]


@FAULTS.says(
    Severity.WARNING,
    "node n1: NVIDIA's GPU Operator is replacing the driver, so the device plugin was stopped",
    "nvidia.com/gpu.deploy.client=paused-for-driver-upgrade",
)
def plant_driver_upgrade(seen: Facts) -> None:
    plant_unregistered_plugin(seen)
    (key, label), *_ = gpunodes.UPGRADE_LABELS.items()
    paused = {"key": key, "operator": "NotIn", "values": [label]}
    affinity = {
        "nodeAffinity": {
            nodeconstraints.REQUIRED_AFFINITY_FIELD: {"nodeSelectorTerms": [{"matchExpressions": [paused]}]}
        }
    }
    seen.nodes[0]["metadata"]["labels"] = {key: label}
    plugin = {"spec": {"template": {"spec": {"affinity": affinity}}}}
    seen.daemonsets = [{"metadata": {"name": "cardwise-deviceplugin", "namespace": names.NAMESPACE}} | plugin]


@FAULTS.says(Severity.PROBLEM, "there is no MutatingWebhookConfiguration cardwise", "helm upgrade")
def plant_deleted_webhook(seen: Facts) -> None:
    """Of a chart that is installed: Helm does not install it again under its name."""
    plant_no_webhook(seen)
    seen.daemonsets = [part("deviceplugin", "DaemonSet")]


@FAULTS.says(Severity.NOTE, "node n1 is gone", "cardwise.dev/node=n1")
def plant_deleted_node(seen: Facts) -> None:
    seen.nodes, seen.node_leases = [], []


@FAULTS.says(Severity.WARNING, "n1: GPUs are assigned by environment variable only", "enable_cdi = true")
def plant_old_runtime(seen: Facts) -> None:
    seen.nodes = [node("n1", "containerd://1.7.27")]
    seen.cards[0]["status"]["gpuAccess"] = seen.cards[1]["status"]["gpuAccess"] = "env"


@FAULTS.says(Severity.WARNING, "n1: GPUs are assigned by environment variable only", "upgrade cri-o to 1.28 or later")
def plant_old_crio(seen: Facts) -> None:
    plant_old_runtime(seen)
    seen.nodes = [node("n1", "cri-o://1.27.8")]


@FAULTS.says(Severity.WARNING, "n1: GPUs are assigned by environment variable only", "use containerd 2 or CRI-O")
def plant_docker(seen: Facts) -> None:
    plant_old_runtime(seen)
    seen.nodes = [node("n1", "docker://27.1")]


@FAULTS.says(Severity.NOTE, "no node has an MPS manager", "cardwise-mps")
def plant_no_mps(seen: Facts) -> None:
    for resource in seen.cards:
        del resource["status"]["mps"]


@FAULTS.says(
    Severity.WARNING,
    "n1: GPU-n1-1 is without MPS, Down: the daemon died",
    "the manager tries again by itself; see its log:",
)
def plant_dead_mps(seen: Facts) -> None:
    seen.cards[1]["status"]["mps"] = {"state": "Down", "reason": "the daemon died"}


@FAULTS.says(
    Severity.WARNING,
    "1 pod (default/strict) demands isolation kernel, which no GPU has (the driver is too old): it waits",
    "or demand less: cardwise.dev/isolation of the pod and of its namespace, and webhook.isolation",
)
def plant_unmet_demand(seen: Facts) -> None:
    for resource in seen.cards:
        resource["status"]["isolation"] = {"memory": "mps", "memoryReason": "the driver is too old"}
    seen.pending_pods = [
        asking("strict", gpu_mem=100, annotations={names.ISOLATION: "kernel"}),
        asking("whole", whole_gpu=1, annotations={names.ISOLATION: "kernel"}),
        asking("limited", gpu_mem=100, annotations={names.ISOLATION: "mps"}),
    ]


@FAULTS.says(
    Severity.WARNING,
    "n1, 2 GPUs: shared without MPS, so limits are advisory: the control program is missing: install it",
    "pods that require MPS wait, and all others run there",
)
def plant_unavailable_mps(seen: Facts) -> None:
    for resource in seen.cards:
        resource["status"]["mps"] = {"state": "Unavailable", "reason": "the control program is missing: install it"}


@FAULTS.says(Severity.PROBLEM, "n1, 2 GPUs: without working MPS, Down: the node's", "deviceplugin.mps=auto")
def plant_no_mps_any_more(seen: Facts) -> None:
    for resource in seen.cards:
        resource["status"]["mps"] = {"state": "Down", "reason": MANAGER_GONE}


@FAULTS.says(Severity.WARNING, "GPU-n1-1 is without MPS, Down: the GPU is closed", "until the pods")
def plant_closed_by_mps(seen: Facts) -> None:
    del seen.cards[0]["status"]["mps"]
    seen.cards[1]["status"]["mps"] = {"state": "Down", "reason": CLOSED_BY_FORMER_MANAGER}


@FAULTS.says(Severity.WARNING, "node n1, 2 GPUs: NVIDIA's device plugin offers", "nodes.gpus")
def plant_nvidia_plugin(seen: Facts) -> None:
    seen.nodes = [node("n1", **{"nvidia.com__gpu": "2"})]


@FAULTS.says(Severity.NOTE, "HAMi is installed: DaemonSet kube-system/hami-device-plugin", "nodeSelector")
def plant_hami(seen: Facts) -> None:
    seen.other_daemonsets = [workload("hami-device-plugin", facts.SYSTEM_NAMESPACE)]


@FAULTS.says(Severity.NOTE, "NVIDIA's DRA driver is installed: DaemonSet nvidia-dra-driver-gpu/n", "nodeSelector")
def plant_dra_driver(seen: Facts) -> None:
    seen.other_daemonsets = [workload("nvidia-dra-driver-gpu-kubelet-plugin", "nvidia-dra-driver-gpu")]


@FAULTS.says(
    Severity.WARNING, "Deployment kube-system/gpushare-schd-extender, label gpushare of node n1, ", "node by node"
)
def plant_gpushare(seen: Facts) -> None:
    seen.other_deployments = [workload("gpushare-schd-extender", facts.SYSTEM_NAMESPACE)]
    seen.nodes = [*seen.nodes, node("n2")]
    seen.nodes[0]["metadata"]["labels"] = {"gpushare": "true"}


@FAULTS.says(Severity.WARNING, "clocks differ from the API server's: n1 (-90 s)", "NTP")
def plant_skew(seen: Facts) -> None:
    seen.node_leases = [lease("n1", ahead=-90.0)]


@FAULTS.says(
    Severity.PROBLEM,
    "2 pods (gpu/a, gpu/b) wait for the scheduler cardwise-scheduler, which no longer exists",
    "kubectl delete pods -A --field-selector=spec.schedulerName=cardwise-scheduler,",
)
def plant_left_scheduler(seen: Facts) -> None:
    spec = {"schedulerName": names.SCHEDULER}
    seen.pending_pods = [
        controlled(workload("a") | {"spec": spec}),
        controlled(workload("b") | {"spec": spec}),
        workload("of another") | {"spec": {}},
    ]


@FAULTS.says(Severity.PROBLEM, "2 pods (gpu/a, gpu/b) wait for the sch", "kubectl delete pods")
def plant_renamed_scheduler(seen: Facts) -> None:
    plant_left_scheduler(seen)
    metadata = {"namespace": names.NAMESPACE, "name": names.SCHEDULER, "annotations": {names.SCHEDULER_NAME: "gpus"}}
    seen.deployments = [{"metadata": metadata}]


def kube_scheduler(on: str, *, wired: bool = True) -> Json:
    """The mirror of a static pod of kubeadm's."""
    annotations = {names.MIRROR: "x"} | ({names.FORMER_CONFIG: ""} if wired else {})
    metadata = {"namespace": facts.SYSTEM_NAMESPACE, "name": f"kube-scheduler-{on}", "annotations": annotations}
    return {"metadata": metadata, "spec": {"nodeName": on}}


@FAULTS.says(
    Severity.PROBLEM,
    "kube-scheduler calls the extender on node cp1, and does not on 2 nodes (cp2, cp3): while",
    "helm upgrade cardwise helm/cardwise -n cardwise-system --reset-then-reuse-values",
)
def plant_new_control_planes(seen: Facts) -> None:
    seen.schedulers = [kube_scheduler("cp1"), kube_scheduler("cp2", wired=False), kube_scheduler("cp3", wired=False)]


@FAULTS.says(
    Severity.WARNING,
    "node n2: ExtendedResource gpu-n1-0 belongs to a GPU of node n1",
    "compare what nvidia-smi -L prints on both nodes: where they report the same UUID",
)
def plant_same_uuid(seen: Facts, minutes: int = 1, server_minutes: int | None = None) -> None:
    """Minutes ago by the node's clock, and by the API server's, if that tells."""
    last = f"{NOW - timedelta(minutes=minutes):%Y-%m-%dT%H:%M:%SZ}"
    text = "ExtendedResource gpu-n1-0 belongs to a GPU of node n1, so this node cannot publish its own; if"
    metadata, about = {"namespace": "default", "name": "e"}, {"kind": "Node", "name": "n2"}
    if server_minutes is not None:
        writes = [
            {"time": f"{NOW - timedelta(minutes=ago):%Y-%m-%dT%H:%M:%SZ}"}
            for ago in (server_minutes + 30, server_minutes)
        ]
        metadata["managedFields"] = writes
    seen.nodes = [node("n1"), {"metadata": {"name": "n2"}, "status": {}}]
    event = podevents.parse_event(
        {"metadata": metadata, "involvedObject": about, "message": text, "lastTimestamp": last}
    )
    assert event is not None
    seen.node_events = [event]


@FAULTS.says(
    Severity.NOTE,
    "could not read 2 of 25 kinds of objects, because you lack the rights: node leases, schedulers",
    "administrator",
)
def plant_no_rights(seen: Facts) -> None:
    seen.unread_kinds = {"node_leases": "", "schedulers": ""}


@pytest.mark.parametrize(("plant", "level", "text", "remedy"), FAULTS)
def test_a_planted_fault_is_found_alone_and_with_a_remedy(sound, plant, level, text, remedy):
    plant(sound)
    (finding,) = troubles(sound)
    assert (finding.level, text in finding.text, remedy in finding.remedy) == (level, True, True), finding


def test_two_nodes_that_reported_the_same_uuid_once_are_no_fault(sound):
    plant_same_uuid(sound, minutes=11)
    assert troubles(sound) == []


@pytest.mark.parametrize("ahead", [-600, 600])
def test_whether_an_event_is_recent_is_by_the_api_servers_clock(sound, ahead):
    """Whatever the clock of the node that wrote it says."""
    plant_same_uuid(sound, minutes=1 - ahead, server_minutes=1)
    assert len([finding for finding in troubles(sound) if "gpu-n1-0" in finding.text]) == 1
    plant_same_uuid(sound, minutes=1, server_minutes=11)
    assert troubles(sound) == []


@pytest.mark.parametrize("state", ["gone", "NotReady"])
def test_a_node_is_named_for_deletion_only_where_it_is_dead_and_has_the_card(sound, state):
    plant_same_uuid(sound)
    alive, dead = node("n1"), node("n1")
    dead["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    n2 = sound.nodes[1]
    sound.nodes = [n2, *([dead] if state == "NotReady" else [])]
    (finding,) = (finding for finding in troubles(sound) if "gpu-n1-0" in finding.text)
    assert finding.remedy == f"node n1 is {state}; if n2 was previously called n1: kubectl delete node n1"
    sound.nodes = [n2, alive]
    (finding,) = troubles(sound)
    assert "kubectl delete" not in finding.remedy
    sound.cards[0]["spec"]["node"] = "n2"
    assert [finding for finding in troubles(sound) if "gpu-n1-0" in finding.text] == [], (
        "the GPU is that node's own by now"
    )
    sound.cards = []
    assert [finding for finding in troubles(sound) if "gpu-n1-0" in finding.text] == []


def test_pods_that_were_bound_past_a_wired_scheduler_are_not_laid_on_it(sound):
    about, metadata = {"kind": "Pod", "namespace": "team", "name": "mine"}, {"namespace": "team", "name": "e"}
    event = {"metadata": metadata, "involvedObject": about, "lastTimestamp": f"{NOW:%Y-%m-%dT%H:%M:%SZ}"}
    sound.pod_events = [*filter(None, [podevents.parse_event(event)])]
    for wired in (True, False):
        sound.schedulers = [kube_scheduler("cp1", wired=wired)]
        (finding,) = troubles(sound)
        assert finding.text.startswith("in the last 10 minutes 1 pod (team/mine) disappeared")
        assert ("kube-scheduler is set to call the extender, so the pod named a node" in finding.remedy) == wired
        assert ("unless the pod was bound by hand" in finding.remedy) != wired


def test_control_planes_are_a_fault_only_where_they_differ(sound):
    for wired, level in (((True, True), []), ((False, False), []), ((True, False), [Severity.PROBLEM])):
        sound.schedulers = [kube_scheduler(f"cp{number}", wired=is_wired) for number, is_wired in enumerate(wired)]
        assert [finding.level for finding in troubles(sound)] == level


def test_waiting_pods_that_nobody_makes_again_are_not_just_deleted(sound):
    plant_left_scheduler(sound)
    del sound.pending_pods[1]["metadata"]["ownerReferences"]
    (finding,) = troubles(sound)
    controlled, bare = finding.remedy.split("; ")
    assert controlled.endswith(": kubectl delete pods -n gpu a")
    assert "kubectl get pod -n gpu b -o yaml | grep -vE '^  (schedulerName):' > b.yaml && kubectl replace" in bare


def test_who_waits_for_a_scheduler_that_is_there_or_may_be_is_no_fault(sound):
    plant_left_scheduler(sound)
    sound.deployments = [workload(names.SCHEDULER, names.NAMESPACE)]
    assert troubles(sound) == []
    sound.deployments, sound.unread_kinds = [], {"deployments": ""}
    assert [finding.level for finding in troubles(sound)] == [Severity.NOTE]


def test_pods_of_a_scheduler_that_has_gone_are_found_also_after_an_uninstallation(monkeypatch):
    api = Cluster({})
    pods = [({"nodeName": "n1"}, "Pending"), ({}, "Failed"), ({"schedulerName": "theirs"}, "Pending"), ({}, "Pending")]
    for number, (spec, phase) in enumerate(pods):
        pod = workload(f"p{number}") | {"spec": {"schedulerName": names.SCHEDULER} | spec, "status": {"phase": phase}}
        api.add("pods", pod)
    probe = workload(f"{facts.PROBE_POD_PREFIX}1") | {"spec": {"schedulerName": names.SCHEDULER}}
    api.add("pods", probe | {"status": {"phase": "Pending"}})
    report = json.loads(run(monkeypatch, api, "doctor", "--no-probe", "-o", "json").stdout)
    texts = [finding["text"] for finding in report["findings"] if finding["check"] == "scheduler"]
    assert [text.partition(",")[0] for text in texts] == ["1 pod (gpu/p3) waits for the scheduler cardwise-scheduler"]


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_the_leader_is_judged_by_the_clock_of_the_api_server(sound, ahead):
    theirs = NOW + timedelta(seconds=ahead)  # the extender's clock
    sound.leases[0]["spec"]["renewTime"] = f"{theirs:%Y-%m-%dT%H:%M:%S.%fZ}"
    assert [finding.level for finding in checks.check_facts(sound) if finding.check == "extender"] == [Severity.OK]
    sound.now += timedelta(seconds=60)
    assert [finding.level for finding in checks.check_facts(sound) if finding.check == "extender"] == [Severity.PROBLEM]
    sound.now = None  # an API server that does not tell: no guess by the admin's clock
    assert [finding.level for finding in checks.check_facts(sound) if finding.check == "extender"] == [Severity.OK]


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_explain_reads_the_age_of_the_lease_by_the_same_clock(ahead):
    """An extender whose clock goes wrong is not silent for that."""
    renewed = lease(names.LEASE, ahead=ahead, namespace=names.NAMESPACE)
    age = installation.lease_age(renewed, NOW)
    assert age is not None
    assert 0 <= age <= 2
    del renewed["metadata"]["managedFields"]
    assert installation.lease_age(renewed, NOW) == pytest.approx(1 - ahead)
    renewed["spec"]["renewTime"] = "yesterday"
    assert installation.lease_age(renewed, NOW) is None


def test_explain_reads_the_lease_with_the_times_at_which_the_api_server_took_it(clock):
    renewed = lease(names.LEASE, namespace=names.NAMESPACE)
    written = clock.wall() - timedelta(seconds=1)
    renewed["metadata"]["managedFields"] = [{"time": f"{written:%Y-%m-%dT%H:%M:%SZ}"}]
    renewed["spec"]["renewTime"] = f"{written - timedelta(hours=1):%Y-%m-%dT%H:%M:%S.%fZ}"
    api = Cluster({"leases": [renewed]}, clock)
    assert installation.leaderless_seconds(api.kube, names.NAMESPACE) is None, "whatever the holder's clock says"


def test_the_wiring_of_kube_scheduler_is_judged():
    def wiring_findings(stanzas: list[Json], **fields: Any) -> list[tuple[Severity, str]]:
        return [
            (finding.level, finding.text)
            for finding in scheduler.check_scheduler_configuration({"extenders": stanzas} | fields, "sched", "do so")
        ]

    assert wiring_findings(CONFIG) == [(Severity.OK, "sched calls the extender for all of Cardwise's resources")]
    assert wiring_findings([]) == [(Severity.PROBLEM, "sched has no extender for Cardwise's resources")]
    ((level, text),) = wiring_findings(CONFIG[:1])
    assert (level, text) == (
        Severity.PROBLEM,
        "sched does not call an extender for cardwise.dev/share, cardwise.dev/bind",
    )
    unignored = deepcopy(CONFIG)
    unignored[1]["managedResources"][1]["ignoredByScheduler"] = False
    assert "does not ignore cardwise.dev/bind, which no node offers" in wiring_findings(unignored)[0][1]
    careless = deepcopy(CONFIG)
    careless[0]["ignorable"] = True
    assert "ignores the extender when it does not answer (ignorable: true):" in wiring_findings(careless)[0][1]
    assert (Severity.NOTE, "sched considers only 50 % of the nodes: pods are packed less tightly") in wiring_findings(
        CONFIG, percentageOfNodesToScore=50
    )


class Probed:
    """A cluster for the probe: whether a webhook rewrites it, and how the scheduler leaves it."""

    def __init__(self, after: Json, *, rewrites: bool = True) -> None:
        self.clock = FakeClock()
        self.api = Cluster({}, self.clock)
        self._after = after
        if rewrites:
            self.api.before_request(self._rewrite, "create")
        self.api.before_request(self._schedule, "get")
        self.created: list[Request] = []
        self.api.before_request(self.created.append, "create", times=math.inf)

    def _rewrite(self, request: Request) -> None:
        request.body["spec"]["containers"][0]["resources"]["limits"][names.SHARE] = "1"
        request.body["spec"]["schedulerName"] = "default-scheduler"

    def _schedule(self, request: Request) -> None:
        self.api.edit(request.path, **self._after)

    def probe(self) -> list[Finding]:
        findings = list(
            probing.run_probe_pod(
                self.api.kube,
                "default",
                names.NAMESPACE,
                self.clock,
                configuration_remedy="wire it",
                renewal_remedy="renew it",
            )
        )
        # What is bound goes when its kubelet says so.
        remaining = [pod for pod in self.api.objects("pods") if pod["metadata"]["namespace"] == names.NAMESPACE]
        assert all("deletionTimestamp" in pod["metadata"] for pod in remaining), "it leaves nothing"
        return findings


def unschedulable(message: str) -> Json:
    return {"status": {"conditions": [{"type": "PodScheduled", "status": "False", "message": message}]}}


ASSIGNED = encode(Assignment({"0": (CardShare(0, "GPU-1", MiB(1), 0, MiB(16276)),)}), assume_time_ns=1)


def test_without_its_priority_class_no_probe_is_sent():
    probed = Probed({})
    text = f'pods "x" is forbidden: no PriorityClass with name {names.PROBE_PRIORITY_CLASS} was found'
    probed.api.fault(Fault(status=403, message=text), "create", f"*/{names.NAMESPACE}/pods", times=math.inf)
    _, finding = probed.probe()
    assert (finding.check, finding.level) == ("probe", Severity.NOTE)
    assert finding.remedy.startswith("upgrade the chart, which creates that PriorityClass: without it")


@pytest.mark.parametrize(
    ("after", "level", "text"),
    [
        (
            {"metadata": {"annotations": ASSIGNED}, "spec": {"nodeName": "n1"}},
            Severity.OK,
            "was placed on a GPU of n1",
        ),
        ({"spec": {"nodeName": "n1"}}, Severity.PROBLEM, "kube-scheduler does not call the extender"),
        (
            unschedulable(f"0/3 nodes: 3 {Refusal.NO_MEMORY.text}."),
            Severity.OK,
            "kube-scheduler calls the extender, which has no capacity now:",
        ),
        (
            unschedulable('Post "https://x": connection refused'),
            Severity.PROBLEM,
            "kube-scheduler cannot reach the extender:",
        ),
        (
            unschedulable('Post "https://x": x509: unknown authority'),
            Severity.PROBLEM,
            "kube-scheduler cannot reach the extender:",
        ),
        (unschedulable(f"0/3 nodes: 3 Insufficient {names.GPU_MEM}"), Severity.NOTE, "no node offers aliyun.com/gpu"),
        (unschedulable("0/3 nodes: 3 had untolerated taint"), Severity.WARNING, "was not placed: 0/3 nodes"),
    ],
)
def test_the_probe_tells_how_far_it_came_and_leaves_nothing(after, level, text):
    webhook, finding = Probed(after).probe()
    assert (webhook.check, webhook.level) == ("webhook", Severity.OK)
    assert (finding.check, finding.level) == ("scheduler", level)
    assert text in finding.text
    assert ("wire it" in finding.remedy) == ("does not call" in finding.text)
    assert ("renew it" in finding.remedy) == ("x509" in finding.text)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            [{"key": "gpu", "effect": "NoExecute"}],
            "has a taint that pods with GPU requests do not tolerate: gpu:NoExecute, ml=x:NoSchedule",
        ),
        ([], "no GPU is free"),
    ],
)
def test_taints_that_all_nodes_with_cards_have_are_named_with_the_value_to_change(second, message):
    webhook = Probed(unschedulable(f"0/3 nodes: 1 Insufficient {names.GPU_MEM}, 1 node(s) had untolerated taint(s)"))
    for name, taints in (("n1", [{"key": "ml", "value": "x", "effect": "NoSchedule"}]), ("n2", second)):
        webhook.api.write_object(paths.nodes(), node(name) | {"spec": {"taints": taints}})
    webhook.api.write_object(paths.nodes(), {"metadata": {"name": "plain"}})
    _, finding = webhook.probe()
    assert message in finding.text
    assert ("webhook.toleratedTaints" in finding.remedy) == bool(second)


def test_the_probe_closes_no_card_to_others_and_is_in_no_quota():
    probed = Probed({"metadata": {"annotations": ASSIGNED}, "spec": {"nodeName": "n1"}})
    probed.probe()
    dry_run, creation = probed.created
    assert (dry_run.path, dry_run.query) == (paths.pods("default"), {"dryRun": "All"})
    assert (creation.path, creation.query) == (paths.pods(names.NAMESPACE), {})
    assert creation.body["spec"]["containers"][0]["resources"]["limits"][names.SHARE] == "1", "as it was admitted"
    assert names.ISOLATION not in creation.body["metadata"]["annotations"], "what the namespace says holds"
    (deleted,) = probed.api.sent("delete")
    assert not deleted.body, "by force its share would stay until nobody can hold it any more"


def test_a_scheduler_that_looks_at_no_pod_is_told_after_a_while_and_nothing_is_left():
    probed = Probed({})
    before = probed.clock.now()
    _, finding = probed.probe()
    assert (finding.level, finding.text) == (
        Severity.PROBLEM,
        "kube-scheduler has not tried the probe pod for 15 s, and no other pod waits",
    )
    assert 15 <= probed.clock.now() - before < 16


@pytest.mark.parametrize(
    ("spec", "level", "says"),
    [
        ({}, Severity.WARNING, "has not tried the probe pod for 15 s: 2 pods ahead"),
        ({"schedulerName": "another"}, Severity.PROBLEM, "no other pod waits"),
        ({"schedulingGates": [{"name": "gang"}]}, Severity.PROBLEM, "no other pod waits"),
        ({"nodeName": "n1"}, Severity.PROBLEM, "no other pod waits"),
    ],
    ids=["pending", "another scheduler's", "gated", "bound"],
)
def test_a_probe_that_waits_behind_other_pods_is_no_problem_of_the_installation(spec, level, says):
    """It has the lowest priority, so kube-scheduler tries all others first."""
    probed = Probed({})
    pod_spec = {"containers": [{"name": "main", "image": "x"}], "schedulerName": "default-scheduler"} | spec
    for name in ("a", "b"):
        probed.api.add("pods", {"metadata": {"name": name, "namespace": "team"}, "spec": pod_spec})
    _, finding = probed.probe()
    assert (finding.level, says in finding.text) == (level, True), finding.text
    assert "check that default-scheduler runs" in finding.remedy


def test_a_probe_that_waits_where_nobody_may_list_pods_is_no_problem():
    probed = Probed({})
    probed.api.fault(Fault(status=403, message="no pods for jane"), "list")
    _, finding = probed.probe()
    assert (finding.level, "pods of higher priority may wait" in finding.text) == (Severity.WARNING, True)


def test_a_probe_that_the_webhook_never_saw_ends_there():
    (finding,) = Probed({}, rewrites=False).probe()
    assert (finding.level, "did not call the webhook" in finding.text) == (Severity.PROBLEM, True)


def test_a_probe_that_may_not_be_made_is_told_from_a_webhook_that_does_not_answer():
    probed = Probed({})
    probed.api.fault(Fault(status=403, message="no pods for jane"), "create")
    probed.api.fault(Fault(status=500, message="failed calling webhook"), "create")
    (refused,) = probed.probe()
    assert (refused.level, "no pods for jane" in refused.text) == (Severity.NOTE, True)
    (broken,) = probed.probe()
    assert (broken.check, broken.level) == ("webhook", Severity.PROBLEM)


class Looked:
    """A cluster for the pods that ask for no card: what each tells is by its node, and by the RuntimeClass it names."""

    def __init__(self, outputs: dict[tuple[str, str], str | Json], *, refused: str = "") -> None:
        self.clock = FakeClock()
        self.api = Cluster({}, self.clock)
        self.created: list[Json] = []
        self._outputs = outputs
        self.api.before_request(lambda request: self.created.append(request.body), "create", times=math.inf)
        self.api.before_request(self._run, "get", times=math.inf)
        if refused:  # what comes after the pod of the default runtime
            fault = Fault(status=422, message=refused)
            self.api.before_request(lambda _: self.api.fault(fault, "create"), "delete")

    def _run(self, request: Request) -> None:
        """An output is a message, or a whole status of the container that has not looked."""
        (spec,) = [pod["spec"] for pod in self.created if request.path.endswith(f"/{pod['metadata']['name']}")][-1:]
        output = self._outputs.get((spec["nodeName"], spec.get("runtimeClassName", "")))
        if isinstance(output, dict):
            self.api.edit(request.path, status={"containerStatuses": [{"state": output}]})
        elif output is not None:
            ended = [{"state": {"terminated": {"message": output}}}]
            self.api.edit(request.path, status={"phase": "Succeeded", "containerStatuses": ended})

    def check_exposure(self, seen: Facts, image: str = "looker") -> list[Finding]:
        findings = list(
            exposure.check_exposure(self.api.kube, "default", names.NAMESPACE, seen, image=image, clock=self.clock)
        )
        assert self.api.objects("pods") == [], "it leaves nothing"
        return findings


def nvidia(name: str = "nvidia", handler: str = "nvidia") -> Json:
    return {"metadata": {"name": name}, "handler": handler}


def test_a_node_where_a_pod_without_a_share_gets_a_card_is_found(sound):
    sound.nodes, sound.cards = [node("n1"), node("n2"), node("n3")], [card("n1", 0), card("n2", 0)]
    sound.cards[1]["status"]["gpuAccess"] = "env"
    sound.runtimeclasses = [nvidia("cards"), nvidia("gvisor", "runsc")]
    sound.nodes[1]["status"]["runtimeHandlers"] = [{"name": "runc"}]
    two_devices = "looked\n/dev/nvidia0\n/dev/nvidia1\n"
    looked = Looked(
        {("n1", ""): two_devices, ("n2", ""): two_devices, ("n1", "cards"): "looked\n", ("n1", "nvidia"): two_devices}
    )
    sound.runtimeclasses.append(nvidia())
    with_cdi, by_env, none, named = looked.check_exposure(sound)
    assert "through RuntimeClass nvidia: n1" in named.text
    assert "list nvidia in policies.runtimeClasses" in named.remedy
    assert {finding.level for finding in (with_cdi, by_env)} == {Severity.WARNING}
    assert "gets GPUs through the default runtime: n1 (/dev/nvidia0, /dev/nvidia1)" in with_cdi.text
    assert "accept-nvidia-visible-devices-envvar-when-unprivileged = false" in with_cdi.remedy
    assert "n2 (/dev/nvidia0, /dev/nvidia1)" in by_env.text
    assert "make runc its default" in by_env.remedy
    assert (none.level, none.text) == (
        Severity.OK,
        "a pod without a GPU request gets none through RuntimeClass cards on 1 node",
    ), "n2 does not serve its handler, and gvisor is not NVIDIA's"
    for pod in looked.created:
        (container,) = pod["spec"]["containers"]
        assert "resources" not in container
        assert {entry["name"] for entry in container["env"]} == {"CUDA_VERSION", "NVIDIA_DISABLE_REQUIRE"}


def test_a_runtime_class_that_the_policy_refuses_needs_no_look(sound):
    sound.runtimeclasses = [nvidia()]
    refused = "ValidatingAdmissionPolicy 'runtimeclasses.cardwise.dev' denied request: spec.runtimeClassName"
    default, named = Looked({("n1", ""): "looked\n"}, refused=refused).check_exposure(sound)
    assert (default.level, named.level) == (Severity.OK, Severity.OK)
    assert named.text == "a policy keeps pods without a GPU request from using RuntimeClass nvidia"
    _, named = Looked({("n1", ""): "looked\n"}, refused="exceeded quota").check_exposure(sound)
    assert (named.level, "exceeded quota" in named.text) == (Severity.NOTE, True)


def test_what_could_not_be_looked_at_is_told(sound):
    (finding,) = Looked({}).check_exposure(sound)
    assert (finding.level, "on n1" in finding.text) == (Severity.NOTE, True)
    (finding,) = Looked({("n1", ""): "failed to create containerd task"}).check_exposure(sound)
    assert (finding.level, "on n1" in finding.text) == (Severity.NOTE, True)
    (finding,) = Looked({("n1", ""): {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}).check_exposure(
        sound
    )
    assert finding.text.endswith("on n1: Kubernetes reports about the test pod: ErrImagePull: not found")
    (finding,) = Looked({}).check_exposure(sound, image="")
    assert (finding.level, "--probe-image" in finding.remedy) == (Severity.NOTE, True)
    plugin = {"spec": {"template": {"spec": {"containers": [{"image": "registry.example/cardwise:1"}]}}}}
    sound.daemonsets = [workload("cardwise-deviceplugin", names.NAMESPACE) | plugin]
    looked = Looked({("n1", ""): "looked\n"})
    assert [finding.level for finding in looked.check_exposure(sound, image="")] == [Severity.OK]
    assert looked.created[0]["spec"]["containers"][0]["image"] == "registry.example/cardwise:1"
    sound.cards = []
    assert Looked({}).check_exposure(sound) == []


def test_the_table_has_remedies_below_and_counts_at_the_end():
    findings = [Finding("cards", Severity.OK, "fine"), Finding("mps", Severity.PROBLEM, "broken", "mend it")]
    assert table(findings) == (
        "OK       cards  fine\n"
        "PROBLEM  mps    broken\n"
        "         -> mend it\n"
        "1 problem, 0 warnings, 0 notes, 1 ok\n"
    )  # fmt: skip
    assert worst_severity(findings) is Severity.PROBLEM
    assert worst_severity([]) is Severity.OK


def test_in_a_namespace_about_which_the_webhook_is_not_asked_no_probe_is_sent(monkeypatch):
    api = Cluster({})
    api.add("daemonsets", part("deviceplugin", "DaemonSet"))
    api.add("namespaces", {"metadata": {"name": names.NAMESPACE}})
    completed = run(monkeypatch, api, "doctor", "-n", names.NAMESPACE, "-o", "json")
    (finding,) = (listed for listed in json.loads(completed.stdout)["findings"] if listed["check"] == "probe")
    assert finding["level"] == "note"
    assert finding["text"].endswith("namespace cardwise-system is exempt from the webhook")
    assert api.sent("create") == []


def test_a_namespace_where_cardwise_is_not_is_the_only_finding(sound):
    sound.leases = []
    sound.mutating_webhooks[0]["webhooks"][0]["clientConfig"]["service"] = {"namespace": "cards"}
    (finding,) = troubles(sound)
    assert (finding.check, finding.level) == ("installation", Severity.PROBLEM)
    assert finding.text == "Cardwise is not installed in namespace cardwise-system but in cards"
    assert "cardwise doctor --cardwise-namespace cards" in finding.remedy
    sound.cardwise_namespace = "cards"
    assert [finding.check for finding in troubles(sound)] == ["extender"]


def test_a_label_of_the_chart_on_somebodys_workload_is_a_hint_and_no_command(sound):
    theirs = part("deviceplugin", "DaemonSet")
    theirs["metadata"] |= {"namespace": "a-team", "labels": {"app.kubernetes.io/name": "cardwise"}}
    sound.other_daemonsets = [theirs]
    (finding,) = troubles(sound)
    assert "a-team" in finding.text
    assert finding.remedy.endswith("cardwise doctor --cardwise-namespace NAMESPACE")
    sound.mutating_webhooks[0]["webhooks"][0]["clientConfig"]["service"] = {"namespace": names.NAMESPACE}
    assert troubles(sound) == [], "the webhook's configuration says where Cardwise is"
    del sound.mutating_webhooks[0]["webhooks"][0]["clientConfig"]["service"]  # webhook.url
    ours = part("deviceplugin", "DaemonSet")
    ours["metadata"]["labels"] = theirs["metadata"]["labels"]
    sound.daemonsets = [ours]
    assert troubles(sound) == []


def test_a_namespace_of_cardwise_that_does_not_exist_is_named_and_no_probe_is_sent(monkeypatch):
    api = Cluster({"extendedresources": [card("n1", 0)]})
    completed = run(monkeypatch, api, "doctor", "--cardwise-namespace", "nowhere", "-o", "json")
    (finding,) = (listed for listed in json.loads(completed.stdout)["findings"] if listed["level"] == "problem")
    assert finding["text"] == "namespace nowhere, where Cardwise was expected, does not exist"
    assert api.sent("create") == []


def test_without_the_right_to_read_webhooks_it_proposes_no_installation(sound):
    plant_uninstalled(sound)
    sound.other_daemonsets, sound.unread_kinds = [of_gpushare()], {"mutating_webhooks": "", "validating_webhooks": ""}
    assert not any("install Cardwise" in finding.remedy for finding in troubles(sound))
    sound.unread_kinds = {"daemonsets": ""}
    sound.other_daemonsets, sound.validating_webhooks = [], [configuration()]
    remedies = {finding.remedy for finding in troubles(sound) if "there is no Mutating" in finding.text}
    assert remedies
    assert all("helm upgrade cardwise" in remedy for remedy in remedies)


def test_a_namespace_of_the_probe_that_does_not_exist_is_named_before_anything_is_read(monkeypatch):
    completed = run(monkeypatch, Cluster({}), "doctor", "-n", "nowhere")
    assert completed.exit_code == 1
    assert "there is no namespace 'nowhere'" in completed.stderr


def test_the_command_ends_with_1_where_there_is_a_problem(monkeypatch):
    api = Cluster({})
    api.lack("extendedresources", "resourceclasses", "gpuquotas", "podgroups")
    completed = run(monkeypatch, api, "doctor", "--no-probe", "-o", "json")
    assert completed.exit_code == 1
    report = json.loads(completed.stdout)
    assert report["worst"] == "problem"
    assert "the CRDs of cardwise.dev are not installed" in {finding["text"] for finding in report["findings"]}


def test_a_card_that_a_killed_defrag_has_left_cordoned_is_named_with_the_command(sound):
    cordon = {"reason": "cardwise defrag is moving its pods", "user": "jane", "time": "2026-11-21T11:00:00Z"}
    sound.cards[0]["spec"] |= {"unschedulable": True, "cordon": cordon}
    (finding,) = troubles(sound)
    assert finding.text == (
        "GPU 0 of node n1 (GPU-n1-0) was cordoned by jane at 2026-11-21T11:00:00Z by a defrag and has not been "
        "uncordoned"
    )
    assert finding.remedy == "if none runs any more: cardwise uncordon n1/0"
    cordon["time"] = "2026-11-21T11:45:00Z"
    assert troubles(sound) == []


@pytest.mark.parametrize("change", [{"spec": {"unschedulable": True}}, {"metadata": {"name": "other"}}])
def test_cards_of_a_node_that_takes_no_pods_are_not_called_usable(sound, change):
    sound.nodes[0] |= change
    texts = [finding.text for finding in checks.check_facts(sound) if finding.check == "cards"]
    assert not any("usable" in text for text in texts), texts
