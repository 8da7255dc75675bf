"""`cardwise defrag`: what it says and whom it leaves alone."""

import json
from functools import partial

import pytest
import yaml

from cardwise.cli.cluster import evicting
from cardwise.cli.commands import defrag
from cardwise.core.api import names
from cardwise.core.api.cardlimits import CardLimits
from cardwise.core.api.policies import DEFAULT_POLICY
from cardwise.core.defrag.defrag import plan
from tests.build import budget
from tests.cli.clusters import Cluster, allocated, card, placed
from tests.cli.defragcluster import (
    PUBLISHED,
    SPREADING,
    cluster,
    objects,
    run,
    running,
    three,
    with_controller,
)

SAFE = {names.SAFE_TO_EVICT: "true"}


def test_what_would_move_and_where_to(monkeypatch):
    shown = run(monkeypatch, cluster(*three(priority=5)), "--free-gpus", "1")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[:3] == [
        "Now there are 0 free whole GPUs, of 1 that are wanted.",
        "1 pod would move:",
        "#  POD         FROM  TO    MIB   PRIORITY  AGE  CONTROLLER           FITS",
    ]
    row = lines[3].split()
    assert row == ["1", "team/small", "n1", "0", "n1", "1", "3000", "5", "26h", "ReplicaSet/small-rs", "1"]
    assert lines[4] == "Each pod is deleted and recreated: its data in memory and on its local disk is lost."
    assert shown.stderr == "nothing was changed; --evict moves them\n"


@pytest.mark.parametrize("start_time", ["10000-01-01T23:58:59Z", "0000-01-01T00:00:00Z", "noon"])
def test_a_pod_whose_start_time_python_does_not_have_stops_nothing(monkeypatch, start_time):
    """Each tenant who may patch pods/status can write one."""
    pods = three()
    pods[0]["status"]["startTime"] = start_time
    assert "1 pod would move:" in run(monkeypatch, cluster(*pods), "--free-gpus", "1").stdout


def test_for_programs(monkeypatch):
    document = json.loads(run(monkeypatch, cluster(*three()), "--fit", "gpu-mem=11000", "-o", "json").stdout)
    assert document == yaml.safe_load(
        run(monkeypatch, cluster(*three()), "--fit", "gpu-mem=11000", "-o", "yaml").stdout
    ) | {"moves": document["moves"]}
    assert (document["requested"], document["fitsBefore"], document["fitsAfter"], document["goalReached"]) == (
        1,
        0,
        1,
        True,
    )
    assert document["minimal"] is True
    (move,) = document["moves"]
    assert move["from"] == {"node": "n1", "gpus": [{"index": 0, "uuid": "GPU-n1-0"}]}
    assert move["to"] == {"node": "n1", "gpus": [{"index": 1, "uuid": "GPU-n1-1"}]}
    assert document["unmovable"] == {"have no controller that would recreate them": 3}


def test_what_the_extender_still_keeps_of_a_pod_that_vanished_is_no_room(monkeypatch):
    cards = [card("n1", 0), allocated(card("n1", 1), 11_000, 2), card("n2", 0), card("n2", 1)]
    shown = run(monkeypatch, cluster(*three(), extendedresources=cards), "--free-gpus", "1")
    assert shown.exit_code == 1
    assert "would move" not in shown.stdout


def test_where_it_fits_already_nothing_moves(monkeypatch):
    shown = run(monkeypatch, cluster(*three()), "--fit", "gpu-mem=2000x2")
    assert (
        shown.stdout
        == "Now there is capacity for at least 2 pods of gpu-mem=2000, of 2 that are wanted. No pod has to be moved.\n"
    )
    assert shown.exit_code == 0


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ({"kind": "DaemonSet"}, "belong to a DaemonSet"),
        ({"labels": {names.GANG: "g"}}, "are members of gangs"),
        ({"annotations": {names.NO_DEFRAG: "true"}}, "say cardwise.dev/no-defrag"),
        ({"annotations": {names.SAFE_TO_EVICT: "false"}}, f"say {names.SAFE_TO_EVICT}: false"),
        ({"kind": "Workflow"}, f"belong to other controllers and lack the annotation {names.SAFE_TO_EVICT}: true"),
        (
            {"kind": "Job", "group": "batch.volcano.sh/v1alpha1"},
            f"belong to other controllers and lack the annotation {names.SAFE_TO_EVICT}: true",
        ),
        ({"kind": "Workflow", "annotations": SAFE | {names.NO_DEFRAG: "true"}}, "say cardwise.dev/no-defrag"),
        ({"kind": "DaemonSet", "annotations": SAFE}, "belong to a DaemonSet"),
    ],
)
def test_who_is_left_where_it_is_and_why(monkeypatch, of, reason):
    shown = run(monkeypatch, cluster(*three(**of)), "--free-gpus", "1")
    assert shown.exit_code == 1
    assert shown.stdout == (
        "Now there are 0 free whole GPUs, of 1 that are wanted.\n"
        "It is impossible to get there by moving pods.\n"
        "0 pods may be moved.\n"
        "Pods that cannot be moved because they have no controller that would recreate them: 3.\n"
        f"Pods that cannot be moved because they {reason}: 1.\n"
    )


