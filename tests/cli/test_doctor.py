"""doctor: each fault that it knows, planted, is found and told with a remedy; and a sound cluster has none."""

import json
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cardwise.cli.doctor import command, facts, probing, scheduler
from cardwise.cli.doctor.facts import Facts
from cardwise.cli.doctor.finding import Finding, Level, table, worst
from cardwise.core import names, schedulerconfig
from cardwise.core.assignment import Assignment, CardShare, encode
from cardwise.core.quantity import MiB
from cardwise.core.verdict import Refusal
from tests.cli.worlds import Cluster, card, run
from tests.fakes.apiserver import Fault, Request
from tests.fakes.clock import FakeClock

Json = dict[str, Any]

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)  # of the API server; no check asks the clock of the machine

CONFIG = schedulerconfig.extender_stanzas(filter_url="https://a:1", bind_url="https://a:2", ca_file="ca")


def node(name: str, runtime: str = "containerd://2.1.4", **allocatable: str) -> Json:
    offers = {names.SHARE: "128", names.GPU_MEM: "32552"} | {
        key.replace("__", "/"): v for key, v in allocatable.items()
    }
    status = {"nodeInfo": {"containerRuntimeVersion": runtime}, "allocatable": offers, "capacity": dict(offers)}
    return {"metadata": {"name": name, "labels": {}}, "status": status}


def lease(name: str, *, ahead: float = 0.0, age: float = 1.0, namespace: str = facts.NODE_LEASES) -> Json:
    """Renewed `age` seconds ago by a clock that is `ahead`."""
    written = NOW - timedelta(seconds=age)
    metadata = {"name": name, "namespace": namespace, "managedFields": [{"time": f"{written:%Y-%m-%dT%H:%M:%SZ}"}]}
    renewed = written + timedelta(seconds=ahead)
    spec = {"holderIdentity": name, "leaseDurationSeconds": 15, "renewTime": f"{renewed:%Y-%m-%dT%H:%M:%S.%fZ}"}
    return {"metadata": metadata, "spec": spec}


def workload(name: str) -> Json:
    return {"metadata": {"namespace": "gpu", "name": name}}


def configuration(bundle: str = "Q0E=") -> Json:
    hook = {"clientConfig": {"caBundle": bundle} if bundle else {}}
    return {"metadata": {"name": names.WEBHOOK_CONFIGURATION}, "webhooks": [hook]}


@pytest.fixture
def sound() -> Facts:
    cards = [card("n1", 0), card("n1", 1)]
    for one in cards:
        one["status"] |= {"cardAccess": "cdi", "mps": {"state": "Ready"}}
    return Facts(
        version={"gitVersion": "v1.34.4"},
        nodes=[node("n1")],
        cards=cards,
        mutating=[configuration()],
        validating=[configuration()],
        policies=[{"metadata": {"name": "annotations.cardwise.dev"}}],
        node_leases=[lease("n1")],
        leases=[lease(names.LEASE, namespace=names.NAMESPACE)],
        now=NOW,
    )


def troubles(seen: Facts) -> list[Finding]:
    return [one for one in command.judge(seen) if one.level is not Level.OK]


def test_a_sound_cluster_has_no_finding_but_good_ones(sound):
    assert troubles(sound) == []
    assert {one.check for one in command.judge(sound)} >= {"kubernetes", "cards", "card-access", "mps", "extender"}


def plant_old_kubernetes(seen: Facts) -> None:
    seen.version = {"gitVersion": "v1.29.9-gke.1"}


def plant_no_kinds(seen: Facts) -> None:
    seen.absent, seen.cards, seen.nodes = {"cards", "classes"}, [], []


def plant_no_webhook(seen: Facts) -> None:
    seen.mutating = []


def plant_webhook_that_never_ran(seen: Facts) -> None:
    seen.validating = [configuration("")]


def plant_no_policies(seen: Facts) -> None:
    seen.policies = [{"metadata": {"name": "somebody-elses"}}]


def plant_no_leader(seen: Facts) -> None:
    seen.leases = []


def plant_dead_leader(seen: Facts) -> None:
    seen.leases = [lease(names.LEASE, age=60)]


def plant_lease_without_times(seen: Facts) -> None:
    seen.leases = [{"metadata": {"name": names.LEASE}, "spec": {"holderIdentity": "e"}}]


def plant_no_cards(seen: Facts) -> None:
    seen.cards, seen.nodes = [], []


def plant_sick_card(seen: Facts) -> None:
    seen.cards[0]["status"] |= {"health": "Unhealthy", "reason": "XID 79"}


def plant_unregistered_plugin(seen: Facts) -> None:
    seen.nodes[0]["status"]["allocatable"][names.SHARE] = "0"


def plant_deleted_node(seen: Facts) -> None:
    seen.nodes, seen.node_leases = [], []


def plant_old_runtime(seen: Facts) -> None:
    seen.nodes = [node("n1", "containerd://1.7.27")]
    seen.cards[0]["status"]["cardAccess"] = seen.cards[1]["status"]["cardAccess"] = "env"


def plant_docker(seen: Facts) -> None:
    plant_old_runtime(seen)
    seen.nodes = [node("n1", "docker://27.1")]


