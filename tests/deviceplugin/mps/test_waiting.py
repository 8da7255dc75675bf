"""What the start of a container waits for: a card that MPS serves, or that is without it."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from cardwise.core.api import mps
from cardwise.core.api.mps import MpsState
from cardwise.core.values.quantity import MiB
from deviceplugin.grants.mpswait import MAX_WAIT_SECONDS, HasManager, MpsWait
from deviceplugin.grants.waitslots import WAIT_SLOTS
from tests.deviceplugin.conftest import P100, card_uuid, refused
from tests.deviceplugin.mps.managednode import HALF, LIMIT_ENV, OURS, bound, pipes, refusal_message, start

PATIENCE = 60  # real seconds

ILL = {
    "starting": (lambda world: world.cards[0].says(state=MpsState.STARTING), "is Starting, not Ready"),
    "fault": (lambda world: world.cards[0].says(state=MpsState.FAULT, reason="Xid 31"), "is Fault, not Ready: Xid 31"),
    "none": (lambda world: world.cards[0].says(state=MpsState.OFF), "is Off, not Ready"),
    "stale": (lambda world: world.cards[0].says(checked=world.rig.mps_clock.now() - 601), "has not checked GPU"),
    "low": (lambda world: world.cards[0].says(ceilings={card_uuid(0): MiB(512)}), "allows 512 MiB, and 8138 MiB"),
    "dead": (lambda world: world.cards[0].dies(), "takes no connection"),
    "damaged": (lambda world: (world.cards[0].home / mps.READY_FILE).write_text("{"), "does not serve GPU"),
    "unmanaged": (lambda world: world.end(), "no MPS manager runs on this node"),
}


@pytest.mark.parametrize("situation", ILL)
def test_nothing_starts_while_its_card_is_ill_and_the_other_card_goes_on(world, situation):
    harm, reason = ILL[situation]
    rig = world.rig.start()
    harm(world)
    pod = bound(rig, "a", [(0, 8138)])
    slot, message = refusal_message(rig, pod)
    assert reason in message
    if situation != "unmanaged":
        start(rig, bound(rig, "b", [(1, 8138)]))
    if situation == "unmanaged":
        world.begin()
    card = world.cards[0].runs()
    card.says(state=MpsState.READY, reason="", checked=rig.mps_clock.now(), ceilings={card_uuid(0): MiB(P100)})
    rig.kubelet.pre_start(slot)
    assert rig.env(slot)[LIMIT_ENV] == "0=8138M"


def test_who_waits_starts_as_soon_as_its_card_is_healed(world):
    rig = world.rig.start()
    world.cards[0].says(state=MpsState.STARTING)
    pod = bound(rig)
    slot = rig.kubelet.admit(pod, "c0")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(rig.kubelet.pre_start, slot)
        rig.clock.until_waiting()
        start(rig, bound(rig, "b", [(1, HALF)]))
        assert rig.spec(slot) is None
        world.cards[0].says(state=MpsState.READY)
        rig.clock.step()
        waiting.result()
    assert rig.env(slot)[LIMIT_ENV] == f"0={HALF}M"


def test_who_is_deleted_while_it_waits_is_granted_nothing(world):
    """Since 1.35 the kubelet ends the call with its pod."""
    rig = world.rig.start()
    world.cards[0].says(state=MpsState.STARTING)
    slot = rig.kubelet.admit(bound(rig), "c0")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(refused, lambda: rig.kubelet.pre_start(slot))
        rig.clock.until_waiting()
        rig.kubelet.plugin.active = False
        world.cards[0].says(state=MpsState.READY)
        rig.clock.step()
        assert "has abandoned" in waiting.result()
    assert rig.spec(slot) is None
    assert not rig.agent.grants.list_grants()


@pytest.mark.parametrize(("namespace", "card"), [("other", 1), ("other", 0), ("default", 1)])
def test_starts_of_a_namespace_on_a_card_leave_a_place_for_other_namespaces_and_cards(world, namespace, card):
    rig = world.rig.start()
    for mps_card in world.cards:
        mps_card.says(state=MpsState.STARTING)
    slots = [rig.kubelet.admit(bound(rig, f"tenant-{number}", [(0, 64)]), "c0") for number in range(WAIT_SLOTS)]
    other_slot = rig.kubelet.admit(bound(rig, "other", [(card, HALF)], namespace=namespace), "c0")
    rig.see()
    with ThreadPoolExecutor(WAIT_SLOTS + 1) as threads:
        starts = []
        for slot in slots:
            starts.append(threads.submit(refused, lambda slot=slot: rig.kubelet.pre_start(slot)))
            rig.clock.until_waiting(len(starts))
        other_start = threads.submit(refused, lambda: rig.kubelet.pre_start(other_slot))
        rig.clock.until_waiting(WAIT_SLOTS + 1)
        rig.clock.step()
        assert "is Starting" in starts[0].result(PATIENCE), "the start that has waited longest lost its place"
        rig.clock.until_waiting(WAIT_SLOTS)
        world.cards[card].says(state=MpsState.READY)
        rig.clock.step()
        assert other_start.result(PATIENCE) == ""
        rig.clock.advance(MAX_WAIT_SECONDS)
        assert [bool(start.result(PATIENCE)) for start in starts[1:]] == [card == 1] * (WAIT_SLOTS - 1)


def test_a_restart_waits_like_a_start(world):
    """And without the API server: what the pod wanted is on the node's disk."""
    rig = world.rig.start()
    slot = start(rig, bound(rig))
    world.cards[0].dies()
    rig.stop()
    rig.api.down = True
    rig.start()
    assert "takes no connection" in refused(lambda: rig.kubelet.pre_start(slot))
    world.cards[0].runs()
    rig.kubelet.pre_start(slot)
    assert rig.env(slot)[LIMIT_ENV] == f"0={HALF}M"


