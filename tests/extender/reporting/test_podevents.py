"""The events of waiting pods."""

import pytest

from cardwise.core.api.quotas import Charge, QuotaEntry
from cardwise.kube.events import ObjectRef
from cardwise.kube.objects.gpuquotas import QuotaRecord
from cardwise.kube.objects.unreadable import Unreadable
from extender.cache.quotas import FullEntry
from extender.records.podref import PodRef
from extender.reporting.listers import Listers
from extender.reporting.podevents import PodEvents
from tests.build import resource_class
from tests.extender.statuscluster import CARDS, CLASSES, Watched, class_path, er_object
from tests.fakes.clock import FakeClock
from tests.fakes.events import Events


class World:
    def __init__(self):
        self.clock, self.seen, self.events, self.active = FakeClock(), Listers(), Events(), True
        self.api = Watched(self.seen, self.clock)
        self.waiting = {"k80": [PodRef("u1", "team", "a"), PodRef("u2", "team", "b")]}
        self.pod_events = PodEvents(
            self.events, self.seen, active=lambda: self.active,
            waiting_for=lambda name: self.waiting.get(name, []), clock=self.clock,
        )  # fmt: skip

    def delete(self, name="k80"):
        self.api.write_object(CLASSES, resource_class(name))
        self.api.show()
        self.api.remove(class_path(name))
        self.api.show()


@pytest.fixture
def world():
    return World()


def test_each_pod_that_waits_for_a_deleted_class_gets_one_event(world):
    world.delete()
    world.delete("v100")
    world.pod_events.step()
    world.pod_events.step()
    assert [event.about for event in world.events.all] == [
        ObjectRef.pod("team", "a", "u1"),
        ObjectRef.pod("team", "b", "u2"),
    ]
    event = world.events.all[0]
    assert (event.reason, event.type) == ("ResourceClassDeleted", "Warning")
    assert "ResourceClass k80 was deleted while the pod waits for it; create the class again" in event.message


def test_a_class_that_was_replaced_is_not_missed(world):
    world.delete()
    world.api.write_object(CLASSES, resource_class("k80"))
    world.api.show()
    world.pod_events.step()
    assert world.events.all == []


def test_only_the_leader_writes_events(world):
    world.active = False
    world.delete()
    world.pod_events.step()
    world.active = True
    world.pod_events.step()
    assert world.events.all == []


def full(**limits):
    return FullEntry(
        "gpus", QuotaEntry(resource_class="k80", **limits), used=Charge(5, 60000, 0), requested=Charge(1, 8000, 0)
    )


def test_the_quota_event_names_the_entry_and_the_amounts(world):
    world.pod_events.record_quota_wait(PodRef("u1", "team", "a"), full(shares=5, memory=65536, cards=0))
    (event,) = world.events.all
    assert (event.about, event.reason, event.type) == (ObjectRef.pod("team", "a", "u1"), "WaitingForQuota", "Normal")
    assert event.message.startswith(
        "GPUQuota gpus is full for k80: 5 of 5 shares used (1 requested), 60000 of 65536 MiB used (8000 requested); "
    )


def test_only_what_is_full_is_named(world):
    world.pod_events.record_quota_wait(PodRef("u1", "team", "a"), full(shares=9, memory=65536))
    assert "shares" not in world.events.all[0].message


def test_a_pod_gets_one_quota_event_in_five_minutes(world):
    for _ in range(10):
        for uid in ("u1", "u2"):
            world.pod_events.record_quota_wait(PodRef(uid, "team", uid), full(shares=5))
        world.clock.advance(29)
    assert len(world.events.all) == 2
    world.clock.advance(20)
    world.pod_events.record_quota_wait(PodRef("u1", "team", "u1"), full(shares=5))
    assert len(world.events.all) == 3


def test_the_event_of_a_request_above_the_quota_says_that_waiting_does_not_help(world):
    full_entry = FullEntry("gpus", QuotaEntry(memory=1000), used=Charge(), requested=Charge(1, 11441, 1))
    world.pod_events.record_quota_wait(PodRef("u1", "team", "a"), full_entry)
    assert world.events.all[0].message == (
        "GPUQuota gpus is full for all GPUs: 0 of 1000 MiB used (11441 requested), counting the smallest suitable GPU; "
        "the request exceeds the quota, so the pod starts only if the quota is raised"
    )


def test_a_deleted_class_that_cards_are_in_by_their_model_is_not_missed(world):
    world.waiting["nvidia.tesla.k80"] = world.waiting["k80"]
    world.api.write_object(CARDS, er_object("GPU-A", "n1"))
    world.delete("nvidia.tesla.k80")
    world.pod_events.step()
    assert world.events.all == []


def test_a_quota_of_a_deleted_class_gets_an_event(world):
    world.pod_events.record_missing_class(
        QuotaRecord(namespace="team", name="gpus", uid="u", parsed=Unreadable("x")), "there is none"
    )
    (event,) = world.events.all
    about = ObjectRef("cardwise.dev/v1alpha1", "GPUQuota", "gpus", "team", "u")
    assert event == (about, "ResourceClassNotFound", "there is none", "Warning")
