"""MPS in placement: the reports of nodes, the requests of pods, and the state after a restart of the extender."""

import msgspec
import pytest

from cardwise.core.api import names, request
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.refusals import Refusal
from extender.cache.reservations import Assumed
from extender.gangs.gangtypes import GangSettings, PlannedNode
from extender.placing.placing import PlacementRequest
from extender.records import wire
from extender.records.podref import PodRef
from extender.state import State
from tests.build import asking, extended_resource, reported_share
from tests.extender.gangcluster import member
from tests.extender.nominationcluster import World as Ahead
from tests.extender.states import as_card, as_pod, bound, make_state
from tests.fakes.clock import FakeClock

ROOMY = 4000  # MiB, of which every card has some


@pytest.fixture
def world(clock):
    return make_state(clock)


def report_mps(world: State, *indices: int, node: str = "n1", reports: list | None = None, **mps) -> None:
    """Report these MPS states of the node's cards; None for a card without a manager."""
    world.set_node(node)
    for index in indices:
        card = extended_resource(index, node=node, reported=reports)
        if mps:
            mps_status = {
                "mode": "card",
                "state": "Ready",
                "reason": "",
                "multiUser": True,
                "ceilingMiB": 1,
                "maxClients": 48,
            }
            card["status"]["mps"] = mps_status | mps | {"lastTransitionTime": "2026-11-21T10:00:00Z"}
        world.set_card(*as_card(card))


def saying(pod: dict, isolation: str = "", user: int | None = None) -> dict:
    if isolation:
        pod["metadata"]["annotations"][names.ISOLATION] = isolation
    if user is not None:
        pod["spec"]["securityContext"] = {"runAsUser": user}
    return pod


def runs(
    world: State, name: str, index: int = 0, *, isolation: str = "", user: int | None = None, mem: int = 1000
) -> None:
    """Let such a pod hold a share of the card."""
    world.set_pod(as_pod(saying(bound(name, mem, index), isolation, user)))


def place(world: State, name: str, isolation: str = "", user: int | None = None, **asks: int):
    """The card that filter chooses for such a pod on node n1, or the refusal."""
    pod_request = request.parse(saying(asking(name, **(asks or {"gpu_mem": ROOMY})), isolation, user))
    placement = world.plan_pod(PlacementRequest(PodRef(f"uid-{name}", "default", name), pod_request, ["n1"], "binpack"))
    if isinstance(placement, Unplaceable):
        return placement.refusals["n1"]
    assert isinstance(placement, Placement)
    return placement.assignment.indices()


def test_only_a_ready_card_gets_pods_and_the_others_wait_with_a_reason(world):
    report_mps(world, 0, state="Down")
    report_mps(world, 1, state="Ready")
    assert place(world, "a", "advisory") == [1]
    assert place(world, "b", "none", gpu_mem=ROOMY) is Refusal.MPS_MIXED
    for bad in ("Starting", "Fault", "Draining", "Down", "Unheard"):
        report_mps(world, 0, 1, state=bad)
        for isolation in ("", "advisory", "mps", "none"):
            assert place(world, "c", isolation) is Refusal.MPS_DOWN


def test_a_card_where_mps_cannot_run_is_open_to_all_but_pods_that_require_it(world):
    report_mps(world, 0, state="Unavailable")
    report_mps(world, 1, state="Down")
    assert place(world, "a", "mps") in (Refusal.MPS_MISSING, Refusal.MPS_DOWN)
    runs(world, "none", isolation="none", mem=100)
    runs(world, "advisory", isolation="advisory", user=1000, mem=100)
    for isolation, user in (("", 0), ("none", None), ("advisory", 2000)):
        assert place(world, "b", isolation, user, gpu_mem=100) == [0], (
            "pods with and without MPS, and of any user, together"
        )
    report_mps(world, 1, state="Unavailable")
    assert place(world, "c", "mps") is Refusal.MPS_MISSING
    assert place(world, "d", gpu_mem=200, gpu_count=2) == [0, 1], "several in one container too"


def report_tier(world: State, index: int, memory: str, node: str = "n1") -> None:
    """Report this memory tier of the card, without an MPS manager."""
    world.set_node(node)
    card = extended_resource(index, node=node)
    card["status"]["isolation"] = {"memory": memory, "memoryReason": "", "compute": "none", "computeReason": ""}
    world.set_card(*as_card(card))


def test_the_reported_tier_decides_which_demands_a_card_meets(world):
    report_tier(world, 0, "advisory")
    assert place(world, "a", "kernel") is Refusal.KERNEL_MISSING
    assert place(world, "b", "mps") is Refusal.MPS_MISSING
    report_tier(world, 0, "kernel")
    for demand in ("none", "advisory", "mps", "kernel"):
        assert place(world, "c", demand) == [0]


