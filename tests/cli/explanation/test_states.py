"""`cardwise explain` in every state that a pod, what is around it, and a workload without pods can be in.

states.yaml says what it has to say. Each cell is made of objects as the API server has them, and explained by the
command.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from cardwise.cli.cluster import podevents
from cardwise.cli.commands import explain
from cardwise.cli.explanation import missingpods, sentences
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests import build
from tests.cli.clusters import Cluster, card, placed, waiting
from tests.fakes.clock import FakeClock

PAGE = yaml.safe_load((Path(__file__).parent / "states.yaml").read_text())
TEXTS: Mapping[str, str | Mapping[str, str]] = PAGE["sentences"]
CREATED, DELETED = "2026-06-01T00:00:00Z", "2026-06-01T01:00:00Z"
KEEPS_AWAY = ("NoSchedule", "NoExecute")


@dataclass(frozen=True)
class Cell:
    """One value of each dimension."""

    def is_of(self, when: Mapping[str, Any]) -> bool:
        return all(getattr(self, name) in (some if isinstance(some, list) else [some]) for name, some in when.items())


@dataclass(frozen=True)
class PodCell(Cell):
    phase: str
    place: str
    node: str
    controller: str
    installation: str

    @property
    def is_placed(self) -> bool:
        return self.place in ("bound", "assigned", "granted")

    @property
    def is_rewritten(self) -> bool:
        return self.controller != "static" and self.installation not in ("no webhook", "exempt", "unregistered")


@dataclass(frozen=True)
class WorkloadCell(Cell):
    kind: str
    state: str


# The objects of a pod's cell.


def taint(key: str, *effects: str) -> list[Json]:
    return [{"key": f"node.kubernetes.io/{key}", "effect": effect} for effect in effects]


NODES: Mapping[str, Json] = {
    "Ready": {"status": {"conditions": [{"type": "Ready", "status": "True"}]}},
    "NotReady": {
        "spec": {"taints": taint("unreachable", *KEEPS_AWAY)},
        "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]},
    },
    "cordoned": {
        "spec": {"unschedulable": True, "taints": taint("unschedulable", "NoSchedule")},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    },
}
OWNERS = {"CronJob": "Job", "static": "Node"}  # by whom the pod itself is controlled, if it is called otherwise
# As the DaemonSet's controller writes it.
OF_ONE_NODE: Json = {
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
                ]
            }
        }
    },
    "tolerations": [
        {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"},
        {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"},
    ],
}  # fmt: skip


def build_restricted_pod(cell: PodCell) -> Json:
    limits = {names.GPU_MEM: "4000"} | ({names.SHARE: "1"} if cell.is_rewritten else {})
    pod = waiting("team-a", "p", limits)
    metadata, spec = pod["metadata"], pod["spec"]
    metadata |= {"uid": "p", "creationTimestamp": CREATED, "annotations": {}}
    if cell.controller != "none":
        kind = OWNERS.get(cell.controller, cell.controller)
        metadata["ownerReferences"] = [{"kind": kind, "name": "o", "uid": "o", "controller": True}]
    if cell.controller == "static":
        metadata["annotations"] |= {names.MIRROR: "hash"}
    if cell.controller == "DaemonSet":
        spec |= OF_ONE_NODE
    if cell.controller in ("Job", "CronJob"):
        spec["restartPolicy"] = "OnFailure"
    if cell.installation == "stopped":
        spec["schedulerName"] = names.SCHEDULER
    if cell.place == "gated":
        metadata["labels"] = {names.GANG: "g"}
        spec["schedulingGates"] = [{"name": names.GANG}]
    if cell.is_placed:
        spec["nodeName"] = "n1"
    if cell.place in ("assigned", "granted"):
        metadata["annotations"] |= placed("team-a", "p", "n1", 0, 4000)["metadata"]["annotations"]
    if cell.place == "granted":
        metadata["annotations"] |= {names.ASSIGNED: "true"}
    if cell.phase == "Ending":
        metadata |= {"deletionTimestamp": DELETED, "deletionGracePeriodSeconds": 30} | (
            {} if cell.is_placed else {"finalizers": ["example.com/keep"]}
        )
    pod["status"] = status_of(cell)
    return pod


def status_of(cell: PodCell) -> Json:
    if cell.phase == "Refused":
        return {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy devices present"}
    ended = {"Succeeded": {"exitCode": 0, "reason": "Completed"}, "Failed": {"exitCode": 1, "reason": "Error"}}
    if cell.phase in ended:
        state = {"terminated": ended[cell.phase]}
        return {"phase": cell.phase, "containerStatuses": [{"name": "main", "state": state}]}
    if not cell.is_placed:
        unanswered = 'Post "https://10.0.0.9:12345/gpushare-scheduler/filter": connection refused'
        is_unanswered = cell.place == "waiting" and cell.node != "gone" and is_admitted(cell)
        message = {"message": unanswered} if cell.installation == "no extender" and is_unanswered else {}
        return {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"} | message]}
    if cell.phase == "Crashed":
        crashed = {"name": "main", "started": False, "state": {"terminated": ended["Failed"]}}
        return {"phase": "Running", "containerStatuses": [crashed]}
    runs = cell.phase == "Running" or (cell.phase == "Ending" and cell.place != "bound")
    state = {"running": {}} if runs else {"waiting": {"reason": "ContainerCreating"}}
    started = [{"name": "main", "started": True, "state": state}]
    return {"phase": "Running" if runs else "Pending", "containerStatuses": started}


def is_admitted(cell: PodCell) -> bool:
    """Whether the node's taints let the pod in, so that kube-scheduler asks the extender about it."""
    return cell.node == "Ready" or cell.controller == "DaemonSet"


