"""Who really is on the cards: what pods, admins and metrics are told when it is not what was granted."""

import os
import re
from dataclasses import replace

import pytest

from cardwise.core.audit import Finding, Granted, Reason
from cardwise.core.quantity import MiB
from mps import audit, cgroups, metrics, processes
from mps.audit import AuditSettings
from mps.cgroups import Membership
from mps.pods import ContainerView, Holding, PodView
from tests.mps.worlds import Node, eventually, uuid_of

CID = "4f1c" * 16
EVENTS = "/api/v1/events"
FAST = AuditSettings(interval=0.05, looks=3, tolerance=MiB(512))


@pytest.fixture
def whose(monkeypatch):
    """PID -> what its cgroup says, instead of the machine's own."""
    table: dict[int, tuple[Membership, ...]] = {}
    monkeypatch.setattr(cgroups, "of", lambda pid: table.get(pid, ()))
    return table


def running(name: str) -> dict:
    """One container, `main`, as the API server tells it."""
    status = {"name": "main", "containerID": f"containerd://{CID}"}
    return {"spec": {"containers": [{"name": "main"}]}, "status": {"containerStatuses": [status]}}


def told(node: Node, reason: str) -> list[dict]:
    return [event for event in list(node.api.objects[EVENTS].values()) if event["reason"] == reason]


def on_card(node: Node, whose: dict, pod: str, mib: int, index: int = 0) -> int:
    pid = node.use(index, mib)
    whose[pid] = (Membership(f"uid-{pod}", CID),) if pod else ()
    return pid


def test_a_pod_that_uses_more_than_its_share_is_told_once_and_its_neighbour_is_not(node, whose):
    node.bind("greedy", 0, 1000)
    node.change_pod("greedy", running("greedy"))
    node.bind("modest", 0, 4000)
    first, second = on_card(node, whose, "greedy", 1200), on_card(node, whose, "greedy", 313)
    on_card(node, whose, "modest", 4512)
    node.start(audit=FAST)
    (event,) = eventually(lambda: told(node, "MemoryOverrun"))
    name = processes.name(first)
    assert event["message"] == (
        f"container main uses 1513 MiB of card {uuid_of(0)} and was given 1000 MiB: "
        f"processes {first} ({name}), {second} ({name})"
    )
    assert event["type"] == "Warning"
    assert event["involvedObject"] | {"apiVersion": ""} == {
        "apiVersion": "",
        "kind": "Pod",
        "namespace": "default",
        "name": "greedy",
        "uid": "uid-greedy",
    }
    standing = metrics.AUDIT_STANDING.labels(uuid_of(0), Reason.MEMORY_OVERRUN)
    assert standing._value.get() == 1
    node.remove_clients()
    eventually(lambda: standing._value.get() == 0, "it is over")
    assert len(told(node, "MemoryOverrun")) == 1
    assert [event["reason"] for event in node.api.objects[EVENTS].values()] == ["MemoryOverrun"]


def test_what_each_container_has_is_exported_for_as_long_as_it_has_it(node, whose):
    def exported() -> dict[tuple[str, str, str, str], float]:
        samples = [one for metric in metrics.USED.collect() for one in metric.samples]
        return {
            (one.labels["namespace"], one.labels["pod"], one.labels["container"], one.labels["card"]): one.value
            for one in samples
            if one.labels["pod"] in ("served", "starting", "")
        }

    node.bind("served", 0, 4000)
    node.change_pod("served", running("served"))
    node.bind("starting", 0, 4000)
    for pod, mib in (("served", 300), ("served", 200), ("starting", 70), ("", 900)):
        on_card(node, whose, pod, mib)
    node.start(audit=FAST)
    served, starting = (("default", pod, name, uuid_of(0)) for pod, name in (("served", "main"), ("starting", "")))
    mine = {served: 500 * 1024 * 1024, starting: 70 * 1024 * 1024}
    eventually(lambda: exported() == mine, "of no pod: the audit tells")
    node.remove_clients()
    eventually(lambda: not exported(), "nobody is told of for ever")