@pytest.mark.parametrize(
    "of",
    [
        {"kind": "ReplicaSet"},
        {"kind": "ReplicationController"},
        {"kind": "StatefulSet"},
        {"kind": "Workflow", "annotations": SAFE},
        {"kind": "Job", "group": "batch.volcano.sh/v1alpha1", "annotations": SAFE},
    ],
)
def test_who_moves_is_made_anew_by_kubernetes_itself_or_says_that_it_may_go(monkeypatch, of):
    shown = run(monkeypatch, cluster(*three(**of)), "--free-gpus", "1")
    assert shown.exit_code == 0, shown.output
    assert f"{of['kind']}/small-rs" in shown.stdout


def test_disruption_budgets_places_and_namespaces_hold_pods(monkeypatch):
    none = budget("b", allowed=0, selector={"matchLabels": {"app": "x"}}, namespace="team")
    held = cluster(*three(labels={"app": "x"}), poddisruptionbudgets=[none])
    assert "are protected by a PodDisruptionBudget: 1" in run(monkeypatch, held, "--free-gpus", "1").stdout
    held.change("poddisruptionbudgets", "b", "team", status={"disruptionsAllowed": 1})
    assert run(monkeypatch, held, "--free-gpus", "1").exit_code == 0
    pods = three()
    pods[0]["spec"]["volumes"] = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
    assert "are tied to their node by volumes: 1" in run(monkeypatch, cluster(*pods), "--free-gpus", "1").stdout
    pods = three()
    pods[0]["spec"]["nodeSelector"] = {"zone": "n2"}
    assert run(monkeypatch, cluster(*pods), "--free-gpus", "1").exit_code == 1
    assert run(monkeypatch, cluster(*three()), "--free-gpus", "1", "-n", "other").exit_code == 1
    assert run(monkeypatch, cluster(*three()), "--free-gpus", "1", "-n", "team").exit_code == 0


def test_pods_of_the_former_name_of_a_node_stay(monkeypatch):
    pods = three()
    assert run(monkeypatch, cluster(*pods), "--free-gpus", "1").exit_code == 0
    pods[0]["spec"]["nodeName"] = "former"
    shown = run(monkeypatch, cluster(*pods), "--free-gpus", "1")
    assert "hold GPUs that another node reports now: 1" in shown.stdout


def ruled(action: str, condition: str, *, codes: bool = True) -> dict:
    """A Job that does this about a pod that ends with this condition; `codes`: after a rule about exit codes."""
    on_codes = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}
    rule = {"action": action, "onPodConditions": [{"type": condition, "status": "True"}]}
    return {"spec": {"podFailurePolicy": {"rules": [*[on_codes] * codes, rule]}}}


@pytest.mark.parametrize(
    ("job", "moves"),
    [
        ({"spec": {}, "status": {"failed": 5}}, True),
        ({"spec": {}, "status": {"failed": 6}}, False),
        ({"spec": {"backoffLimit": 0}}, False),
        ({"spec": {"backoffLimit": 2147483647, "backoffLimitPerIndex": 1}}, False),
        ({"spec": {"backoffLimit": 2147483647, "backoffLimitPerIndex": 0}}, False),
        (ruled("FailJob", "DisruptionTarget"), False),
        (ruled("FailIndex", "DisruptionTarget"), False),
        (ruled("Ignore", "DisruptionTarget"), True),
        (ruled("FailJob", "ConfigIssue"), True),
    ],
)
def test_no_job_is_made_to_fail(monkeypatch, job, moves):
    named = job | {"metadata": {"namespace": "team", "name": "small-rs", "uid": "rs-small"}}
    shown = run(monkeypatch, cluster(*three(kind="Job"), jobs=[named]), "--free-gpus", "1")
    assert (
        "team/small" in shown.stdout,
        "belong to Jobs that would fail because of the eviction: 1" in shown.stdout,
    ) == (moves, not moves)


