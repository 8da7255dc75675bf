"""What the share agent of a pod gets to see of MPS, and whom it waits for."""

import pytest

from cardwise.core.api import mps, names, shareagent
from cardwise.core.api.mps import MpsState
from deviceplugin.grants.mpswait import HasManager
from mps.agent import podshares
from tests.deviceplugin.conftest import PODS, refused
from tests.deviceplugin.mps.managednode import HALF, OURS, bound, pipes, refusal_message, start


def test_the_agent_sees_the_cards_of_its_pod_and_no_lock(world):
    rig = world.rig.start()
    world.cards[0].says(state=MpsState.STARTING)  # it waits by itself
    pod = bound(rig, "a", [(0, 1000)], [(0, 3000)], core=20, agent=True)
    slot = start(rig, pod, shareagent.CONTAINER_NAME)
    home = world.cards[0].home
    inside = f"{shareagent.MPS_ROOT}/{home.name}"
    whole, log, pipe = rig.edits(slot)["mounts"]
    assert (whole["hostPath"], whole["containerPath"]) == (str(home), inside)
    assert "ro" in whole["options"]
    assert (log["type"], log["containerPath"]) == ("tmpfs", f"{inside}/log"), "it names neighbours"
    assert (pipe["type"], pipe["containerPath"]) == ("tmpfs", f"{inside}/pipe"), "its daemon can be kept down by these"
    assert not rig.edits(slot).get("deviceNodes")
    env = rig.env(slot)
    assert env.keys().isdisjoint(OURS)
    assert env["NVIDIA_VISIBLE_DEVICES"] == "void"
    settings = podshares.parse_settings(env)
    assert settings.waits
    assert {key: shares[0].mem for key, shares in settings.shares.items()} == {"0": 1000, "1": 3000}
    assert settings.shares["0"][0].core == 20


def test_the_agent_beside_shares_of_two_cards(world):
    rig = world.rig.start()
    slot = start(rig, bound(rig, "a", [(0, 1000)], [(1, 1000)], agent=True), shareagent.CONTAINER_NAME)
    assert {str(card.home) for card in world.cards} < pipes(rig, slot).keys()


@pytest.mark.parametrize("isolation", ["none", "advisory"])
def test_the_agent_of_a_pod_without_mps_waits_for_nothing(world, idle_rig, isolation):
    if isolation == "advisory":
        world.rig.mps = HasManager.NEVER
    rig = world.rig.start()
    slot = start(rig, bound(rig, isolation=isolation, agent=True), shareagent.CONTAINER_NAME)
    assert pipes(rig, slot) == {}
    settings = podshares.parse_settings(rig.env(slot))
    assert not settings.waits
    assert settings.shares["0"][0].mem == HALF


def test_the_agent_beside_a_container_that_can_only_go_without(world):
    rig = world.rig.start()
    slot = start(rig, bound(rig, "a", [(0, 100), (1, 100)], agent=True), shareagent.CONTAINER_NAME)
    assert not podshares.parse_settings(rig.env(slot)).waits
    world.one_for_all()
    slot = start(rig, bound(rig, "b", [(0, 100), (1, 100)], agent=True), shareagent.CONTAINER_NAME)
    assert podshares.parse_settings(rig.env(slot)).waits
    assert str(world.root / "node") in pipes(rig, slot)


def test_an_agent_is_refused_while_there_is_nothing_to_look_at(world):
    rig = world.rig.start()
    (world.cards[0].home / mps.READY_FILE).unlink()
    _, message = refusal_message(rig, bound(rig, agent=True), shareagent.CONTAINER_NAME)
    assert "does not serve GPU" in message


def test_the_agent_restarts_without_the_api_server(world):
    rig = world.rig.start()
    slot = start(rig, bound(rig, agent=True), shareagent.CONTAINER_NAME)
    before = rig.spec(slot)
    rig.stop()
    rig.api.down = True
    rig.start()
    rig.kubelet.pre_start(slot)
    assert rig.spec(slot) == before


def test_the_agent_holds_nothing_by_itself(world):
    rig = world.rig.start()
    pod = bound(rig, "a", [(0, HALF)], agent=True)
    start(rig, pod, shareagent.CONTAINER_NAME)
    start(rig, pod)
    assert rig.held_on_disk(0) == HALF
    start(rig, bound(rig, "b", [(0, HALF)]))


def test_a_user_cannot_call_a_container_without_share_the_agent_of_a_pod_without_card(world):
    rig = world.rig.start()
    pod = bound(rig, agent=True)
    pod["metadata"]["annotations"][names.ASSIGNMENT] = '{"v":1,"containers":{},"devices":{"0":[["rdma","x"]]}}'
    rig.api.write_object(PODS, pod)
    rig.settle()
    assert "no GPU or device" in refused(lambda: start(rig, pod, shareagent.CONTAINER_NAME))
