"""MPS where pods are placed: what nodes say of it, what pods say of it, and what a restart of the extender knows."""

import msgspec
import pytest

from cardwise.core.api import names, request
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.refusals import Refusal
from extender.api import verbs
from extender.api.verbs import Preferences
from extender.cache.placing import Ask
from extender.cache.reservations import Begun
from extender.gangs.gangwords import Settings
from extender.records import wire
from extender.records.podref import PodRef
from extender.state import State
from tests.extender.gangworlds import member
from tests.extender.worlds import as_card, as_pod, asking, bound, held, resource, state
from tests.fakes.clock import FakeClock

ROOMY = 4000  # MiB, of which every card has some


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def world(clock):
    return state(clock)


def tell(world: State, *indices: int, node: str = "n1", reports: list | None = None, **mps) -> None:
    """The node's manager says this of the cards; of MPS nothing where there is nothing to say."""
    world.set_node(node)
    for index in indices:
        made = resource(index, node=node, held=reports)
        if mps:
            said = {
                "mode": "card",
                "state": "Ready",
                "reason": "",
                "multiUser": True,
                "ceilingMiB": 1,
                "maxClients": 48,
            }
            made["status"]["mps"] = said | mps | {"lastChange": "2026-11-21T10:00:00Z"}
        world.set_card(*as_card(made))


def saying(made: dict, mode: str = "", user: int | None = None) -> dict:
    if mode:
        made["metadata"]["annotations"][names.MPS] = mode
    if user is not None:
        made["spec"]["securityContext"] = {"runAsUser": user}
    return made


def runs(world: State, name: str, index: int = 0, *, mode: str = "", user: int | None = None, mem: int = 1000) -> None:
    """Such a pod holds a share of the card."""
    world.set_pod(as_pod(saying(bound(name, mem, index), mode, user)))


def place(world: State, name: str, mode: str = "", user: int | None = None, **asks: int):
    """The card that filter finds for such a pod on node n1, or why it finds none."""
    asked = request.parse(saying(asking(name, **(asks or {"gpu_mem": ROOMY})), mode, user))
    found = world.plan(Ask(PodRef(f"uid-{name}", "default", name), asked, ["n1"], "binpack"))
    if isinstance(found, Unplaceable):
        return found.refusals["n1"]
    assert isinstance(found, Placement)
    return found.assignment.indices()


def test_only_a_ready_card_gets_pods_and_the_others_wait_with_a_reason(world):
    tell(world, 0, state="Down")
    tell(world, 1, state="Ready")
    assert place(world, "a", "preferred") == [1]
    assert place(world, "b", "off", gpu_mem=ROOMY) is Refusal.MPS_MIXED
    for bad in ("Starting", "Fault", "Draining", "Down", "Unheard"):
        tell(world, 0, 1, state=bad)
        for mode in ("", "preferred", "required", "off"):
            assert place(world, "c", mode) is Refusal.MPS_DOWN


def test_waiting_pods_are_woken_when_a_card_is_ready(world, clock):
    tell(world, 0, state="Down")
    place(world, "waits")
    clock.advance(5)
    world.touch_due()
    clock.advance(5)
    tell(world, 0, state="Down", reason="the daemon does not start", ceilingMiB=512)
    assert world.touch_due() is None, "only another reason: nobody fits for that"
    tell(world, 0, state="Ready")
    assert world.touch_due() == "n1"


def test_a_node_without_a_manager_takes_all_but_who_requires_mps(world):
    tell(world, 0)
    runs(world, "off", mode="off", user=5)
    runs(world, "on", mode="preferred", user=6)
    assert place(world, "a", "preferred") == [0]
    assert place(world, "b", "off") == [0]
    assert place(world, "c", "required") is Refusal.MPS_MISSING
    tell(world, 0, state="Ready")
    assert place(world, "d", "required") is Refusal.MPS_MIXED


@pytest.mark.parametrize(
    ("holds", "comes", "fits"),
    [
        ("off", "off", True),
        ("", "required", True),
        ("preferred", "", True),
        ("off", "preferred", False),
        ("off", "", False),
        ("required", "off", False),
        ("", "off", False),
    ],
)
@pytest.mark.parametrize("now", ["Ready", "Off"])
def test_pods_with_and_without_mps_never_share_a_card(world, holds, comes, fits, now):
    tell(world, 0, state=now)
    runs(world, "holds", mode=holds)
    assert place(world, "comes", comes) == ([0] if fits else Refusal.MPS_MIXED)
    world.remove_pod(as_pod(saying(bound("holds", 1000, 0, containers="terminated", deleting=True), holds)))
    assert place(world, "comes", comes) == [0]