@pytest.mark.parametrize(
    ("job", "moves"),
    [
        ({"spec": {"backoffLimit": 1}}, False),
        ({"spec": {"backoffLimit": 2}}, True),
        ({"spec": {"backoffLimit": 2}, "status": {"failed": 1}}, False),
        ({"spec": {"backoffLimit": 2}, "status": {"uncountedTerminatedPods": {"failed": ["uid"]}}}, False),
        ({"spec": {"backoffLimit": 0} | ruled("Ignore", "DisruptionTarget", codes=False)["spec"]}, True),
        # By its exit code the evicted pod may count all the same, or fail the Job.
        ({"spec": {"backoffLimit": 1} | ruled("Ignore", "DisruptionTarget")["spec"]}, False),
    ],
)
def test_no_job_loses_more_pods_than_it_has_failures_left(monkeypatch, job, moves):
    pods = [with_controller(running(name, "n1", 0, 1500), kind="Job") for name in ("small", "small-2")]
    pods[1]["metadata"]["ownerReferences"] = pods[0]["metadata"]["ownerReferences"]
    named = job | {"metadata": {"namespace": "team", "name": "small-rs", "uid": "rs-small"}}
    shown = run(monkeypatch, cluster(*pods, *three()[1:], jobs=[named]), "--free-gpus", "1")
    assert ("2 pods would move" in shown.stdout, shown.exit_code) == (moves, 0 if moves else 1)


def test_where_the_extender_tells_nothing_a_note_says_what_its_policy_is_taken_for(monkeypatch):
    note = (
        "note: assuming that the extender's policy is priced: there is no ConfigMap cardwise-workload in {0}; the "
        "leading extender creates it; if Cardwise is installed in another namespace, give --cardwise-namespace or "
        "$CARDWISE_NAMESPACE\n"
    )
    monkeypatch.delenv("CARDWISE_NAMESPACE", raising=False)
    none = run(monkeypatch, cluster(*three(), configmaps=[]), "--free-gpus", "1")
    assert none.exit_code == 0, none.output
    assert none.stderr == note.format(names.NAMESPACE) + "nothing was changed; --evict moves them\n"
    named = run(monkeypatch, cluster(*three()), "--free-gpus", "1", "--cardwise-namespace", "gpus")
    assert note.format("gpus") in named.stderr
    monkeypatch.setenv("CARDWISE_NAMESPACE", "gpus")
    assert note.format("gpus") in run(monkeypatch, cluster(*three()), "--free-gpus", "1").stderr


def test_the_policy_of_an_extender_in_another_namespace_is_read_there(monkeypatch):
    there = {
        "metadata": PUBLISHED["metadata"] | {"namespace": "gpus"},
        "data": PUBLISHED["data"] | {names.WORKLOAD_POLICY: "spread"},
    }
    api = cluster(*three(), configmaps=[PUBLISHED, there])
    monkeypatch.setenv("CARDWISE_NAMESPACE", "")
    assert run(monkeypatch, api, "--free-gpus", "1").exit_code == 0
    monkeypatch.setenv("CARDWISE_NAMESPACE", "gpus")
    spread = run(monkeypatch, api, "--free-gpus", "1", "--no-cordon")
    assert (spread.exit_code, spread.stderr) == (1, "")  # under it the pod goes back to the card that it has left


def spreading(*pods: dict) -> Cluster:
    return cluster(*pods, configmaps=[SPREADING])


def test_where_cards_must_be_cordoned_meanwhile_it_says_so(monkeypatch):
    shown = run(monkeypatch, spreading(*three()), "--free-gpus", "1")
    assert shown.exit_code == 0, shown.output
    assert "1 pod would move:\n" in shown.stdout
    assert (
        "The GPUs of a moved pod are cordoned until the last pod has moved: otherwise the pod could return to them, "
        "or more pods would have to be moved. --no-cordon skips this.\n"
    ) in shown.stdout
    document = json.loads(run(monkeypatch, spreading(*three()), "--free-gpus", "1", "-o", "json").stdout)
    assert (document["cordons"], document["exhaustive"]) == (True, True)
    refused = run(monkeypatch, spreading(*three()), "--free-gpus", "1", "--no-cordon")
    assert refused.exit_code == 1
    assert (
        "It is impossible to get there by moving pods without cordoning the GPUs that they leave.\n"
        "There may be a plan without --no-cordon, or if you cordon the GPUs that should become free: cardwise cordon "
        "NODE/INDEX.\n"
    ) in refused.stdout