def test_a_pod_that_demands_the_drivers_limit_is_tried_again_when_a_card_has_it(world, clock):
    report_tier(world, 0, "advisory")
    assert place(world, "waits", "kernel") is Refusal.KERNEL_MISSING
    clock.advance(5)
    world.next_requeue_node()
    clock.advance(5)
    report_tier(world, 0, "kernel")
    assert world.next_requeue_node() == "n1"


def test_bind_refuses_a_card_that_has_lost_the_demanded_tier(world):
    report_tier(world, 0, "kernel")
    assert place(world, "a", "kernel") == [0]
    report_tier(world, 0, "advisory")
    pod_request = request.parse(saying(asking("a", gpu_mem=ROOMY), "kernel"))
    begun = world.assume(PodRef("uid-a", "default", "a"), pod_request, "n1", "binpack", epoch=0)
    assert begun is Refusal.KERNEL_MISSING


def test_waiting_pods_are_woken_when_a_card_is_ready(world, clock):
    report_mps(world, 0, state="Down")
    place(world, "waits")
    clock.advance(5)
    world.next_requeue_node()
    clock.advance(5)
    report_mps(world, 0, state="Down", reason="the daemon does not start", ceilingMiB=512)
    assert world.next_requeue_node() is None, "only another reason: nobody fits for that"
    report_mps(world, 0, state="Ready")
    assert world.next_requeue_node() == "n1"


def test_users_of_pods(world):
    report_mps(world, 0, multiUser=False)
    runs(world, "image")
    assert place(world, "a") == [0], "the image's user is taken to be the same in all"
    assert place(world, "b", user=0) is Refusal.MPS_USER
    mixed = asking("m", gpu_mem=1000)
    mixed["spec"]["containers"] *= 2
    mixed["spec"]["containers"][1] = mixed["spec"]["containers"][1] | {"securityContext": {"runAsUser": 7}}
    report_mps(world, 1, multiUser=False)
    placement = world.plan_pod(
        PlacementRequest(PodRef("uid-m", "default", "m"), request.parse(mixed), ["n1"], "binpack")
    )
    assert isinstance(placement, Unplaceable), "its own containers would wait for each other"
    assert placement.refusals == {"n1": Refusal.MPS_USER}
    sidecar = {"name": "log", "image": "i", "securityContext": {"runAsUser": 7}}
    mixed["spec"]["containers"][1] = sidecar
    assert isinstance(
        world.plan_pod(PlacementRequest(PodRef("uid-m", "default", "m"), request.parse(mixed), ["n1"], "binpack")),
        Placement,
    )


def test_a_card_that_is_kept_for_a_nominated_pod_is_kept_for_its_user(world):
    report_mps(world, 0, multiUser=False)
    refused = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
    pod = saying(asking("p", gpu_mem=1000), user=7)
    pod["status"] = {"phase": "Pending", "nominatedNodeName": "n1", "conditions": refused}
    world.set_pod(as_pod(pod))
    assert place(world, "image") is Refusal.MPS_USER, "the pod could not follow it onto the card"
    assert place(world, "a", user=7) == [0]


def test_a_pod_with_users_of_its_own_is_nobodys_companion():
    """With `hostUsers: false`, its user ID 1000 is a different user on the node than in other pods."""

    def own(pod):
        pod["spec"]["hostUsers"] = False
        return pod

    def planned(isolation, **mps_fields):
        fresh = make_state(FakeClock())
        report_mps(fresh, 0, **mps_fields)
        pod_request = request.parse(own(saying(asking("a", gpu_mem=1000), isolation, 1000)))
        return fresh.plan_pod(PlacementRequest(PodRef("uid-a", "default", "a"), pod_request, ["n1"], "binpack"))

    refused = planned("mps", multiUser=False)
    assert isinstance(refused, Unplaceable)
    assert refused.refusals == {"n1": Refusal.MPS_USER}
    assert isinstance(planned("none", multiUser=False), Placement), "without MPS nobody asks"
    assert isinstance(planned("mps", multiUser=True), Placement)
    for user in (None, 1000):  # one that was bound all the same
        again = make_state(FakeClock())
        report_mps(again, 0, multiUser=False)
        again.set_pod(as_pod(own(saying(bound("own", 1000, 0), "mps", user))))
        assert place(again, "d", "mps", user=user) is Refusal.MPS_USER


def test_a_restart_reads_isolation_and_users_from_the_pods(clock):
    for order in (0, 1):
        again = make_state(clock)
        steps = [
            lambda again=again: report_mps(again, 0, multiUser=False),
            lambda again=again: runs(again, "a", isolation="mps", user=1000),
        ]
        for step in steps[:: -1 if order else 1]:
            step()
        assert place(again, "b", "none") is Refusal.MPS_MIXED
        assert place(again, "c", "advisory", user=1) is Refusal.MPS_USER
        assert place(again, "d", "advisory", user=1000) == [0]