def test_a_moments_spike_is_no_alarm(node, whose, monkeypatch):
    node.bind("spiky", 0, 1000)
    pid = on_card(node, whose, "spiky", 9000)
    node.start(audit=replace(FAST, interval=3600.0))
    eventually(lambda: node.manager.pods.synced)
    look = node.manager._audit._look
    spoke = []
    monkeypatch.setattr(node.manager._audit, "_tell", lambda finding, pod: spoke.append((finding.reason, pod.name)))
    look(0.0)
    look(1.0)
    node.use_changed(0, pid, 900)
    look(2.0)
    node.use_changed(0, pid, 9000)
    look(3.0)
    look(4.0)
    assert spoke == []
    look(5.0)
    assert spoke == [(Reason.MEMORY_OVERRUN, "spiky")]


def test_a_pod_on_a_card_that_it_was_not_given(pair, whose):
    pair.bind("lost", 0, 1000)
    on_card(pair, whose, "lost", 100, index=1)
    pair.start(audit=FAST)
    (event,) = eventually(lambda: told(pair, "WrongCard"))
    assert f"uses 100 MiB of card {uuid_of(1)}, which it was not given (it has {uuid_of(0)})" in event["message"]


def test_a_pod_without_any_share(node, whose):
    node.bind("thief", 0, 1)
    node.change_pod("thief", {"metadata": {"annotations": None}})
    on_card(node, whose, "thief", 100)
    node.start(audit=replace(FAST, evict_after=0.0))
    (event,) = eventually(lambda: told(node, "CardWithoutGrant"))
    assert "the pod uses 100 MiB of card" in event["message"]
    assert "and has no share of any card" in event["message"]
    assert not evicted(node), "it is not ours to end"


def test_a_process_of_no_pod_is_told_once_at_the_node(node, whose):
    stranger = on_card(node, whose, "", 700)
    node.start(audit=FAST)
    (event,) = eventually(lambda: told(node, "UnknownProcess"))
    assert event["involvedObject"]["kind"] == "Node"
    assert re.fullmatch(rf"process {stranger} \(.+\) of no pod uses 700 MiB of card {uuid_of(0)}, .*", event["message"])


def test_the_server_is_nobodys_use_but_a_tenant_that_calls_itself_so_is(node, whose, monkeypatch):
    node.bind("disguised", 0, 1000)
    node.start(audit=FAST)
    node.wait_ready()
    (server,) = node.servers()
    node.use(0, 400, server.pid)
    disguised = on_card(node, whose, "disguised", 3000)
    real = processes.is_server
    monkeypatch.setattr(processes, "is_server", lambda pid: pid == disguised or real(pid))
    (event,) = eventually(lambda: told(node, "MemoryOverrun"))
    assert "3000 MiB" in event["message"]
    assert not told(node, "UnknownProcess")


def evicted(node: Node) -> list[dict]:
    return [change for path, change in list(node.api.posts) if path.endswith("/eviction")]


def test_on_request_a_pod_that_goes_on_is_evicted_when_its_budget_allows(node, whose):
    node.bind("greedy", 0, 1000)
    on_card(node, whose, "greedy", 9000)
    node.api.budget = True
    node.start(audit=replace(FAST, evict_after=0.3))
    eventually(lambda: len(evicted(node)) > 1, "it is tried again")
    assert node.api.get("/api/v1/pods", "greedy", "default"), "the budget keeps it"
    assert not told(node, "AuditEvicted")
    node.api.budget = False
    eventually(lambda: node.api.get("/api/v1/pods", "greedy", "default") is None)
    assert evicted(node)[-1]["deleteOptions"] == {"preconditions": {"uid": "uid-greedy"}}
    (event,) = eventually(lambda: told(node, "AuditEvicted"))
    assert event["message"].startswith("evicted, since it went on (--audit-evict): the pod uses 9000 MiB of card ")