def test_what_was_not_searched_through_is_not_called_impossible(monkeypatch):
    """Forty pods with room for three on a card, and more cards wanted than can be free."""
    pods = [with_controller(running(f"p{i}", f"n{i // 8}", i % 8, 3800)) for i in range(40)]
    cards = [card(f"n{i // 8}", i % 8) for i in range(40)]
    nodes = [objects()["nodes"][0] | {"metadata": {"name": f"n{i}"}} for i in range(5)]
    monkeypatch.setattr(defrag, "plan", partial(plan, effort=500))
    shown = run(monkeypatch, cluster(*pods, nodes=nodes, extendedresources=cards), "--free-gpus", "27")
    assert shown.exit_code == 1
    assert (
        "No plan was found to get there by moving pods; the best plan found: there are 26 free whole GPUs, by 26 "
        "moves.\n"
        "One may exist: not all plans could be tried.\n"
    ) in shown.stdout


def test_classes_and_counts(monkeypatch):
    of_class = run(monkeypatch, cluster(*three()), "--free-gpus", "1", "--class", "nvidia.tesla.k80")
    assert "there are 0 free whole GPUs of class nvidia.tesla.k80, of 1 that are wanted." in of_class.stdout
    assert of_class.exit_code == 0
    shown = run(monkeypatch, cluster(*three()), "--free-gpus", "2", "--max-moves", "1")
    assert (
        "It is impossible to get there by moving pods with at most 1 move; the best plan found: there is 1 free whole "
        "GPU, "
        "by 1 move.\n"
    ) in shown.stdout
    assert shown.exit_code == 1


def limited(**limits: int) -> dict:
    """The ConfigMap of an extender with these limits."""
    return PUBLISHED | {"data": PUBLISHED["data"] | CardLimits(**limits).configmap_data()}


@pytest.mark.parametrize(
    ("limits", "moves"),
    [
        ({}, True),
        ({"kept_back": 441}, True),
        ({"kept_back": 442}, False),  # beside the 8000 MiB of `big` the card has not 3000 left
        ({"max_clients": 2}, True),
        ({"max_clients": 1}, False),
    ],
)
def test_nothing_moves_to_a_card_that_the_extender_says_is_too_full(monkeypatch, limits, moves):
    shown = run(monkeypatch, cluster(*three(), configmaps=[limited(**limits)]), "--free-gpus", "1", "--evict")
    assert ("1 pod would move" in shown.stdout) == moves


@pytest.mark.parametrize(("core", "code"), [(100, 1), (200, 0)])
def test_cores_count_as_often_as_the_extender_gives_them(monkeypatch, core, code):
    pods = [placed("team", f"p{i}", f"n{i // 2 + 1}", i % 2, 100, core=60) for i in range(4)]
    api = cluster(*pods, configmaps=[limited(core=core)])
    assert run(monkeypatch, api, "--fit", "gpu-mem=100,core=60").exit_code == code


OLDER = PUBLISHED | {"data": {names.WORKLOAD_POLICY: DEFAULT_POLICY}}


@pytest.mark.parametrize("configmap", [PUBLISHED, OLDER])
def test_where_the_extender_does_not_say_what_a_card_gives_evict_warns(monkeypatch, configmap):
    monkeypatch.setattr(evicting.MoveRun, "move_pod", lambda *_: None)
    says = "warning: the extender's limits per GPU are unknown"
    args = ("--free-gpus", "1", "--no-cordon")
    api = cluster(*three(), configmaps=[configmap])
    assert (says in run(monkeypatch, api, *args, "--evict").stderr) == (configmap is OLDER)
    assert says not in run(monkeypatch, api, *args).stderr


def n1_is_empty(taint: str = "", *, tolerated: bool = False) -> Cluster:
    """n1 has two free cards, and n2 one if `small` moves. `taint`: KEY:EFFECT of n1; `tolerated` by all pods."""
    pods = [with_controller(running("small", "n2", 0, 3000)), running("big", "n2", 1, 8000)]
    api = cluster(*pods)
    key, _, effect = taint.partition(":")
    if taint:
        api.change("nodes", "n1", spec={"taints": [{"key": key, "effect": effect}]})
    if tolerated:
        for pod in pods:
            tolerations = [{"key": key, "operator": "Exists"}, {"operator": "Exists", "effect": "NoExecute"}]
            api.change("pods", pod["metadata"]["name"], "team", spec={"tolerations": tolerations})
    return api


FITS_ALREADY, MOVES = "No pod has to be moved.", "team/small  n2 0  n2 1"


