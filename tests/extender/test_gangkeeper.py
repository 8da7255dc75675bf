"""What is written for gangs: gates, evictions, PodGroups and events, by the extender that leads."""

import json

import pytest

from cardwise.core import names
from cardwise.kube import errors, paths
from extender import podgroups
from extender.gangkeeper import GangKeeper
from extender.gangtelling import GangTelling
from extender.sightings import Seen
from tests.extender.gangworlds import P100, World, member

GATE = {"spec": {"schedulingGates": [{"name": names.GANG, "$patch": "delete"}]}}


class Api:
    """At the seam of KubeClient; it remembers, and fails once where it was told to."""

    def __init__(self):
        self.calls = []
        self.fail = []
        self.foreign = {}

    def _call(self, *call):
        self.calls.append(call)
        if self.fail:
            raise self.fail.pop(0)
        return {}

    def patch(self, path, body, kind, *, timeout):
        return self._call("patch", path, body, kind)

    def create(self, path, body, *, timeout):
        return self._call("create", path, body)

    def delete(self, path, body, *, timeout):
        return self._call("delete", path, body)

    def get(self, path, *, timeout):
        if path not in self.foreign:
            raise errors.NotFound(404, "NotFound", path)
        return self.foreign[path]


class Recorder:
    def __init__(self):
        self.told = []

    def record(self, regarding, reason, message, kind="Normal"):
        self.told.append((regarding.name, reason, message, kind))


class Scene:
    def __init__(self, world, *, leads=True):
        self.world, self.api, self.events, self.leads = world, Api(), Recorder(), leads
        self.seen = Seen()
        clock, active = world.clock, lambda: self.leads
        self.keeper = GangKeeper(self.api, world.state, self.events, active=active, clock=clock)
        self.telling = GangTelling(
            self.api, self.seen, self.events, gangs=world.state.gangs.views, active=active, clock=clock,
        )  # fmt: skip

    def show(self, obj):
        """The watch tells of a PodGroup."""
        key, record = podgroups.record(json.dumps(obj).encode())
        self.world.state.gangs.set_group(key, record.group)
        self.seen.put(key, record)

    def tell(self, seconds=3):
        for _ in range(int(seconds * 4)):
            self.telling.step()
            self.world.clock.advance(0.25)


def group(name="g", *, auto=False, minimum=3, **status):
    labels = {names.AUTO_LABEL: "true"} if auto else {}
    metadata = {"name": name, "namespace": "default", "labels": labels, "uid": f"uid-{name}"}
    return {"metadata": metadata, "spec": {"minMember": minimum}, "status": status}


@pytest.fixture
def scene():
    made = Scene(World({"n1": 3}))
    yield made
    made.keeper.stop()


def trio(scene, *, gated=True):
    scene.world.create(*(member(f"g{i}", gated=gated, created=i, gpu_mem=P100) for i in range(3)))


def test_gates_are_taken_away_once_and_again_where_that_does_not_show(scene):
    trio(scene)
    scene.keeper.step()
    assert sorted(call[1] for call in scene.api.calls) == [paths.pods("default", f"g{i}") for i in range(3)]
    assert all(
        call[2:] == (GATE | {"metadata": {"uid": f"uid-g{call[1][-1]}"}}, "strategic") for call in scene.api.calls
    )
    scene.keeper.step()
    assert len(scene.api.calls) == 3
    del scene.world.pods["g0"]["spec"]["schedulingGates"]
    scene.world.tell(scene.world.pods["g0"])
    scene.world.clock.advance(5)
    scene.keeper.step()
    assert len(scene.api.calls) == 5


def test_a_gate_stays_while_members_are_missing_or_another_leads(scene):
    scene.world.create(member("g0"), member("g1", created=1))
    scene.keeper.step()
    scene.leads = False
    scene.world.create(member("g2", created=2))
    scene.keeper.step()
    assert scene.api.calls == []


def test_an_api_server_that_fails_changes_nothing(scene):
    trio(scene)
    scene.api.fail = [errors.ServerError(500), errors.Conflict(409), errors.NotFound(404)]
    scene.keeper.step()
    scene.world.clock.advance(5)
    scene.keeper.step()
    assert len(scene.api.calls) == 6


def test_evicted_by_the_eviction_api_with_an_event_each(scene):
    trio(scene, gated=False)
    for name in ("g0", "g1", "g2"):
        scene.world.schedule(name)
    scene.world.settle(only="g0")
    scene.world.settle(land=False)
    scene.world.clock.advance(121)
    scene.api.fail = [errors.TooManyRequests(429, "TooManyRequests", "disruption budget")]
    scene.keeper.step()
    eviction = ("create", paths.pods("default", "g0", "eviction"))
    assert [call[:2] for call in scene.api.calls] == [eviction]
    assert scene.events.told == []
    scene.world.clock.advance(6)
    scene.keeper.step()
    assert [call[:2] for call in scene.api.calls] == [eviction, eviction]
    assert scene.api.calls[1][2]["deleteOptions"] == {"preconditions": {"uid": "uid-g0"}}
    ((name, reason, text, kind),) = scene.events.told
    assert (name, reason, kind) == ("g0", "GangRolledBack", "Warning")
    assert "could not be bound whole" in text


