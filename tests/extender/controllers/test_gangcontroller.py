"""The leader's writes for gangs: gates, evictions, PodGroups and events."""

import json
import math
import threading

import pytest
from structlog.testing import capture_logs

from cardwise.core.api import names
from cardwise.kube import paths
from extender.controllers import gangcontroller
from extender.controllers.gangcontroller import GangController
from extender.gangs import podgroups
from extender.records.podref import PodRef
from extender.reporting.listers import Lister
from extender.reporting.podgroupwriter import PodGroupWriter
from tests.build import P100, pod_group
from tests.extender.gangcluster import World, member
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.events import Events
from tests.runtime.http.loopback import until

GATE = {"spec": {"schedulingGates": [{"name": names.GANG, "$patch": "delete"}]}}


class Scene:
    def __init__(self, world, *, leads=True):
        self.world, self.events, self.leads = world, Events(), leads
        self.api = ApiServer(world.clock)
        self.seen = Lister()
        self._fresh = self.api.follow(paths.podgroups())
        client, clock = self.api.client(), world.clock
        self.controller = GangController(client, world.state, self.events, active=lambda: self.leads, clock=clock)
        self.writer = PodGroupWriter(
            client, self.seen, self.events, gangs=world.state.gangs.views, active=lambda: self.leads, clock=clock
        )

    def step(self):
        """Run a step, and all writes that it has started."""
        self.controller.step()
        until(lambda: not self.controller._writing, "that all is written")

    def create(self, *pods):
        self.world.create(*pods)
        self.store()

    def store(self):
        """Store the pods of the state in the API server."""
        for pod in self.world.pods.values():
            self.api.write_object(paths.pods(), pod)

    def put_podgroup(self, podgroup):
        """Create a PodGroup, and deliver its watch event."""
        self.api.write_object(paths.podgroups(), podgroup)
        self.show()

    def show(self):
        """Deliver the watch events of PodGroups."""
        for event in self._fresh():
            key, record = podgroups.decode_group(json.dumps(event["object"]).encode())
            if event["type"] == "DELETED":
                self.world.state.gangs.set_group(key, None)
                self.seen.remove_object(key)
            else:
                self.world.state.gangs.set_group(key, record.group)
                self.seen.set_object(key, record)

    def write_statuses(self, seconds=3):
        for _ in range(int(seconds * 4)):
            self.writer.step()
            self.world.clock.advance(0.25)

    def group(self):
        return self.api.get(paths.podgroups("default", "g"))


@pytest.fixture
def scene():
    gang_scene = Scene(World({"n1": 3}))
    yield gang_scene
    gang_scene.controller.stop()


def trio(scene, *, gated=True):
    scene.create(*(member(f"g{i}", gated=gated, created=i, gpu_mem=P100) for i in range(3)))


def gated(scene):
    pods = scene.api.all(paths.pods())
    return [pod["metadata"]["name"] for pod in pods if pod["spec"].get("schedulingGates")]


def test_gates_are_taken_away_once_and_again_where_that_does_not_show(scene):
    trio(scene)
    scene.step()
    assert gated(scene) == []
    assert sorted((call.path, call.body) for call in scene.api.requests) == [
        (paths.pods("default", f"g{i}"), GATE | {"metadata": {"uid": f"uid-g{i}"}}) for i in range(3)
    ]
    scene.step()
    assert len(scene.api.requests) == 3
    del scene.world.pods["g0"]["spec"]["schedulingGates"]
    scene.world.show_pod(scene.world.pods["g0"])
    scene.world.clock.advance(5)
    scene.step()
    assert len(scene.api.requests) == 5


def test_a_write_that_is_due_waits_for_no_plan(scene, monkeypatch):
    """A search for cards to reserve may take long, and each write of the step was begun only afterwards."""
    trio(scene)

    def is_written():
        until(lambda: gated(scene) == [], "that the gates are removed")
        written.append(True)

    written = []
    monkeypatch.setattr(scene.world.state.gangs, "plan_waiting", is_written)
    scene.step()
    assert written