@pytest.mark.parametrize(
    ("taint", "tolerated", "says"),
    [
        ("", False, FITS_ALREADY),
        ("node.kubernetes.io/unreachable:NoSchedule", False, MOVES),
        ("node.kubernetes.io/unreachable:NoSchedule", True, MOVES),  # as pods of DaemonSets do
        ("dedicated:NoSchedule", False, MOVES),
        ("dedicated:PreferNoSchedule", False, FITS_ALREADY),
        # What the webhook adds, and what it adds by another setting: all pods with cards have it then.
        ("nvidia.com/gpu:NoSchedule", False, FITS_ALREADY),
        ("dedicated:NoSchedule", True, FITS_ALREADY),
    ],
)
@pytest.mark.parametrize("wanted", [("--free-gpus", "1"), ("--fit", "gpu-mem=11000")])
def test_a_node_that_keeps_pods_with_cards_away_is_no_room(monkeypatch, wanted, taint, tolerated, says):
    assert says in run(monkeypatch, n1_is_empty(taint, tolerated=tolerated), *wanted).stdout


def test_a_node_that_is_gone_is_no_room(monkeypatch):
    api = n1_is_empty()
    api.remove("/api/v1/nodes/n1")
    assert MOVES in run(monkeypatch, api, "--free-gpus", "1").stdout


AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["n2"]}]}]
        }
    }
}


@pytest.mark.parametrize(
    ("spec", "taint", "says"),
    [
        ({}, "", FITS_ALREADY),
        ({"nodeSelector": {"zone": "n2"}}, "", MOVES),
        ({"affinity": AFFINITY}, "", MOVES),
        ({"affinity": {"podAffinity": {}}}, "", FITS_ALREADY),
        ({"tolerations": [{"key": "dedicated", "operator": "Exists"}]}, "dedicated:NoSchedule", FITS_ALREADY),
        ({}, "nvidia.com/gpu:NoSchedule", FITS_ALREADY),
        ({"nodeSelector": {"zone": "n3"}}, "", "\nNo capacity: 2 of 2 nodes with GPUs, because of a taint"),
    ],
)
def test_the_pod_of_a_manifest_fits_where_it_may_be(monkeypatch, tmp_path, spec, taint, says):
    container = {"name": "main", "resources": {"limits": {names.GPU_MEM: "11000"}}}
    file = tmp_path / "pod.yaml"
    file.write_text(yaml.safe_dump({"kind": "Pod", "spec": {"containers": [container], **spec}}))
    assert says in run(monkeypatch, n1_is_empty(taint), "--fit", str(file)).stdout


def test_where_there_is_no_way_it_says_which_nodes_do_not_count(monkeypatch):
    api = n1_is_empty("dedicated:NoSchedule")
    shown = run(monkeypatch, api, "--free-gpus", "3")
    assert (
        "\nNo capacity: 1 of 2 nodes with GPUs, because of a taint or of the pod's constraints on its node.\n"
        in shown.stdout
    )


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": ["zone"]},
        {"nodeSelector": {"zone": 1}},
        {"tolerations": {"key": "a"}},
        {"tolerations": ["a"]},
        {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"matchExpressions": 1}]}}},
    ],
)
def test_a_manifest_that_kubernetes_would_not_take_is_refused(monkeypatch, tmp_path, spec):
    container = {"name": "main", "resources": {"limits": {names.GPU_MEM: "11000"}}}
    file = tmp_path / "pod.yaml"
    file.write_text(yaml.safe_dump({"kind": "Pod", "spec": {"containers": [container], **spec}}))
    refused = run(monkeypatch, n1_is_empty(), "--fit", str(file))
    assert (refused.exit_code, "write it as in a Kubernetes manifest" in refused.stderr) == (1, True)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "write either --free-gpus N or --fit SHAPE"),
        (("--free-gpus", "1", "--fit", "gpu=1"), "write either"),
        (("--fit", "nothing.yaml"), "--fit nothing.yaml: is neither a file nor a list of KEY=AMOUNT"),
        (("--fit", "gpus=1"), "--fit gpus=1: 'gpus' is unknown"),
        (("--fit", "gpu-mem=100x0"), "0 pods are out of range"),
        (("--free-gpus", "1", "--class", "v100"), "no GPU or device matches class v100"),
    ],
)
def test_mistakes_are_told_with_a_remedy(monkeypatch, args, says):
    refused = run(monkeypatch, cluster(*three()), *args)
    assert refused.exit_code != 0
    assert says in refused.stderr