def test_not_more_than_its_number_of_an_hour_is_evicted_and_the_others_are_told(node, whose):
    for name in ("first", "second"):
        node.bind(name, 0, 1000)
        on_card(node, whose, name, 9000)
    node.start(audit=replace(FAST, evict_after=0.0, evict_per_hour=1))
    (event,) = eventually(lambda: told(node, "AuditEvictionWithheld"))
    left = event["involvedObject"]["name"]
    assert (
        "this node has had its 1 evictions of an hour (--audit-evict-per-hour): the pod uses 9000" in event["message"]
    )
    again = node.manager._audit._standing
    eventually(lambda: node.manager._audit._standing is not again, "one more look at least")
    assert [change["metadata"]["name"] for change in evicted(node)] == [{"first": "second", "second": "first"}[left]]
    assert len(told(node, "AuditEvictionWithheld")) == 1, "not at each look"


def test_one_goes_after_the_other(node, whose):
    for name in ("first", "second"):
        node.bind(name, 0, 1000)
        on_card(node, whose, name, 9000)
    node.api.graceful = True
    node.start(audit=replace(FAST, evict_after=0.0))
    (event,) = eventually(lambda: told(node, "AuditEvictionWithheld"))
    left = event["involvedObject"]["name"]
    assert "but the pod that was evicted before it has not ended yet" in event["message"]
    assert len(evicted(node)) == 1
    node.end({"first": "second", "second": "first"}[left])
    eventually(lambda: len(evicted(node)) == 2, "its turn has come")


def test_without_request_nobody_is_evicted_and_without_audit_nobody_is_told(node, whose):
    node.bind("greedy", 0, 1000)
    on_card(node, whose, "greedy", 9000)
    node.start(audit=FAST)
    eventually(lambda: told(node, "MemoryOverrun"))
    assert not evicted(node)
    node.stop()
    node.start(audit=None)
    assert node.manager._audit is None


def test_a_card_that_does_not_answer_neither_accuses_nor_acquits(node, whose, monkeypatch):
    node.bind("greedy", 0, 1000)
    pid = on_card(node, whose, "greedy", 9000)
    node.start(audit=replace(FAST, interval=3600.0))
    eventually(lambda: node.manager.pods.synced)
    watcher, spoke = node.manager._audit, []
    monkeypatch.setattr(watcher, "_tell", lambda finding, pod: spoke.append(finding.pids))
    watcher._look(0.0)
    watcher._look(1.0)
    entry = node.cards.pop()
    kept = node.gpus.cards()
    node.write_cards_raw([entry | {"uuid": "GPU-other"}])
    monkeypatch.setattr(watcher._gpus, "cards", lambda: kept)
    watcher._look(2.0)
    assert spoke == []
    node.write_cards_raw([entry])
    watcher._look(3.0)
    assert spoke == [(pid,)]


def pod(*holdings: Holding, containers: tuple[ContainerView, ...] = ()) -> PodView:
    return PodView(
        uid="u", namespace="d", name="p", finished=False, off=False, holdings=holdings, containers=containers
    )


def test_what_a_pod_has_by_container_and_card():
    main, side = ContainerView("0", "main", "abc"), ContainerView("init-1", "side")
    seen = pod(Holding(0, "GPU-0", MiB(5), "0"), Holding(1, "GPU-1", MiB(7), "init-1"), containers=(main, side))
    assert audit.granted(seen, {}) == Granted({("0", "GPU-0"): 5, ("init-1", "GPU-1"): 7}, {"abc": "0"})


def test_of_gpushares_pod_only_the_whole_is_known():
    seen = pod(Holding(1, "", MiB(700)), containers=(ContainerView("0", "main", "abc"),))
    assert audit.granted(seen, {1: "GPU-1"}) == Granted({("", "GPU-1"): 700})


def test_many_processes_are_counted_not_listed():
    finding = Finding(reason=Reason.MEMORY_OVERRUN, card="GPU-0", pids=tuple(range(40)), used=MiB(9))
    said = audit.message(finding, pod(), ["a", "", "b"])
    assert said == "the pod uses 9 MiB of card GPU-0 and was given 0 MiB: processes 0 (a), 1, 2 (b) and 37 more"


def test_a_process_that_has_ended_meanwhile_is_nobodys(whose):
    assert processes.name(2**22 + 1) == ""
    assert not processes.is_server(os.getpid())