def test_writes_that_are_slow_keep_neither_another_namespace_nor_the_next_step_waiting(scene):
    """This holds however long they take."""
    fat = (member(f"f{i}", gang="fat", minimum=40, namespace="fat", created=i) for i in range(40))
    scene.create(*fat)
    path, begun, released = f"{paths.pods('fat')}/*", threading.Semaphore(0), threading.Event()

    def takes_long(_call):
        begun.release()
        assert released.wait(60)

    scene.api.before_request(takes_long, "patch", path, times=math.inf)
    scene.controller.step()
    for _ in range(6):
        assert begun.acquire(timeout=60)
    scene.create(*(member(f"g{i}", created=100 + i, gpu_mem=P100) for i in range(3)))
    scene.controller.step()
    until(lambda: not [name for name in gated(scene) if name.startswith("g")], "that the other namespace's are written")
    assert not begun.acquire(blocking=False), "two of the eight threads are left for others"
    released.set()
    until(lambda: not gated(scene), "that all are written")


def test_of_one_namespaces_many_gangs_few_writes_wait_for_a_thread(scene):
    """A write must not be based on old state; the next steps write the others."""
    others = (
        member(f"m{i}-{j}", gang=f"many{i}", minimum=20, namespace="many", created=20 * i + j)
        for i in range(15)
        for j in range(20)
    )
    scene.create(*others, *(member(f"g{i}", created=1000 + i, gpu_mem=P100) for i in range(3)))
    scene.step()
    assert not [name for name in gated(scene) if name.startswith("g")]
    assert len(gated(scene)) == 300 - 64
    for _ in range(4):
        scene.step()
    assert gated(scene) == []


def test_gates_of_a_namespace_keep_none_of_its_evictions_waiting(scene):
    """This holds however many there are and however long they take: a gang that is bound in part keeps its cards until
    then.
    """
    begun, released = threading.Event(), threading.Event()
    gates = [PodRef(namespace="n", name=f"p{i}", uid=f"u{i}") for i in range(100)]

    def takes_long():
        begun.set()
        assert released.wait(60)

    evicted = threading.Event()
    scene.controller._submit_writes("free", [(pod, takes_long) for pod in gates], 3.0)
    assert begun.wait(60)
    scene.controller._submit_writes("evict", [(PodRef(namespace="n", name="e", uid="e"), evicted.set)], 5.0)
    assert len(scene.controller._writing) == 64 + 1
    scene.world.clock.advance(1.0)
    scene.controller._submit_writes("free", [(pod, takes_long) for pod in gates], 3.0)
    released.set()
    assert evicted.wait(60)
    until(lambda: not scene.controller._writing, "that all is written")


def test_the_gate_of_a_recreated_pod_stays_without_an_error(scene):
    trio(scene)
    scene.api.remove(paths.pods("default", "g0"))
    scene.api.write_object(paths.pods(), scene.world.pods["g0"] | {"metadata": {"name": "g0", "uid": "another"}})
    with capture_logs() as logs:
        scene.step()
    assert gated(scene) == ["g0"]
    assert logs == []


def test_a_gate_stays_while_members_are_missing_or_another_leads(scene):
    scene.create(member("g0"), member("g1", created=1))
    scene.step()
    scene.leads = False
    scene.create(member("g2", created=2))
    scene.step()
    assert scene.api.requests == []


@pytest.mark.parametrize("meanwhile", ["a member is deleted", "the gate is gone"])
def test_a_gate_is_removed_only_if_it_still_should_be_once_the_write_has_its_turn(scene, monkeypatch, meanwhile):
    monkeypatch.setattr(gangcontroller, "_MAX_PARALLEL_WRITES", 1)
    trio(scene)

    def changes(_call):
        if meanwhile == "a member is deleted":
            scene.world.delete("g2")
        else:
            for name in ("g1", "g2"):
                del scene.world.pods[name]["spec"]["schedulingGates"]
                scene.world.show_pod(scene.world.pods[name])

    scene.api.before_request(changes, "patch", paths.pods("default", "g0"))
    scene.step()
    assert [call.path for call in scene.api.sent("patch")] == [paths.pods("default", "g0")]


def test_an_api_server_that_fails_changes_nothing(scene):
    trio(scene)
    for status in (500, 409, 404):
        scene.api.fault(Fault(status=status))
    scene.step()
    assert gated(scene) == ["g0", "g1", "g2"]
    scene.world.clock.advance(5)
    scene.step()
    assert gated(scene) == []
    assert len(scene.api.requests) == 6


