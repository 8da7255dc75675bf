"""`cardwise gangs`, and gangs in `explain` and `inspect`."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from cardwise.cli.cluster import podgroups
from cardwise.cli.render import gangtable
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests.build import pod_group
from tests.cli.clusters import Cluster, lists, run, waiting

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
SHARE = {names.GPU_MEM: "8138", names.SHARE: "1"}


def member(gang: str, name: str, *, node: str = "", phase: str = "Pending", limits: Json = SHARE, **meta: Any) -> Json:
    pod = waiting("team-a", name, limits)
    pod["metadata"] |= {"labels": {names.GANG: gang}, "creationTimestamp": "2026-11-21T11:57:00Z"} | meta
    pod["metadata"]["annotations"] = {names.GROUP_NAME: gang, names.GROUP_NUM: "3"}
    if node:
        pod["spec"]["nodeName"] = node
    return pod | {"status": {"phase": phase}}


def group(name: str, phase: str = "", **status: Any) -> Json:
    group_status = (
        {"phase": phase, "minMember": 3, "lastTransitionTime": "2026-11-21T11:58:00Z"} | status if phase else {}
    )
    return pod_group(name, namespace="team-a", status=group_status, creationTimestamp="2026-11-21T10:00:00Z")


def world(groups: list[Json], *pods: Json, **objects: list[Json]) -> Cluster:
    api = lists(podgroups=groups, **objects)
    api.add("pods", *pods)
    return api


RESERVED = group(
    "slurp",
    "Reserved",
    waitingFor=["slurp-2"],
    reserved=[{"node": "n1", "members": 2, "gpus": 2}, {"node": "n2", "gpus": 1}],
)
SLURP = [member("slurp", f"slurp-{i}") for i in range(3)]


def rows(api: Cluster, namespace: str = "", *, wide: bool = False) -> list[list[str]]:
    table = gangtable.table(podgroups.list_gangs(api.kube, namespace), NOW, wide=wide)  # type: ignore[arg-type]
    return [line.split() for line in table.splitlines()]


def test_a_gang_is_one_row_with_who_is_there_and_what_is_held():
    head, row = rows(world([RESERVED], *SLURP))
    assert head == ["NAMESPACE", "NAME", "PHASE", "MEMBERS/MIN", "BOUND", "GPUS-RESERVED", "AGE", "REASON"]
    assert row == ["team-a", "slurp", "Reserved", "3/3", "0", "3", "2h"]
    assert rows(world([RESERVED], *SLURP), wide=True)[1][7:] == ["slurp-2", "n1:2,n2:1"]


def test_who_counts_is_who_lives():
    pods = [
        member("slurp", "a", node="n1", phase="Running"),
        member("slurp", "b", node="n1", phase="Succeeded"),
        member("slurp", "c", phase="Failed"),
        member("slurp", "d", deletionTimestamp="2026-11-21T11:59:00Z"),
        member("other", "e"),
    ]
    _, other, slurp = rows(world([group("slurp", "Waiting", reason="no room")], *pods))
    assert slurp == ["team-a", "slurp", "Waiting", "2/3", "2", "0", "2h", "no", "room"]
    assert other[:7] == ["team-a", "other", "Unknown", "1/3", "0", "0", "3m"]


def test_pods_that_a_podgroup_of_kubernetes_keeps_together_in_name_only_are_no_gang():
    pods = [member("basic", "a"), member("basic", "b", node="n1"), member("gang", "c")]
    for pod in pods:
        pod["metadata"]["annotations"] = {}
        pod["spec"]["schedulingGroup"] = {"podGroupName": pod["metadata"]["labels"][names.GANG]}
    pods[2]["spec"]["schedulingGates"] = [{"name": names.GANG}]
    assert [row[1] for row in rows(world([], *pods))[1:]] == ["gang"]


def test_where_nobody_has_told_anything_the_pods_and_the_podgroup_are_shown():
    assert rows(world([group("new")]))[1][:6] == ["team-a", "new", "Unknown", "0/3", "0", "0"]
    alone = world([], member("slurp", "a"))
    (view,) = podgroups.list_gangs(alone.kube)  # type: ignore[arg-type]
    assert (view.phase, view.minimum, view.members) == ("Unknown", 3, ("a",))
    unnumbered = member("slurp", "a")
    unnumbered["metadata"]["annotations"] = {}
    row = rows(world([], unnumbered))[1]
    assert row[3] == "1/?"
    assert " ".join(row[7:]) == (
        "no PodGroup that the extender knows and no annotation scheduling.k8s.io/group-pod-num says how many pods it "
        "needs"
    ), "the extender never reports on it"
    broken = member("slurp", "a")
    broken["metadata"]["annotations"][names.GROUP_NUM] = "0"
    assert rows(world([], broken))[1][3] == "1/?"


@pytest.mark.parametrize(
    ("created", "shown"),
    [
        ("2026-11-21T12:00:01Z", "0s"),
        ("2026-11-21T11:58:01Z", "119s"),
        ("2026-11-21T11:58:00Z", "2m"),
        ("2026-11-21T09:59:00Z", "2h"),
        ("2026-11-18T12:00:00Z", "3d"),
        ("", "-"),
    ],
)
def test_ages_are_as_kubectl_writes_them(created, shown):
    assert gangtable.format_age(created, NOW) == shown


def test_the_command_by_every_output_and_namespace(monkeypatch):
    elsewhere = member("b", "b-0")
    elsewhere["metadata"]["namespace"] = "team-b"
    api = world([RESERVED], *SLURP, elsewhere)
    assert "team-b" not in run(monkeypatch, api, "gangs", "-n", "team-a").output
    assert "team-b" in run(monkeypatch, api, "gangs", "-A").output
    assert "WAITING-FOR" in run(monkeypatch, api, "gangs", "-A", "-o", "wide").output
    as_json = json.loads(run(monkeypatch, api, "gangs", "-n", "team-a", "-o", "json").output)
    assert as_json == yaml.safe_load(run(monkeypatch, api, "gangs", "-n", "team-a", "-o", "yaml").output)
    (gang,) = as_json["gangs"]
    assert (gang["phase"], gang["minMember"], gang["gpusReserved"]) == ("Reserved", 3, 3)
    assert gang["members"] == ["slurp-0", "slurp-1", "slurp-2"]
    none = run(monkeypatch, api, "gangs")
    assert (none.exit_code, none.stdout) == (0, "")
    assert "there is no gang in namespace 'default'; -A shows all namespaces" in none.stderr


def test_a_missing_right_is_told(monkeypatch):
    api = world([RESERVED], *SLURP)
    api.forbid("podgroups")
    assert run(monkeypatch, api, "gangs", "-A").exit_code == 1


def explained(monkeypatch: pytest.MonkeyPatch, api: Cluster, name: str) -> str:
    done = run(monkeypatch, api, "explain", "pod", "-n", "team-a", name)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_member_hears_who_is_missing(monkeypatch):
    api = world([group("slurp", "Pending")], *SLURP[:2])
    text = explained(monkeypatch, api, "slurp-0")
    assert text.startswith("pod team-a/slurp-0 requests 8138 MiB")
    assert "Its gang slurp needs 3 pods: 2 exist, 0 have a node (Pending since 2026-11-21T11:58:00Z).\n" in text
    assert "1 more must be created before any of them is scheduled; existing: slurp-0, slurp-1.\n" in text


def test_a_member_of_a_gang_of_which_nobody_says_how_many_hears_what_to_make(monkeypatch):
    alone = member("g", "alone")
    del alone["metadata"]["annotations"][names.GROUP_NUM]
    text = explained(monkeypatch, world([], alone), "alone")
    assert (
        "The number is unknown, so the gang waits forever: create a PodGroup g with spec.minMember, or create " in text
    )
    assert names.GROUP_NUM in text


def test_a_member_hears_whom_the_gang_waits_for_and_what_is_held(monkeypatch):
    text = explained(monkeypatch, world([RESERVED], *SLURP), "slurp-0")
    assert "The gang fits and waits for slurp-2 to be scheduled.\n" in text
    assert "GPUs reserved for it: 3, on n1 (2), n2 (1).\n" in text
    assert "must be created" not in text
    waits = world([group("slurp", "Waiting", reason="it does not fit as a whole")], *SLURP)
    assert "Last status: it does not fit as a whole.\n" in explained(monkeypatch, waits, "slurp-0")


def test_a_member_without_gpu_is_not_called_a_stranger(monkeypatch):
    server = member("slurp", "ps-0", limits={names.FILTER_CALL_RESOURCE: "1", names.BIND_CALL_RESOURCE: "1"})
    text = explained(monkeypatch, world([RESERVED], *SLURP, server), "ps-0")
    assert "requests no GPU and no device of Cardwise, and is placed together with its gang.\n" in text
    assert "Its gang slurp needs 3 pods" in text


def test_what_is_held_is_below_the_pods_of_the_nodes(monkeypatch):
    api = world([RESERVED, group("done", "Running")], *SLURP)
    text = run(monkeypatch, api, "inspect", "-d").output
    table = text.partition("Reserved for gangs that are not bound yet:\n")[2].splitlines()
    assert [line.split() for line in table] == [
        ["GANG", "NAMESPACE", "NODE", "MEMBERS", "GPUS"],
        ["slurp", "team-a", "n1", "2", "2"],
        ["slurp", "team-a", "n2", "0", "1"],
    ]
    assert "n2  " not in run(monkeypatch, api, "inspect", "-d", "n1").output.partition("Reserved for")[2]
    assert "Reserved for" not in run(monkeypatch, api, "inspect").output
    for quiet in (world([group("done", "Running")]), lists()):
        assert "Reserved for" not in run(monkeypatch, quiet, "inspect", "-d").output
    api.forbid("podgroups")
    allowed = run(monkeypatch, api, "inspect", "-d")
    assert (allowed.exit_code, "Reserved for" in allowed.output) == (0, False)