def test_after_a_restart_no_pod_joins_shares_that_only_the_node_reports(world):
    report_mps(world, 0, reports=[reported_share("uid-gone", 1000)], state="Ready")
    for isolation in ("none", "advisory"):
        assert place(world, "a", isolation) is Refusal.MPS_MIXED
    report_mps(world, 0, state="Ready")
    assert place(world, "a", "none") == [0]


def test_a_pod_that_vanished_keeps_its_kind_while_it_may_run(world):
    report_mps(world, 0)
    report_mps(world, 0, state="Ready")
    runs(world, "a", isolation="advisory")
    world.remove_pod(as_pod(saying(bound("a", 1000, 0), "advisory")))
    assert place(world, "b", "none") is Refusal.MPS_MIXED
    assert place(world, "c", "advisory") == [0]


def test_bind_chooses_another_card_when_the_planned_one_is_no_longer_ready(world):
    report_mps(world, 0, 1, state="Ready")
    assert place(world, "a") == [0]
    report_mps(world, 0, state="Fault")
    pod_request = request.parse(asking("a", gpu_mem=ROOMY))
    begun = world.assume(PodRef("uid-a", "default", "a"), pod_request, "n1", "binpack", epoch=0)
    assert isinstance(begun, Assumed)
    assert begun.assignment.indices() == [1]
    report_mps(world, 0, 1, state="Fault")
    pod_request = request.parse(asking("b", gpu_mem=ROOMY))
    assert world.assume(PodRef("uid-b", "default", "b"), pod_request, "n1", "binpack", epoch=0) is Refusal.MPS_DOWN


def test_bind_keeps_the_planned_card_though_another_is_fuller_by_now(world):
    report_mps(world, 0, 1, state="Ready")
    assert place(world, "a", "advisory") == [0]
    runs(world, "b", 1, isolation="advisory", mem=2 * ROOMY)
    pod_request = request.parse(saying(asking("a", gpu_mem=ROOMY), "advisory"))
    begun = world.assume(PodRef("uid-a", "default", "a"), pod_request, "n1", "binpack", epoch=0)
    assert isinstance(begun, Assumed)
    assert begun.assignment.indices() == [0]


def test_bind_refuses_several_cards_that_have_a_daemon_each_by_now(world):
    report_mps(world, 0, 1, mode="node")
    assert place(world, "a", "advisory", gpu_mem=2000, gpu_count=2) == [0, 1]
    report_mps(world, 0, 1, mode="card")
    pod_request = request.parse(saying(asking("a", gpu_mem=2000, gpu_count=2), "advisory"))
    begun = world.assume(PodRef("uid-a", "default", "a"), pod_request, "n1", "binpack", epoch=0)
    assert begun is Refusal.MPS_SEVERAL


def test_a_planned_pod_holds_its_card_as_its_user(world):
    report_mps(world, 0, multiUser=False)
    assert place(world, "a", "advisory", user=1) == [0]
    assert place(world, "b", "advisory", user=2) is Refusal.MPS_USER
    assert place(world, "c", "advisory", user=1) == [0]


def test_a_nominated_pod_has_its_user_too():
    world = Ahead()
    report_mps(world.state, 0, multiUser=False)
    world.node("n1", cards=0)  # with cpu, and without more cards
    for name, user in (("a", 1), ("b", 2), ("c", 1)):
        world.create(name, 1000, securityContext={"runAsUser": user})
    assert world.nominate_all().keys() == {"a", "c"}


def test_a_security_context_that_is_none_is_no_call(world):
    bad = asking("a", gpu_mem=1000)
    bad["spec"]["securityContext"] = {"runAsUser": "root"}
    with pytest.raises(wire.Malformed):
        wire.decode_filter_args(msgspec.json.encode({"Pod": bad, "NodeNames": ["n1"]}))


def test_a_gang_is_planned_as_its_members_may_meet(clock):
    world = State(clock=clock, gang_settings=GangSettings(max_waiting=3))
    report_mps(world, 0, 1, state="Ready")
    for name, isolation in (("a", "none"), ("b", "advisory"), ("c", "none")):
        pod = member(name, gated=False, gpu_mem=1000, annotations={names.ISOLATION: isolation})
        world.set_pod(as_pod(pod))
    for name in "abc":
        assert world.gangs.filter_member(f"uid-{name}", ["n1"]) == PlannedNode("n1")
    with world.view() as ledger:
        cards = {held.name: held.assignment.indices() for held in ledger.holdings("n1")}
    assert cards["a"] == cards["c"] != cards["b"]