def test_after_a_reboot_specs_are_made_with_the_pipe_they_had(world):
    rig = world.rig.start()
    slot = start(rig, bound(rig))
    before = rig.spec(slot)
    rig.stop()
    for path in (rig.folder / "cdi").iterdir():
        path.unlink()
    rig.start()
    assert rig.spec(slot) == before


def test_mps_that_breaks_while_the_card_is_awaited_counts(world):
    """Room on the card came late; by then the daemon was gone."""
    rig = world.rig
    rig.start()
    first = bound(rig, "a", [(0, P100)])
    start(rig, first)
    rig.force_delete(first)
    second = bound(rig, "b", [(0, P100)])
    slot = rig.kubelet.admit(second, "c0")
    rig.see()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(refused, lambda: rig.kubelet.pre_start(slot))
        rig.clock.until_waiting()
        assert rig.agent.grants.grants_of_pod(first["metadata"]["uid"]), "the first pod's share is held"
        world.cards[0].dies()
        rig.runtime.kill(first["metadata"]["uid"])
        rig.clock.step()
        assert "takes no connection" in waiting.result()
    assert not rig.agent.grants.grants_of_pod(first["metadata"]["uid"])
    assert rig.spec(slot) is None


def test_a_pod_that_does_without_waits_until_mps_is_off(world):
    rig = world.rig.start()
    pod = bound(rig, isolation="none")
    slot, message = refusal_message(rig, pod)
    assert "is Ready, not Off" in message
    world.cards[0].dies().says(state=MpsState.OFF)
    rig.kubelet.pre_start(slot)
    assert rig.env(slot).keys().isdisjoint(OURS)
    assert pipes(rig, slot) == {}


@pytest.mark.parametrize("isolation", [None, "advisory", "none"])
def test_where_mps_cannot_run_a_pod_starts_without_it_also_without_the_manager(world, isolation):
    world.cards[0].says(state=MpsState.UNAVAILABLE, checked=0.0).dies()
    world.end()
    rig = world.rig.start()
    slot = start(rig, bound(rig, isolation=isolation))
    assert pipes(rig, slot) == {}
    assert rig.env(slot).keys().isdisjoint(OURS)


def test_where_mps_cannot_run_a_pod_that_requires_it_waits_with_the_reason(world):
    world.cards[0].says(state=MpsState.UNAVAILABLE, reason="driver 470: upgrade it").dies()
    rig = world.rig.start()
    slot, message = refusal_message(rig, bound(rig, isolation="mps"))
    assert "is Unavailable, not Ready: driver 470: upgrade it" in message
    world.cards[0].says(state=MpsState.READY, reason="").runs()
    rig.kubelet.pre_start(slot)
    assert LIMIT_ENV in rig.env(slot)


def test_several_cards_without_mps_whatever_the_reason(world):
    world.cards[0].says(state=MpsState.UNAVAILABLE).dies()
    world.cards[1].says(state=MpsState.OFF).dies()
    rig = world.rig.start()
    assert pipes(rig, start(rig, bound(rig, "a", [(0, 100), (1, 100)]))) == {}