def test_of_one_daemon_for_the_node_the_whole_node_is_with_it_or_without(world):
    tell(world, 0, 1, mode="node")
    runs(world, "off", mode="off")
    assert place(world, "a", "preferred") is Refusal.MPS_MIXED
    assert place(world, "b", "off", gpu_mem=16276) == [1]


def test_several_cards_go_through_one_daemon_or_none(world):
    tell(world, 0, 1)
    two = {"gpu_mem": 2000, "gpu_count": 2}
    assert place(world, "a", "required", **two) is Refusal.MPS_MISSING
    assert place(world, "b", "preferred", **two) == [0, 1]
    world.remove_pod(as_pod(saying(asking("b", gpu_mem=1), "preferred")))
    tell(world, 0, 1, mode="card")
    assert place(world, "c", "required", **two) is Refusal.MPS_SEVERAL
    assert place(world, "d", "preferred", **two) is Refusal.MPS_SEVERAL
    assert place(world, "e", "preferred", whole_gpu=2) is Refusal.MPS_SEVERAL
    assert place(world, "f", "preferred", whole_gpu=1) == [0]
    assert place(world, "g", "off", gpu_mem=ROOMY) == [1]
    tell(world, 0, 1, node="n2", mode="node")
    asked = request.parse(saying(asking("h", **two), "required"))
    found = world.plan(Ask(PodRef("uid-h", "default", "h"), asked, ["n1", "n2"], "binpack"))
    assert isinstance(found, Placement)
    assert found.node == "n2"


def test_where_one_server_serves_one_user_others_go_elsewhere(world):
    tell(world, 0, multiUser=False)
    tell(world, 1, multiUser=True)
    runs(world, "a", 0, user=1000)
    runs(world, "b", 1, user=1000)
    assert place(world, "same", user=1000) == [0]
    assert place(world, "other", user=1001) == [1]
    tell(world, 1, multiUser=False)
    runs(world, "c", 1, user=1001)
    assert place(world, "neither", user=1002, gpu_mem=1) is Refusal.MPS_USER


def test_who_runs_as_whom(world):
    tell(world, 0, multiUser=False)
    runs(world, "image")
    assert place(world, "a") == [0], "the image's user is taken to be the same in all"
    assert place(world, "b", user=0) is Refusal.MPS_USER
    mixed = asking("m", gpu_mem=1000)
    mixed["spec"]["containers"] *= 2
    mixed["spec"]["containers"][1] = mixed["spec"]["containers"][1] | {"securityContext": {"runAsUser": 7}}
    tell(world, 1, multiUser=False)
    found = world.plan(Ask(PodRef("uid-m", "default", "m"), request.parse(mixed), ["n1"], "binpack"))
    assert isinstance(found, Unplaceable), "its own containers would wait for each other"
    assert found.refusals == {"n1": Refusal.MPS_USER}
    sidecar = {"name": "log", "image": "i", "securityContext": {"runAsUser": 7}}
    mixed["spec"]["containers"][1] = sidecar
    assert isinstance(
        world.plan(Ask(PodRef("uid-m", "default", "m"), request.parse(mixed), ["n1"], "binpack")), Placement
    )


def test_a_pod_with_users_of_its_own_is_nobodys_companion():
    """With `hostUsers: false` its 1000 is another user on the node than everybody else's."""

    def own(made):
        made["spec"]["hostUsers"] = False
        return made

    def planned(mode, **told):
        fresh = state(FakeClock())
        tell(fresh, 0, **told)
        asked = request.parse(own(saying(asking("a", gpu_mem=1000), mode, 1000)))
        return fresh.plan(Ask(PodRef("uid-a", "default", "a"), asked, ["n1"], "binpack"))

    refused = planned("required", multiUser=False)
    assert isinstance(refused, Unplaceable)
    assert refused.refusals == {"n1": Refusal.MPS_USER}
    assert isinstance(planned("off", multiUser=False), Placement), "without MPS nobody asks"
    assert isinstance(planned("required", multiUser=True), Placement)
    for user in (None, 1000):  # one that was bound all the same
        again = state(FakeClock())
        tell(again, 0, multiUser=False)
        again.set_pod(as_pod(own(saying(bound("own", 1000, 0), "required", user))))
        assert place(again, "d", "required", user=user) is Refusal.MPS_USER


def test_without_mps_users_do_not_matter(world):
    tell(world, 0, state="Off", multiUser=False)
    runs(world, "a", mode="off", user=1)
    assert place(world, "b", "off", user=2) == [0]