def plant_no_mps(seen: Facts) -> None:
    for one in seen.cards:
        del one["status"]["mps"]


def plant_dead_mps(seen: Facts) -> None:
    seen.cards[1]["status"]["mps"] = {"state": "Down", "reason": "the daemon died"}


def plant_nvidia_plugin(seen: Facts) -> None:
    seen.nodes = [node("n1", **{"nvidia.com__gpu": "2"})]


def plant_hami(seen: Facts) -> None:
    seen.daemonsets = [workload("hami-device-plugin")]


def plant_gpushare(seen: Facts) -> None:
    seen.deployments = [workload("gpushare-schd-extender")]
    seen.nodes = [*seen.nodes, node("n2")]
    seen.nodes[0]["metadata"]["labels"] = {"gpushare": "true"}


def plant_skew(seen: Facts) -> None:
    seen.node_leases = [lease("n1", ahead=-90.0)]


def plant_no_rights(seen: Facts) -> None:
    seen.unread = {"node_leases": 'User "jane" cannot list resource "leases"'}


@pytest.mark.parametrize(
    ("plant", "level", "text", "remedy"),
    [
        (plant_old_kubernetes, Level.PROBLEM, "Kubernetes v1.29.9-gke.1, not 1.30", "upgrade the control plane"),
        (plant_no_kinds, Level.PROBLEM, "the kinds of cardwise.dev are not installed", "helm install cardwise"),
        (plant_no_webhook, Level.PROBLEM, "there is no MutatingWebhookConfiguration cardwise", "helm install"),
        (plant_webhook_that_never_ran, Level.PROBLEM, "has no CA: the webhook has never run", "start the webhook"),
        (plant_no_policies, Level.WARNING, "no ValidatingAdmissionPolicy of Cardwise", "policies.enabled"),
        (plant_no_leader, Level.WARNING, "no extender holds the Lease cardwise-extender", "start the extender"),
        (plant_dead_leader, Level.PROBLEM, "has not renewed its Lease for", "see whether it runs"),
        (
            plant_lease_without_times,
            Level.WARNING,
            "extender e holds the Lease cardwise-extender, which",
            "see whether it runs",
        ),
        (plant_no_cards, Level.WARNING, "no card is known", "device plugin"),
        (plant_sick_card, Level.WARNING, "n1: GPU-n1-0 is unhealthy: XID 79", "comes back by itself"),
        (plant_unregistered_plugin, Level.PROBLEM, "n1: offers no cardwise.dev/share", "device plugin"),
        (plant_deleted_node, Level.NOTE, "node n1 is gone", "cardwise.dev/node=n1"),
        (plant_old_runtime, Level.WARNING, "n1: cards are given by environment only", "enable_cdi = true"),
        (plant_docker, Level.WARNING, "n1: cards are given by environment only", "use containerd 2 or CRI-O"),
        (plant_no_mps, Level.NOTE, "no node has an MPS manager", "cardwise-mps"),
        (plant_dead_mps, Level.WARNING, "n1: MPS of GPU-n1-1 is Down: the daemon died", "tried again by itself"),
        (plant_nvidia_plugin, Level.WARNING, "n1: NVIDIA's device plugin offers 2 cards", "--cards"),
        (plant_hami, Level.NOTE, "HAMi is installed: DaemonSet gpu/hami-device-plugin", "nodeSelector"),
        (
            plant_gpushare,
            Level.WARNING,
            "Deployment gpu/gpushare-schd-extender, label gpushare of node n1, ",
            "node by node",
        ),
        (plant_skew, Level.WARNING, "clocks differ from the API server's: n1 (-90 s)", "NTP"),
        (plant_no_rights, Level.NOTE, "node leases were not looked at: User", "administrator"),
    ],
)
def test_a_planted_fault_is_found_alone_and_with_a_remedy(sound, plant, level, text, remedy):
    plant(sound)
    (found,) = troubles(sound)
    assert (found.level, text in found.text, remedy in found.remedy) == (level, True, True), found


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_the_leader_is_judged_by_the_clock_of_the_api_server(sound, ahead):
    theirs = NOW + timedelta(seconds=ahead)  # the extender's clock
    sound.leases[0]["spec"]["renewTime"] = f"{theirs:%Y-%m-%dT%H:%M:%S.%fZ}"
    assert [one.level for one in command.judge(sound) if one.check == "extender"] == [Level.OK]
    sound.now += timedelta(seconds=60)
    assert [one.level for one in command.judge(sound) if one.check == "extender"] == [Level.PROBLEM]
    sound.now = None  # an API server that does not tell: no guess by the admin's clock
    assert [one.level for one in command.judge(sound) if one.check == "extender"] == [Level.OK]