def test_mps_that_comes_back_before_the_grant_is_delivered_counts(world, monkeypatch):
    """The manager has taken back that MPS is unavailable, and closes the card if it finds no pod."""
    world.cards[0].says(state=MpsState.UNAVAILABLE)
    rig = world.rig.start()
    confirm = MpsWait.confirm_ready

    def late(self, grant, kernel_obstacles):
        world.cards[0].says(state=MpsState.STARTING)
        confirm(self, grant, kernel_obstacles)

    monkeypatch.setattr(MpsWait, "confirm_ready", late)
    slot, message = refusal_message(rig, bound(rig))
    assert "is Starting, not Ready" in message
    monkeypatch.undo()
    world.cards[0].says(state=MpsState.READY)
    rig.kubelet.pre_start(slot)
    assert LIMIT_ENV in rig.env(slot)


def test_a_node_without_manager(idle_rig):
    rig = idle_rig.start()
    for name, isolation in (("a", None), ("b", "advisory"), ("c", "none")):
        slot = start(rig, bound(rig, name, [(0, 100)], isolation=isolation))
        assert rig.env(slot).keys().isdisjoint(OURS)
        assert pipes(rig, slot) == {}
    _, message = refusal_message(rig, bound(rig, "d", [(0, 100)], isolation="mps"))
    assert "requires MPS (cardwise.dev/isolation), which this node does not have" in message
    _, message = refusal_message(rig, bound(rig, "e", [(0, 100)], isolation="on"))
    assert "'on' is not a tier of isolation; write one of: none, advisory, mps, kernel; create the pod again" in message


def test_a_node_that_is_to_have_no_mps_takes_no_notice_of_one(world):
    world.rig.mps = HasManager.NEVER
    rig = world.rig.start()
    assert pipes(rig, start(rig, bound(rig, isolation="advisory"))) == {}
    _, message = refusal_message(rig, bound(rig, "b", [(1, 100)], isolation="mps"))
    assert "--mps=never" in message


def test_on_a_card_that_a_former_manager_left_closed_nothing_starts_without_mps(world):
    world.end()
    (world.cards[0].home / mps.MODES_FILE).write_text(json.dumps({world.cards[0].uuid: "DEFAULT"}))
    world.rig.mps = HasManager.NEVER
    rig = world.rig.start()
    _, message = refusal_message(rig, bound(rig))
    assert mps.CLOSED_BY_FORMER_MANAGER in message
    assert pipes(rig, start(rig, bound(rig, "b", [(1, 100)]))) == {}


def test_a_node_that_must_have_it_waits_for_a_manager_that_never_came(idle_rig):
    idle_rig.mps = HasManager.ALWAYS
    rig = idle_rig.start()
    _, message = refusal_message(rig, bound(rig))
    assert "no MPS manager runs on this node" in message


def test_after_a_reboot_nobody_gets_past_a_manager_that_is_not_up_yet(world):
    rig = world.rig.start()
    slot = start(rig, bound(rig))
    rig.stop()
    world.close()
    world.root.rename(world.root.with_name("before"))  # /run is empty
    rig.start()
    assert "no MPS manager runs on this node" in refused(lambda: rig.kubelet.pre_start(slot))
    rig.stop()
    rig.mps = HasManager.NEVER  # it was taken off the node
    rig.start()
    rig.kubelet.pre_start(slot)
    assert pipes(rig, slot) == {}
    rig.stop()
    rig.mps = HasManager.SEEN
    rig.start()
    rig.kubelet.pre_start(slot)


def test_a_container_starts_again_with_its_limit_after_the_reset_of_its_card(world):
    rig = world.rig.start()
    slot = start(rig, pod := bound(rig, "a", [(0, 8138)]))
    before, held = rig.env(slot), rig.agent.grants.list_grants()
    world.cards[0].dies().says(state=MpsState.DOWN)
    rig.cards[0] |= {"healthy": False, "reason": "Xid 95"}
    rig.write_cards()
    rig.settle()
    assert "Xid 95" in refused(lambda: rig.kubelet.pre_start(slot))
    assert rig.agent.grants.list_grants() == held, "the share stays with its pod"
    start(rig, bound(rig, "b", [(1, 8138)]))
    rig.cards[0] |= {"healthy": True, "reason": ""}
    rig.write_cards()
    rig.settle()
    assert "is Down, not Ready" in refused(lambda: rig.kubelet.pre_start(slot)), "until its daemon is there again"
    world.cards[0].runs().says(state=MpsState.READY)
    rig.kubelet.pre_start(slot)
    assert rig.env(slot) == before
    assert before[LIMIT_ENV] == "0=8138M"
    assert [grant.pod_uid for grant in rig.agent.grants.list_grants()].count(pod["metadata"]["uid"]) == 1