def test_a_restart_knows_from_the_pods_who_is_with_mps_and_as_whom(clock):
    for order in (0, 1):
        again = state(clock)
        steps = [
            lambda again=again: tell(again, 0, multiUser=False),
            lambda again=again: runs(again, "a", mode="required", user=1000),
        ]
        for step in steps[:: -1 if order else 1]:
            step()
        assert place(again, "b", "off") is Refusal.MPS_MIXED
        assert place(again, "c", "preferred", user=1) is Refusal.MPS_USER
        assert place(again, "d", "preferred", user=1000) == [0]


def test_after_a_restart_nobody_joins_what_only_the_node_still_tells_of(world):
    tell(world, 0, reports=[held("uid-gone", 1000)], state="Ready")
    for mode in ("off", "preferred"):
        assert place(world, "a", mode) is Refusal.MPS_MIXED
    tell(world, 0, state="Ready")
    assert place(world, "a", "off") == [0]


def test_a_pod_that_vanished_keeps_its_kind_while_it_may_run(world):
    tell(world, 0)
    tell(world, 0, state="Ready")
    runs(world, "a", mode="preferred")
    world.remove_pod(as_pod(saying(bound("a", 1000, 0), "preferred")))
    assert place(world, "b", "off") is Refusal.MPS_MIXED
    assert place(world, "c", "preferred") == [0]


def test_bind_chooses_anew_when_the_planned_card_is_not_ready_any_more(world):
    tell(world, 0, 1, state="Ready")
    assert place(world, "a") == [0]
    tell(world, 0, state="Fault")
    asked = request.parse(asking("a", gpu_mem=ROOMY))
    begun = world.begin_bind(PodRef("uid-a", "default", "a"), asked, "n1", "binpack")
    assert isinstance(begun, Begun)
    assert begun.assignment.indices() == [1]
    tell(world, 0, 1, state="Fault")
    asked = request.parse(asking("b", gpu_mem=ROOMY))
    assert world.begin_bind(PodRef("uid-b", "default", "b"), asked, "n1", "binpack") is Refusal.MPS_DOWN


@pytest.mark.parametrize(
    ("setting", "told", "most"), [(None, {"maxClients": 2}, 2), (None, {"maxClients": 60}, 60), (None, {}, 48),
                                  (3, {"maxClients": 60}, 3), (60, {"maxClients": 2}, 2), (60, {"maxClients": 0}, 60)],
)  # fmt: skip
def test_as_many_share_a_card_as_its_mps_and_the_setting_allow(clock, setting, told, most):
    made = State(clock=clock, max_clients=setting)
    tell(made, 0, **told)
    for i in range(most):
        runs(made, f"p{i}", mem=1)
    assert place(made, "one-more", gpu_mem=1) is Refusal.TOO_MANY_CLIENTS
    made.remove_pod(as_pod(bound("p0", 1, 0, containers="terminated", deleting=True)))
    assert place(made, "one-more", gpu_mem=1) == [0]


def test_what_the_scheduler_reads_is_the_constant_text(world):
    tell(world, 0, state="Down", reason="the control program is missing")
    body = wire.encode({"Pod": asking("a", gpu_mem=1000), "NodeNames": ["n1"]})
    args = wire.filter_args(body)
    answer = verbs.filter_nodes(world, Preferences(policy="binpack", one_best_node=True), args)
    assert answer.failed_and_unresolvable_nodes == {"n1": "MPS is not ready on the GPU cards that would do"}


def test_a_security_context_that_is_none_is_no_call(world):
    bad = asking("a", gpu_mem=1000)
    bad["spec"]["securityContext"] = {"runAsUser": "root"}
    with pytest.raises(wire.Malformed):
        wire.filter_args(msgspec.json.encode({"Pod": bad, "NodeNames": ["n1"]}))


def test_a_gang_is_planned_as_its_members_may_meet(clock):
    world = State(clock=clock, of_gangs=Settings(max_waiting=3))
    tell(world, 0, 1, state="Ready")
    for name, mode in (("a", "off"), ("b", "preferred"), ("c", "off")):
        made = member(name, gated=False, gpu_mem=1000, annotations={names.MPS: mode})
        world.set_pod(as_pod(made))
    for name in "abc":
        assert world.gangs.filter(f"uid-{name}", ["n1"]) == "n1"
    with world.view() as ledger:
        cards = {held.name: held.assignment.indices() for held in ledger.holdings("n1")}
    assert cards["a"] == cards["c"] != cards["b"]