def event(reason: str, message: str, at: str = DELETED, kind: str = "Pod", name: str = "p") -> Json:
    return build.event(reason, message, about=f"{kind}/{name}", namespace="team-a", at=at)


def events_of(cell: PodCell) -> Iterator[Json]:
    past = "deleted: it requests GPUs or devices and was bound to node n1 by something other than Cardwise"
    if cell.installation == "unwired":
        yield event(names.BOUND_WITHOUT_EXTENDER, past, name="p" if cell.phase == "Gone" else "web-1-x")
    if cell.phase == "Mounting":
        yield event("FailedScheduling", "0/1 nodes are available", "2026-06-01T02:00:00Z") | {"type": "Warning"}
        yield event("FailedMount", 'MountVolume.SetUp failed for volume "data": secret "keys" not found') | {
            "type": "Warning"
        }
    if cell.phase == "Gone" and cell.installation != "unwired":
        yield event("Killing", "Stopping container main")
        if cell.controller not in ("none", "static"):
            kind = OWNERS.get(cell.controller, cell.controller)
            yield event("SuccessfulDelete", "Deleted pod: p", "2026-06-01T01:00:01Z", kind, "o")


def objects_of(cell: PodCell) -> dict[str, list[Json]]:
    exempt = "['kube-system', 'team-a']" if cell.installation == "exempt" else "['kube-system']"
    condition = {"name": "not-exempt", "expression": f"!(request.namespace in {exempt})"}
    configuration = {
        "metadata": {"name": names.WEBHOOK_CONFIGURATION, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "webhooks": [{"name": "pods.cardwise.dev", "matchConditions": [condition]}],
    }
    there = {"metadata": {"name": "n1"}}
    silent = timedelta(minutes=5 if cell.installation == "no extender" else 0)
    renewed = (FakeClock().wall() - silent).strftime("%Y-%m-%dT%H:%M:%S.000000Z")
    group = {"metadata": {"namespace": "team-a", "name": "g"}, "spec": {"minMember": 2}}
    ours = {"namespace": names.NAMESPACE}
    lease = {"metadata": ours | {"name": names.LEASE}, "spec": {"renewTime": renewed}}
    return {
        "nodes": [there | NODES[cell.node]] if cell.node in NODES else [],
        "extendedresources": [card("n1", 0)],
        "pods": [build_restricted_pod(cell)] if cell.phase != "Gone" else [],
        "events": list(events_of(cell)),
        "mutatingwebhookconfigurations": [configuration] if cell.installation != "unregistered" else [],
        "deployments": [{"metadata": ours | {"name": names.SCHEDULER}}] if cell.installation == "stopped" else [],
        "podgroups": [group | {"status": {"phase": "Incomplete"}}] if cell.place == "gated" else [],
        "configmaps": [{"metadata": ours | {"name": names.WORKLOAD}, "data": {names.WORKLOAD_POLICY: "priced"}}],
        "leases": [lease] if cell.installation != "never led" else [],
    }


def said_of_pod(cell: PodCell) -> str:
    """What the command says of the pod."""
    return explanation_of(json.dumps(objects_of(cell)))


@cache
def explanation_of(objects: str) -> str:
    """The same in the cluster of these objects."""
    client = Cluster(json.loads(objects)).kube
    target = explain.find_target(client, "pod", "team-a", "p")
    if target is None:
        return sentences.join_lines(
            missingpods.explain_gone_pod("team-a", "p", podevents.events_of_pod(client, "team-a", "p"))
        )
    return explain.explain_pod(client, target[1], "team-a", names.NAMESPACE)[0]


# The objects of a workload's cell.

MAKERS = {"deployment": "replicasets", "cronjob": "jobs"}
ENDS = {
    "complete": {"type": "Complete", "status": "True"},
    "failed": {
        "type": "Failed",
        "status": "True",
        "reason": "BackoffLimitExceeded",
        "message": "Job has reached the specified backoff limit",
    },
}


def spec_of(cell: WorkloadCell) -> Json:
    match cell.kind, cell.state:
        case "job", "none wanted":
            return {"parallelism": 0}
        case "daemonset", _:
            return {}
        case _, "none wanted":
            return {"replicas": 0}
        case "deployment", "halted":
            return {"paused": True}
        case _, "halted" | "queued":
            return {"suspend": True}
        case _, "elsewhere":
            return {"managedBy": "kueue.x-k8s.io/multikueue"}
        case "cronjob", _:
            return {"schedule": "0 3 * * *", "timeZone": "Europe/Zurich"}
    return {}


def said_of_workload(cell: WorkloadCell) -> str:
    metadata: Json = {"name": "w", "namespace": "team-a", "uid": "w"}
    if cell.kind == "replicaset":
        metadata["ownerReferences"] = [{"kind": "Deployment", "name": "d", "uid": "d", "controller": True}]
    if cell.state == "deleted":
        metadata |= {"deletionTimestamp": DELETED, "finalizers": ["foregroundDeletion"]}
    if cell.state == "queued":
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": "q"}
    status: Json = {"conditions": [ENDS[cell.state]]} if cell.state in ENDS else {}
    if cell.kind == "daemonset":
        status["desiredNumberScheduled"] = 0 if cell.state == "none wanted" else 1
    if cell.kind == "cronjob":
        status["lastScheduleTime"] = DELETED
    api = Cluster({f"{cell.kind}s": [{"metadata": metadata, "spec": spec_of(cell), "status": status}]})
    maker = "w"
    if cell.kind in MAKERS and cell.state not in ("halted", "not due"):
        maker = "w-1"
        owner = {"kind": "x", "name": "w", "uid": "w", "controller": True}
        of_maker = {"name": maker, "namespace": "team-a", "uid": maker, "ownerReferences": [owner]}
        api.add(MAKERS[cell.kind], {"metadata": of_maker, "spec": {}})
    if cell.state == "refused":
        denied = "admission webhook denied the request: too much"
        api.add("events", event("FailedCreate", denied, kind="x", name=maker))
    if cell.state == "bound past":
        api.add("events", event(names.BOUND_WITHOUT_EXTENDER, "deleted: ...", name=f"{maker}-a"))
    target = explain.find_target(api.kube, cell.kind, "team-a", "w")
    assert target is not None
    return explain.explain_workload(api.kube, *target, "team-a", names.NAMESPACE)[0]


# The table.

TABLES: Mapping[str, tuple[type[Cell], Callable[[Any], str]]] = {
    "pods": (PodCell, said_of_pod),
    "workloads": (WorkloadCell, said_of_workload),
}
ROWS = [(kind, row) for kind in TABLES for row in PAGE[kind]["rows"]]


def text_of(name: str, cell: Cell) -> str:
    """The sentence, with the sentences in it."""
    text = TEXTS[name]
    if not isinstance(text, str):
        text = text[getattr(cell, text["by"])]
    return text.removeprefix("\\").format_map({other: text_of(other, cell) for other in named_in(text)})


def named_in(text: str) -> list[str]:
    return [part.partition("}")[0] for part in text.split("{")[1:]]


def dimensions_of(name: str, cell: Cell) -> set[str]:
    """The dimensions that decide what the sentence is in the cell."""
    text, dimensions = TEXTS[name], set[str]()
    if not isinstance(text, str):
        dimensions, text = {text["by"]}, text[getattr(cell, text["by"])]
    return dimensions.union(*(dimensions_of(other, cell) for other in named_in(text)))


@cache
def cells(kind: str) -> Sequence[Cell]:
    return [TABLES[kind][0](*coordinates) for coordinates in itertools.product(*PAGE[kind]["dimensions"].values())]


@cache
def possible(kind: str) -> Sequence[Cell]:
    return [cell for cell in cells(kind) if not any(cell.is_of(row["when"]) for row in PAGE[kind]["impossible"])]


def titled(coordinate: Any) -> str:
    if isinstance(coordinate, str):
        return coordinate
    return "; ".join(
        f"{name} {' or '.join(some) if isinstance(some, list) else some}" for name, some in coordinate["when"].items()
    )


@pytest.mark.parametrize("kind", TABLES)
def test_each_cell_is_impossible_or_in_one_row(kind):
    table = PAGE[kind]
    assert [field.name for field in fields(TABLES[kind][0])] == list(table["dimensions"])
    assert all(row["because"] for row in table["impossible"])
    for row in (*table["impossible"], *table["rows"]):
        assert any(cell.is_of(row["when"]) for cell in cells(kind)), f"no cell is so: {titled(row)}"
    for cell in possible(kind):
        rows = [titled(row) for row in table["rows"] if cell.is_of(row["when"])]
        assert len(rows) == 1, f"{cell} is in {rows}"


@pytest.mark.parametrize(("kind", "row"), ROWS, ids=titled)
def test_what_is_said_in_each_cell_is_what_the_table_says(kind, row):
    of_row = [cell for cell in possible(kind) if cell.is_of(row["when"])]
    for cell in of_row:
        expected = "".join(f"{text}\n" for name in row["says"] if (text := text_of(name, cell)))
        assert TABLES[kind][1](cell) == expected, cell
    several = {name for name in PAGE[kind]["dimensions"] if len({getattr(cell, name) for cell in of_row}) > 1}
    named_dimensions = {dimension for cell in of_row for name in row["says"] for dimension in dimensions_of(name, cell)}
    assert set(row["no matter"]) == several - named_dimensions


# States beside the table, each with a change of a cell's objects.


def said_of_changed(cell: PodCell, **fields: Json) -> str:
    """What is said of the cell's pod with these fields changed: of its metadata, spec or status."""
    objects = objects_of(cell)
    for name, change in fields.items():
        objects["pods"][0][name] |= change
    return explanation_of(json.dumps(objects))


def test_what_two_things_keep_away_does_not_run_without_the_first():
    cell = PodCell("Pending", "waiting", "NotReady", "none", "up")
    text = said_of_changed(cell, spec={"nodeSelector": {"zone": "a"}})
    assert "It excludes every node with GPUs by its nodeSelector (zone=a)." in text
    assert "takes no new pods: it is NotReady" in text
    assert "It would run if" not in text


def test_what_the_api_server_said_while_a_pod_had_gates_is_over_without_them():
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "Scheduling is blocked"}
    text = said_of_changed(PodCell("Pending", "waiting", "Ready", "none", "up"), status={"conditions": [gated]})
    assert "kube-scheduler says" not in text
    assert "kube-scheduler's message above says what it waits for" not in text