def test_a_podgroup_of_coscheduling_says_how_many(scene):
    pods = [member(f"g{i}", minimum=None, created=i, gpu_mem=P100) for i in range(2)]
    for pod in pods:
        del pod["metadata"]["annotations"][names.GROUP_NAME]
        pod["metadata"]["labels"][names.COSCHEDULING] = "g"
    scene.world.create(*pods)
    scene.keeper.step()
    assert scene.world.phase() == "Pending"
    path = "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/default/podgroups/g"
    scene.api.foreign[path] = {"spec": {"minMember": 2}}
    scene.world.clock.advance(6)
    scene.keeper.step()
    assert scene.world.phase() == "Waiting"
    assert len([call for call in scene.api.calls if call[0] == "patch"]) == 2


def test_a_gang_gets_a_podgroup_and_loses_it_with_its_last_pod(scene):
    trio(scene)
    scene.tell()
    made = [call for call in scene.api.calls if call[0] == "create"]
    assert made[0][1] == paths.podgroups("default")
    assert made[0][2]["spec"] == {"minMember": 3}
    assert made[0][2]["metadata"]["labels"] == {names.AUTO_LABEL: "true"}
    scene.show(group(auto=True))
    scene.api.calls.clear()
    scene.world.delete("g0", "g1", "g2")
    scene.tell()
    assert ("delete", paths.podgroups("default", "g"), {"preconditions": {"uid": "uid-g"}}) in scene.api.calls


def test_a_persons_podgroup_stays_and_is_told_that_it_has_no_pod(scene):
    scene.show(group())
    scene.tell()
    ((verb, path, body, _),) = [call for call in scene.api.calls if call[0] == "patch"][:1]
    assert (verb, path) == ("patch", paths.podgroups("default", "g", "status"))
    assert body["status"]["phase"] == "Pending"
    assert body["status"]["reason"] == "there is no pod of it"
    assert not [call for call in scene.api.calls if call[0] == "delete"]


def test_the_status_says_how_far_the_gang_is_and_is_written_on_change_only(scene):
    scene.show(group())
    trio(scene, gated=False)
    scene.world.schedule("g0")
    scene.tell(1)
    status = scene.api.calls[-1][2]["status"]
    assert status["phase"] == "Held"
    assert status["waitingFor"] == ["g1", "g2"]
    assert status["held"] == [{"node": "n1", "members": 3, "cards": 3}]
    assert (status["members"], status["bound"], status["minMember"]) == (3, 0, 3)
    scene.show(group(**status))
    scene.api.calls.clear()
    scene.tell(2)
    assert scene.api.calls == []
    scene.world.schedule("g1")
    scene.world.schedule("g2")
    scene.world.settle()
    scene.tell(1)
    status = scene.api.calls[-1][2]["status"]
    assert (status["phase"], status["bound"], status["held"]) == ("Running", 3, [])
    assert status["conditions"][0]["status"] == "True"


def test_a_status_that_says_running_of_former_pods_is_put_right_before_anything_is_planned(scene):
    scene.show(group(phase="Running"))
    trio(scene, gated=False)
    assert scene.world.schedule("g0") != ""
    assert scene.world.held() == 0
    scene.tell(1)
    scene.show(group(phase=scene.api.calls[-1][2]["status"]["phase"]))
    assert scene.world.schedule("g0") == ""


def test_pods_are_told_what_their_gang_waits_for(scene):
    scene.world.create(member("g0"))
    scene.tell()
    assert ("g0", "GangIncomplete", "gang g is waiting for 2 of 3 members", "Warning") in scene.events.told
    scene.world.create(member("g1", created=1, gated=False), member("g2", created=2, gated=False))
    del scene.world.pods["g0"]["spec"]["schedulingGates"]
    scene.world.tell(scene.world.pods["g0"])
    scene.world.schedule("g0")
    scene.world.schedule("g1")
    scene.tell()
    assert ("g0", "GangHeld", "gang g fits, waiting for g2 to be scheduled", "Normal") in scene.events.told
    count = len(scene.events.told)
    scene.tell()
    assert len(scene.events.told) == count, "once"
    scene.world.schedule("g2")
    scene.world.settle()
    scene.tell()
    told = [each for each in scene.events.told if each[1] == "GangBound"]
    assert [name for name, *_ in told] == ["g0", "g1", "g2"]


def test_what_passes_in_a_moment_is_no_event(scene):
    trio(scene, gated=False)
    scene.world.schedule("g0")
    scene.tell(0.5)
    scene.world.schedule("g1")
    scene.world.schedule("g2")
    scene.world.settle()
    scene.tell()
    assert {reason for _, reason, _, _ in scene.events.told} == {"GangBound"}


def test_who_does_not_lead_says_nothing(scene):
    scene.leads = False
    trio(scene)
    scene.tell()
    assert (scene.api.calls, scene.events.told) == ([], [])
