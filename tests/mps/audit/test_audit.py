"""Who really is on the cards: what pods, admins and metrics are told when it is not what was granted."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from cardwise.core.api import names
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import CardError
from cardwise.kube import paths
from cardwise.kube.events import ObjectRef
from mps import metrics
from mps.audit import audit
from mps.audit.audit import AuditSettings
from mps.audit.findings import PodGrant, Reason, Violation
from mps.host.pods import ContainerView
from mps.host.processes import SERVER_PROGRAM
from tests.build import budget
from tests.mps import records
from tests.mps.mpsnode import NODE, Node, uuid_of

SETTINGS = AuditSettings(interval=10.0, passes=3, tolerance=MiB(512))
BUDGETS = "/apis/policy/v1/poddisruptionbudgets"


@pytest.fixture
def node(node):
    """Its cards are open, so that nobody on them is there past a server; test_strangers.py has those who are."""
    node.settings = replace(node.settings, exclusive=False)
    return node


@pytest.fixture
def run_audits() -> Callable[..., None]:
    def at(node: Node, times: int = 1) -> None:
        """So often, each time after the interval."""
        for _ in range(times):
            node.clock.advance(SETTINGS.interval)
            node.manager._audit.audit_once()

    return at


def test_a_pod_that_uses_more_than_its_share_is_told_once_and_its_neighbour_is_not(node, run_audits):
    node.bind("greedy", 0, 1000)
    node.bind("modest", 0, 4000)
    first, second = node.use(0, 1200, "greedy"), node.use(0, 825, "greedy")  # each has a context
    node.use(0, 4512, "modest")
    node.start(audit=SETTINGS)
    run_audits(node, 2)
    assert not node.events.all
    run_audits(node)
    text = (
        f"container main uses 2025 MiB of card {uuid_of(0)} and has a share of 1000 MiB: "
        f"processes {first.pid} (python), {second.pid} (python)"
    )
    assert node.events.all == [(ObjectRef.pod("default", "greedy", "uid-greedy"), "MemoryOverrun", text, "Warning")]
    standing = metrics.AUDIT_OPEN_VIOLATIONS.labels(uuid_of(0), Reason.MEMORY_OVERRUN)
    assert standing._value.get() == 1
    run_audits(node, 10)
    node.end_clients()
    run_audits(node)
    assert standing._value.get() == 0, "it is over"
    assert len(node.events.all) == 1


def test_a_pod_that_calls_itself_the_mirror_of_another_hides_nothing_of_it(node, run_audits):
    """Whoever may create pods can write the mark of a mirror, with the UID of his own pod."""
    node.bind("greedy", 0, 1000)
    node.use(0, 9000, "greedy")
    metadata = {"name": "later", "uid": "uid-later", "annotations": {names.MIRROR: "uid-greedy"}}
    node.api.write_object(
        "/api/v1/pods", {"metadata": metadata, "spec": {"nodeName": NODE}, "status": {"phase": "Running"}}
    )
    node.start(audit=SETTINGS)
    run_audits(node, 3)
    assert node.events.summaries() == [("greedy", "MemoryOverrun", "Warning")]


def test_a_framework_that_fills_its_share_without_mps_is_not_told_of(node, run_audits):
    """Its context comes on top, of each process. As PyTorch filled shares of 8138 MiB on an H200: docs/measured.md."""
    node.bind("pod", 0, 8138)
    node.use(0, 8684, "pod")
    node.bind("several", 0, 3000)
    for _ in range(3):
        node.use(0, 1000 + 546, "several")
    node.start(audit=AuditSettings())
    run_audits(node, 10)
    assert not node.events.all


def test_one_that_goes_on_is_told_again_after_ten_minutes(node, run_audits):
    node.bind("greedy", 0, 1000)
    node.use(0, 9000, "greedy")
    node.start(audit=SETTINGS)
    run_audits(node, 3 + 59)
    assert len(node.events.all) == 1
    run_audits(node)
    assert len(node.events.all) == 2


def test_a_moments_spike_is_no_alarm(node, run_audits):
    node.bind("spiky", 0, 1000)
    process = node.use(0, 9000, "spiky")
    node.start(audit=SETTINGS)
    run_audits(node, 2)
    node.set_use(0, process.pid, 900)
    run_audits(node)
    node.set_use(0, process.pid, 9000)
    run_audits(node, 2)
    assert not node.events.all
    run_audits(node)
    assert [event.reason for event in node.events.all] == ["MemoryOverrun"]


def test_nobody_is_accused_before_the_pods_are_known(node, run_audits):
    node.use(0, 9000)
    node.pods.synced = False
    node.start(audit=SETTINGS)
    run_audits(node, 5)
    assert not node.events.all


def test_a_pod_on_a_card_that_it_was_not_given(pair, run_audits):
    pair.bind("lost", 0, 1000)
    pair.use(1, 100, "lost")
    pair.start(audit=SETTINGS)
    run_audits(pair, 3)
    (text,) = pair.events.messages("WrongGPU")
    assert f"uses 100 MiB of card {uuid_of(1)} without a share of it (it has {uuid_of(0)})" in text


def test_a_pod_without_any_share(node, run_audits):
    node.bind("thief", 0, 1)
    node.api.edit(paths.pods("default", "thief"), metadata={"annotations": None})
    node.use(0, 100, "thief")
    node.start(audit=replace(SETTINGS, evict_after=0.0))
    run_audits(node, 3)
    (text,) = node.events.messages("GPUWithoutGrant")
    assert "the pod uses 100 MiB of card" in text
    assert "and has no share of any GPU" in text
    assert not evicted(node), "it is not ours to end"


def test_a_process_of_no_pod_is_told_once_at_the_node(node, run_audits):
    stranger = node.use(0, 700)
    node.start(audit=SETTINGS)
    run_audits(node, 5)
    ((about, _, text, _),) = node.events.with_reason("UnknownProcess")
    assert about == ObjectRef.node("n1")
    assert re.fullmatch(rf"process {stranger.pid} \(python\) of no pod uses 700 MiB of card {uuid_of(0)}, .*", text)


def test_a_process_that_has_ended_meanwhile_is_nobodys(node, run_audits):
    node.use(0, 700).kill()
    node.start(audit=SETTINGS)
    run_audits(node, 5)
    assert not node.events.all


def test_the_server_is_nobodys_use_but_a_tenant_that_calls_itself_so_is(node, run_audits):
    node.bind("disguised", 0, 1000)
    node.start(audit=SETTINGS)
    node.wait_ready()
    (server,) = node.servers()
    node.set_use(0, server.pid, 400)
    node.use(0, 3000, "disguised", name=SERVER_PROGRAM)
    run_audits(node, 3)
    ((_, reason, text, _),) = node.events.all
    assert reason == "MemoryOverrun"
    assert "3000 MiB" in text


def evicted(node: Node) -> list[str]:
    return [request.body["metadata"]["name"] for request in node.api.sent("create", "*/eviction")]


def test_on_request_a_pod_that_goes_on_is_evicted_when_its_budget_allows(node, run_audits):
    node.bind("greedy", 0, 1000)
    node.api.edit(paths.pods("default", "greedy"), metadata={"labels": {"app": "greedy"}})
    selector = {"matchLabels": {"app": "greedy"}}
    node.api.write_object(BUDGETS, budget(allowed=0, selector=selector))
    node.use(0, 9000, "greedy")
    node.start(audit=replace(SETTINGS, evict_after=300.0))
    run_audits(node, 30)
    assert not evicted(node)
    run_audits(node, 2)
    assert evicted(node) == ["greedy", "greedy"], "it is tried again"
    assert not node.events.with_reason("AuditEvicted")
    node.api.write_object(BUDGETS, budget(allowed=1, selector=selector))
    run_audits(node)
    assert node.api.get(paths.pods("default", "greedy"))["metadata"]["deletionTimestamp"]
    assert node.api.sent("create", "*/eviction")[-1].body["deleteOptions"] == {"preconditions": {"uid": "uid-greedy"}}
    (text,) = node.events.messages("AuditEvicted")
    assert text.startswith("evicted, since the violation lasted (--audit=evict): container main uses 9000 MiB of card ")


def test_not_more_than_its_number_of_an_hour_is_evicted_and_the_others_are_told(node, run_audits):
    for name in ("first", "second"):
        node.bind(name, 0, 1000)
        node.use(0, 9000, name)
    node.start(audit=replace(SETTINGS, evict_after=0.0, evict_per_hour=1))
    run_audits(node, 3)
    (gone,) = evicted(node)
    ((about, _, text, _),) = node.events.with_reason("AuditEvictionWithheld")
    assert {gone, about.name} == {"first", "second"}
    assert "this node has used its 1 evictions per hour: container main uses 9000" in text
    node.end(gone)
    run_audits(node, 10)
    assert evicted(node) == [gone]
    assert len(node.events.with_reason("AuditEvictionWithheld")) == 1, "not at each look"
    run_audits(node, 360)
    assert len(evicted(node)) == 2


def test_one_goes_after_the_other(node, run_audits):
    for name in ("first", "second"):
        node.bind(name, 0, 1000)
        node.use(0, 9000, name)
    node.start(audit=replace(SETTINGS, evict_after=0.0))
    run_audits(node, 5)
    (gone,) = evicted(node)
    (text,) = node.events.messages("AuditEvictionWithheld")
    assert "the pod that was evicted last has not ended yet" in text
    node.end(gone)
    run_audits(node)
    assert len(evicted(node)) == 2, "its turn has come"


def test_without_request_nobody_is_evicted_and_without_audit_nobody_looks(node, run_audits):
    node.bind("greedy", 0, 1000)
    node.use(0, 9000, "greedy")
    node.start(audit=SETTINGS)
    run_audits(node, 100)
    assert node.events.with_reason("MemoryOverrun")
    assert not evicted(node)
    node.stop()
    node.start(audit=None)
    assert node.manager._audit is None


def test_a_card_that_does_not_answer_neither_accuses_nor_acquits(node, run_audits, monkeypatch):
    node.bind("greedy", 0, 1000)
    node.use(0, 9000, "greedy")
    node.start(audit=SETTINGS)
    run_audits(node, 2)
    with monkeypatch.context() as patched:
        patched.setattr(node.gpus, "processes", raise_card_error)
        run_audits(node)
        assert not node.events.all
    run_audits(node)
    assert node.events.with_reason("MemoryOverrun")


def raise_card_error(uuid: str) -> None:
    raise CardError(f"card {uuid} does not answer")


def test_what_a_pod_has_by_container_and_card():
    main, side = ContainerView("0", "main", "abc"), ContainerView("init-1", "side")
    held = {"0": (records.share(0, 5),), "init-1": (records.share(1, 7),)}
    seen = records.pod("u", held, containers=(main, side))
    assert audit.pod_grant(seen, {}) == PodGrant({("0", "GPU-0"): 5, ("init-1", "GPU-1"): 7}, {"abc": "0"})


def test_of_gpushares_pod_only_the_whole_is_known():
    seen = records.pod("u", {"pod": (records.share(1, 700, ""),)}, containers=(ContainerView("0", "main", "abc"),))
    assert audit.pod_grant(seen, {1: "GPU-1"}) == PodGrant({("", "GPU-1"): 700})


def test_many_processes_are_counted_not_listed():
    finding = Violation(reason=Reason.MEMORY_OVERRUN, card="GPU-0", pids=tuple(range(40)), used=MiB(9))
    text = audit.event_message(finding, records.pod(), ["a", "", "b"])
    assert text == "the pod uses 9 MiB of card GPU-0 and has a share of 0 MiB: processes 0 (a), 1, 2 (b) and 37 more"