def test_evicted_by_the_eviction_api_with_an_event_each(scene):
    trio(scene, gated=False)
    for name in ("g0", "g1", "g2"):
        scene.world.schedule(name)
    scene.world.settle(only="g0")
    scene.world.settle(land=False)
    scene.store()
    scene.world.clock.advance(121)
    scene.api.fault(Fault(status=429))
    scene.step()
    eviction = ("create", paths.pods("default", "g0", "eviction"))
    assert [(call.verb, call.path) for call in scene.api.requests] == [eviction]
    assert scene.events.all == []
    scene.world.clock.advance(6)
    scene.step()
    assert [(call.verb, call.path) for call in scene.api.requests] == [eviction, eviction]
    assert scene.api.requests[1].body["deleteOptions"] == {"preconditions": {"uid": "uid-g0"}}
    assert "deletionTimestamp" in scene.api.get(paths.pods("default", "g0"))["metadata"]
    (event,) = scene.events.all
    assert scene.events.summaries() == [("g0", "GangRolledBack", "Warning")]
    assert "could not be bound whole" in event.message


@pytest.mark.parametrize("meanwhile", ["runs", "another leads"])
def test_members_are_not_evicted_once_their_gang_runs(scene, monkeypatch, meanwhile):
    monkeypatch.setattr(gangcontroller, "_MAX_PARALLEL_WRITES", 1)
    trio(scene, gated=False)
    for name in ("g0", "g1", "g2"):
        scene.world.schedule(name)
    scene.world.settle(only="g0")
    scene.world.settle(only="g1")
    scene.world.settle(land=False)
    scene.store()
    scene.world.clock.advance(121)

    def comes(_call):
        if meanwhile == "runs":
            scene.world.schedule("g2")
            scene.world.settle()
            assert scene.world.phase() == "Running"
        scene.leads = meanwhile == "runs"

    scene.api.before_request(comes, "create", "*/eviction")
    scene.api.fault(Fault(status=429))
    scene.world.clock.advance(61)
    scene.step()
    assert len(scene.api.sent("create")) == 1
    assert scene.events.all == []


def test_a_podgroup_of_coscheduling_sets_the_minimum(scene):
    pods = [member(f"g{i}", minimum=None, created=i, gpu_mem=P100) for i in range(2)]
    for pod in pods:
        del pod["metadata"]["annotations"][names.GROUP_NAME]
        pod["metadata"]["labels"][names.COSCHEDULING] = "g"
    scene.create(*pods)
    scene.step()
    assert scene.world.phase() == "Pending"
    path = "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/default/podgroups/g"
    scene.api.answers[path] = {"spec": {"minMember": 2}}
    scene.world.clock.advance(6)
    scene.step()
    assert scene.world.phase() == "Waiting"
    assert len(scene.api.sent("patch")) == 2
    del scene.api.answers[path]
    scene.world.clock.advance(6)
    scene.step()
    assert scene.world.phase() == "Pending", "it is gone, so nobody says how many"


def natives(scene, *gangs, **options):
    """A pending pod in each of these groups, by a PodGroup of Kubernetes."""
    options |= {"minimum": None, "gpu_mem": P100}
    pods = [member(f"{gang}-0", gang, created=i, **options) for i, gang in enumerate(gangs)]
    for pod in pods:
        del pod["metadata"]["annotations"][names.GROUP_NAME]
        pod["spec"]["schedulingGroup"] = {"podGroupName": pod["metadata"]["labels"][names.GANG]}
    scene.create(*pods)


NATIVE = "/apis/scheduling.k8s.io/v1beta1/namespaces/default/podgroups/"


def test_a_podgroup_of_kubernetes_sets_the_minimum_and_is_not_written(scene):
    natives(scene, "g")
    scene.step()
    scene.write_statuses()
    assert (scene.world.phase(), scene.group()) == ("Pending", None)
    for policy, phase in (({"gang": {"minCount": 2}}, "Pending"), ({"gang": {"minCount": 1}}, "Waiting")):
        scene.api.answers[NATIVE + "g"] = {"spec": {"schedulingPolicy": policy}}
        scene.world.clock.advance(6)
        scene.step()
        assert scene.world.phase() == phase
    assert gated(scene) == []
    scene.write_statuses()
    assert scene.group()["metadata"]["labels"] == {names.AUTO_LABEL: "true"}
    assert {call.verb for call in scene.api.requests if call.path.startswith(NATIVE)} == {"get"}


