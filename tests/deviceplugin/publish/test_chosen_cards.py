"""Which cards of a node are Cardwise's: not those of NVIDIA's plugin, and those that --gpus names."""

import grpc

from cardwise.core.api import names
from tests.deviceplugin.conftest import (
    P100,
    Rig,
    card_uuid,
    health,
    offers,
    refusal,
)


class TestNvidiasPlugin:
    def serve(self, rig: Rig, count: str | None) -> None:
        rig.edit_node(status={"capacity": {names.NVIDIA_GPU: count}})

    def test_shares_that_it_offers_under_another_name_count_too(self, rig):
        rig.edit_node(status={"capacity": {f"{names.NVIDIA_GPU}.shared": "20"}})
        rig.settle()
        assert health(rig) == ["Unhealthy", "Unhealthy"]

    def test_while_it_serves_the_node_nothing_is_shared(self, rig):
        running = rig.run(rig.bind("running", [(0, 100)]))
        self.serve(rig, "2")
        rig.settle()
        assert health(rig) == ["Unhealthy", "Unhealthy"]
        reason = (
            "NVIDIA's device plugin serves this node (nvidia.com/gpu: 2): stop it there, or set --gpus to the GPUs "
            "that Cardwise may share"
        )
        assert rig.status(0)["reason"] == rig.status(1)["reason"] == reason
        assert rig.events("NvidiaDevicePluginActive") == [reason]
        code, message = refusal(lambda: rig.run(rig.bind("new", [(1, 100)])))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert reason in message
        assert rig.held_on_disk(0) == 100, "what runs goes on"
        assert rig.spec(running)
        assert rig.capacity(names.GPU_MEM) == str(2 * P100), "running pods stay admitted"
        self.serve(rig, "0")
        rig.settle()
        assert health(rig) == ["Healthy", "Healthy"]
        assert rig.status(0)["reason"] == ""
        assert rig.events("NvidiaDevicePluginRemoved")
        assert names.REQUEUE in rig.node()["metadata"].get("annotations", {})
        rig.run(rig.bind("later", [(1, 100)]))

    def test_it_was_there_first(self, idle_rig):
        self.serve(idle_rig, "1")
        idle_rig.start()
        assert health(idle_rig) == ["Unhealthy", "Unhealthy"]
        assert not any(
            entry.body.get("status", {}).get("health") == "Healthy" for entry in idle_rig.api.sent("patch")
        ), "not for a moment"
        self.serve(idle_rig, None)
        idle_rig.settle()
        assert health(idle_rig) == ["Healthy", "Healthy"]

    def test_a_node_split_by_hand(self, idle_rig):
        rig = idle_rig
        self.serve(rig, "1")
        rig.chosen = card_uuid(1).upper()
        rig.start()
        assert rig.status(1).get("health") == "Healthy"
        assert rig.problems() == []
        assert rig.card(0) is None
        assert {name: rig.capacity(name) for name in (names.GPU_MEM, names.GPU_COUNT, names.WHOLE_GPU)} == {
            names.GPU_MEM: str(P100),
            names.GPU_COUNT: "1",
            names.WHOLE_GPU: "1",
        }
        rig.make_class("p100", {"selector": {"matchLabels": {"model": "Tesla-P100"}}})
        offers(rig, "cardwise.dev/p100", "128")
        slot = rig.run(rig.bind("a", [(1, 100)]))
        assert rig.edits(slot)["deviceNodes"][0]["path"] == "/dev/nvidia1"
        assert "--gpus leaves it out" in refusal(lambda: rig.run(rig.bind("b", [(0, 100)])))[1]
        assert not rig.events("NvidiaDevicePluginActive")


class TestCardsSetting:
    def test_a_card_that_is_left_out_now_stays_while_pods_hold_it(self, rig):
        pod = rig.bind("a", [(0, 100)])
        rig.run(pod)
        rig.stop()
        rig.chosen = "1"
        rig.start()
        assert rig.status(0).get("health") == "Unhealthy"
        assert "--gpus leaves it out" in rig.status(0)["reason"]
        assert rig.capacity(names.GPU_COUNT) == "2"
        rig.end(pod)
        offers(rig, names.GPU_COUNT, "1")
        assert rig.card(0) is None

    def test_a_card_that_is_not_there_is_told_and_the_others_are_served(self, idle_rig):
        rig = idle_rig
        rig.chosen = "1,7"
        rig.start()
        assert rig.status(1).get("health") == "Healthy"
        (message,) = rig.events("InvalidCardSelection")
        here = f"0 ({card_uuid(0)}), 1 ({card_uuid(1)})"
        assert message == f"--gpus: 7 is not a GPU of this node; use one of: {here}"
        assert rig.problems() == []
        rig.cards.append(rig.cards[0] | {"index": 7, "uuid": card_uuid(7), "device": rig.device(7)})
        rig.write_cards()
        rig.settle()
        assert rig.status(7).get("health") == "Healthy"

    def test_without_any_card_it_is_not_ready(self, idle_rig):
        idle_rig.chosen = "7"
        idle_rig.start()
        assert any("--gpus: 7 is not a GPU of this node" in entry for entry in idle_rig.agent.problems())
        assert idle_rig.capacity(names.GPU_COUNT) == "0"
        assert idle_rig.card(0) is None
