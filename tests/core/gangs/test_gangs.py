"""How a pod names its gang, and which of two gangs comes first."""

import pytest

from cardwise.core.api import names
from cardwise.core.gangs import gangs
from cardwise.core.gangs.gangs import ForeignPodGroup, Member, Membership, gang_rank
from cardwise.core.gangs.roster import Roster
from cardwise.core.values.invalid import InvalidRequest

NAME, NUMBER, LABEL = names.GROUP_NAME, names.GROUP_NUM, names.COSCHEDULING


def pod(annotations=None, labels=None, gates=()):
    spec = {"schedulingGates": [{"name": gate} for gate in gates]}
    return {"metadata": {"annotations": annotations or {}, "labels": labels or {}}, "spec": spec}


@pytest.mark.parametrize(
    ("annotations", "labels", "expected"),
    [
        ({}, {}, None),
        ({NAME: "g", NUMBER: "3"}, {}, Membership(name="g", minimum=3)),
        ({}, {NAME: "g", NUMBER: "3"}, Membership(name="g", minimum=3)),
        ({NAME: "g"}, {NAME: "other", NUMBER: "2"}, Membership(name="g", minimum=2)),
        ({NAME: "g"}, {}, Membership(name="g")),
        ({}, {LABEL: "c"}, Membership(name="c", foreign_podgroup=ForeignPodGroup.COSCHEDULING)),
        ({NAME: "g"}, {LABEL: "c"}, Membership(name="g")),
    ],
)
def test_membership_from_annotations_and_labels(annotations, labels, expected):
    assert gangs.membership(pod(annotations, labels)) == expected


@pytest.mark.parametrize(
    ("annotations", "labels", "field"),
    [
        ({NAME: "Not_a_label", NUMBER: "3"}, {}, f"metadata.annotations[{NAME}]"),
        ({}, {NAME: "a.b"}, f"metadata.labels[{NAME}]"),
        ({NAME: "g" * 64}, {}, f"metadata.annotations[{NAME}]"),
        ({NAME: "g", NUMBER: "0"}, {}, f"metadata.annotations[{NUMBER}]"),
        ({NAME: "g", NUMBER: "501"}, {}, f"metadata.annotations[{NUMBER}]"),
        ({NAME: "g"}, {NUMBER: "many"}, f"metadata.labels[{NUMBER}]"),
        ({NUMBER: "3"}, {}, f"metadata.annotations[{NUMBER}]"),
        ({}, {LABEL: "UPPER"}, f"metadata.labels[{LABEL}]"),
    ],
)
def test_what_cannot_be_read_names_the_field(annotations, labels, field):
    with pytest.raises(InvalidRequest) as error:
        gangs.membership(pod(annotations, labels))
    assert error.value.field == field
    assert error.value.remedy


def test_the_webhooks_label_alone_makes_a_member():
    assert gangs.gang_of(pod({NAME: "g", NUMBER: "3"})) is None
    assert gangs.gang_of(pod({NAME: "g", NUMBER: "3"}, {names.GANG: ""})) is None, "the extender counts none of such"
    membership = gangs.gang_of(pod({NAME: "g", NUMBER: "3"}, {names.GANG: "g"}))
    assert membership == Membership(name="g", minimum=3)
    assert gangs.gang_of(pod({NAME: "other", NUMBER: "3"}, {names.GANG: "g"})) == Membership(name="g")


def test_the_gate_is_found_among_others():
    assert gangs.is_gated(pod(gates=["other/gate", names.GANG]))
    assert not gangs.is_gated(pod(gates=["other/gate"]))


@pytest.mark.parametrize(("text", "number"), [("5", 5), ("-3", -3), ("+0", 0), (None, None)])
def test_a_place_in_the_queue_is_a_whole_number(text, number):
    assert gangs.queue_priority({names.QUEUE_PRIORITY: text} if text else {}) == number


@pytest.mark.parametrize("text", ["high", "1.5", "", "9999999999", "٩", "9" * 5000])
def test_what_is_no_place_in_the_queue(text):
    with pytest.raises(InvalidRequest) as error:
        gangs.queue_priority({names.QUEUE_PRIORITY: text})
    assert len(str(error.value)) < 300


def member(name, created, *, priority=0, queued=None):
    return Member(uid=name, name=name, created=created, priority=priority, queue_priority=queued)


def rank(members, priority, key):
    roster = Roster()
    for member in reversed(members):
        roster.update_member(None, member)
    return gang_rank(roster.counted[0], max(roster.priorities), priority, key)


def test_higher_priority_then_place_in_the_queue_then_age():
    old, new = member("old", "2026-01-01"), member("new", "2026-01-02")
    assert rank([old], None, "a") < rank([new], None, "b")
    assert rank([member("n", "2026-01-02", priority=1)], None, "b") < rank([old], 99, "a")
    assert rank([new], 1, "b") < rank([old], None, "a")
    assert rank([member("n", "2026-01-02", queued=2)], 0, "b") < rank([old], 1, "a"), "the pod's own word wins"
    assert rank([old, new], None, "a") < rank([new], None, "b"), "the oldest member counts"