@pytest.mark.parametrize("policy", [{"basic": {}}, {}])
def test_a_podgroup_of_kubernetes_without_a_minimum_gates_no_pod_and_gets_no_event(scene, policy):
    natives(scene, "g")
    scene.api.answers[NATIVE + "g"] = {"spec": {"schedulingPolicy": policy}}
    scene.step()
    scene.step()
    assert gated(scene) == []
    scene.write_statuses()
    assert scene.group() is None
    assert scene.events.all == []


def test_of_thousands_of_podgroups_that_are_not_there_few_are_read_at_a_time(scene):
    natives(scene, *(f"g{i:03}" for i in range(120)))
    for reads in (50, 100, 120, 120):
        scene.step()
        assert len({call.path for call in scene.api.requests}) == reads
    assert len(scene.api.requests) == 120


def test_a_namespace_of_thousands_of_podgroups_delays_those_of_others_by_one_read(scene):
    natives(scene, *(f"g{i:03}" for i in range(120)))
    scene.step()
    natives(scene, "z", namespace="other")
    scene.api.before_request(
        lambda _call: scene.world.clock.advance(1.0), "get", "/apis/scheduling.k8s.io/*", times=math.inf
    )
    read = []
    for _ in range(3):
        before = len(scene.api.requests)
        scene.step()
        (only,) = scene.api.requests[before:]  # a slow read ends the step
        read.append("/namespaces/other/" in only.path)
    assert read == [True, False, False]


def test_a_gang_gets_a_podgroup_and_loses_it_with_its_last_pod(scene):
    trio(scene)
    scene.write_statuses()
    podgroup = scene.group()
    assert podgroup["spec"] == {"minMember": 3}
    assert podgroup["metadata"]["labels"] == {names.AUTO_LABEL: "true"}
    scene.show()
    scene.world.delete("g0", "g1", "g2")
    scene.write_statuses()
    assert scene.group() is None
    deleted = scene.api.sent("delete", paths.podgroups("default", "g"))
    assert deleted[0].body == {"preconditions": {"uid": podgroup["metadata"]["uid"]}}


def test_an_automatic_podgroup_that_a_finalizer_keeps_is_deleted_once(scene):
    podgroup = pod_group()
    podgroup["metadata"] |= {"labels": {names.AUTO_LABEL: "true"}, "finalizers": ["example.com/keep"]}
    scene.put_podgroup(podgroup)
    scene.write_statuses(0.25)
    assert [call.verb for call in scene.api.requests] == ["delete"]
    podgroup["metadata"]["deletionTimestamp"] = "2026-11-30T22:00:00Z"
    scene.put_podgroup(podgroup)
    scene.write_statuses(60)
    assert [call.verb for call in scene.api.requests] == ["delete"]
    trio(scene)
    scene.write_statuses()
    assert scene.group()["status"]["members"] == 3, "a gang of this name has come"


@pytest.mark.parametrize("label", ["false", "", "yes"])
def test_a_podgroup_is_automatic_by_the_value_of_its_label(scene, label):
    """The admission policy uses the value as well: it refuses the extender's writes to other PodGroups."""
    podgroup = pod_group()
    podgroup["metadata"]["labels"] = {names.AUTO_LABEL: label}
    scene.put_podgroup(podgroup)
    scene.write_statuses()
    assert scene.group() is not None, "no pod is of it"
    assert not scene.api.sent("delete", paths.podgroups("default", "g"))


def test_a_users_podgroup_stays_with_a_condition_that_it_has_no_pod(scene):
    scene.put_podgroup(pod_group())
    scene.write_statuses()
    assert scene.group()["status"]["phase"] == "Pending"
    assert scene.group()["status"]["reason"] == "the gang has no pods"
    assert {(call.verb, call.path) for call in scene.api.requests} == {
        ("patch", paths.podgroups("default", "g", "status"))
    }