def test_a_placed_pod_that_is_deleted_is_there_as_long_as_it_has_finalizers():
    text = said_of_changed(
        PodCell("Ending", "granted", "Ready", "Job", "up"), metadata={"finalizers": ["example.com/keep"]}
    )
    assert (
        "It is being deleted (since 2026-06-01T00:59:30Z), and exists as long as it has the finalizers "
        "example.com/keep: what it holds is free once its containers have ended.\n"
    ) in text


def test_a_node_s_pressure_is_a_state_in_words():
    objects = objects_of(PodCell("Pending", "waiting", "Ready", "none", "up"))
    objects["nodes"][0] |= {"spec": {"taints": taint("disk-pressure", "NoSchedule")}}
    assert "Node n1 takes no new pods: it is under DiskPressure.\n" in explanation_of(json.dumps(objects))


def claimed(**spec: Json) -> Json:
    """The fields of a pod whose share is allocated by claim."""
    entries = [{"name": "cardwise", "resourceClaimName": "cardwise-0123456789abcdef"}]
    return {"resourceClaims": entries, **spec}


def test_pod_behind_the_gate_of_its_claim() -> None:
    """What the API server says of gates is not repeated as kube-scheduler's word."""
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "Scheduling is blocked"}
    spec = claimed(schedulingGates=[{"name": "cardwise.dev/allocation"}])
    text = said_of_changed(
        PodCell("Pending", "waiting", "Ready", "none", "up"), spec=spec, status={"conditions": [gated]}
    )
    assert "It waits behind the gate cardwise.dev/allocation until the extender has GPUs for it" in text
    assert "`kubectl describe pod -n " in text
    assert "kube-scheduler says" not in text
    assert "by the controller or person that set it" not in text