def test_the_wiring_of_kube_scheduler_is_judged():
    def said(stanzas: list[Json], **more: Any) -> list[tuple[Level, str]]:
        return [(one.level, one.text) for one in scheduler.wiring({"extenders": stanzas} | more, "sched")]

    assert said(CONFIG) == [(Level.OK, "sched asks the extender for all our resources")]
    assert said([]) == [(Level.PROBLEM, "sched has no extender for our resources")]
    ((level, text),) = said(CONFIG[:1])
    assert (level, text) == (Level.PROBLEM, "sched does not ask an extender for cardwise.dev/share, cardwise.dev/bind")
    unignored = deepcopy(CONFIG)
    unignored[1]["managedResources"][1]["ignoredByScheduler"] = False
    assert "looks for cardwise.dev/bind on nodes" in said(unignored)[0][1]
    careless = deepcopy(CONFIG)
    careless[0]["ignorable"] = True
    assert "goes on without the extender" in said(careless)[0][1]
    assert (Level.NOTE, "sched looks at 50 % of the nodes only: pods are packed less tightly") in said(
        CONFIG, percentageOfNodesToScore=50
    )


class Probed:
    """A cluster for the probe: whether a webhook rewrites it, and how the scheduler leaves it."""

    def __init__(self, after: Json, *, rewrites: bool = True) -> None:
        self.clock = FakeClock()
        self.api = Cluster({}, self.clock)
        self._after = after
        if rewrites:
            self.api.before(self._rewrite, "create")
        self.api.before(self._schedule, "get")

    def _rewrite(self, request: Request) -> None:
        request.body["spec"]["containers"][0]["resources"]["limits"][names.SHARE] = "1"

    def _schedule(self, request: Request) -> None:
        self.api.edit(request.path, **self._after)

    def probe(self) -> list[Finding]:
        found = list(probing.probe(self.api.kube, "default", self.clock))
        assert self.api.of("pods") == [], "it leaves nothing"
        return found


def unschedulable(message: str) -> Json:
    return {"status": {"conditions": [{"type": "PodScheduled", "status": "False", "message": message}]}}


ASSIGNED = encode(Assignment({"0": (CardShare(0, "GPU-1", MiB(1), 0, MiB(16276)),)}), assume_time_ns=1)


@pytest.mark.parametrize(
    ("after", "level", "text"),
    [
        ({"metadata": {"annotations": ASSIGNED}, "spec": {"nodeName": "n1"}}, Level.OK, "was placed on a card of n1"),
        ({"spec": {"nodeName": "n1"}}, Level.PROBLEM, "kube-scheduler does not ask the extender"),
        (unschedulable(f"0/3 nodes: 3 {Refusal.NO_MEMORY.text}."), Level.OK, "which has no room now"),
        (unschedulable('Post "https://x": connection refused'), Level.PROBLEM, "does not reach the extender"),
        (unschedulable(f"0/3 nodes: 3 Insufficient {names.GPU_MEM}"), Level.NOTE, "no card is free"),
        (unschedulable("0/3 nodes: 3 had untolerated taint"), Level.WARNING, "was not placed: 0/3 nodes"),
    ],
)
def test_the_probe_tells_how_far_it_came_and_leaves_nothing(after, level, text):
    webhook, found = Probed(after).probe()
    assert (webhook.check, webhook.level) == ("webhook", Level.OK)
    assert (found.check, found.level) == ("scheduler", level)
    assert text in found.text


def test_a_scheduler_that_looks_at_no_pod_is_told_after_a_while_and_nothing_is_left():
    probed = Probed({})
    before = probed.clock.now()
    _, found = probed.probe()
    assert (found.level, "has not looked at the probe pod for 15 s" in found.text) == (Level.PROBLEM, True)
    assert 15 <= probed.clock.now() - before < 16


def test_a_probe_that_the_webhook_never_saw_ends_there():
    (found,) = Probed({}, rewrites=False).probe()
    assert (found.level, "was not asked" in found.text) == (Level.PROBLEM, True)


def test_a_probe_that_may_not_be_made_is_told_from_a_webhook_that_does_not_answer():
    probed = Probed({})
    probed.api.fault(Fault(status=403, message="no pods for jane"), "create")
    probed.api.fault(Fault(status=500, message="failed calling webhook"), "create")
    (refused,) = probed.probe()
    assert (refused.level, "no pods for jane" in refused.text) == (Level.NOTE, True)
    (broken,) = probed.probe()
    assert (broken.check, broken.level) == ("webhook", Level.PROBLEM)


def test_the_table_has_remedies_below_and_counts_at_the_end():
    found = [Finding("cards", Level.OK, "fine"), Finding("mps", Level.PROBLEM, "broken", "mend it")]
    assert table(found) == (
        "OK       cards  fine\n"
        "PROBLEM  mps    broken\n"
        "         -> mend it\n"
        "1 problem, 0 warning, 0 note, 1 ok\n"
    )  # fmt: skip
    assert worst(found) is Level.PROBLEM
    assert worst([]) is Level.OK


def test_the_command_ends_with_1_where_there_is_a_problem(monkeypatch):
    api = Cluster({})
    api.lack("extendedresources", "resourceclasses", "gpuquotas", "podgroups")
    said = run(monkeypatch, api, "doctor", "--no-probe", "-o", "json")
    assert said.exit_code == 1
    report = json.loads(said.stdout)
    assert report["worst"] == "problem"
    assert "the kinds of cardwise.dev are not installed" in {one["text"] for one in report["findings"]}