def test_the_status_shows_the_gangs_progress_and_is_written_only_on_change(scene):
    scene.put_podgroup(pod_group())
    trio(scene, gated=False)
    scene.world.schedule("g0")
    scene.write_statuses(1)
    status = scene.group()["status"]
    assert status["phase"] == "Reserved"
    assert status["waitingFor"] == ["g1", "g2"]
    assert status["reserved"] == [{"node": "n1", "members": 3, "gpus": 3}]
    assert (status["members"], status["bound"], status["minMember"]) == (3, 0, 3)
    scene.show()
    before = len(scene.api.requests)
    scene.write_statuses(2)
    assert len(scene.api.requests) == before
    scene.world.schedule("g1")
    scene.world.schedule("g2")
    scene.world.settle()
    scene.write_statuses(1)
    status = scene.group()["status"]
    assert (status["phase"], status["bound"], status["reserved"]) == ("Running", 3, [])
    assert status["conditions"][0]["status"] == "True"


def test_a_status_that_says_running_of_former_pods_is_put_right_before_anything_is_planned(scene):
    scene.put_podgroup(pod_group(status={"phase": "Running"}))
    trio(scene, gated=False)
    assert scene.world.schedule("g0") != ""
    assert scene.world.unbound_shares() == 0
    scene.write_statuses(1)
    scene.show()
    assert scene.world.schedule("g0") == ""


def events_with_reason(scene, reason):
    return [(event.about.name, event.message, event.type) for event in scene.events.with_reason(reason)]


def test_pods_have_a_condition_with_the_reason_of_their_gang(scene):
    scene.create(member("g0"))
    scene.write_statuses()
    assert events_with_reason(scene, "GangIncomplete") == [("g0", "gang g is waiting for 2 of 3 members", "Warning")]
    scene.create(member("g1", created=1, gated=False), member("g2", created=2, gated=False))
    del scene.world.pods["g0"]["spec"]["schedulingGates"]
    scene.world.show_pod(scene.world.pods["g0"])
    scene.world.schedule("g0")
    scene.world.schedule("g1")
    scene.write_statuses()
    assert ("g0", "gang g fits, waiting for g2 to be scheduled", "Normal") in events_with_reason(scene, "GangReserved")
    count = len(scene.events.all)
    scene.write_statuses()
    assert len(scene.events.all) == count, "once"
    scene.world.schedule("g2")
    scene.world.settle()
    scene.write_statuses()
    assert [name for name, *_ in events_with_reason(scene, "GangBound")] == ["g0", "g1", "g2"]


@pytest.mark.parametrize("grouped", [True, False], ids=["a PodGroup of its own", "one of ours"])
def test_a_gang_whose_pods_all_terminate_gets_no_event(scene, grouped):
    if grouped:
        scene.put_podgroup(pod_group())
    trio(scene)
    scene.write_statuses()
    scene.show()
    for pod in scene.world.pods.values():
        pod["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
        scene.world.show_pod(pod)
    scene.write_statuses()
    assert not scene.events.with_reason("GangIncomplete")
    assert scene.group()["status"]["reason"] == "all its pods are ending"


def test_what_passes_in_a_moment_is_no_event(scene):
    trio(scene, gated=False)
    scene.world.schedule("g0")
    scene.write_statuses(0.5)
    scene.world.schedule("g1")
    scene.world.schedule("g2")
    scene.world.settle()
    scene.write_statuses()
    assert {event.reason for event in scene.events.all} == {"GangBound"}


def test_a_follower_writes_no_status(scene):
    scene.leads = False
    trio(scene)
    scene.write_statuses()
    assert (scene.api.requests, scene.events.all) == ([], [])


def test_podgroups_that_are_slow_to_write_delay_those_of_other_namespaces_by_one_write(scene):
    slow = paths.podgroups("fat")
    scene.api.before_request(lambda _call: scene.world.clock.advance(2.0), "patch", f"{slow}/*", times=math.inf)
    for i in range(20):
        scene.put_podgroup({"metadata": {"name": f"f{i}", "namespace": "fat"}, "spec": {"minMember": 2}})
    scene.writer.step()
    for i in range(5):
        scene.put_podgroup({"metadata": {"name": f"g{i}", "namespace": "quick"}, "spec": {"minMember": 2}})
    began, before = scene.world.clock.now(), len(scene.api.sent("patch"))
    while not all(scene.api.get(paths.podgroups("quick", f"g{i}")).get("status") for i in range(5)):
        scene.writer.step()
        scene.world.clock.advance(0.25)
    assert scene.world.clock.now() - began <= 5.0, scene.api.sent("patch")[before:]
